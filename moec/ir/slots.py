"""Whether all experts of a Program have a slot of device memory of their own."""

from __future__ import annotations

from moec.ir.program import Program


def most_held(program: Program) -> int:
    """Experts of one layer that a rank holds, at most."""
    return max(max(table.counts) for table in program.placements.values())


def is_cached(program: Program) -> bool:
    """Whether some experts have none, and take turns in those of others."""
    slots = program.cache.slots if program.cache is not None else None
    return slots is not None and slots < most_held(program)
