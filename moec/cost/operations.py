"""Bytes, messages and microseconds of each operation of a Program, on the busiest rank in a step of the largest size.

Times follow the alpha-beta model: m messages of n bytes together take ceil(m / concurrency) latencies + n / bandwidth.
The link classes that one collective uses work at the same time (a device's links inside its node and its network port
are separate engines), so the slowest counts; operations that follow one another add up. What an operation does on its
own rank takes the larger of its arithmetic and its memory traffic, at the device's nominal rates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from moec.cost.cache import copied_by
from moec.cost.flow import CLASSES
from moec.cost.links import Load, load
from moec.cost.local import work
from moec.cost.sizes import Sizes, sizes_of
from moec.ir.program import Program, is_op, op_of, operands, type_of
from moec.topology import Cluster, Link

#: What the time of an exchange is made of. `latency`: of messages; the rest: bytes over a class of link, or arithmetic.
TERMS: tuple[str, ...] = ("latency", *reversed(CLASSES), "compute")


@dataclass(frozen=True)
class NodeCost:
    """One operation of a body, each time it runs.

    `bytes` and `messages` are by class of `moec.cost.flow.CLASSES`. `terms` are (term, microseconds) that add up to its
    time; `unknown` names the terms whose rate the cluster does not give.
    """

    node: fx.Node
    bytes: tuple[float, ...]
    messages: tuple[int, ...]
    flops: float
    terms: tuple[tuple[str, float], ...]
    unknown: tuple[str, ...] = ()

    @property
    def us(self) -> float | None:
        """Microseconds, None where something is unknown."""
        return None if self.unknown else sum(us for _, us in self.terms)


def node_costs(program: Program) -> Iterator[tuple[str, NodeCost]]:
    """(body, cost) of every operation, in order. Needs a typed Program."""
    for body in program.bodies.values():
        yield from ((body.name, cost) for cost in body_costs(sizes_of(program, body)))


def body_costs(sizes: Sizes) -> Iterator[NodeCost]:
    """The cost of each operation of one body, in order."""
    for node in sizes.body.graph.nodes:
        if is_op(node):
            yield node_cost(sizes, node)


def node_cost(sizes: Sizes, node: fx.Node) -> NodeCost:
    """The cost of one operation."""
    if "cache" in op_of(node).effects:
        return _copied(sizes, node)
    moved = load(sizes, node)
    return _local(sizes, node) if moved is None else _collective(sizes.program.cluster, node, moved)


def _collective(cluster: Cluster, node: fx.Node, moved: Load) -> NodeCost:
    """The slowest of the links used at the same time, then what the sum of the parts reads and writes."""
    candidates, unknown = [], []
    for name, size, messages in zip(CLASSES, moved.bytes, moved.messages, strict=True):
        link = _link(cluster, name)
        if messages == 0:
            continue
        if link is None:
            unknown += [name] if name != "memory" else []  # what stays is copied meanwhile: it seldom decides
            continue
        latency = link.time_us(0, messages) * moved.rounds if name != "memory" else 0.0
        candidates.append((latency, link.time_us(size, 0), name))
    latency, transfer, name = max(candidates, key=lambda c: c[0] + c[1], default=(0.0, 0.0, "memory"))
    terms = [("latency", latency), (name, transfer)]
    memory = _link(cluster, "memory")
    if moved.summed and memory is not None:
        terms.append(("memory", memory.time_us(moved.summed)))
    stays, intra, inter = moved.bytes
    sent = (0, *(count * moved.rounds for count in moved.messages[1:]))
    return NodeCost(node, (stays + moved.summed, intra, inter), sent, 0.0, tuple(terms), tuple(unknown))


def _copied(sizes: Sizes, node: fx.Node) -> NodeCost:
    """Copies of experts from their tiers, the slowest of which counts."""
    found = copied_by(sizes, node)
    slowest = max(found.us_by_tier, key=lambda tier: found.us_by_tier[tier], default="host")
    return NodeCost(node, (0.0, 0.0, 0.0), (0, 0, 0), 0.0, ((slowest, found.us),), found.unknown)


def _local(sizes: Sizes, node: fx.Node) -> NodeCost:
    flops, moved = work(sizes, node)
    device = sizes.program.cluster.device
    memory, unknown = _link(sizes.program.cluster, "memory"), []
    rate = dict(device.tflops).get(type_of(operands(node)[0]).dtype)
    times = []
    if moved:
        times += [(memory.time_us(moved), "memory")] if memory else []
        unknown += [] if memory else ["memory"]
    if flops:
        times += [(flops / (rate * 1e6), "compute")] if rate else []
        unknown += [] if rate else ["compute"]
    us, term = max(times, default=(0.0, "memory"))
    return NodeCost(node, (moved, 0.0, 0.0), (0, 0, 0), flops, ((term, us),), tuple(unknown))


def _link(cluster: Cluster, name: str) -> Link | None:
    if name == "memory":
        rate = cluster.device.memory_gbps
        return None if rate is None else Link(rate)
    return cluster.inter if name == "inter" else cluster.intra


def of_operation(cost: NodeCost) -> str:
    """Name of the operation that a cost is of."""
    return op_of(cost.node).name
