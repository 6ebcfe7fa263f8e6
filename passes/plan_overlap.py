"""Decide in how many chunks a sparse layer is cut, by what the cost model says each would gain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moec.ir.program import Program
from moec.passes.base import Pass, pass_named
from moec.plan.overlap import Overlap, plan_overlap

#: The passes that each candidate goes through.
LOWERING = ("chunk-tokens", "insert-exchange", "fuse-gate-up", "merge-linears")


@dataclass(frozen=True)
class PlanOverlap(Pass):
    """Settle `overlap`: off where nothing is gained, else the number of chunks; 1 only reorders.

    before: overlap=auto
    after:  overlap=2
    """

    name: ClassVar[str] = "plan-overlap"

    def run(self, program: Program) -> None:
        if program.overlap != "off":
            program.overlap = self.compare(program).chosen

    def compare(self, program: Program) -> Overlap:
        """All candidates of a program that has not been lowered yet."""

        def lower(copied: Program) -> None:
            for name in LOWERING:
                pass_named(name)().run(copied)

        return plan_overlap(program, lower)
