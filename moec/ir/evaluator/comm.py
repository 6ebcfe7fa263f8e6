"""Operations of the reference evaluator that see all ranks: a list with one tensor a rank in, another out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moec.ir.evaluator import local as reference
from moec.placement import balanced

if TYPE_CHECKING:
    from moec.ir.evaluator.program import Reference

Ranks = list[Tensor]
Collective = Callable[["Reference", list[Ranks], dict[str, Any]], Ranks]


def _by_group(ref: Reference, group: str, give: Callable[[tuple[int, ...], int], Tensor]) -> Ranks:
    """For each rank, `give(ranks of its group, its index there)`."""
    mesh = ref.program.mesh
    groups = [mesh.group_of(group, rank) for rank in ref.ranks()]
    return [give(ranks, ranks.index(rank)) for rank, ranks in enumerate(groups)]


def _pieces(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return list(torch.split(x, list(sizes)))


def _whole(ref: Reference, group: str, give: Callable[[tuple[int, ...]], Tensor]) -> Ranks:
    """For each group, `give(its ranks)`: every rank of it gets the same."""
    return ref.once(
        lambda rank: ref.program.mesh.group_of(group, rank), lambda rank: give(ref.program.mesh.group_of(group, rank))
    )


def _all_reduce(ref: Reference, args: list[Ranks], attrs: dict[str, Any]) -> Ranks:
    (x,) = args
    return _whole(ref, attrs["group"], lambda ranks: torch.stack([x[r] for r in ranks]).sum(0))


def _all_gather(ref: Reference, args: list[Ranks], attrs: dict[str, Any]) -> Ranks:
    (x,) = args
    return _whole(ref, attrs["group"], lambda ranks: torch.cat([x[r] for r in ranks], attrs["dim"]))


def _all_gather_rows(ref: Reference, args: list[Ranks], attrs: dict[str, Any]) -> Ranks:
    x, sizes = args

    def give(ranks: tuple[int, ...]) -> Tensor:
        rows = [len(x[r]) for r in ranks]
        assert all(sizes[r].tolist() == rows for r in ranks), f"{rows} rows are gathered, sizes differ"
        return torch.cat([x[r] for r in ranks])

    return _whole(ref, attrs["group"], give)


def _exchange_sizes(ref: Reference, args: list[Ranks], attrs: dict[str, Any]) -> Ranks:
    (x,) = args
    return _whole(ref, attrs["group"], lambda ranks: torch.tensor([len(x[r]) for r in ranks]))


def _reduce_scatter_rows(ref: Reference, args: list[Ranks], attrs: dict[str, Any]) -> Ranks:
    x, sizes = args
    return _by_group(
        ref,
        attrs["group"],
        lambda ranks, i: _pieces(torch.stack([x[r] for r in ranks]).sum(0), sizes[ranks[i]].tolist())[i],
    )


def _exchange_counts(ref: Reference, args: list[Ranks], attrs: dict[str, Any]) -> Ranks:
    (counts,) = args
    return _by_group(ref, attrs["group"], lambda ranks, i: torch.stack([counts[r][i] for r in ranks]))


def _all_to_all(ref: Reference, args: list[Ranks], attrs: dict[str, Any]) -> Ranks:
    """Piece j of each rank goes to its rank j. Each rank knows what it sends to each peer and what it gets."""
    rows, *counts = args
    if not counts:
        return _by_group(ref, attrs["group"], lambda ranks, i: torch.cat([rows[r].chunk(len(ranks))[i] for r in ranks]))
    sent, got = reversed(counts) if attrs["back"] else counts

    def give(ranks: tuple[int, ...], i: int) -> Tensor:
        sizes = [sent[r].tolist() for r in ranks]
        assert got[ranks[i]].tolist() == [size[i] for size in sizes], f"rank {ranks[i]} expects other rows of its peers"
        return torch.cat([_pieces(rows[r], size)[i] for r, size in zip(ranks, sizes, strict=True)])

    return _by_group(ref, attrs["group"], give)


def _relayout(ref: Reference, args: list[Ranks], attrs: dict[str, Any]) -> Ranks:
    (x,) = args
    if attrs["how"] == "keep":
        return x
    if attrs["how"] == "gather":
        return _whole(ref, attrs["group"], lambda ranks: torch.cat([x[r] for r in ranks]))
    if attrs["to"] == "experts":
        return _by_group(
            ref, attrs["group"], lambda ranks, i: _pieces(x[ranks[i]], balanced(len(x[ranks[i]]), len(ranks)))[i]
        )
    return _own_rows(ref, x, attrs)


def _own_rows(ref: Reference, x: Ranks, attrs: dict[str, Any]) -> Ranks:
    """Back from rows that were gathered over etp: each rank keeps those that were its own."""

    index, parts = attrs.get("chunk", (0, 1))

    def give(ranks: tuple[int, ...], i: int) -> Tensor:
        sizes = [balanced(sum(len(s.tokens) for s in ref.batches[r]), parts)[index] for r in ranks]
        return _pieces(x[ranks[i]], sizes)[i]

    return _by_group(ref, attrs["group"], give)


def _receive(ref: Reference, args: list[Ranks], attrs: dict[str, Any]) -> Ranks:
    assert ref.received is not None, "a stage behind the first is given what the one before sent"
    return ref.received


def _send(ref: Reference, args: list[Ranks], attrs: dict[str, Any]) -> Ranks:
    return args[0]


def _moe(ref: Reference, args: list[Ranks], attrs: dict[str, Any]) -> Ranks:
    """The coarse operation: every expert of the ep group applied to the rows its weights choose."""
    x, ids, weights, *experts = args
    table, mesh = attrs["table"], ref.program.mesh

    def give(rank: int) -> Tensor:
        whole = [w[rank] for w in experts]
        if len(whole[0]) < ref.program.experts[table]:
            order = list(ref.program.placements[table].slot_of)
            whole = [torch.cat([w[r] for r in mesh.group_of("experts.ep", rank)])[order] for w in experts]
        scales = whole[3:] or (None, None, None)
        scaled = [reference.scaled(w, given) for w, given in zip(whole[:3], scales, strict=True)]
        return reference.moe(x[rank], ids[rank], weights[rank], *scaled)

    return ref.once(lambda rank: tuple(id(a[rank]) for a in args), give)


COLLECTIVES: dict[str, Collective] = {
    "all_reduce": _all_reduce,
    "sum_counts": _all_reduce,
    "all_gather": _all_gather,
    "all_gather_rows": _all_gather_rows,
    "exchange_sizes": _exchange_sizes,
    "reduce_scatter_rows": _reduce_scatter_rows,
    "exchange_counts": _exchange_counts,
    "all_to_all.start": _all_to_all,
    "relayout": _relayout,
    "moe": _moe,
    "receive": _receive,
    "send": _send,
}
