"""Proof that no rank waits for ever: equal collectives in equal order on every group, and no circle of waits.

Each rank issues the operations of a body in order. A collective takes part once the collective before it on the same
stream of that rank is done; it is done once all ranks of its group take part. What is started is waited for later; any
other collective holds the rank until it is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import networkx as nx
from torch import fx

from moec.ir.program import Body, Program, is_op, op_of
from moec.ir.proof.rows import Fault


class Event(NamedTuple):
    """One collective, or the wait for one that was started. `key` numbers the collective in its body."""

    op: str
    key: int
    group: str
    stream: str
    node: fx.Node


def events(body: Body) -> tuple[Event, ...]:
    """What a rank issues in one run of the body, in order. Every rank runs the same body."""
    found: list[Event] = []
    started: dict[fx.Node, Event] = {}
    for number, node in enumerate(n for n in body.graph.nodes if is_op(n)):
        if op_of(node).name == "all_to_all.wait":
            found.append(_wait(node, started))
        elif "comm" in op_of(node).effects and node.kwargs.get("how", "gather") == "gather":
            event = Event(op_of(node).name, number, str(node.kwargs["group"]), str(node.meta["stream"]), node)
            started[node] = event
            found.append(event)
    return tuple(found)


def _wait(node: fx.Node, started: dict[fx.Node, Event]) -> Event:
    source = node.args[0]
    if not isinstance(source, fx.Node) or source not in started:
        raise _fault(f"waits for {source}, which has not been started", node)
    return started[source]._replace(op="all_to_all.wait", node=node)


def _fault(why: str, node: fx.Node) -> Fault:
    fault = Fault(why)
    fault.node = node
    return fault


def prove_order(program: Program, traces: Sequence[Sequence[Event]]) -> None:
    """`traces[rank]` is what that rank of a pipeline stage issues among the stage's ranks. Raises Fault."""
    for name, lists in program.mesh.groups().items():
        for ranks in (ranks for ranks in lists if ranks[-1] < program.mesh.size):
            _same_order(name, ranks, [_collectives(traces[rank], name) for rank in ranks])
    graph = _happens_before(program, traces)
    if not nx.is_directed_acyclic_graph(graph):
        circle = [first for first, _ in nx.find_cycle(graph) if len(first) == 3]
        raise _fault(f"ranks wait for each other: {_told(circle)}", _node_of(traces, circle[0]))


def _collectives(trace: Sequence[Event], group: str) -> list[Event]:
    return [event for event in trace if event.group == group and event.op != "all_to_all.wait"]


def _same_order(name: str, ranks: tuple[int, ...], issued: list[list[Event]]) -> None:
    for rank, theirs in zip(ranks, issued, strict=True):
        if len(theirs) != len(issued[0]):
            longer = max(theirs, issued[0], key=len)
            words = f"rank {ranks[0]} runs {len(issued[0])} collectives on {name}, rank {rank} {len(theirs)}"
            raise _fault(words, longer[min(len(theirs), len(issued[0]))].node)
        for number, (first, other) in enumerate(zip(issued[0], theirs, strict=True)):
            if first.key != other.key:
                words = (
                    f"collective {number} on {name} is {_name(first)} on rank {ranks[0]}, {_name(other)} on rank {rank}"
                )
                raise _fault(words, other.node)


def _name(event: Event) -> str:
    return f"{event.op} ({event.node})"


Point = tuple[int | str, ...]


def _happens_before(program: Program, traces: Sequence[Sequence[Event]]) -> nx.DiGraph[Point]:
    """Points (rank, index, issued or done), and one per collective between the two: all its ranks take part."""
    graph: nx.DiGraph[Point] = nx.DiGraph()
    for rank, trace in enumerate(traces):
        last: dict[str, Point] = {}  # by stream: what must be done first; "host": what holds the rank
        started: dict[int, Point] = {}
        for index, event in enumerate(trace):
            issued: Point = (rank, index, "issued")
            graph.add_edges_from((last[name], issued) for name in ("host", event.stream) if name in last)
            if event.op == "all_to_all.wait":
                if event.key not in started:
                    raise _fault(f"rank {rank} waits for what it has not started", event.node)
                graph.add_edge(started[event.key], issued)
                last["host"] = issued
                continue
            done = _take_part(program, graph, issued, event)
            last["host"] = issued if event.op.endswith(".start") else done
            last[event.stream] = started[event.key] = done
    return graph


def _take_part(program: Program, graph: nx.DiGraph[Point], issued: Point, event: Event) -> Point:
    rank, index, _ = issued
    assert isinstance(rank, int)
    met: Point = (event.group, program.mesh.group_of(event.group, rank)[0], event.key, "met")
    done: Point = (rank, index, "done")
    graph.add_edges_from([(issued, met), (met, done)])
    return done


def _node_of(traces: Sequence[Sequence[Event]], point: Point) -> fx.Node:
    rank, index, _ = point
    return traces[int(rank)][int(index)].node


def _told(circle: list[Point]) -> str:
    return ", ".join(dict.fromkeys(f"rank {rank}" for rank, _, _ in circle))
