"""One exchange of rows between the ranks of a group: started, finished, and its faults told.

On gloo large pieces go as single messages, all receives posted before the first send. Its `all_to_all_single` sends
first: a peer that is not ready to receive then keeps a connection busy in one direction, and exchanges take up to
twice as long as the link needs. Small pieces (and everything on NCCL) go by `all_to_all_single`, which costs one call:
posted one by one, they contend with gloo's own thread for the connection, which takes milliseconds on busy cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moec.diagnostics import MoecError, fail
from moec.runtime.groups import Group
from moec.runtime.launch.report import PeerLost, first_line, is_peer_loss

#: Where the largest piece between two ranks has at most so many bytes, gloo takes them all in one call. At twice as
#: many single messages are faster over a link of 400 Mbit/s, at half as many they are not, even there.
_SMALL_BYTES = 1 << 16


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
        raise disagree(
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
        raise peer_lost(error) from error
    return Pending(received, sent, works, group, op)


def finish(pending: Pending) -> Tensor:
    """The rows received, in order of the ranks they came from."""
    pending.group.status.enter(pending.op)
    try:
        for work in pending.works:
            work.wait()
    except RuntimeError as error:
        raise peer_lost(error) from error
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
        raise peer_lost(error) from error
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


def disagree(message: str) -> MoecError:
    return fail("E0610", message, "this is a bug in moec: please report it with the program")


def peer_lost(error: RuntimeError) -> Exception:
    return PeerLost(first_line(error)) if is_peer_loss(error) else error
