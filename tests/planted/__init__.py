"""Mistakes planted in correct programs, each the way a careless pass would make it.

`MISTAKES`: what the verifier must refuse, and words its message must have. Types are inferred again behind each change
as far as the rules go, so that none is caught for a stale type alone. `UNSEEN`: what no type can show; the reference
evaluator gives other numbers for each, and parity with the checkpoint's own implementation holds them.
"""

from tests.planted import cache, parameters, routing, scales, structure, sums
from tests.planted.tools import BASES, MISTAKES, UNSEEN, Mistake, layer, ops, tidy

__all__ = [
    "BASES",
    "MISTAKES",
    "UNSEEN",
    "Mistake",
    "cache",
    "layer",
    "ops",
    "parameters",
    "routing",
    "scales",
    "structure",
    "sums",
    "tidy",
]
