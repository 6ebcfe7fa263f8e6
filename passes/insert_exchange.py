"""Lower `moe` to what moves the tokens to their experts and back, and the experts' own matrix products.

Every lowering but `gather` is a list of hops out, the experts, and the same hops back; they differ in the hops alone:

    flat, padded   experts.ep                  each message straight to its rank
    two_hop        links.node, links.local     one message per remote node, fanned out inside it
    aggregate      links.local, links.node     first to the rank that sends to that place in every node
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from moec.cost.sizes import token_rows
from moec.diagnostics import CompileError, Diagnostic
from moec.ir.build import Builder, erase
from moec.ir.program import Program, Type, is_op, op_of, operands, type_of
from moec.passes.base import Pass

EP, NODE, LOCAL = "experts.ep", "links.node", "links.local"
HOPS = {"flat": (EP,), "padded": (EP,), "two_hop": (NODE, LOCAL), "aggregate": (LOCAL, NODE)}


@dataclass(frozen=True)
class InsertExchange(Pass):
    """Choose how routed rows travel, by the phase's `exchange` and `combine`. Without an ep axis nothing travels.

    ordered (flat): a row per token and expert comes home and is summed there in the order of the token's choices.
    reduced: each rank sums what its experts gave for a row, and a row per hop comes back.

    before: %4 = moe(%1, %2, %3, @experts.gate, @experts.up, @experts.down, table=routed)
    after:  %4, %5, %6 = fan_out(%1, %2, %3, group=experts.ep, ...); %7 = exchange_counts(%5, ...)
            %8 = all_to_all.start(%4, %5, %7, back=false, ...); ...; %20 = fan_in(%19, %6, %2)
    """

    name: ClassVar[str] = "insert-exchange"
    exact: ClassVar[bool] = False

    def run(self, program: Program) -> None:
        _refuse_uneven_nodes(program)
        for body in program.bodies.values():
            for node in list(body.graph.nodes):
                if is_op(node) and op_of(node).name == "moe":
                    build = Builder(program, body)
                    with build.before(node):
                        value = _lower(build, node)
                    node.replace_all_uses_with(value)
                    erase(body, node)


def _refuse_uneven_nodes(program: Program) -> None:
    if program.exchange in ("two_hop", "aggregate") and program.mesh.ep > 1 and program.mesh.nodes == 0:
        help = "choose degrees that put the same number of an expert group's ranks in each node, or `exchange = flat`"
        message = f"`{program.exchange}` needs expert groups of {program.mesh.ep} ranks that span nodes in equal parts"
        raise CompileError(Diagnostic("E0331", f"{message}; {program.cluster.name} does not give them", help=help))


def _lower(build: Builder, moe: fx.Node) -> fx.Node:
    x, ids, weights = operands(moe)[:3]
    program = build.program
    if program.mesh.ep == 1:
        return _serve(build, moe, x, ids, weights)
    if program.exchange == "gather":
        return _gather(build, moe)
    hops = [group for group in HOPS[program.exchange] if group in program.mesh.groups()]
    if len(hops) < len(HOPS[program.exchange]):
        hops = [EP]  # one node, or one rank a node: both hops are the one
    if program.combine == "ordered" and hops == [EP] and program.exchange == "flat":
        return _ordered(build, moe)
    return _travel(build, moe, (x, ids, weights), hops)


def _travel(build: Builder, moe: fx.Node, rows: tuple[fx.Node, ...], hops: list[str]) -> fx.Node:
    """One hop, then the rest of the way from there; on the way back the sum over this hop's destinations."""
    x, ids, weights = rows
    if not hops:
        return _serve(build, moe, x, ids, weights)
    group, *rest = hops
    table, bound = moe.kwargs["table"], _bound(build.program, moe)
    message, counts, origin = build.emit(
        "fan_out", x, ids, weights, at=moe, table=table, group=group, bound=bound, drop=build.program.drop
    )
    exchanged = [] if bound else [counts, build.emit("exchange_counts", counts, at=moe, table=table, group=group)]
    arrived = _all_to_all(build, moe, message, exchanged, group, back=False)
    served = _travel(build, moe, _open(build, moe, arrived), rest)
    returned = _all_to_all(build, moe, served, exchanged, group, back=True)
    return _one(build.emit("fan_in", returned, origin, ids, at=moe, table=table))


