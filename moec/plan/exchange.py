"""The part of plan.json that says what every exchange would have cost, and from how many tokens another is cheaper."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from moec.checked import Phase, Plan
from moec.cost.exchange import CANDIDATES, Candidate, Comparison, Estimate, measure_of
from moec.cost.flow import CLASSES
from moec.ir.program import Program


class ExchangeTables:
    """An observer of the passes: makes each phase's table after `choose-exchange`, and what overlap would gain.

    `found`: (phase, pipeline stage) -> table. A program that exchanges nothing has none.
    """

    def __init__(self, plan: Plan) -> None:
        self.phases = {"prefill": plan.prefill, "decode": plan.decode}
        self.found: dict[tuple[str, int], dict[str, Any]] = {}

    def __call__(self, step: Any, program: Program) -> None:
        if program.mesh.ep == 1 or not program.experts:
            return
        phase, place = self.phases[program.phase], (program.phase, program.stage)
        if step.name == "plan-overlap" and phase.overlap != "off":
            found = step.compare(replace(program, overlap=phase.overlap))
            self.found[place]["overlap"] = {"asked": phase.overlap, **asdict(found)}
        if step.name == "choose-exchange":
            open_to_all = replace(program, exchange="auto", combine="auto", capacity=phase.capacity, drop=phase.drop)
            self.found[place] = table(step.compare(open_to_all), phase, (program.exchange, program.combine))


def table(comparison: Comparison, phase: Phase, chosen: Candidate) -> dict[str, Any]:
    """Every candidate, the one chosen, and the cheapest at other numbers of tokens, as JSON.

    `by`: what tells them apart, see `moec.cost.exchange.measure_of`.
    """
    found = [comparison.estimate(candidate) for candidate in CANDIDATES]
    return {
        "asked": {"exchange": phase.exchange, "combine": phase.combine},
        "chosen": _name(chosen),
        "cheapest": _name(comparison.cheapest(CANDIDATES)),
        "by": measure_of([estimate for estimate in found if estimate.is_eligible]),
        "candidates": [_candidate(estimate) for estimate in found],
        "by_tokens": [
            {"first": first, "last": last, **_name(candidate)}
            for first, last, candidate in comparison.ranges(CANDIDATES)
        ],
    }


def _candidate(found: Estimate) -> dict[str, Any]:
    return {
        **_name((found.exchange, found.combine)),
        "bytes": dict(zip(CLASSES, map(round, found.bytes), strict=True)),
        "messages": dict(zip(CLASSES, map(round, found.messages), strict=True)),
        "us": None if found.us is None else round(found.us, 3),
        "terms": {term: round(us, 3) for term, us in found.terms.items()},
        "unknown": list(found.unknown),
        "memory_bytes": found.memory,
        "note": found.note,
        "is_eligible": found.is_eligible,
    }


def _name(candidate: Candidate | None) -> dict[str, str]:
    return dict(zip(("exchange", "combine"), candidate or ("none", "none"), strict=True))
