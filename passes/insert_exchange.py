"""Lower `moe` to what moves the tokens to their experts and back, and the experts' own matrix products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from moec.ir import Program, is_op, op_of, operands
from moec.ir_build import Builder, erase
from moec.passes.base import Pass

EP = "experts.ep"


@dataclass(frozen=True)
class InsertExchange(Pass):
    """Choose how routed rows travel, by the phase's `exchange`. Without an ep axis nothing travels.

    flat:   dispatch; exchange_counts; all_to_all; experts; all_to_all back; combine by token, then slot
    gather: all-gather tokens and routing; each rank's own experts; reduce-scatter, summed by rank

    before: %4 = moe(%1, %2, %3, @experts.gate, @experts.up, @experts.down, table=routed)
    after:  %4, %5, %6 = dispatch(%1, %2, local=false, table=routed)
            %7 = exchange_counts(%5, ...); %8 = all_to_all.start(%4, %5, %7, back=false, ...) ...
    """

    name: ClassVar[str] = "insert-exchange"
    exact: ClassVar[bool] = False

    def run(self, program: Program) -> None:
        has_ep = program.mesh.ep > 1
        lower = {"flat": _flat, "gather": _gather}[program.exchange] if has_ep else _local
        for body in program.bodies.values():
            for node in list(body.graph.nodes):
                if is_op(node) and op_of(node).name == "moe":
                    build = Builder(program, body)
                    with build.before(node):
                        value = lower(build, node)
                    node.replace_all_uses_with(value)
                    erase(body, node)


def _local(build: Builder, moe: fx.Node) -> fx.Node:
    """Every expert is on this rank: sort rows by expert, and back."""
    x, ids, weights, *_ = operands(moe)
    table = moe.kwargs["table"]
    rows, counts, order = build.emit("dispatch", x, ids, at=moe, table=table, local=False)
    y = _experts(build, moe, rows, build.emit("offsets", counts, at=moe))
    return _one(build.emit("combine", y, order, weights, at=moe, table=table, local=False))


def _flat(build: Builder, moe: fx.Node) -> fx.Node:
    x, ids, weights, *_ = operands(moe)
    table = moe.kwargs["table"]
    rows, counts, order = build.emit("dispatch", x, ids, at=moe, table=table, local=False)
    recv = build.emit("exchange_counts", counts, at=moe, table=table, group=EP)
    there = _all_to_all(build, moe, rows, counts, recv, back=False)
    rows, offsets, perm = build.emit("group_rows", there, recv, at=moe)
    y = build.emit("ungroup_rows", _experts(build, moe, rows, offsets), perm, at=moe)
    home = _all_to_all(build, moe, y, counts, recv, back=True)
    return _one(build.emit("combine", home, order, weights, at=moe, table=table, local=False))


def _all_to_all(build: Builder, moe: fx.Node, *args: fx.Node, back: bool) -> fx.Node:
    table = moe.kwargs["table"]
    started = build.emit("all_to_all.start", *args, at=moe, table=table, group=EP, back=back)
    return _one(build.emit("all_to_all.wait", started, at=moe))


def _gather(build: Builder, moe: fx.Node) -> fx.Node:
    table = moe.kwargs["table"]
    sizes = build.emit("exchange_sizes", operands(moe)[0], at=moe, group=EP)
    x, ids, weights = (build.emit("all_gather_rows", value, sizes, at=moe, group=EP) for value in operands(moe)[:3])
    rows, counts, order = build.emit("dispatch", x, ids, at=moe, table=table, local=True)
    y = _experts(build, moe, rows, build.emit("offsets", counts, at=moe))
    part = build.emit("combine", y, order, weights, at=moe, table=table, local=True)
    return _one(build.emit("reduce_scatter_rows", part, sizes, at=moe, group=EP))


def _experts(build: Builder, moe: fx.Node, rows: fx.Node, offsets: fx.Node) -> fx.Node:
    gate, up, down = operands(moe)[3:6]
    gated = build.emit("grouped_linear", rows, offsets, gate, at=moe)
    act = build.emit("silu_mul", gated, build.emit("grouped_linear", rows, offsets, up, at=moe), at=moe)
    return _one(build.emit("grouped_linear", act, offsets, down, at=moe))


def _one(value: object) -> fx.Node:
    assert isinstance(value, fx.Node)
    return value
