"""The collective operations of a Program on torch.distributed, as kernels: `kernel(ctx, *tensors, **attributes)`.

Everything travels as an all-to-all of exact splits, which takes uneven and empty parts. Sums are made here, in rank
order and in fp32, so that a result does not depend on how a library orders its additions. A rank with no rows takes
part like any other.

On gloo large pieces go as single messages, all receives posted before the first send. Its `all_to_all_single` sends
first: a peer that is not ready to receive then keeps a connection busy in one direction, and exchanges take up to
twice as long as the link needs. Small pieces (and everything on NCCL) go by `all_to_all_single`, which costs one call:
posted one by one, they contend with gloo's own thread for the connection, which takes milliseconds on busy cores.

Shapes: S rows of this rank, P rows sent, R received, G rows of the whole group, D width, n ranks of the group.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moec.diagnostics import MoecError, fail
from moec.placement import balanced
from moec.runtime.context import DTYPES
from moec.runtime.groups import Announced, Group
from moec.runtime.launch_report import PeerLost, first_line, is_peer_loss
from moec.runtime.step import Step

#: Where `Context.memo` keeps the rows that are on their way to the next stage.
_SENDING = "sending"
#: Where the largest piece between two ranks has at most so many bytes, gloo takes them all in one call. At twice as
#: many single messages are faster over a link of 400 Mbit/s, at half as many they are not, even there.
_SMALL_BYTES = 1 << 16
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


@dataclass(eq=False)
class Pending:
    """A started exchange. Keeps `sent` alive until it has left, and no longer: it is large."""

    rows: Tensor
    sent: Tensor | None
    works: list[dist.Work]
    group: Group
    op: str


def start(
    group: Group, rows: Tensor, sends: Sequence[int], receives: Sequence[int], op: str, largest: int | None = None
) -> Pending:
    """Send the first sends[0] rows to the group's rank 0, and so on; receives[i] rows come from its rank i.

    `largest`: rows of the largest piece between any two ranks, if all ranks of the group know the same number.

    Raises:
        MoecError: E0610, the splits do not fit the rows; nothing has moved.
        PeerLost: a peer is gone.
    """
    group.status.enter(op)
    if len(sends) != group.size or len(receives) != group.size or sum(sends) != rows.shape[0]:
        raise _disagree(
            f"rank {group.ranks[group.index]} has {rows.shape[0]} rows for {op} in {group.name} of {group.size} ranks, "
            f"its splits are {list(sends)} to send and {list(receives)} to receive"
        )
    received = rows.new_empty((sum(receives), *rows.shape[1:]))
    sent = rows.contiguous()
    try:
        if rows.is_cuda or _is_small(rows, largest):
            work = dist.all_to_all_single(
                received, sent, list(receives), list(sends), group=group.handle, async_op=True
            )
            assert work is not None
            works = [work]
        else:
            works = _post(group, torch.split(received, list(receives)), torch.split(sent, list(sends)))
    except RuntimeError as error:
        raise _peer_lost(error) from error
    return Pending(received, sent, works, group, op)


def finish(pending: Pending) -> Tensor:
    """The rows received, in order of the ranks they came from."""
    pending.group.status.enter(pending.op)
    try:
        for work in pending.works:
            work.wait()
    except RuntimeError as error:
        raise _peer_lost(error) from error
    pending.group.status.leave()
    pending.sent = None
    return pending.rows


def gather(group: Group, x: Tensor, sizes: Sequence[int], op: str) -> Tensor:
    """Rows of all ranks in rank order; rank i has sizes[i] of them."""
    mine = x.shape[0]
    if x.is_cuda or _is_small(x, max(sizes)) or mine != sizes[group.index]:
        copies = x.expand(group.size, *x.shape).reshape(group.size * mine, *x.shape[1:])
        return finish(start(group, copies, [mine] * group.size, sizes, op, max(sizes)))
    group.status.enter(op)
    received, sent = x.new_empty((sum(sizes), *x.shape[1:])), x.contiguous()
    try:
        works = _post(group, torch.split(received, list(sizes)), [sent] * group.size)
    except RuntimeError as error:
        raise _peer_lost(error) from error
    return finish(Pending(received, sent, works, group, op))


def _is_small(rows: Tensor, largest: int | None) -> bool:
    return largest is not None and largest * rows.shape[1:].numel() * rows.element_size() <= _SMALL_BYTES


def _post(group: Group, received: Sequence[Tensor], sent: Sequence[Tensor]) -> list[dist.Work]:
    """A message per peer with rows, each rank beginning with its next one; the own piece is copied."""
    me, tag = group.index, next(group.tags)
    others = [(me + distance) % group.size for distance in range(1, group.size)]
    works = [group.handle.recv([received[peer]], peer, tag) for peer in reversed(others) if received[peer].numel()]
    works += [group.handle.send([sent[peer]], peer, tag) for peer in others if sent[peer].numel()]
    received[me].copy_(sent[me])
    return works


# --- counts and the exact all-to-all ------------------------------------------------------------------------------


def exchange_counts(ctx: Context, counts: Tensor, *, table: str, group: str) -> Tensor:
    """counts i64 [n], rows of this rank for each rank of the group -> i64 [n], rows of each rank for this one."""
    at = ctx.groups[group]
    sends = counts.tolist()
    if len(sends) != at.size:
        raise _disagree(f"rank {at.ranks[at.index]} has {len(sends)} rows for exchange_counts in {at.name}")
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
        raise _disagree(f"all_to_all in {at.name} uses counts that were not exchanged in this group")
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
            raise _disagree(f"rank {me} expects {mine} rows from rank {peer}, which announced {theirs}")
    for peer, mine, theirs in zip(group.ranks, sends, told.sends, strict=True):
        if mine != theirs:
            raise _disagree(f"rank {me} has {mine} rows for rank {peer}, to which it announced {theirs}")


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


def relayout(ctx: Context, x: Tensor, *, to: str, how: str, parts: int, group: str) -> Tensor:
    """Token rows from one view of the mesh to the other.

    `keep`: both views hold the same rows. `slice`: this rank's piece of `parts`. `gather`: the pieces of all ranks.
    Where attention holds more ranks per block (to experts: slice), the pieces are balanced, the first ones one longer.
    Where the experts do (to experts: gather), a piece is what one dp rank computes in this step.
    """
    if how == "keep":
        return x
    at = ctx.groups[group]
    if (how == "slice") == (to == "experts"):
        pieces = list(balanced(ctx.step.num_tokens, parts))
    else:
        pieces = _sizes(at, ctx.step.num_tokens, x.device)
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
        raise _peer_lost(error) from error
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
        raise _peer_lost(error) from error
    at.status.leave()
    return rows


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


def _disagree(message: str) -> MoecError:
    return fail("E0610", message, "this is a bug in moec: please report it with the program")


def _peer_lost(error: RuntimeError) -> Exception:
    return PeerLost(first_line(error)) if is_peer_loss(error) else error
