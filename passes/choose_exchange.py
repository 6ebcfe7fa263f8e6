"""Decide how routed rows travel where the plan leaves it open, by what each way would cost on this cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moec.cost.exchange import CANDIDATES, Comparison
from moec.ir.program import Program
from moec.passes.base import Pass, pass_named


@dataclass(frozen=True)
class ChooseExchange(Pass):
    """Settle `exchange = auto` and `combine = auto` for the cheapest of the candidates, lowered by pass `lowering`.

    One that the devices have no room for is left out. Of equal times the simplest wins; without the links' rates, fewer
    bytes over the slowest class of them. `moec explain` shows the table.

    before: exchange=auto combine=auto
    after:  exchange=two_hop combine=reduced
    """

    name: ClassVar[str] = "choose-exchange"
    lowering: str = "insert-exchange"

    def run(self, program: Program) -> None:
        is_open = "auto" in (program.exchange, program.combine)
        chosen = CANDIDATES[0] if is_open else (program.exchange, program.combine)
        if program.mesh.ep > 1 and program.experts:
            comparison = self.compare(program)
            chosen = comparison.cheapest(comparison.open_candidates()) if is_open else chosen
            program.fitting = comparison.fitting(chosen)
        program.exchange, program.combine = chosen
        if is_open and program.exchange != "padded":  # bounds of no other exchange
            program.capacity, program.drop = None, False

    def compare(self, program: Program) -> Comparison:
        """All candidates of a program that has not been lowered yet."""

        def lower(copied: Program) -> None:
            for name in (self.lowering, "fuse-gate-up"):  # the second makes of an expert's values what memory counts
                pass_named(name)().run(copied)

        return Comparison(program, lower)
