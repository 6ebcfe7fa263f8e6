"""Cached experts on torch: guessing, fetching and serving them. The slots themselves: `moec.runtime.expert_cache`.

An expert's rows go through the same products as where all experts are in device memory (`kernels_torch_moe`), and lie
at the same places of as large tensors, since a product's last bits may depend on where its operands begin. So results
have the same bits, whichever experts were there.

Shapes: S tokens, E experts, M experts held by this rank, k choices, X rows at their experts, D hidden, I inner,
C slots of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moec.runtime.context import Context
from moec.runtime.kernels_torch import rms_norm
from moec.runtime.kernels_torch_moe import at_boundary, route, router_logits
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
    """The experts that a later layer's norm and router would choose for these rows: i64 [S, k].

    What a plain softmax router prefers is what has the largest products, and a row's norm scales all of them alike: so
    neither is computed. Equal scores are not told apart as `route` does; a guess may be wrong.
    """
    if choice["score"] == "softmax" and choice["groups"] == 1 and bias_E is None:
        return F.linear(x_SD.float() * norm_D.float(), router_ED.float()).topk(choice["top"], dim=-1).indices
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

    The G = 2 I rows of a slot are gate's, then up's. Raises what `served` does.
    """
    out_XD, num_rows = torch.empty_like(rows_XD), rows_XD.shape[0]
    wide_XG, act_XI = (rows_XD.new_empty(num_rows, width) for width in (gate_up_CGD.shape[1], down_CDI.shape[2]))
    for mine in served(ctx, num_rows, offsets_M, slots_M, table):
        for slot, rows in mine:
            torch.mm(rows_XD[rows], at_boundary(gate_up_CGD[slot]).t(), out=wide_XG[rows])
        is_whole = sum(rows.stop - rows.start for _, rows in mine) == num_rows
        for rows in [slice(0, num_rows)] if is_whole else [rows for _, rows in mine]:
            gate, up = wide_XG[rows].chunk(2, dim=-1)
            torch.mul(F.silu(gate), up, out=act_XI[rows])
        for slot, rows in mine:
            torch.mm(act_XI[rows], at_boundary(down_CDI[slot]).t(), out=out_XD[rows])
    return out_XD


def served(
    ctx: Context, num_rows: int, offsets_M: Tensor, slots_M: Tensor, table: str
) -> Iterator[list[tuple[int, slice]]]:
    """(slot, its rows) of the experts that are there together, then of the others as they come.

    Each is in its slot until the next ones are asked for. Raises E0508 where the ends leave rows over, and what stood
    against reading an expert.
    """
    assert ctx.cache is not None and ctx.layer is not None
    place, num_served = _places(ctx, table), 0
    ends, slots = [0, *offsets_M.tolist()], slots_M.tolist()
    for experts in ctx.cache.serve(ctx.layer):
        mine = [(slots[m], slice(ends[m], ends[m + 1])) for m in map(place.__getitem__, experts)]
        yield mine
        num_served += sum(rows.stop - rows.start for _, rows in mine)
    if num_served != num_rows:
        raise lost_rows(ctx, f"cached experts were given {num_served} of {num_rows} rows")


def _places(ctx: Context, table: str) -> dict[int, int]:
    """Where each expert stands among those of this rank."""
    key = ("place among those held", table)
    if key not in ctx.memo:
        ctx.memo[key] = {expert: m for m, expert in enumerate(ctx.held_experts(table))}
    found: dict[int, int] = ctx.memo[key]
    return found