def _bound(program: Program, moe: fx.Node) -> int | None:
    """Rows per destination of a padded exchange: all of this rank's tokens, or `capacity` times an even share."""
    if program.exchange != "padded":
        return None
    rows = token_rows(program)
    if program.capacity is None:
        return rows
    return min(rows, math.ceil(program.capacity * rows * _top(moe) / program.mesh.ep))


def _top(moe: fx.Node) -> int:
    ids: Type = type_of(operands(moe)[1])
    return int(ids.shape[1])


def _all_to_all(build: Builder, moe: fx.Node, rows: fx.Node, counts: list[fx.Node], group: str, back: bool) -> fx.Node:
    table = moe.kwargs["table"]
    started = build.emit("all_to_all.start", rows, *counts, at=moe, table=table, group=group, back=back)
    return _one(build.emit("all_to_all.wait", started, at=moe))


def _open(build: Builder, moe: fx.Node, message: fx.Node) -> tuple[fx.Node, ...]:
    x = type_of(operands(moe)[0])
    opened: tuple[fx.Node, ...] = build.emit(
        "open_rows", message, at=moe, hidden=x.shape[1], top=_top(moe), dtype=x.dtype
    )
    return opened


def _serve(build: Builder, moe: fx.Node, x: fx.Node, ids: fx.Node, weights: fx.Node) -> fx.Node:
    """The experts of this rank on the rows that are here, weighed and summed row by row."""
    table = moe.kwargs["table"]
    rows, offsets, pairs = build.emit("group_rows", x, ids, at=moe, table=table)
    y = _experts(build, moe, rows, offsets)
    return _one(build.emit("reduce_rows", y, pairs, weights, at=moe, table=table))


def _ordered(build: Builder, moe: fx.Node) -> fx.Node:
    """Flat, with a row per token and expert on the way back."""
    x, ids, weights = operands(moe)[:3]
    table = moe.kwargs["table"]
    message, counts, _ = build.emit("fan_out", x, ids, weights, at=moe, table=table, group=EP, bound=None, drop=False)
    recv = build.emit("exchange_counts", counts, at=moe, table=table, group=EP)
    arrived = _all_to_all(build, moe, message, [counts, recv], EP, back=False)
    rows, served_ids, _ = _open(build, moe, arrived)
    grouped, offsets, pairs = build.emit("group_rows", rows, served_ids, at=moe, table=table)
    y = build.emit("return_rows", _experts(build, moe, grouped, offsets), pairs, at=moe)
    order, wanted = build.emit("pair_order", ids, at=moe, table=table, group=EP)
    served = build.emit("count_pairs", served_ids, recv, at=moe)
    home = _all_to_all(build, moe, y, [wanted, served], EP, back=True)
    return _one(build.emit("combine", home, order, weights, at=moe, table=table))


def _gather(build: Builder, moe: fx.Node) -> fx.Node:
    """Every rank sees all tokens of the group and serves those of its own experts; shares are summed by rank."""
    sizes = build.emit("exchange_sizes", operands(moe)[0], at=moe, group=EP)
    rows = [build.emit("all_gather_rows", value, sizes, at=moe, group=EP) for value in operands(moe)[:3]]
    return _one(build.emit("reduce_scatter_rows", _serve(build, moe, *rows), sizes, at=moe, group=EP))


def _experts(build: Builder, moe: fx.Node, rows: fx.Node, offsets: fx.Node) -> fx.Node:
    """Each product takes its weights, and their scales where they are in fp8."""
    weights = operands(moe)[3:]
    gate, up, down = (weights[i::3] for i in range(3))
    gated = build.emit("grouped_linear", rows, offsets, *gate, at=moe)
    act = build.emit("silu_mul", gated, build.emit("grouped_linear", rows, offsets, *up, at=moe), at=moe)
    return _one(build.emit("grouped_linear", act, offsets, *down, at=moe))


def _one(value: object) -> fx.Node:
    assert isinstance(value, fx.Node)
    return value
