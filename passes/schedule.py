"""Order each body's operations so that transfers run under what does not need them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from moec.cost.operations import node_cost
from moec.cost.sizes import sizes_of
from moec.ir.program import Body, Program
from moec.passes.base import Pass
from moec.schedule import Cost, reorder


@dataclass(frozen=True)
class Schedule(Pass):
    """List scheduling by the cost model: starts hoisted, waits sunk. A phase with `overlap = off` keeps its order.

    before: %8 = all_to_all.start(%4, ...); %9 = all_to_all.wait(%8); ...; %37 = gate_up(%16, @shared.gate_up)
    after:  %8 = all_to_all.start(%4, ...); %9 = gate_up(%16, @shared.gate_up); %10 = all_to_all.wait(%8); ...
    """

    name: ClassVar[str] = "schedule"

    def run(self, program: Program) -> None:
        if program.overlap == "off":
            return
        for body in program.bodies.values():
            reorder(body, cost_of(program, body))


def cost_of(program: Program, body: Body) -> Cost:
    """Microseconds of a body's operations; what is not known costs nothing."""
    sizes = sizes_of(program, body)
    known: dict[fx.Node, float] = {}

    def cost(node: fx.Node) -> float:
        if node not in known:
            known[node] = node_cost(sizes, node).us or 0.0
        return known[node]

    return cost
