"""Decide how routed rows travel where the plan leaves it open, by what each way would cost on this cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moec.cost_exchange import CANDIDATES, Comparison
from moec.ir import Program
from moec.passes.base import Pass, pass_named


@dataclass(frozen=True)
class ChooseExchange(Pass):
    """Settle `exchange = auto` and `combine = auto` for the cheapest of the candidates, lowered by pass `lowering`.

    Of equal times the simplest wins, and without the links' rates the first; `moec explain` shows the table.

    before: exchange=auto combine=auto
    after:  exchange=two_hop combine=reduced
    """

    name: ClassVar[str] = "choose-exchange"
    lowering: str = "insert-exchange"

    def run(self, program: Program) -> None:
        if "auto" not in (program.exchange, program.combine):
            return
        chosen = CANDIDATES[0]
        if program.mesh.ep > 1 and program.experts:
            comparison = self.compare(program)
            chosen = comparison.cheapest(comparison.open_candidates())
        program.exchange, program.combine = chosen
        if program.exchange != "padded":  # bounds of no other exchange
            program.capacity, program.drop = None, False

    def compare(self, program: Program) -> Comparison:
        """All candidates of a program that has not been lowered yet."""
        return Comparison(program, pass_named(self.lowering)().run)
