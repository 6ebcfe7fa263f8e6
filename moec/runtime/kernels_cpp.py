"""Kernels rendered from the C++ template, under the names of the kernel table.

Each function here hands a library's function its operands' addresses. Where rows are many (more than `FEW` to a
product's weights), torch's matrix product is faster and serves: as many rows give the same choice everywhere, so that
cached experts give the bits of resident ones. What a C++ kernel refuses goes to torch's, whose check says why.

Shapes: T, R rows, D hidden, K summed, N outputs, I inner, H heads, d head dim, S tokens, E experts, k choices,
M experts held, P pairs, X pairs served here.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from moec.codegen.cpp import Attention, LatentAttention, Norm, Pairs, Product, Rope, Route, Router, Score
from moec.runtime import kernels_cache, kernels_torch, kernels_torch_attention, kernels_torch_moe, kernels_torch_pairs
from moec.runtime.context import Context
from moec.runtime.cpp_library import Library
from moec.runtime.kernels_torch_rope import Yarn, turns

#: Rows to an expert's or a layer's weights up to which the C++ product is used.
FEW = 16
_P, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def bind(library: Library) -> dict[str, Callable[..., Any]]:
    """Operation -> kernel, over a library, which gets as many threads as torch has now."""
    library.set_threads(torch.get_num_threads())
    return {name: functools.partial(kernel, library) for name, kernel in KERNELS.items()}


# --- products -----------------------------------------------------------------------------------------------------

_PRODUCT = (_P, _P, _N, _P, _P)


@functools.cache
def _one_end(rows: int) -> ctypes.Array[ctypes.c_int32]:
    return (ctypes.c_int32 * 1)(rows)


def _multiply(library: Library, shape: Product, x: Tensor, ends: Any, experts: int, w: Tensor) -> Tensor:
    """`ends`: address or array of the ends of each expert's rows."""
    x, w = x.contiguous(), w.contiguous()
    out = x.new_empty(*x.shape[:-1], shape.outer)
    library.get(shape, _PRODUCT)(x.data_ptr(), ends, experts, w.data_ptr(), out.data_ptr())
    return out


def linear(library: Library, ctx: Context, x: Tensor, w_NK: Tensor) -> Tensor:
    rows = x.numel() // x.shape[-1]
    if rows > FEW:
        return kernels_torch.linear(ctx, x, w_NK)
    outer, inner = w_NK.shape
    return _multiply(library, Product(inner, outer), x, _one_end(rows), 1, w_NK)


