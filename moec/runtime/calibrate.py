"""Measures what links, memory and arithmetic of the ranks it runs on give, by moec's own collectives.

All ranks work at the same time, as they do in a model, and a time is that of the slowest. Every point is measured in
each of several rounds, so that what else the machine does hits all points alike; the median of the rounds counts.

Patterns of a class of link, with n bytes of each rank in all:
    one      to the next rank of the class: one message (a ring of ping-pongs)
    each     to every rank of the same place in the other nodes, or to every rank of the node
    all      to every rank of all other nodes: only between nodes of several ranks
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moec.mesh import Mesh
from moec.runtime.context import DTYPES
from moec.runtime.groups import Group, make_groups
from moec.runtime.launch.rank import Rank
from moec.runtime.messages import finish, start

#: Bytes that each rank sends, in all.
SIZES = (64, 4096, 65536, 512 << 10, 2 << 20, 8 << 20)
#: Exchanges up to this size are timed by several in a row: one is about as short as ranks are apart after a barrier.
_SHORT_BYTES, _IN_A_ROW = 1 << 16, 8
#: Size of a copied tensor and of a product's matrices, by kind of device: large enough to leave caches and fill it.
_COPY_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}
_PRODUCT_WIDTH = {"cpu": 256, "cuda": 4096}


@dataclass(frozen=True)
class Point:
    """One thing to measure: `run` does it once; `count` times in a row are timed together."""

    name: str
    messages: int
    amount: float  # bytes, or floating-point operations
    run: Callable[[], object]
    count: int = 1


def measure(rank: Rank, num_nodes: int, devices_per_node: int, rounds: int = 7) -> list[list[object]]:
    """[name, messages, amount, microseconds] of every point, the same on every rank.

    Names are `intra`, `inter` (amount: bytes a rank sends), `copy` (bytes read and written) and dtypes (operations of a
    product). Rank r is in node r // devices_per_node.

    Raises:
        PeerLost: a peer is gone.
    """
    mesh = Mesh(dp=rank.world, ep=rank.world, nodes=num_nodes)
    groups = make_groups(mesh, rank)
    points = [*_links(groups, num_nodes, devices_per_node, rank), *_local(rank.device)]
    times = torch.zeros(rounds + 1, len(points), dtype=torch.float64, device=rank.device)
    rank.status.begin("load", "calibrate")
    for turn in range(rounds + 1):
        for i, point in enumerate(points):
            times[turn, i] = _time(point, rank)
            rank.status.progressed()
    if rank.world > 1:
        dist.all_reduce(times, dist.ReduceOp.MAX)
    medians = [statistics.median(column) for column in times[1:].T.tolist()]  # the first round warms up
    return [[p.name, p.messages, p.amount, us] for p, us in zip(points, medians, strict=True)]


def _time(point: Point, rank: Rank) -> float:
    """Microseconds of one run of a point, from when all ranks are ready."""
    _settle(rank)
    began = time.perf_counter_ns()
    for _ in range(point.count):
        point.run()
    if rank.device.type == "cuda":
        torch.cuda.synchronize(rank.device)
    return (time.perf_counter_ns() - began) / 1e3 / point.count


def _settle(rank: Rank) -> None:
    if rank.device.type == "cuda":
        torch.cuda.synchronize(rank.device)
    if rank.world > 1:
        dist.barrier()


def _links(groups: Mapping[str, Group], num_nodes: int, local: int, rank: Rank) -> list[Point]:
    """The patterns of both classes, as far as the cluster has them."""
    points = []
    for size in SIZES:
        if local > 1:
            group = groups["links.local" if num_nodes > 1 else "experts.ep"]
            points += _patterns("intra", group, size, rank)
        if num_nodes > 1:
            group = groups["links.node" if local > 1 else "experts.ep"]
            points += _patterns("inter", group, size, rank)
        if num_nodes > 1 and local > 1:
            world, node = groups["experts.ep"], rank.rank // local
            points.append(_exchange("inter", world, [peer // local != node for peer in world.ranks], size, rank))
    return points


def _patterns(name: str, group: Group, size: int, rank: Rank) -> list[Point]:
    """`one`, and `each` where that is not the same."""
    others = [i != group.index for i in range(group.size)]
    one = _exchange(name, group, [i == (group.index + 1) % group.size for i in range(group.size)], size, rank)
    return [one] if sum(others) == 1 else [one, _exchange(name, group, others, size, rank)]


def _exchange(name: str, group: Group, to: list[bool], size: int, rank: Rank) -> Point:
    """`size` bytes in equal pieces to the ranks of the group that `to` names by index."""
    count = sum(to)
    piece = -(-size // count)
    sends = [piece * wanted for wanted in to]
    # To the next rank, from the one before; the other patterns are the same both ways.
    receives = sends if count > 1 else [sends[(2 * group.index - i) % group.size] for i in range(group.size)]
    rows = torch.zeros(sum(sends), dtype=torch.uint8, device=rank.device)

    def run() -> Tensor:
        return finish(start(group, rows, sends, receives, "calibrate", largest=piece))

    return Point(name, count, piece * count, run, _IN_A_ROW if size <= _SHORT_BYTES else 1)


def _local(device: torch.device) -> list[Point]:
    """A copy of rows one by one, as exchanges do it, and products."""
    width = 2048
    rows = torch.zeros(_COPY_BYTES[device.type] // (4 * width), width, device=device)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).to(device)
    copied = torch.empty_like(rows)
    points = [Point("copy", 0, 8 * rows.numel(), lambda: torch.index_select(rows, 0, order, out=copied))]
    n = _PRODUCT_WIDTH[device.type]
    for name, dtype in DTYPES.items():
        a, b = (torch.ones(n, n, dtype=dtype, device=device) for _ in range(2))
        points.append(Point(name, 0, 2 * n**3, lambda a=a, b=b: a @ b))  # type: ignore[misc]
    return points
