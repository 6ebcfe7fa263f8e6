"""Deal the experts to the ranks of the expert-parallel group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moec.ir.program import Program
from moec.passes.base import Pass
from moec.placement import STRATEGIES


@dataclass(frozen=True)
class PlaceExperts(Pass):
    """Write one placement table for each set of routed experts, by the mesh's strategy.

    before: experts routed=32                 (ep=3)
    after:  placement routed [0-10] [11-21] [22-31]
    """

    name: ClassVar[str] = "place-experts"

    def run(self, program: Program) -> None:
        for table, count in program.experts.items():
            program.placements[table] = STRATEGIES[program.strategy](count, program.mesh.ep)