def gate_up(library: Library, ctx: Context, x_TD: Tensor, w_GD: Tensor) -> Tensor:
    if x_TD.shape[0] > FEW:
        return kernels_torch.gate_up(ctx, x_TD, w_GD)
    outer, inner = w_GD.shape
    return _multiply(library, Product(inner, outer // 2, True), x_TD, _one_end(x_TD.shape[0]), 1, w_GD)


def _is_few(rows_RK: Tensor, offsets_M: Tensor) -> bool:
    return rows_RK.shape[0] <= FEW * offsets_M.shape[0]


def _check_rows(ctx: Context, rows_RK: Tensor, offsets_M: Tensor) -> None:
    served = int(offsets_M[-1]) if offsets_M.shape[0] else 0
    if served != rows_RK.shape[0]:
        raise kernels_torch_pairs.lost_rows(ctx, f"experts were given {served} of {rows_RK.shape[0]} rows")


def grouped_linear(library: Library, ctx: Context, rows_RK: Tensor, offsets_M: Tensor, w_MNK: Tensor) -> Tensor:
    if not _is_few(rows_RK, offsets_M):
        return kernels_torch_moe.grouped_linear(ctx, rows_RK, offsets_M, w_MNK)
    _check_rows(ctx, rows_RK, offsets_M)
    experts, outer, inner = w_MNK.shape
    return _multiply(library, Product(inner, outer), rows_RK, offsets_M.data_ptr(), experts, w_MNK)


def grouped_gate_up(library: Library, ctx: Context, rows_RD: Tensor, offsets_M: Tensor, w_MGD: Tensor) -> Tensor:
    if not _is_few(rows_RD, offsets_M):
        return kernels_torch_moe.grouped_gate_up(ctx, rows_RD, offsets_M, w_MGD)
    _check_rows(ctx, rows_RD, offsets_M)
    experts, outer, inner = w_MGD.shape
    return _multiply(library, Product(inner, outer // 2, True), rows_RD, offsets_M.data_ptr(), experts, w_MGD)


def cached_experts(
    library: Library,
    ctx: Context,
    rows_XD: Tensor,
    offsets_M: Tensor,
    slots_M: Tensor,
    gate_up_CGD: Tensor,
    down_CDI: Tensor,
    *,
    table: str,
) -> Tensor:
    """As `kernels_cache.cached_experts`, with the products that resident experts of as many rows get."""
    if not _is_few(rows_XD, offsets_M):
        return kernels_cache.cached_experts(ctx, rows_XD, offsets_M, slots_M, gate_up_CGD, down_CDI, table=table)
    hidden, inner = down_CDI.shape[1:]
    gate_up, down = Product(hidden, inner, True), Product(inner, hidden)
    out_XD = torch.empty_like(rows_XD)
    for slot, mine in chain.from_iterable(kernels_cache.served(ctx, rows_XD.shape[0], offsets_M, slots_M, table)):
        end = _one_end(mine.stop - mine.start)
        act_XI = _multiply(library, gate_up, rows_XD[mine], end, 1, gate_up_CGD[slot])
        out_XD[mine] = _multiply(library, down, act_XI, end, 1, down_CDI[slot])
    return out_XD


# --- norms, rotary embedding, attention ---------------------------------------------------------------------------


def rms_norm(library: Library, ctx: Context, x: Tensor, w_D: Tensor, *, eps: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    width = w_D.shape[0]
    kernel = library.get(Norm(width), (_P, _N, _P, _P, _F))
    kernel(x.data_ptr(), x.numel() // width, w_D.data_ptr(), out.data_ptr(), eps)
    return out


def rope(
    library: Library, ctx: Context, x: Tensor, positions_T: Tensor, *, theta: float, pairs: str, yarn: Yarn | None
) -> Tensor:
    x = x.contiguous()
    dim = x.shape[-1]
    cos_TF, sin_TF = turns(ctx, positions_T, dim, theta, yarn)
    out = torch.empty_like(x)
    heads = x.shape[1] if x.dim() == 3 else 1
    kernel = library.get(Rope(dim, Pairs(pairs)), (_P, _N, _N, _P, _P, _P))
    kernel(x.data_ptr(), x.shape[0], heads, cos_TF.data_ptr(), sin_TF.data_ptr(), out.data_ptr())
    return out


def attention(
    library: Library,
    ctx: Context,
    q_THd: Tensor,
    k_TKd: Tensor,
    v_TKd: Tensor,
    *,
    scale: float,
    chunk: tuple[int, int] | None = None,
) -> Tensor:
    """One new row a sequence in C++; several in torch."""
    reading = kernels_torch_attention.reading_of(ctx, chunk)
    if not reading.is_single:
        return kernels_torch_attention.attention(ctx, q_THd, k_TKd, v_TKd, scale=scale, chunk=chunk)
    lengths_B = _lengths(ctx, reading, chunk)
    keys, values = ctx.kv["k"], ctx.kv["v"]
    q_THd, k_TKd, v_TKd = q_THd.contiguous(), k_TKd.contiguous(), v_TKd.contiguous()
    out = torch.empty_like(q_THd)
    (batch, heads, dim), kv_heads = q_THd.shape, k_TKd.shape[1]
    kernel = library.get(Attention(kv_heads, heads // kv_heads, dim), (_P,) * 7 + (_N, _N, _F, _P))
    addresses = [t.data_ptr() for t in (q_THd, k_TKd, v_TKd, keys, values, reading.slots_T, lengths_B)]
    kernel(*addresses, batch, keys.shape[1], scale, out.data_ptr())
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
    chunk: tuple[int, int] | None = None,
) -> Tensor:
    """The absorbed form of one new row a sequence in C++, but for the query's and the result's products; else torch."""
    reading = kernels_torch_attention.reading_of(ctx, chunk)
    if not reading.is_single or form != "absorbed":
        return kernels_torch_attention.mla_attention(
            ctx, q_nope_THn, q_rope_THr, c_TC, k_rope_Tr, w_kv_b, scale=scale, value=value, form=form, chunk=chunk
        )
    batch, heads, _ = q_nope_THn.shape
    q_THd, w_value_HeC = kernels_torch_attention.absorb(q_nope_THn, q_rope_THr, w_kv_b, value)
    c_TC, k_rope_Tr, latent, turned = c_TC.contiguous(), k_rope_Tr.contiguous(), ctx.kv["latent"], ctx.kv["rope"]
    out_THC = c_TC.new_empty(batch, heads, c_TC.shape[1])
    kernel = library.get(LatentAttention(heads, c_TC.shape[1], k_rope_Tr.shape[1]), (_P,) * 7 + (_N, _N, _F, _P))
    lengths_B = _lengths(ctx, reading, chunk)
    addresses = [t.data_ptr() for t in (q_THd, c_TC, k_rope_Tr, latent, turned, reading.slots_T, lengths_B)]
    kernel(*addresses, batch, latent.shape[1], scale, out_THC.data_ptr())
    return torch.bmm(out_THC.transpose(0, 1), w_value_HeC.transpose(1, 2)).transpose(0, 1)


def _lengths(ctx: Context, reading: kernels_torch_attention.Reading, chunk: tuple[int, int] | None) -> Tensor:
    """Places of each sequence that hold rows: i64 [B], made by the first layer."""
    key = "lengths", chunk
    if key not in ctx.step_memo:
        ctx.step_memo[key] = torch.tensor(reading.lengths)
    found: Tensor = ctx.step_memo[key]
    return found


# --- routing and pairs --------------------------------------------------------------------------------------------


def router_logits(library: Library, ctx: Context, x_SD: Tensor, w_ED: Tensor) -> Tensor:
    if x_SD.shape[0] > FEW:
        return kernels_torch_moe.router_logits(ctx, x_SD, w_ED)
    x_SD = x_SD.contiguous()
    experts, hidden = w_ED.shape
    out = torch.empty(x_SD.shape[0], experts)
    library.get(Router(hidden, experts), (_P, _N, _P, _P))(x_SD.data_ptr(), len(x_SD), w_ED.data_ptr(), out.data_ptr())
    return out


def route(
    library: Library, ctx: Context, logits_SE: Tensor, bias_E: Tensor | None = None, **choice: Any
) -> tuple[Tensor, Tensor]:
    logits_SE = logits_SE.contiguous()
    rows, experts = logits_SE.shape
    top, score = choice["top"], Score(choice["score"])
    shape = Route(experts, top, choice["groups"], choice["keep"], score, choice["renormalize"])
    ids_Sk, weights_Sk = torch.empty(rows, top, dtype=torch.int64), torch.empty(rows, top)
    bias = None if bias_E is None else bias_E.data_ptr()
    kernel = library.get(shape, (_P, _N, _P, _F, _P, _P), _N)
    if kernel(logits_SE.data_ptr(), rows, bias, choice["scale"], ids_Sk.data_ptr(), weights_Sk.data_ptr()):
        return kernels_torch_moe.route(ctx, logits_SE, bias_E, **choice)
    return ids_Sk, weights_Sk


def group_rows(
    library: Library, ctx: Context, rows_RD: Tensor, ids_Rk: Tensor, *, table: str
) -> tuple[Tensor, Tensor, Tensor]:
    rows_RD, ids_Rk = rows_RD.contiguous(), ids_Rk.contiguous()
    held = len(ctx.held(table))
    slots = kernels_torch_pairs.slots_here(ctx, table, ids_Rk.device)
    pairs_P = torch.empty(ids_Rk.numel(), dtype=torch.int64)
    out_PD = rows_RD.new_empty(ids_Rk.numel(), rows_RD.shape[1])
    ends_M = torch.empty(held, dtype=torch.int32)
    served = library.get("group_rows", (_P, *(_N,) * 3, _P, _P, _N, _N, _P, _P, _P), _N)(
        rows_RD.data_ptr(), *ids_Rk.shape, rows_RD.shape[1] * rows_RD.element_size(), ids_Rk.data_ptr(),
        slots.data_ptr(), slots.shape[0] - 1, held, out_PD.data_ptr(), ends_M.data_ptr(), pairs_P.data_ptr(),
    )  # fmt: skip
    if served < 0:
        return kernels_torch_pairs.group_rows(ctx, rows_RD, ids_Rk, table=table)
    return out_PD[:served], ends_M, pairs_P[:served]


def reduce_rows(
    library: Library, ctx: Context, rows_XD: Tensor, pairs_X: Tensor, weights_Rk: Tensor, *, table: str
) -> Tensor:
    if rows_XD.shape[0] != pairs_X.shape[0]:
        return kernels_torch_pairs.reduce_rows(ctx, rows_XD, pairs_X, weights_Rk, table=table)
    rows_XD, pairs_X, weights_Rk = rows_XD.contiguous(), pairs_X.contiguous(), weights_Rk.contiguous()
    out_RD = rows_XD.new_empty(weights_Rk.shape[0], rows_XD.shape[1])
    library.get("reduce_rows", (_P, _N, _N, _P, _P, _N, _N, _P))(
        rows_XD.data_ptr(), *rows_XD.shape, pairs_X.data_ptr(), weights_Rk.data_ptr(), *weights_Rk.shape,
        out_RD.data_ptr(),
    )  # fmt: skip
    return out_RD


KERNELS: dict[str, Callable[..., Any]] = {
    kernel.__name__: kernel
    for kernel in (
        linear, gate_up, grouped_linear, grouped_gate_up, cached_experts, rms_norm, rope, attention, mla_attention,
        router_logits, route, group_rows, reduce_rows,
    )
}  # fmt: skip
