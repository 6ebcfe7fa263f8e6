"""How large cached experts are, how many slots their memory makes, and which of them wait in which tier.

One rank is meant everywhere. Experts of a layer are alike; layers may differ.
"""

from __future__ import annotations

import math
from dataclasses import replace

from moec.cost_sizes import WIDTH
from moec.diagnostics import CompileError, Diagnostic
from moec.ir import Body, Cache, Program


def expert_params(body: Body) -> list[str]:
    """Parameters that hold one matrix per routed expert, in the order in which an expert's bytes stand in a slot."""
    return [name for name in body.params if name.startswith("experts.")]


def expert_bytes(program: Program, body: Body) -> int:
    """Bytes of one routed expert of `body` on one rank; 0 where it has none."""
    total = 0
    for name in expert_params(body):
        param = body.params[name]
        _, *shape = param.local_shape(program.mesh, program.placements)
        total += math.prod(map(int, shape)) * WIDTH[param.dtype]
    return total


def layer_bytes(program: Program) -> dict[int, int]:
    """Bytes of one expert, by sparse layer."""
    return {
        layer: expert_bytes(program, body)
        for body in program.bodies.values()
        for layer in sorted(program.layers_of(body.name))
        if expert_params(body)
    }


def is_cached(program: Program) -> bool:
    """Whether some experts have no slot of their own."""
    cache, tables = program.cache, program.placements.values()
    return cache is not None and cache.slots is not None and cache.slots < max(max(t.counts) for t in tables)


def cached_params(program: Program, body: Body) -> list[str]:
    """Parameters of a body that are read from slots."""
    return expert_params(body) if program.cache is not None and is_cached(program) else []


def pinned_slots(program: Program, cache: Cache) -> int:
    """Slots of a layer that the rank with the most pinned experts does not have for others."""
    tables = program.placements.values()
    return max(len(set(cache.pinned) & set(held)) for table in tables for held in table.slots)


def count_slots(program: Program) -> int:
    """Slots per layer and rank that the plan's memory makes.

    Raises CompileError E0332 where they are too few to work, E0333 where a tier is too small.
    """
    cache = program.cache
    assert cache is not None
    per_slot, most_held = sum(layer_bytes(program).values()), max(max(t.counts) for t in program.placements.values())
    if cache.slots is not None:
        slots = cache.slots
    elif cache.hbm is not None:
        slots = cache.hbm // per_slot
    else:
        assert cache.share is not None
        slots = math.floor(cache.share * most_held + 1e-9)  # 0.29 of 100 is 29
    pinned = pinned_slots(program, cache)
    least = min(pinned + 1, most_held)  # one that experts take turns in
    if slots < least:
        raise CompileError(_too_few(slots, least, pinned, per_slot))
    _need_room(program, replace(cache, slots=slots), per_slot, most_held)
    return slots


def _too_few(slots: int, least: int, pinned: int, per_slot: int) -> Diagnostic:
    why = f"{pinned} for pinned experts and one for the others" if pinned else "one that experts take turns in"
    return Diagnostic(
        "E0332",
        f"the cache has {slots} slots for each layer's experts on a rank, the least that works is {least}: {why}",
        help=f"`hbm = slots({least})`, or from {least * per_slot / 2**20:.1f} MiB per rank on",
    )


def host_experts(program: Program) -> int:
    """Experts of each layer that the host tier has room for on a rank; the others wait in nvme."""
    cache = program.cache
    assert cache is not None
    most_held = max(max(table.counts) for table in program.placements.values())
    host = next((tier for tier in cache.tiers if tier.name == "host"), None)
    if host is None:
        return 0
    if host.bytes is None:
        return most_held
    return min(most_held, host.bytes // sum(layer_bytes(program).values()))


def _need_room(program: Program, cache: Cache, per_slot: int, most_held: int) -> None:
    """Without a second tier, host memory must hold what has no slot of its own."""
    if [tier.name for tier in cache.tiers] != ["host"] or (cache.slots or 0) >= most_held:
        return
    found = host_experts(program)
    if found < most_held:
        need = most_held * per_slot / 2**20
        message = f"the host tier has room for {found} of the {most_held} experts that a rank holds of each layer"
        help = f"give it {need:.1f} MiB per rank, or declare an `nvme` tier for the rest"
        raise CompileError(Diagnostic("E0333", message, help=help))
