"""When the operations of a body run, by their costs: a simulation of one rank's streams, and a better order.

One rank issues its operations one after the other. A start takes its link's stream and lets the rank go on; its wait
holds the rank until the transfer has ended. The `prefetch.wait` of a layer starts copies too, of what is needed at
once, before any that are only guessed; its `cached_experts` work meanwhile on what is there. Everything else keeps the
rank busy for as long as it takes, a collective that is not started its link as well. Ranks are taken to be alike, so
that one rank's time is the step's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from moec.ir.program import Body, is_op, op_of, results_of

#: Microseconds of an operation: of a start, those of its transfer.
Cost = Callable[[fx.Node], float]

#: What issuing a start costs the rank.
ISSUE_US = 2.0
#: Operations that begin a transfer.
STARTS = ("all_to_all.start", "prefetch.start", "prefetch.wait")
#: Operations that need one to have ended, and which operand says which.
ENDS = {"all_to_all.wait": 0, "cached_experts": 2}


@dataclass(frozen=True)
class Span:
    """One operation on its stream, in microseconds from the beginning of the body."""

    node: fx.Node
    stream: str
    start: float
    end: float


class Streams:
    """The clock of one rank: when it is free itself, and when each link is."""

    def __init__(self, cost: Cost) -> None:
        self.cost = cost
        self.now = 0.0
        self.free: dict[str, float] = {}
        self.ends: dict[fx.Node, float] = {}

    def idle(self, node: fx.Node) -> float:
        """Microseconds that the end of a transfer would hold the rank if `node` were issued now."""
        return max(0.0, self.ends[_transfer(node)] - self.now - self.cost(node))

    def run(self, node: fx.Node) -> Span:
        """Issue one operation."""
        name, stream, cost = op_of(node).name, str(node.meta["stream"]), self.cost(node)
        if name in STARTS:
            free = max(self.now, self.free.get(stream, 0.0))
            begin = self.now if name == "prefetch.wait" else free
            self.free[stream], self.ends[node] = free + cost, begin + cost
            self.now += ISSUE_US
            return Span(node, stream, begin, begin + cost)
        if name in ENDS:
            begin = self.now
            self.now = max(self.now + cost, self.ends[_transfer(node)])
            return Span(node, "compute", begin, self.now)
        begin = max(self.now, self.free.get(stream, 0.0)) if stream != "compute" else self.now
        self.now = begin + cost
        if stream != "compute":
            self.free[stream] = self.now
        return Span(node, stream, begin, self.now)


def _transfer(node: fx.Node) -> fx.Node:
    """The start whose transfer a node needs the end of."""
    started = node.args[ENDS[op_of(node).name]]
    assert isinstance(started, fx.Node)
    return started


def simulate(body: Body, cost: Cost) -> list[Span]:
    """Every operation of a body in its order, with its times."""
    streams = Streams(cost)
    return [streams.run(node) for node in operations(body)]


def makespan(body: Body, cost: Cost) -> float:
    """Microseconds of one run of a body; what it fetches for a later one may then still be under way."""
    spans = simulate(body, cost)
    return max((span.end for span in spans if op_of(span.node).name != "prefetch.start"), default=0.0)


def operations(body: Body) -> list[fx.Node]:
    return [node for node in body.graph.nodes if is_op(node)]


def reorder(body: Body, cost: Cost) -> None:
    """List scheduling: starts as soon as their rows are there, waits sunk, the longest path over links first.

    Of equal paths the one that the graph has first: one chunk goes on to its link before the next one catches up. Every
    rank runs this one order, so collectives need no other; reads and writes of KV state keep theirs.
    """
    nodes = operations(body)
    before = _dependencies(nodes)
    path = _longest_paths(nodes, before, cost)
    streams, done, order = Streams(cost), set[fx.Node](), list[fx.Node]()
    waiting = list(nodes)
    while waiting:
        ready = [node for node in waiting if before[node] <= done]
        chosen = _choose(ready, path, streams)
        streams.run(chosen)
        done.add(chosen)
        order.append(chosen)
        waiting.remove(chosen)
    _place(body, order)


def _choose(ready: list[fx.Node], path: dict[fx.Node, float], streams: Streams) -> fx.Node:
    """Starts first; then what has the longest path to the end, a wait that would hold the rank only if that pays.

    It pays to stand idle for a short transfer where the operation that could run meanwhile would hold up the longer
    path by more than the idle time.
    """
    starts = [node for node in ready if op_of(node).name in STARTS]
    idle = {node: streams.idle(node) for node in ready if op_of(node).name in ENDS}
    busy = [node for node in ready if idle.get(node, 0.0) == 0.0]
    if starts or not busy:
        return max(starts, key=lambda n: path[n]) if starts else min(idle, key=lambda n: idle[n])
    best = max(busy, key=lambda n: path[n])
    for wait, us in sorted(idle.items(), key=lambda item: item[1]):
        if us and path[wait] > path[best] and streams.cost(best) - us > us:
            return wait
    return best


def _dependencies(nodes: list[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """Operations that must have run before each: those whose values it reads, and the KV access before it."""
    kv = set[fx.Node]()
    before: dict[fx.Node, set[fx.Node]] = {}
    for node in nodes:
        made = {
            value if is_op(value) else value.all_input_nodes[0] for value in node.all_input_nodes if _is_made(value)
        }
        if "kv" in op_of(node).effects:
            made |= kv
            kv = {node}
        before[node] = made
    return before


def _is_made(value: fx.Node) -> bool:
    return value.op == "call_function"


def _longest_paths(nodes: list[fx.Node], before: dict[fx.Node, set[fx.Node]], cost: Cost) -> dict[fx.Node, float]:
    """What each operation holds up, in microseconds on links: the rank itself is busy whatever the order."""
    path = dict.fromkeys(nodes, 0.0)
    for node in reversed(nodes):
        path[node] += cost(node) * (node.meta["stream"] != "compute")
        for earlier in before[node]:
            path[earlier] = max(path[earlier], path[node])
    return path


def _place(body: Body, order: list[fx.Node]) -> None:
    """Move the nodes of the graph into `order`, each with its numbered results behind it."""
    first = next((n for n in body.graph.nodes if n.op not in ("placeholder", "get_attr")), None)
    assert first is not None
    last = first.prev
    for node in order:
        for value in dict.fromkeys((node, *results_of(node))):
            last.append(value)
            last = value
