"""Which layers prefetch for which: each for the one that many sparse layers later, dense ones in front for the first.

Where no dense layer can look ahead for the first sparse ones, nobody does. But in a pool of all layers the last layers
of a decode step bring back what the first ones have used most, for the next step.
"""

from __future__ import annotations

from moec.cache.policies import COUNTING
from moec.cache_sizes import has_pool, tables_of
from moec.ir.program import Program, op_of
from moec.ir.slots import is_cached

#: A body, the body of a later layer for which its layers prefetch, and how many layers later that is: of a layer of the
#: next step as many less as the model has.
Pair = tuple[str, str, int]


def pairs(program: Program) -> dict[Pair, list[int]]:
    """Layers by the pair they are of; no later body where nothing is cached there, or nothing can be guessed here.

    What follows a choice is known among the experts of one table only, and what comes back is counted in one.
    """
    cache = program.cache
    assert cache is not None
    cached = _having(program, "cached_experts") if is_cached(program) and cache.prefetch != "none" else {}
    tables, sources = tables_of(program), _sources(program, sorted(cached), cache.ahead)
    found: dict[Pair, list[int]] = {}
    for run in program.runs:
        for layer in run.layers:
            later = sources.get(layer)
            if later is not None and (cache.prefetch == "history" or later < layer):
                later = later if tables.get(layer) == tables[later] else None
            pair = (run.body, "", 0) if later is None else (run.body, cached[later], later - layer)
            found.setdefault(pair, []).append(layer)
    return found


def _sources(program: Program, sparse: list[int], ahead: int) -> dict[int, int]:
    """Which layer prefetches for which sparse one: the sparse one `ahead` before, else a dense one before them all.

    Where there is none, in a pool whose policy counts uses, one of the last sparse ones does so for the next step.
    """
    found = dict(zip(sparse, sparse[ahead:], strict=False))
    layers = {layer for run in program.runs for layer in run.layers}
    for index, later in enumerate(sparse[:ahead]):
        if (before := sparse[0] + index - ahead) in layers:
            found[before] = later
        elif comes_back(program) and len(sparse) > ahead:
            found[sparse[index - ahead]] = later
    return found


def comes_back(program: Program) -> bool:
    """Whether a step can bring back what the next one begins with: in prompts' steps the slots are all needed."""
    cache = program.cache
    return program.phase == "decode" and cache is not None and has_pool(program) and cache.evict in COUNTING


def predictor_of(program: Program, pair: Pair) -> str:
    """What a prefetch of this pair goes by."""
    assert program.cache is not None
    return "frequency" if pair[2] < 0 else program.cache.prefetch


def _having(program: Program, name: str) -> dict[int, str]:
    """Layers whose body has an operation `name`, and that body."""
    bodies = {body.name for body, node in program.nodes() if op_of(node).name == name}
    return {layer: body for body in sorted(bodies) for layer in program.layers_of(body)}
