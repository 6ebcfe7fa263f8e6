"""The two exchanges of routed tokens, all ranks in one process, on the torch kernels; and experts to exchange with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moec.placement import Placement
from moec.runtime import kernels_torch_moe as k
from tests.contexts import context

#: One rank's tokens [S, D], ids [S, k] and weights [S, k].
Batch = tuple[Tensor, Tensor, Tensor]
#: Rows of one rank's experts, counts of its slots, slot -> expert id: the rows they give.
Experts = Callable[[Tensor, Tensor, tuple[int, ...]], Tensor]
#: Each rank's result, and how many pairs each rank's experts served.
Exchange = Callable[[list[Batch], Placement, Experts], tuple[list[Tensor], list[int]]]


def flat(batches: list[Batch], placement: Placement, experts: Experts) -> tuple[list[Tensor], list[int]]:
    """The `flat` exchange: each rank's result, and how many pairs each rank's experts served."""
    ends = [sum(placement.counts[: i + 1]) for i in range(len(placement.counts))]
    spans = [range(end - count, end) for end, count in zip(ends, placement.counts, strict=True)]
    ctxs = [context(placement=placement, rank=rank) for rank in range(len(batches))]
    sent = [k.dispatch(ctx, x, ids, table="routed") for ctx, (x, ids, _) in zip(ctxs, batches, strict=True)]
    back: list[list[Tensor]] = [[] for _ in batches]
    served = []
    for ctx, span, held in zip(ctxs, spans, placement.slots, strict=True):
        recv = torch.stack([counts[span.start : span.stop] for _, counts, _ in sent])
        pieces = [rows[counts[: span.start].sum() : counts[: span.stop].sum()] for rows, counts, _ in sent]
        rows, offsets, perm = k.group_rows(ctx, torch.cat(pieces), recv)
        assert offsets.dtype == torch.int32 and torch.equal(offsets, k.offsets(ctx, recv.sum(0)))
        given = k.ungroup_rows(ctx, experts(rows, offsets, held), perm)
        for home, piece in enumerate(given.split(recv.sum(1).tolist())):
            back[home].append(piece)
        served.append(given.shape[0])
    results = [
        k.combine(ctx, torch.cat(rows), order, weights, table="routed")
        for ctx, rows, (_, _, order), (_, _, weights) in zip(ctxs, back, sent, batches, strict=True)
    ]
    return results, served


def gather(batches: list[Batch], placement: Placement, experts: Experts) -> tuple[list[Tensor], list[int]]:
    """The `gather` exchange: every rank sees all tokens, serves its own experts, and the parts are summed."""
    x, ids, weights = (torch.cat(column) for column in zip(*batches, strict=True))
    total, served = torch.zeros(x.shape, dtype=torch.float32), []
    for rank, held in enumerate(placement.slots):
        ctx = context(placement=placement, rank=rank)
        rows, counts, order = k.dispatch(ctx, x, ids, table="routed", local=True)
        given = experts(rows, k.offsets(ctx, counts), held)
        total += k.combine(ctx, given, order, weights, table="routed", local=True).float()
        served.append(rows.shape[0])
    return list(total.to(x.dtype).split([batch[0].shape[0] for batch in batches])), served


EXCHANGES: list[Exchange] = [flat, gather]


def constants(values: list[float]) -> Experts:
    """Expert e turns a row into values[e] everywhere, whatever the row holds."""

    def experts(rows: Tensor, offsets: Tensor, held: tuple[int, ...]) -> Tensor:
        width = rows.shape[1]
        w = torch.stack([torch.full((width, width), values[e] / width) for e in held])
        return k.grouped_linear(context(), torch.ones_like(rows), offsets, w)

    return experts


def gated(num_experts: int, hidden: int, inner: int) -> tuple[Experts, Tensor, Tensor]:
    """Random gated experts, and their weights gate_up [E, 2 I, D] and down [E, D, I]."""
    generator = torch.Generator().manual_seed(num_experts)
    gate_up = torch.randn(num_experts, 2 * inner, hidden, generator=generator) * hidden**-0.5
    down = torch.randn(num_experts, hidden, inner, generator=generator)

    def experts(rows: Tensor, offsets: Tensor, held: tuple[int, ...]) -> Tensor:
        act = k.grouped_gate_up(context(), rows, offsets, gate_up[list(held)].to(rows.dtype))
        return k.grouped_linear(context(), act, offsets, down[list(held)].to(rows.dtype))

    return experts, gate_up, down


def exact(batch: Batch, gate_up: Tensor, down: Tensor) -> Tensor:
    """The same in fp64, token by token and choice by choice."""
    x, ids, weights = batch
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for expert, weight in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ x[t].double()).chunk(2)
            out[t] += weight * (down[expert].double() @ (gate * gate.sigmoid() * up))
    return out


def random_batches(sizes: list[int], num_experts: int, top: int, hidden: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(sum(sizes))
    batches = []
    for size in sizes:
        order = [torch.randperm(num_experts, generator=generator)[:top] for _ in range(size)]
        ids = torch.stack(order) if order else torch.empty(0, top, dtype=torch.int64)
        batches.append(
            (torch.randn(size, hidden, generator=generator), ids, torch.rand(size, top, generator=generator))
        )
    return batches
