"""What each collective does to the symbols of all ranks. What one rank sends another must be what that one expects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moec.ir.proof.rows import Column, Fault, Row, Value, require, same_tokens, terms_of
from moec.mesh import Mesh, RankLists
from moec.placement import balanced


@dataclass(frozen=True)
class Comm:
    """One collective on `group`, with the tokens that each rank has in the attention view."""

    mesh: Mesh
    group: str
    attrs: dict[str, Any]
    held: tuple[int, ...]

    @property
    def lists(self) -> RankLists:
        """Of one pipeline stage: the others do the same."""
        require(self.group in self.mesh.groups(), f"this mesh has no group {self.group}")
        return tuple(ranks for ranks in self.mesh.groups()[self.group] if ranks[-1] < self.mesh.size)

    def each(self, give: Callable[[tuple[int, ...], int], Column]) -> list[Column]:
        """For each rank, `give(ranks of its group, its index there)`."""
        found = {rank: give(ranks, index) for ranks in self.lists for index, rank in enumerate(ranks)}
        require(len(found) == self.mesh.size, f"ranks {set(range(self.mesh.size)) - set(found)} are in no {self.group}")
        return [found[rank] for rank in range(self.mesh.size)]


def _want(value: Value, *kinds: str) -> None:
    require(value.kind in kinds, f"{value.kind} are given where {' or '.join(kinds)} are wanted")


# --- hops --------------------------------------------------------------------------------------------------------


def _exchange_counts(comm: Comm, counts: Value) -> Value:
    _want(counts, "numbers")
    for ranks in comm.lists:
        for rank in ranks:
            sent = len(counts.columns[rank])
            require(sent == len(ranks), f"rank {rank} sends {sent} counts to the {len(ranks)} ranks of {comm.group}")
    return Value("numbers", comm.each(lambda ranks, i: [counts.columns[rank][i] for rank in ranks]))


def _all_to_all(comm: Comm, rows: Value, *counts: Value) -> Value:
    _want(rows, "rows", "messages")
    if not counts:
        columns = _equal_pieces(comm, rows.columns)
    else:
        for value in counts:
            _want(value, "numbers")
        sends, expects = reversed(counts) if comm.attrs["back"] else counts
        columns = _pieces(comm, rows.columns, sends.columns, expects.columns)
    return Value(rows.kind, columns, pending=True)


def _equal_pieces(comm: Comm, rows: list[Column]) -> list[Column]:
    shares: dict[int, Column] = {}
    for ranks in comm.lists:
        sizes = tuple(len(rows[rank]) for rank in ranks)
        require(len(set(sizes)) == 1, f"ranks {ranks} of {comm.group} have {sizes} padded rows")
        require(sizes[0] % len(ranks) == 0, f"{sizes[0]} padded rows do not divide by {len(ranks)} ranks")
        shares |= {rank: [sizes[0] // len(ranks)] * len(ranks) for rank in ranks}
    equal = [shares[rank] for rank in range(comm.mesh.size)]
    return _pieces(comm, rows, equal, equal)


def _pieces(comm: Comm, rows: list[Column], sends: list[Column], expects: list[Column]) -> list[Column]:
    """Piece j of each rank goes to rank j of its group, as both of them count it."""
    for ranks in comm.lists:
        for i, rank in enumerate(ranks):
            for what, counts in (("send", sends[rank]), ("expect", expects[rank])):
                require(len(counts) == len(ranks), f"rank {rank} has {len(counts)} counts to {what} on {comm.group}")
            total = sum(sends[rank])
            require(total == len(rows[rank]), f"rank {rank} has {len(rows[rank])} rows and counts {total} to send")
            for j, other in enumerate(ranks):
                sent, expected = sends[rank][j], expects[other][i]
                words = f"rank {rank} sends {sent} rows to rank {other}, which expects {expected}"
                require(sent == expected, words)

    def arrive(ranks: tuple[int, ...], i: int) -> Column:
        pieces = [rows[r][sum(sends[r][:i]) : sum(sends[r][: i + 1])] for r in ranks]
        return [row for piece in pieces for row in piece]

    return comm.each(arrive)


# --- whole values ------------------------------------------------------------------------------------------------


def _sum(comm: Comm, value: Value) -> list[Column]:
    """Rows of the same tokens on all ranks of a group, their terms together."""
    _want(value, "rows")

    def give(ranks: tuple[int, ...], index: int) -> Column:
        parts = [value.columns[rank] for rank in ranks]
        same_tokens(f"rows that ranks {ranks} sum", *parts)
        return [
            Row(rows[0].token, tuple(t for row in rows for t in terms_of(row))) for rows in zip(*parts, strict=True)
        ]

    return comm.each(give)


def _all_reduce(comm: Comm, value: Value) -> Value:
    return Value("rows", _sum(comm, value))


def _sum_counts(comm: Comm, counts: Value) -> Value:
    """Rows per expert of a whole group: what a prefetch goes by, which no row depends on."""
    _want(counts, "numbers")
    return Value("numbers", comm.each(lambda ranks, i: counts.columns[ranks[i]]))


def _all_gather(comm: Comm, value: Value) -> Value:
    """Along rows, or along another dim of rows of the same tokens."""
    if comm.attrs["dim"] == 0:
        return Value(value.kind, _joined(comm, value))
    return Value("rows", [[Row(row.token) for row in column] for column in _sum(comm, value)])


def _joined(comm: Comm, value: Value) -> list[Column]:
    return comm.each(lambda ranks, i: [row for rank in ranks for row in value.columns[rank]])


def _exchange_sizes(comm: Comm, value: Value) -> Value:
    return Value("numbers", comm.each(lambda ranks, i: [len(value.columns[rank]) for rank in ranks]))


def _all_gather_rows(comm: Comm, value: Value, sizes: Value) -> Value:
    _want(value, "rows", "ids", "weights")
    _sized(comm, value, sizes, lambda rank: len(value.columns[rank]))
    return Value(value.kind, _joined(comm, value))


def _reduce_scatter_rows(comm: Comm, value: Value, sizes: Value) -> Value:
    whole = _sum(comm, value)
    for rank, column in enumerate(whole):
        total = sum(sizes.columns[rank])
        require(total == len(column), f"rank {rank} scatters {len(column)} rows by sizes of {total}")

    def give(ranks: tuple[int, ...], i: int) -> Column:
        mine = sizes.columns[ranks[i]]
        return whole[ranks[i]][sum(mine[:i]) : sum(mine[: i + 1])]

    _sized(comm, value, sizes, None)
    return Value("rows", comm.each(give))


def _sized(comm: Comm, value: Value, sizes: Value, held: Callable[[int], int] | None) -> None:
    """All ranks of a group know the same sizes, and (where given) they are what each of them holds."""
    _want(sizes, "numbers")
    for ranks in comm.lists:
        for rank in ranks:
            known = sizes.columns[rank]
            require(known == sizes.columns[ranks[0]], f"ranks {ranks[0]} and {rank} know other sizes of {comm.group}")
            require(len(known) == len(ranks), f"{len(known)} sizes for the {len(ranks)} ranks of {comm.group}")
        for size, rank in zip(sizes.columns[ranks[0]], ranks, strict=True):
            sends = size if held is None else held(rank)
            require(sends == size, f"rank {rank} sends {sends} rows, the others expect {size}")


def _relayout(comm: Comm, value: Value) -> Value:
    """To the other view: keep, take one's balanced piece, join the pieces, or take back one's own rows."""
    _want(value, "rows")
    columns, how, to = value.columns, comm.attrs["how"], comm.attrs["to"]
    index, parts = comm.attrs.get("chunk", (0, 1))
    if how == "keep":
        return value
    if how == "gather":
        return Value("rows", _joined(comm, value))

    def piece(ranks: tuple[int, ...], i: int) -> Column:
        rows = columns[ranks[i]]
        held = [balanced(comm.held[rank], parts)[index] for rank in ranks]
        sizes = balanced(len(rows), len(ranks)) if to == "experts" else held
        return rows[sum(sizes[:i]) : sum(sizes[: i + 1])]

    return Value("rows", comm.each(piece))


COLLECTIVES: dict[str, Callable[..., Value]] = {
    "exchange_counts": _exchange_counts,
    "all_to_all.start": _all_to_all,
    "all_reduce": _all_reduce,
    "sum_counts": _sum_counts,
    "all_gather": _all_gather,
    "exchange_sizes": _exchange_sizes,
    "all_gather_rows": _all_gather_rows,
    "reduce_scatter_rows": _reduce_scatter_rows,
    "relayout": _relayout,
}


def wait(value: Value) -> Value:
    if not value.pending:
        raise Fault("it waits for what was not started")
    return Value(value.kind, value.columns)
