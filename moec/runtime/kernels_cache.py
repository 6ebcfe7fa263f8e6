"""Cached experts on torch: guessing, fetching and serving them. The slots themselves: `moec.runtime.expert_cache`.

An expert's rows go through the same products as where all experts are in device memory (`kernels_torch_moe`), and lie
at the same places of as large tensors: a product's last bits may depend on whether its operands begin at multiples of
16 bytes. So results have the same bits, whichever experts were there (where an expert's matrices are multiples of 16
bytes long; others begin elsewhere in a slot than in a stack of experts).

Shapes: S tokens, E experts, M experts held by this rank, k choices, X rows at their experts, D hidden, I inner,
C slots of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moec.runtime.context import Context
from moec.runtime.kernels_torch import rms_norm
from moec.runtime.kernels_torch_moe import route, router_logits
from moec.runtime.kernels_torch_pairs import lost_rows


def guess(
    ctx: Context,
    x_SD: Tensor,
    norm_D: Tensor,
    router_ED: Tensor,
    bias_E: Tensor | None = None,
    *,
    eps: float,
    **choice: Any,
) -> Tensor:
    """The experts that a later layer's norm and router would choose for these rows: i64 [S, k]."""
    logits_SE = router_logits(ctx, rms_norm(ctx, x_SD, norm_D, eps=eps), router_ED)
    return route(ctx, logits_SE, bias_E, **choice, renormalize=False, scale=1.0, table="guess")[0]


def count_experts(ctx: Context, ids_Sk: Tensor, *, table: str) -> Tensor:
    """Rows of this rank per expert: i64 [E]."""
    return torch.bincount(ids_Sk.flatten(), minlength=ctx.placements[table].num_experts)


def prefetch_start(ctx: Context, counts_E: Tensor, *, table: str, ahead: int, most: int, by: str) -> Tensor:
    """Start copies for the layer `ahead`: at most `most`, those with the most rows first. What is given back is empty.

    By `history`, `counts` are of this layer, and what used to follow them is fetched.
    """
    assert ctx.cache is not None and ctx.layer is not None
    ctx.cache.prefetch(ctx.layer, ctx.layer + ahead, counts_E.tolist(), most, by)
    return counts_E.new_empty(0)


def prefetch_wait(ctx: Context, offsets_M: Tensor, *, table: str) -> Tensor:
    """Claim a slot for each expert of this rank that has rows: i32 [M], -1 for those without."""
    assert ctx.cache is not None and ctx.layer is not None
    held, ends = ctx.held_experts(table), offsets_M.tolist()
    needed = [expert for expert, first, end in zip(held, [0, *ends], ends, strict=False) if end > first]
    slots = ctx.cache.demand(ctx.layer, needed)
    return torch.tensor([slots.get(expert, -1) for expert in held], dtype=torch.int32, device=offsets_M.device)


def cached_experts(
    ctx: Context,
    rows_XD: Tensor,
    offsets_M: Tensor,
    slots_M: Tensor,
    gate_up_CGD: Tensor,
    down_CDI: Tensor,
    *,
    table: str,
) -> Tensor:
    """down(silu(gate row) * (up row)) for the rows of each expert, as it comes into its slot: [X, D].

    The G = 2 I rows of a slot are gate's, then up's. Raises E0508 where the ends leave rows over, and what stood
    against reading an expert.
    """
    assert ctx.cache is not None and ctx.layer is not None
    place = {expert: m for m, expert in enumerate(ctx.held_experts(table))}
    ends, slots = [0, *offsets_M.tolist()], slots_M.tolist()
    out_XD = torch.empty_like(rows_XD)
    wide_XG, act_XI = (
        rows_XD.new_empty(rows_XD.shape[0], width) for width in (gate_up_CGD.shape[1], down_CDI.shape[2])
    )
    num_served = 0
    for expert in ctx.cache.serve(ctx.layer):
        m = place[expert]
        mine, slot = slice(ends[m], ends[m + 1]), slots[m]
        gate, up = torch.mm(rows_XD[mine], gate_up_CGD[slot].t(), out=wide_XG[mine]).chunk(2, dim=-1)
        torch.mul(F.silu(gate), up, out=act_XI[mine])
        torch.mm(act_XI[mine], down_CDI[slot].t(), out=out_XD[mine])
        num_served += ends[m + 1] - ends[m]
    if num_served != rows_XD.shape[0]:
        raise lost_rows(ctx, f"cached experts were given {num_served} of {rows_XD.shape[0]} rows")
    return out_XD
