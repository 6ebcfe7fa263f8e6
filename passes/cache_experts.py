"""Serve a layer's experts from slots that hold some of them, where a plan has an expert cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from moec.cache_sizes import count_slots
from moec.cost.hits import traced_hit_rate
from moec.ir.build import Builder, erase
from moec.ir.program import Body, Program, is_op, op_of, operands
from moec.ir.slots import most_held
from moec.passes.base import Pass


@dataclass(frozen=True)
class CacheExperts(Pass):
    """Settle how many slots a layer has, and read its experts from there. With a slot for each, nothing changes.

    Where costs are counted over a trace, decode's share of hits is counted there too; a prefill is taken to find what
    the slots have room for.

    before: %3 = grouped_gate_up(%1, %2, @experts.gate_up); %4 = grouped_linear(%3, %2, @experts.down)
    after:  %3 = prefetch.wait(%2, table=routed)
            %4 = cached_experts(%1, %2, %3, @experts.gate_up, @experts.down, table=routed)
    """

    name: ClassVar[str] = "cache-experts"

    def run(self, program: Program) -> None:
        if program.cache is None:
            return
        if not program.experts:  # a pipeline stage without sparse layers
            program.cache = None
            return
        slots, held = count_slots(program), most_held(program)
        program.cache = replace(program.cache, slots=min(slots, held), hbm=None, share=None)
        if slots >= held:
            program.cache = replace(program.cache, prefetch="none")
            return
        if program.routing is not None and program.phase == "decode":
            program.cache = replace(program.cache, hit_rate=round(traced_hit_rate(program), 4))
        for body in program.bodies.values():
            for node in list(body.graph.nodes):
                if is_op(node) and op_of(node).name == "grouped_gate_up":
                    _serve(program, body, node)


def _serve(program: Program, body: Body, first: fx.Node) -> None:
    """Join the two products of the experts into one operation, which may take them expert by expert."""
    rows, offsets, *gate_up = operands(first)
    (second,) = first.users
    table = next(str(n.kwargs["table"]) for n in body.graph.nodes if is_op(n) and op_of(n).name == "group_rows")
    build = Builder(program, body)
    with build.before(second):
        slots = build.emit("prefetch.wait", offsets, at=first, table=table)
        weights = [value for pair in zip(gate_up, operands(second)[2:], strict=True) for value in pair]
        served = build.emit("cached_experts", rows, offsets, slots, *weights, at=first, table=table)
    second.replace_all_uses_with(served)
    erase(body, second)
    erase(body, first)
