"""The collective operations of a Program on torch.distributed, as kernels: `kernel(ctx, *tensors, **attributes)`.

Everything travels as an all-to-all of exact splits, which takes uneven and empty parts. Sums are made here, in rank
order and in fp32, so that a result does not depend on how a library orders its additions. A rank with no rows takes
part like any other.

Shapes: S rows of this rank, P rows sent, R received, G rows of the whole group, D width, n ranks of the group.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moec.placement import balanced
from moec.runtime.context import DTYPES
from moec.runtime.groups import Announced, Group
from moec.runtime.messages import Pending, disagree, finish, gather, peer_lost, start
from moec.runtime.step import Step

#: Where `Context.memo` keeps the rows that are on their way to the next stage.
_SENDING = "sending"
#: An all_reduce of at most this many elements over the group goes in one exchange of whole values instead of two.
_ONE_EXCHANGE_ELEMENTS = 1 << 16


class Context(Protocol):
    """What collectives read of the runtime context."""

    @property
    def groups(self) -> Mapping[str, Group]: ...
    @property
    def step(self) -> Step: ...
    @property
    def memo(self) -> dict[Hashable, Any]: ...


# --- counts and the exact all-to-all ------------------------------------------------------------------------------


def exchange_counts(ctx: Context, counts: Tensor, *, table: str, group: str) -> Tensor:
    """counts i64 [n], rows of this rank for each rank of the group -> i64 [n], rows of each rank for this one."""
    at = ctx.groups[group]
    sends = counts.tolist()
    if len(sends) != at.size:
        raise disagree(f"rank {at.ranks[at.index]} has {len(sends)} rows for exchange_counts in {at.name}")
    told = torch.stack([counts, counts.max().expand(at.size)], 1)
    recv, largest = finish(start(at, told, [1] * at.size, [1] * at.size, "exchange_counts", largest=1)).unbind(1)
    at.announced.append(Announced(recv, sends, recv.tolist(), int(largest.max())))
    return recv


def all_to_all_start(
    ctx: Context,
    rows: Tensor,
    counts: Tensor | None = None,
    recv: Tensor | None = None,
    *,
    table: str,
    group: str,
    back: bool = False,
) -> Pending:
    """Rows [P, D] to the group's ranks, counts[i] of them to rank i, from which recv[i] come; `back`: the other way.

    Without counts each rank gets an equal piece. Counts that lead out were exchanged, which makes them each other's
    transpose; they are held against what the peers were told. Those that lead back may be of other rows (one per pair).

    Raises:
        MoecError: E0610, rows or counts differ from what was announced.
        PeerLost: a peer is gone.
    """
    at = ctx.groups[group]
    if counts is None or recv is None:
        equal = [rows.shape[0] // at.size] * at.size
        return start(at, rows, equal, equal, "all_to_all", largest=equal[0])
    sends, receives = counts.tolist(), recv.tolist()
    told = next((entry for entry in at.announced if entry.recv is recv), None)
    if told is not None:
        _check_announced(at, told, sends, receives)
    elif not back:
        raise disagree(f"all_to_all in {at.name} uses counts that were not exchanged in this group")
    if back:
        sends, receives = receives, sends
    return start(at, rows, sends, receives, "all_to_all", _largest(at, told))


def _largest(group: Group, told: Announced | None) -> int | None:
    """Rows of the largest piece, or about as many: what matters is that all ranks say the same."""
    if told is None and group.announced:
        told = group.announced[-1]  # rows of pairs come home after the exchange of the tokens that they are of
    return told.largest if told else None


def all_to_all_wait(ctx: Context, handle: Pending) -> Tensor:
    """The rows of a started all-to-all, in order of the ranks they came from."""
    return finish(handle)


def _check_announced(group: Group, told: Announced, sends: list[int], receives: list[int]) -> None:
    me = group.ranks[group.index]
    for peer, mine, theirs in zip(group.ranks, receives, told.receives, strict=True):
        if mine != theirs:
            raise disagree(f"rank {me} expects {mine} rows from rank {peer}, which announced {theirs}")
    for peer, mine, theirs in zip(group.ranks, sends, told.sends, strict=True):
        if mine != theirs:
            raise disagree(f"rank {me} has {mine} rows for rank {peer}, to which it announced {theirs}")


# --- gather and reduce-scatter of uneven rows ---------------------------------------------------------------------


def exchange_sizes(ctx: Context, x: Tensor, *, group: str) -> Tensor:
    """i64 [n]: rows of `x` on each rank of the group, on the CPU."""
    return torch.tensor(_sizes(ctx.groups[group], x.shape[0], x.device), dtype=torch.int64)


def all_gather_rows(ctx: Context, x: Tensor, sizes: Tensor, *, group: str) -> Tensor:
    """x [S, ...] -> [G, ...], the rows of all ranks in rank order."""
    return gather(ctx.groups[group], x, sizes.tolist(), "all_gather_rows")


def reduce_scatter_rows(ctx: Context, x: Tensor, sizes: Tensor, *, group: str) -> Tensor:
    """x [G, D] -> [S, D]: this rank's rows summed over the ranks, in rank order, in fp32, cast back to x's dtype."""
    at = ctx.groups[group]
    pieces = sizes.tolist()
    mine = pieces[at.index]
    parts = finish(start(at, x, pieces, [mine] * at.size, "reduce_scatter_rows", max(pieces)))
    return _ordered_sum(parts.view(at.size, mine, *x.shape[1:]))


# --- equal shards -------------------------------------------------------------------------------------------------


def all_reduce(ctx: Context, x: Tensor, *, group: str) -> Tensor:
    """The sum over the ranks, in rank order, in fp32, cast back to x's dtype: the same bits on every rank."""
    at = ctx.groups[group]
    flat = x.reshape(-1)
    if flat.numel() * at.size <= _ONE_EXCHANGE_ELEMENTS:
        whole = gather(at, flat, [flat.numel()] * at.size, "all_reduce")
        return _ordered_sum(whole.view(at.size, *x.shape))
    pieces = balanced(flat.numel(), at.size)
    mine = pieces[at.index]
    parts = finish(start(at, flat, pieces, [mine] * at.size, "all_reduce", max(pieces)))
    return gather(at, _ordered_sum(parts.view(at.size, mine)), pieces, "all_reduce").view(x.shape)


