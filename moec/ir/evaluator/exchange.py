"""The exchange in the reference evaluator: what one rank does with its rows, written pair by pair.

A message is a row of fp64 numbers: the hidden state, then k expert ids, then k weights. Id -1: not for here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moec.ir.evaluator.local import Context
from moec.mesh import Mesh
from moec.placement import span


def destination(mesh: Mesh, group: str, owner: int) -> int:
    """Index in `group` of the rank that a row for the ep group's rank `owner` goes to next."""
    node, local = mesh.ep_position(owner)
    return {"experts.ep": owner, "links.node": node, "links.local": local}[group]


def owners(ctx: Context, table: str) -> list[int]:
    """Rank in the ep group that holds each expert."""
    placement = ctx.program.placements[table]
    by_expert = {e: rank for rank, held in enumerate(placement.slots) for e in held}
    return [by_expert[e] for e in range(placement.num_experts)]


def fan_out(
    ctx: Context, x: Tensor, ids: Tensor, weights: Tensor, table: str, group: str, bound: int | None, drop: bool
) -> tuple[Tensor, Tensor, Tensor]:
    mesh, owner = ctx.program.mesh, owners(ctx, table)
    num_ranks = len(mesh.groups()[group][0])
    blocks: list[list[int]] = [[] for _ in range(num_ranks)]
    for row, chosen in enumerate(ids.tolist()):
        for there in sorted({destination(mesh, group, owner[e]) for e in chosen if e >= 0}):
            blocks[there].append(row)
    counts = torch.tensor([len(block) for block in blocks], dtype=torch.int64)
    if bound is not None:
        assert drop or all(len(block) <= bound for block in blocks), "a padded exchange overflows"
        blocks = [(block + [-1] * bound)[:bound] for block in blocks]
    messages, origin = [], []
    for there, block in enumerate(blocks):
        for row in block:
            origin.append(row)
            messages.append(_message(ctx, x, ids, weights, row, there, group, owner))
    width = x.shape[1] + 2 * ids.shape[1]
    whole = torch.stack(messages) if messages else x.new_zeros(0, width)
    return whole, counts, torch.tensor(origin, dtype=torch.int64)


def _message(
    ctx: Context, x: Tensor, ids: Tensor, weights: Tensor, row: int, there: int, group: str, owner: list[int]
) -> Tensor:
    """Row `row` with those of its ids that are for `there`; row -1 is empty room."""
    top = ids.shape[1]
    if row < 0:
        return torch.cat([x.new_zeros(x.shape[1]), x.new_full((top,), -1), x.new_zeros(top)])
    mine = [e if e >= 0 and destination(ctx.program.mesh, group, owner[e]) == there else -1 for e in ids[row].tolist()]
    return torch.cat([x[row], x.new_tensor(mine), weights[row].double()])


def open_rows(ctx: Context, message: Tensor, hidden: int, top: int, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    return message[:, :hidden], message[:, hidden : hidden + top].long(), message[:, hidden + top :]


def group_rows(ctx: Context, rows: Tensor, ids: Tensor, table: str) -> tuple[Tensor, Tensor, Tensor]:
    """(row, choice) pairs that this rank's experts serve, expert by expert, in order of arrival."""
    held = ctx.program.placements[table].slots[ctx.program.mesh.coordinate(ctx.rank, "ep")]
    flat = ids.flatten().tolist()
    pairs = [[p for p, e in enumerate(flat) if e == expert] for expert in held]
    ends = torch.tensor([len(served) for served in pairs], dtype=torch.int64).cumsum(0)
    order = torch.tensor([p for served in pairs for p in served], dtype=torch.int64)
    return rows[order // ids.shape[1]], ends, order


def reduce_rows(ctx: Context, rows: Tensor, pairs: Tensor, weights: Tensor, table: str) -> Tensor:
    out = rows.new_zeros(weights.shape[0], rows.shape[1])
    for pair, row in sorted(zip(pairs.tolist(), rows, strict=True), key=lambda item: item[0]):
        out[pair // weights.shape[1]] += weights.flatten()[pair] * row
    return out


def combine(ctx: Context, rows: Tensor, order: Tensor, weights: Tensor, table: str) -> Tensor:
    return reduce_rows(ctx, rows, order, weights, table)


def return_rows(ctx: Context, rows: Tensor, pairs: Tensor) -> Tensor:
    return rows[pairs.argsort()]


def count_pairs(ctx: Context, ids: Tensor, recv: Tensor) -> Tensor:
    """Pairs among the rows that came from each rank."""
    valid = (ids >= 0).sum(1).tolist()
    starts = [0, *recv.cumsum(0).tolist()]
    return torch.tensor([sum(valid[a:b]) for a, b in itertools.pairwise(starts)], dtype=torch.int64)


def fan_in(ctx: Context, rows: Tensor, origin: Tensor, ids: Tensor, table: str) -> Tensor:
    out = rows.new_zeros(ids.shape[0], rows.shape[1])
    for row, source in zip(rows, origin.tolist(), strict=True):
        if source >= 0:
            out[source] += row
    return out


def pair_order(ctx: Context, ids: Tensor, table: str, group: str) -> tuple[Tensor, Tensor]:
    """Pairs in the order in which they come home: by rank, then token, then choice; and how many from each rank."""
    owner = owners(ctx, table)
    ranks = [owner[e] for e in ids.flatten().tolist()]
    counts = torch.tensor([ranks.count(r) for r in range(ctx.program.mesh.ep)], dtype=torch.int64)
    return torch.tensor(sorted(range(len(ranks)), key=lambda p: (ranks[p], p)), dtype=torch.int64), counts


def chunk_rows(ctx: Context, x: Tensor, parts: int, index: int) -> Tensor:
    return x[span(len(x), index, parts)]


def join_rows(ctx: Context, *parts: Tensor) -> Tensor:
    return torch.cat(parts)


EXCHANGE: dict[str, Callable[..., Any]] = {
    "chunk_rows": chunk_rows,
    "join_rows": join_rows,
    "fan_out": fan_out,
    "open_rows": open_rows,
    "group_rows": group_rows,
    "reduce_rows": reduce_rows,
    "return_rows": return_rows,
    "count_pairs": count_pairs,
    "fan_in": fan_in,
    "pair_order": pair_order,
    "combine": combine,
}
