"""Join the experts' products with what sorts their rows before and what sums them after, where kernels can."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from moec.cost.gather import is_gathering_better
from moec.cost.sizes import sizes_of
from moec.ir.build import Builder, erase
from moec.ir.ops.scales import has_fp8
from moec.ir.program import Body, Program, is_op, op_of, operands, results_of
from moec.passes.base import Pass

#: Kernels that read rows through their pairs, and that sum as they go.
FUSING = ("triton",)


@dataclass(frozen=True)
class FuseExperts(Pass):
    """Leave out the copy of the rows where reading them through their pairs is cheaper, by `moec.cost.gather`.

    A phase with `sums = any` adds what the experts give into the tokens' rows at once, as it comes.

    before: %3, %4, %5 = group_rows(%1, %2, table=routed); %6 = grouped_gate_up(%3, %4, @experts.gate_up)
            %7 = grouped_linear(%6, %4, @experts.down); %8 = reduce_rows(%7, %5, %0, table=routed)
    after:  %3, %4 = group_pairs(%2, table=routed); %5 = gathered_gate_up(%1, %3, %4, @experts.gate_up, ...)
            %6 = reduced_linear(%5, %3, @experts.down, %4, %0, table=routed)
    """

    name: ClassVar[str] = "fuse-experts"
    prefer: str = "torch"

    def run(self, program: Program) -> None:
        if self.prefer not in FUSING:
            return
        for body in program.bodies.values():
            for node in list(body.graph.nodes):
                if is_op(node) and op_of(node).name == "group_rows":
                    _gather(program, body, node)
                elif is_op(node) and op_of(node).name == "reduce_rows" and program.sums == "any":
                    _reduce(program, body, node)


def _gather(program: Program, body: Body, group: fx.Node) -> None:
    """Rows that came in a message are packed with other bytes: those are copied, and only those of the step are not."""
    x, ids = operands(group)
    rows, offsets, pairs = results_of(group)
    users = list(rows.users)
    if len(users) != 1 or op_of(users[0]).name != "grouped_gate_up" or _is_message(x):
        return
    (product,) = users
    if not is_gathering_better(sizes_of(program, body), product):
        return
    table, top, build = group.kwargs["table"], _top(body, ids), Builder(program, body)
    with build.before(group):
        ends, sorted_pairs = build.emit("group_pairs", ids, at=group, table=table)
    with build.before(product):
        fused = build.emit(
            "gathered_gate_up", x, ends, sorted_pairs, *operands(product)[2:], at=product, table=table, top=top
        )
    for old, new in ((product, fused), (offsets, ends), (pairs, sorted_pairs)):
        old.replace_all_uses_with(new)
    erase(body, product)
    erase(body, group)


def _reduce(program: Program, body: Body, reduce: fx.Node) -> None:
    product, pairs, weights = operands(reduce)
    if not is_op(product) or op_of(product).name != "grouped_linear" or len(product.users) != 1:
        return
    if has_fp8(product):
        return  # no kernel sums what fp8 experts give as it comes
    build = Builder(program, body)
    with build.before(reduce):
        fused = build.emit(
            "reduced_linear", *operands(product), pairs, weights, at=product, table=reduce.kwargs["table"]
        )
    reduce.replace_all_uses_with(fused)
    erase(body, reduce)
    erase(body, product)


def _is_message(rows: fx.Node) -> bool:
    return not is_op(rows) and any(is_op(maker) and op_of(maker).name == "open_rows" for maker in rows.all_input_nodes)


def _top(body: Body, ids: fx.Node) -> int:
    """Choices of a row."""
    return int(ids.meta["type"].shape[1])