def all_gather(ctx: Context, x: Tensor, *, dim: int, group: str) -> Tensor:
    """Equal shards of all ranks, concatenated along `dim` in rank order."""
    at = ctx.groups[group]
    moved = x.movedim(dim, 0).contiguous()
    return gather(at, moved, [moved.shape[0]] * at.size, "all_gather").movedim(0, dim).contiguous()


def relayout(
    ctx: Context, x: Tensor, *, to: str, how: str, parts: int, group: str, chunk: tuple[int, int] | None = None
) -> Tensor:
    """Token rows of the step, or of chunk (index, parts) of it, from one view of the mesh to the other.

    `keep`: both views hold the same rows. `slice`: this rank's piece of `parts`. `gather`: the pieces of all ranks.
    Where attention holds more ranks per block (to experts: slice), the pieces are balanced, the first ones one longer.
    Where the experts do (to experts: gather), a piece is what one dp rank computes in this step.
    """
    if how == "keep":
        return x
    at = ctx.groups[group]
    index, num_chunks = chunk or (0, 1)
    num_tokens = balanced(ctx.step.num_tokens, num_chunks)[index]
    if (how == "slice") == (to == "experts"):
        pieces = list(balanced(num_tokens, parts))
    else:
        pieces = _sizes(at, num_tokens, x.device)
    if how == "gather":
        return gather(at, x, pieces, "relayout")
    first = sum(pieces[: at.index])
    return x[first : first + pieces[at.index]]


# --- between pipeline stages --------------------------------------------------------------------------------------


def send(ctx: Context, x: Tensor) -> Tensor:
    """Hand rows [T, D] to the rank of the same place in the next stage, without waiting until they are there."""
    at = ctx.groups["stages"]
    at.status.enter("send")
    try:
        for work, _ in ctx.memo.pop(_SENDING, ()):
            work.wait()
        if len(x):
            rows = x.contiguous()
            ctx.memo[_SENDING] = [(dist.isend(rows, at.ranks[at.index + 1]), rows)]
    except RuntimeError as error:
        raise peer_lost(error) from error
    at.status.leave()
    return x


def receive(ctx: Context, positions: Tensor, *, hidden: int, dtype: str) -> Tensor:
    """The rows [T, D] of this step from the stage before, one for each position."""
    at = ctx.groups["stages"]
    at.status.enter("receive")
    rows = torch.empty(len(positions), hidden, dtype=DTYPES[dtype], device=positions.device)
    try:
        if len(rows):
            dist.recv(rows, at.ranks[at.index - 1])
    except RuntimeError as error:
        raise peer_lost(error) from error
    at.status.leave()
    return rows


def sum_counts(ctx: Context, counts_E: Tensor, *, group: str) -> Tensor:
    """Counts of all ranks of the group, added up: i64 [E]."""
    at = ctx.groups[group]
    return gather(at, counts_E.unsqueeze(0), [1] * at.size, "sum_counts").sum(0)


# --- inside -------------------------------------------------------------------------------------------------------


def _sizes(group: Group, rows: int, device: torch.device) -> list[int]:
    """Each rank's number, where this rank's is `rows`."""
    mine = torch.tensor([rows], dtype=torch.int64, device=device)
    return [int(size) for size in gather(group, mine, [1] * group.size, "exchange_sizes").tolist()]


def _ordered_sum(parts: Tensor) -> Tensor:
    """[n, ...] -> [...]: added from first to last in fp32 (fp64 stays fp64), cast back."""
    total = parts[0].to(torch.promote_types(parts.dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)
