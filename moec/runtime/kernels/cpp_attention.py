"""Rotary embedding and attention rendered from the C++ template.

Shapes: T rows, P positions, F = d / 2 pairs, H query heads, K KV heads, d head dim, C latent rank, r rotated dim, n the
rest of a query head, e value dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moec.codegen.cpp import Attention, LatentAttention, Pairs, Rope
from moec.runtime.context import Context
from moec.runtime.cpp_library import Library
from moec.runtime.kernels import torch_attention
from moec.runtime.kernels.torch_attention import Chunk
from moec.runtime.kernels.torch_rope import Yarn, frequencies

_PAIRS = {pairs.value: pairs for pairs in Pairs}


def rope(
    library: Library, ctx: Context, x: Tensor, positions_T: Tensor, *, theta: float, pairs: str, yarn: Yarn | None
) -> Tensor:
    x = x.contiguous()
    dim = x.shape[-1]
    cos_PF, sin_PF = _turns(ctx, dim, theta, yarn)
    out = torch.empty_like(x)
    heads = x.shape[1] if x.dim() == 3 else 1
    addresses = [tensor.data_ptr() for tensor in (positions_T, cos_PF, sin_PF, out)]
    library.get(Rope, dim, _PAIRS[pairs])(x.data_ptr(), x.shape[0], heads, *addresses)
    return out


def _turns(ctx: Context, dim: int, theta: float, yarn: Yarn | None) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles of every position that the step may have, fp32 [P, F]; kept for the program."""
    step, key = ctx.step, ("turns", dim, theta, yarn)
    if key in ctx.step_memo:
        known: tuple[Tensor, Tensor] = ctx.step_memo[key]
        return known
    ends = [cached + b - a for cached, a, b in zip(step.cached, step.starts, step.starts[1:], strict=False)]
    wanted = max(ends, default=0)
    held = ctx.memo.get(key)
    if held is None or held[0].shape[0] < wanted:
        frequency_F, factor = frequencies(dim, theta, yarn)
        angle_PF = torch.arange(1 << max(8, wanted.bit_length())).float()[:, None] * frequency_F
        held = ctx.memo[key] = angle_PF.cos() * factor, angle_PF.sin() * factor
    ctx.step_memo[key] = held
    return held


def attention(
    library: Library, ctx: Context, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, *, scale: float, chunk: Chunk = None
) -> Tensor:
    out = torch.empty_like(q_THd, memory_format=torch.contiguous_format)
    (_, heads, dim), kv_heads = q_THd.shape, k_TKd.shape[1]
    kernel = library.get(Attention, kv_heads, heads // kv_heads, dim)
    _attend(kernel, ctx, chunk, scale, out, (q_THd, k_TKd, v_TKd), (ctx.kv["k"], ctx.kv["v"]))
    return out


def mla_attention(
    library: Library,
    ctx: Context,
    q_nope_THn: Tensor,
    q_rope_THr: Tensor,
    c_TC: Tensor,
    k_rope_Tr: Tensor,
    w_kv_b: Tensor,
    *,
    scale: float,
    value: int,
    form: str,
    chunk: Chunk = None,
) -> Tensor:
    """The absorbed form in C++, but for the query's and the result's products; the expanded one in torch."""
    if form != "absorbed":
        return torch_attention.mla_attention(
            ctx, q_nope_THn, q_rope_THr, c_TC, k_rope_Tr, w_kv_b, scale=scale, value=value, form=form, chunk=chunk
        )
    q_THd, w_value_HeC = torch_attention.absorb(q_nope_THn, q_rope_THr, w_kv_b, value)
    out_THC = c_TC.new_empty(*q_THd.shape[:2], c_TC.shape[1])
    kernel = library.get(LatentAttention, q_THd.shape[1], c_TC.shape[1], k_rope_Tr.shape[1])
    _attend(kernel, ctx, chunk, scale, out_THC, (q_THd, c_TC, k_rope_Tr), (ctx.kv["latent"], ctx.kv["rope"]))
    return torch.bmm(out_THC.transpose(0, 1), w_value_HeC.transpose(1, 2)).transpose(0, 1)


def _attend(
    kernel: Any,
    ctx: Context,
    chunk: Chunk,
    scale: float,
    out: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    memories: tuple[Tensor, Tensor],
) -> None:
    """`rows`: the query's, and the two that are put at their places in `memories`."""
    rows = rows[0].contiguous(), rows[1].contiguous(), rows[2].contiguous()
    addresses = [tensor.data_ptr() for tensor in (*rows, *memories, *_places(ctx, chunk))]
    kernel(*addresses, out.shape[0], memories[0].shape[1], scale, out.data_ptr())


def _places(ctx: Context, chunk: Chunk) -> tuple[Tensor, Tensor]:
    """KV slot and position of each row of the step, or of a chunk of it: i64 [T] each, made by the first layer."""
    key = "places", chunk
    if key not in ctx.step_memo:
        step = ctx.step if chunk is None else ctx.step.chunk(*chunk)
        sizes = [stop - start for start, stop in zip(step.starts, step.starts[1:], strict=False)]
        slots = [slot for slot, size in zip(step.slots, sizes, strict=True) for _ in range(size)]
        ctx.step_memo[key] = torch.tensor(slots, dtype=torch.int64), step.positions
    found: tuple[Tensor, Tensor] = ctx.step_memo[key]
    return found
