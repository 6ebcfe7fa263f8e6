"""The part of plan.json that says whether shared experts run in the products of the routed ones, or why not."""

from __future__ import annotations

from typing import Any

from moec.ir.program import Program


class SharedTables:
    """An observer of the passes: keeps what `join-shared` found.

    `found`: (phase, pipeline stage) -> by body with shared experts, why they are apart; empty where they are not.
    """

    def __init__(self) -> None:
        self.found: dict[tuple[str, int], dict[str, str]] = {}

    def __call__(self, step: Any, program: Program) -> None:
        if step.name == "join-shared":
            self.found[program.phase, program.stage] = step.outcome(program)
