"""Join a decode step's experts into one operation, which few rows make without sorting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from moec.cost.pairs import most_rows
from moec.cost.sizes import sizes_of
from moec.ir.build import Builder, erase
from moec.ir.program import Body, Program, is_op, op_of, operands, results_of, type_of
from moec.passes.base import Pass

#: Kernels that multiply pair by pair.
PAIRING = ("triton",)


@dataclass(frozen=True)
class PairExperts(Pass):
    """Let the kernel of a decode step sort its pairs or not, as its rows are many or few: by `moec.cost.pairs`.

    Where rows are read through their pairs, all weights in the rows' dtype. A program decodes as many rows as there are
    sequences, from one to its batch, so which it is, is known when a step begins.

    before: %3, %4 = group_pairs(%1, table=routed); %5 = gathered_gate_up(%0, %3, %4, @experts.gate_up, ...)
            %6 = grouped_linear(%5, %3, @experts.down); %7 = reduce_rows(%6, %4, %2, table=routed)
    after:  %3 = paired_experts(%0, %1, %2, @experts.gate_up, @experts.down, rows=8, sums=fixed, table=routed)
    """

    name: ClassVar[str] = "pair-experts"
    prefer: str = "torch"

    def run(self, program: Program) -> None:
        if self.prefer not in PAIRING or program.phase != "decode":
            return
        for body in program.bodies.values():
            for node in list(body.graph.nodes):
                if is_op(node) and op_of(node).name == "gathered_gate_up":
                    _pair(program, body, node)


def _pair(program: Program, body: Body, gate_up: fx.Node) -> None:
    x, _, pairs, *weights = operands(gate_up)
    (group,) = pairs.all_input_nodes
    chain = _chain(gate_up, group)
    if len(weights) > 1 or chain is None:  # weights with scales
        return
    down, last = chain
    bound, build = sizes_of(program, body).dim(type_of(x).shape[0]), Builder(program, body)
    with build.before(last):
        paired = build.emit(
            "paired_experts", x, operands(group)[0], operands(last)[-1], *weights, operands(down)[2], at=gate_up,
            table=gate_up.kwargs["table"], rows=most_rows(sizes_of(program, body), round(bound)),
            sums="any" if last is down else "fixed",
        )  # fmt: skip
    last.replace_all_uses_with(paired)
    for node in dict.fromkeys((last, down, gate_up, group)):
        erase(body, node)


def _chain(gate_up: fx.Node, group: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """What reads activations of sorted pairs: the down product, and what sums its rows, itself or the next operation.

    None where anything else reads what `group` or one of these gives, or where down's weights have scales.
    """
    down = last = next(iter(gate_up.users))
    if op_of(down).name == "grouped_linear" and len(operands(down)) == 3:
        last = next(iter(down.users))
    is_alone = len(gate_up.users) == 1 and (last is down or len(down.users) == 1)
    readers = {user for result in results_of(group) for user in result.users}
    if op_of(last).name not in ("reduced_linear", "reduce_rows") or not is_alone or readers != {gate_up, down, last}:
        return None
    return down, last
