"""The scheduler: times of hand-made bodies, and orders that pay."""

from __future__ import annotations

import pytest
from torch import fx

from moec.ir.build import Builder
from moec.ir.program import Body, Loc, Program, op_of
from moec.mesh import Mesh
from moec.schedule import ISSUE_US, makespan, operations, reorder, simulate
from moec.topology import Cluster

HERE = Loc(1, 1)
US = {"all_to_all.start": 100.0, "all_to_all.wait": 0.0, "linear": 30.0, "add": 5.0, "fan_out": 10.0}


def cost(node: fx.Node) -> float:
    return US[op_of(node).name]


def make_program() -> Program:
    return Program(
        name="p", phase="prefill", source="p.moe", mesh=Mesh(dp=2, ep=2), cluster=Cluster("c", 1, 2), tokens=4, slots=1,
        context=8, dtype="fp32", exchange="flat", strategy="linear",
    )  # fmt: skip


def exchange(build: Builder, x: fx.Node) -> fx.Node:
    sent = build.emit("fan_out", x, x, x, at=HERE, table="t", group="experts.ep", bound=4, drop=False)[0]
    started = build.emit("all_to_all.start", sent, at=HERE, table="t", group="experts.ep", back=False)
    arrived: fx.Node = build.emit("all_to_all.wait", started, at=HERE)
    return arrived


def make_body(num_exchanges: int = 1) -> Body:
    """add(exchange(x), linear(x)) for each exchange; untyped, as the scheduler reads no types."""
    program, body = make_program(), Body("b")
    build = Builder(program, body)
    x = build.input("x")
    for _ in range(num_exchanges):
        arrived = exchange(build, x)
        beside = build.emit("linear", x, x, at=HERE)
        x = build.emit("add", arrived, beside, at=HERE)
    body.graph.output(x)
    return body


def test_a_wait_holds_the_rank_until_the_transfer_ends() -> None:
    spans = {op_of(span.node).name: (span.start, span.end) for span in simulate(make_body(), cost)}
    assert spans["all_to_all.start"] == (10, 110)
    assert spans["all_to_all.wait"] == (10 + ISSUE_US, 110)
    assert spans["linear"] == (110, 140)


def test_what_does_not_need_the_rows_runs_while_they_travel() -> None:
    body = make_body()
    assert makespan(body, cost) == 145
    reorder(body, cost)
    names = [op_of(node).name for node in operations(body)]
    assert names == ["fan_out", "all_to_all.start", "linear", "all_to_all.wait", "add"]
    assert makespan(body, cost) == 115


def test_one_link_carries_one_transfer_at_a_time() -> None:
    body = make_body(2)
    spans = [span for span in simulate(body, cost) if span.stream != "compute"]
    assert spans[1].start >= spans[0].end


def test_of_equal_paths_one_goes_on_before_the_next_catches_up() -> None:
    """Two chunks, each with a product before its exchange and one behind: the second's product runs while the first
    travels, where both products first would leave the link idle."""
    program, body = make_program(), Body("b")
    build = Builder(program, body)
    x = build.input("x")
    parts = []
    for _ in range(2):
        before = build.emit("linear", x, x, at=HERE)
        parts.append(build.emit("linear", exchange(build, before), x, at=HERE))
    body.graph.output(build.emit("add", *parts, at=HERE))
    reorder(body, cost)
    names = [op_of(node).name for node in operations(body)]
    assert names[:6] == ["linear", "fan_out", "all_to_all.start", "linear", "fan_out", "all_to_all.start"]
    assert makespan(body, cost) == 30 + 10 + 100 + 100 + 30 + 5  # the link is never idle


@pytest.mark.parametrize("num_exchanges", [1, 2, 3])
def test_reordering_twice_changes_nothing(num_exchanges: int) -> None:
    body = make_body(num_exchanges)
    reorder(body, cost)
    first = operations(body)
    reorder(body, cost)
    assert operations(body) == first


def cached_body() -> Body:
    """add(experts from slots, shared expert), a prefetch before the look-up and one behind the experts."""
    program = Program(
        name="p", phase="decode", source="p.moe", mesh=Mesh(), cluster=Cluster("c", 1, 1), tokens=1, slots=1,
        context=8, dtype="fp32", exchange="flat", strategy="linear",
    )  # fmt: skip
    body = program.bodies["b"] = Body("b")
    build = Builder(program, body)
    x = build.input("x")
    rows, offsets, pairs = build.emit("group_rows", x, x, at=HERE, table="t")
    counts = build.emit("count_experts", x, at=HERE, table="t")
    build.emit("prefetch.start", counts, at=HERE, table="t", ahead=1, most=1, by="history")
    slots = build.emit("prefetch.wait", offsets, at=HERE, table="t")
    served = build.emit("cached_experts", rows, offsets, slots, x, x, at=HERE, table="t")
    routed = build.emit("reduce_rows", served, pairs, x, at=HERE, table="t")
    build.emit("prefetch.start", counts, at=HERE, table="t", ahead=2, most=1, by="history")
    shared = build.emit("linear", x, x, at=HERE)
    body.graph.output(build.emit("add", routed, shared, at=HERE))
    return body


CACHED_US = {
    "group_rows": 5.0, "count_experts": 1.0, "prefetch.start": 400.0, "prefetch.wait": 100.0, "cached_experts": 20.0,
    "reduce_rows": 5.0, "linear": 60.0, "add": 5.0,
}  # fmt: skip


def cached_cost(node: fx.Node) -> float:
    return CACHED_US[op_of(node).name]


def test_what_is_needed_at_once_goes_before_what_is_guessed() -> None:
    """The first prefetch has the link, yet the look-up's copies start at once; the next prefetch waits for both."""
    body = cached_body()
    starts = [(span.start, span.end) for span in simulate(body, cached_cost) if span.stream == "copy"]
    looked_up = 5 + 1 + ISSUE_US
    assert starts == [(6, 406), (looked_up, looked_up + 100), (506, 906)]
    (served,) = (s for s in simulate(body, cached_cost) if op_of(s.node).name == "cached_experts")
    assert (served.start, served.end) == (looked_up + ISSUE_US, looked_up + 100)
    assert makespan(body, cached_cost) == looked_up + 100 + 5 + ISSUE_US + 60 + 5


def test_the_shared_expert_runs_while_experts_come() -> None:
    body = cached_body()
    plain = makespan(body, cached_cost)
    reorder(body, cached_cost)
    names = [op_of(node).name for node in operations(body)]
    assert names.index("prefetch.wait") < names.index("linear") < names.index("cached_experts")
    assert plain - makespan(body, cached_cost) >= 60
    first = operations(body)
    reorder(body, cached_cost)
    assert operations(body) == first
