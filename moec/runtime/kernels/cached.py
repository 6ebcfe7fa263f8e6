"""Cached experts on torch: guessing, fetching and serving them. The slots themselves: `moec.runtime.experts.cache`.

An expert's rows go through the same products as where all experts are in device memory (`torch_moe`), and lie
at the same places of as large tensors, since a product's last bits may depend on where its operands begin. So results
have the same bits, whichever experts were there.

Shapes: S tokens, E experts, M experts held by this rank, k choices, X rows at their experts, D hidden, I inner,
C slots of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moec.runtime.context import Context
from moec.runtime.kernels.torch_dense import rms_norm
from moec.runtime.kernels.torch_moe import (
    GROUPED_ALIGNMENT,
    activated,
    all_ranges,
    at_boundary,
    multiply_fp8,
    ranges_of,
    route,
    router_logits,
)


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
    """The experts that a later layer's norm and router would choose for these rows: i64 [S, k].

    What a plain softmax router prefers is what has the largest products, and a row's norm scales all of them alike: so
    neither is computed, and the norm's weights are put into the router's once. Equal scores are not told apart as
    `route` does; a guess may be wrong.
    """
    if choice["score"] == "softmax" and choice["groups"] == 1 and bias_E is None:
        key = "guess", router_ED.data_ptr()
        if key not in ctx.memo:
            ctx.memo[key] = router_ED.float() * norm_D.float()
        return F.linear(x_SD.float(), ctx.memo[key]).topk(choice["top"], dim=-1).indices
    logits_SE = router_logits(ctx, rms_norm(ctx, x_SD, norm_D, eps=eps), router_ED)
    return route(ctx, logits_SE, bias_E, **choice, renormalize=False, scale=1.0, table="guess")[0]


def count_experts(ctx: Context, ids_Sk: Tensor, *, table: str) -> Tensor:
    """Rows of this rank per expert: i64 [E]."""
    return torch.bincount(ids_Sk.flatten(), minlength=ctx.placements[table].num_experts)


def prefetch_start(ctx: Context, given: Tensor, *, table: str, ahead: int, most: int, by: str) -> Tensor:
    """Start copies for the layer `ahead`: at most `most`, those with the most rows first. What is given back is empty.

    `given`: counts_E; by `history` those of this layer, and what used to follow them is fetched. By `frequency` it is
    what this layer gives, which says no more than that its experts are through.
    """
    assert ctx.cache is not None and ctx.layer is not None
    if by == "frequency":
        ctx.cache.bring_back(ctx.layer + ahead, most)
    else:
        ctx.cache.prefetch(ctx.layer, ctx.layer + ahead, given.tolist(), most, by)
    return given.new_empty(0)


def prefetch_wait(ctx: Context, offsets_M: Tensor, *, table: str) -> Tensor:
    """Claim a slot for each expert of this rank that has rows: i32 [M], -1 for those without."""
    assert ctx.cache is not None and ctx.layer is not None
    held, place = _held(ctx, table)
    slots = [-1] * len(held)
    experts = [held[m] for m, _, _ in ranges_of(offsets_M)]
    for use in ctx.cache.demand(ctx.layer, experts, of_prompts=ctx.phase == "prefill"):
        slots[place[use.expert]] = use.slot
    slots_M = torch.from_numpy(np.array(slots, np.int32))  # of a list, torch takes three times as long
    return slots_M.to(offsets_M.device) if offsets_M.is_cuda else slots_M


def cached_experts(
    ctx: Context,
    rows_XD: Tensor,
    offsets_M: Tensor,
    slots_M: Tensor,
    gate_up_CGD: Tensor,
    down_CDI: Tensor,
    *scales: Tensor,
    table: str,
) -> Tensor:
    """down(silu(gate row) * (up row)) for the rows of each expert, as it comes into its slot: [X, D].

    The G = 2 I rows of a slot are gate's, then up's; experts in fp8 have `scales` of both matrices. Which slots those
    are is known on this side of the device (`slots_M` has them there). Raises what `served` does.
    """
    assert ctx.cache is not None and ctx.layer is not None
    if scales:
        return _cached_fp8(ctx, rows_XD, offsets_M, slots_M, (gate_up_CGD, down_CDI), scales, table)
    held, _ = _held(ctx, table)
    ranges, num_rows = all_ranges(ctx, rows_XD.shape[0], offsets_M, "cached experts"), rows_XD.shape[0]
    sizes, number = [end - first for _, first, end in ranges], {held[m]: i for i, (m, _, _) in enumerate(ranges)}
    wide_XG, out_XD = rows_XD.new_empty(num_rows, gate_up_CGD.shape[1]), torch.empty_like(rows_XD)
    rows, wide, out = (x.split_with_sizes(sizes) for x in (rows_XD, wide_XG, out_XD))
    act_XI = rows_XD.new_empty(num_rows, down_CDI.shape[2])
    act = act_XI.split_with_sizes(sizes)
    gate_up, down = _matrices(ctx, gate_up_CGD), _matrices(ctx, down_CDI)
    for uses in ctx.cache.serve(ctx.layer):
        mine = [(number[use.expert], use.slot) for use in uses]
        for i, slot in mine:
            torch.mm(rows[i], gate_up(slot), out=wide[i])
        first, end = min(mine)[0], max(mine)[0]
        span = slice(ranges[first][1], ranges[end][2])
        activated(wide_XG[span], act_XI[span])  # rows of others between them too: they are written again, or were so
        for i, slot in mine:
            torch.mm(act[i], down(slot), out=out[i])
    return out_XD


def _cached_fp8(
    ctx: Context, rows_XD: Tensor, offsets_M: Tensor, slots_M: Tensor, matrices: Sequence[Tensor],
    scales: Sequence[Tensor], table: str,
) -> Tensor:  # fmt: skip
    out_XD, dtype = torch.empty_like(rows_XD), rows_XD.dtype
    for slot, mine in chain.from_iterable(served(ctx, rows_XD.shape[0], offsets_M, slots_M, table)):
        (gate_up, down), (gate_up_scales, down_scales) = ((x[slot] for x in found) for found in (matrices, scales))
        act = activated(multiply_fp8(rows_XD[mine], gate_up, gate_up_scales, sides=2).to(dtype))
        out_XD[mine] = multiply_fp8(act, down, down_scales).to(dtype)
    return out_XD


def served(
    ctx: Context, num_rows: int, offsets_M: Tensor, slots_M: Tensor, table: str
) -> Iterator[list[tuple[int, slice]]]:
    """(slot, its rows) of the experts that are there together, then of the others as they come.

    Each is in its slot until the next ones are asked for. Raises E0508 where the ends leave rows over, and what stood
    against reading an expert.
    """
    assert ctx.cache is not None and ctx.layer is not None
    held, _ = _held(ctx, table)
    rows = {held[m]: slice(first, end) for m, first, end in all_ranges(ctx, num_rows, offsets_M, "cached experts")}
    for uses in ctx.cache.serve(ctx.layer):
        yield [(use.slot, rows[use.expert]) for use in uses]


def _held(ctx: Context, table: str) -> tuple[tuple[int, ...], dict[int, int]]:
    """The experts of this rank, and where each stands among them."""
    key = "experts held", table
    if key not in ctx.memo:
        held = ctx.held_experts(table)
        ctx.memo[key] = held, {expert: m for m, expert in enumerate(held)}
    found: tuple[tuple[int, ...], dict[int, int]] = ctx.memo[key]
    return found


def _matrices(ctx: Context, slots_CNK: Tensor) -> Callable[[int], Tensor]:
    """Slot -> its matrix, transposed: [K, N]. Slots do not move, so views of them are made once.

    Layers whose experts have other sizes may have theirs at the same address.
    """
    key = "matrices", slots_CNK.data_ptr(), slots_CNK.shape
    if key not in ctx.memo:
        views = [matrix.t() for matrix in slots_CNK.unbind()]
        is_aligned = not any(view.data_ptr() % GROUPED_ALIGNMENT for view in views)
        ctx.memo[key] = views.__getitem__ if is_aligned else lambda slot: at_boundary(slots_CNK[slot]).t()
    found: Callable[[int], Tensor] = ctx.memo[key]
    return found
