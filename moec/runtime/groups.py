"""Process groups of a mesh.

Creating a group is a collective over the whole world, so every rank creates every group, member or not, in the one
order that follows from the mesh. Each group is used once at the start: a group first used after a peer has died hangs.
Local indices come from the mesh's rank lists and nowhere else.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from moec.mesh import Mesh
from moec.runtime.launch.rank import Rank
from moec.runtime.launch.report import PeerLost, first_line, is_peer_loss
from moec.runtime.launch.status import Status


@dataclass(frozen=True)
class Announced:
    """Rows this rank said it sends to each peer, and each peer said it sends here, as tensor `recv` has it."""

    recv: Tensor
    sends: list[int]
    receives: list[int]
    #: The largest number that any rank of the group announced to any other.
    largest: int


@dataclass(frozen=True, eq=False)
class Group:
    """This rank's group of one name: the global ranks in order, and its own index among them."""

    name: str
    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup
    status: Status
    #: The latest counts exchanges, so that an all-to-all can be held against what was announced.
    announced: deque[Announced] = field(default_factory=lambda: deque(maxlen=8), repr=False)
    #: Tells the messages of one exchange from those of the next. Each rank counts alike; gloo keeps state for each tag.
    tags: Iterator[int] = field(default_factory=lambda: itertools.cycle(range(256)), repr=False)

    @property
    def size(self) -> int:
        return len(self.ranks)


def make_groups(mesh: Mesh, rank: Rank) -> dict[str, Group]:
    """The groups `rank` is in, by name (`experts.ep`), and `world` for all ranks; empty for a mesh of one rank.

    Raises:
        PeerLost: a peer went away meanwhile.
    """
    if mesh.world == 1:
        return {}
    rank_lists: Mapping[str, tuple[tuple[int, ...], ...]] = {"world": (tuple(range(mesh.world)),), **mesh.groups()}
    mine: dict[str, Group] = {}
    try:
        for name, lists in rank_lists.items():
            rank.status.enter(f"join {name}")
            handles = [dist.new_group(list(ranks)) for ranks in lists]
            at = next(i for i, ranks in enumerate(lists) if rank.rank in ranks)
            handle = handles[at]
            assert isinstance(handle, dist.ProcessGroup)
            mine[name] = Group(name, lists[at], lists[at].index(rank.rank), handle, rank.status)
        for group in mine.values():
            rank.status.enter(f"join {group.name}")
            dist.all_reduce(torch.zeros(1, device=rank.device), group=group.handle)
        rank.status.leave()
    except RuntimeError as error:
        if is_peer_loss(error):
            raise PeerLost(first_line(error)) from error
        raise
    return mine
