"""How large cached experts are, how many slots their memory makes, and which of them wait in which tier.

One rank is meant everywhere. Experts of a layer are alike; layers may differ, and a slot fits an expert of any.
"""

from __future__ import annotations

import math

from moec.cache.policies import scope_of
from moec.cache.policy import Key
from moec.cache.residency import least_slots
from moec.diagnostics import CompileError, Diagnostic
from moec.ir.ops.table import WIDTH
from moec.ir.program import Body, Cache, Program, op_of
from moec.ir.slots import is_cached, most_held

#: Slots start at multiples of this, as torch's own tensors do.
SLOT_ALIGNMENT = 64
#: What a device takes at once of an expert that is read from a file; so much host memory lies between the two.
DEVICE_PIECE_BYTES = 4 << 20


def expert_params(body: Body) -> list[str]:
    """Parameters that hold one matrix per routed expert, in the order in which an expert's bytes stand in a slot.

    Wider elements come first, so that each begins at a multiple of its size.
    """
    names = [name for name in body.params if name.startswith("experts.")]
    return sorted(names, key=lambda name: -WIDTH[body.params[name].dtype])


def expert_bytes(program: Program, body: Body) -> int:
    """Bytes of one routed expert of `body`; 0 where it has none."""
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


def arena_bytes(program: Program, slots: int) -> int:
    """Bytes of `slots` slots for every sparse layer."""
    sizes = layer_bytes(program).values()
    return slots * len(sizes) * -(-max(sizes) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def cached_params(program: Program, body: Body) -> list[str]:
    """Parameters of a body that are read from slots."""
    return expert_params(body) if is_cached(program) else []


def tables_of(program: Program) -> dict[int, str]:
    """The table of experts of each sparse layer, in order."""
    routes = [(body, node) for body, node in program.nodes() if op_of(node).name == "route"]
    found = {layer: str(node.kwargs["table"]) for body, node in routes for layer in program.layers_of(body.name)}
    return dict(sorted(found.items()))


def held_experts(program: Program, ep_rank: int) -> list[tuple[int, ...]]:
    """Experts of each sparse layer that a rank of an ep group holds."""
    return [program.placements[table].slots[ep_rank] for table in tables_of(program).values()]


def pinned_keys(cache: Cache, held: list[tuple[int, ...]]) -> list[Key]:
    """What keeps its slot, of the experts that a rank holds."""
    return [(layer, expert) for layer, experts in enumerate(held) for expert in cache.pinned if expert in experts]


def most_pinned(program: Program) -> int:
    """Slots of a layer that pinned experts have, on the rank with most of them."""
    cache = program.cache
    assert cache is not None
    held = [experts for table in program.placements.values() for experts in table.slots]
    return max(len(set(cache.pinned) & set(experts)) for experts in held)


def count_slots(program: Program) -> int:
    """Slots per layer and rank that the plan's memory makes.

    Raises CompileError E0332 where they are too few to work, E0333 where host memory is too small.
    """
    cache = program.cache
    assert cache is not None
    if cache.slots is not None:
        slots = cache.slots
    elif cache.hbm is not None:
        slots = cache.hbm // arena_bytes(program, 1)
    else:
        assert cache.share is not None
        slots = math.floor(cache.share * most_held(program) + 1e-9)  # 0.29 of 100 is 29
    least = least_count(program)
    if slots < least:
        raise CompileError(_too_few(program, slots, least))
    _need_room(program, slots)
    return slots


def least_count(program: Program) -> int:
    """The fewest slots that every rank works with."""
    cache = program.cache
    assert cache is not None
    ranks = [held_experts(program, rank) for rank in range(program.mesh.ep)]
    return max(least_slots(held, scope_of(cache.evict), pinned_keys(cache, held)) for held in ranks)


def has_pool(program: Program) -> bool:
    """Whether the layers of a rank share their slots, by the policy; else each has its own."""
    return program.cache is not None and scope_of(program.cache.evict) == "rank"


def host_experts(program: Program) -> int:
    """Experts of each layer that the host tier has room for; the others wait in nvme."""
    cache = program.cache
    assert cache is not None
    host = next((tier for tier in cache.tiers if tier.name == "host"), None)
    if host is None:
        return 0
    if host.bytes is None:
        return most_held(program)
    return min(most_held(program), host.bytes // sum(layer_bytes(program).values()))


def _too_few(program: Program, slots: int, least: int) -> Diagnostic:
    pinned = most_pinned(program)
    why = f"{pinned} for pinned experts and one for the others" if pinned else "one that experts take turns in"
    return Diagnostic(
        "E0332",
        f"the cache has {slots} slots for each layer's experts on a rank, the least that works is {least}: {why}",
        help=f"use `hbm = slots({least})`, or `hbm = {_room(arena_bytes(program, least))} per rank`",
    )


def _room(num_bytes: int) -> str:
    """As much in a unit of the language, rounded up."""
    unit, size = ("KiB", 2**10) if num_bytes < 2**24 else ("MiB", 2**20)
    return f"{-(-num_bytes // size)} {unit}"


def _need_room(program: Program, slots: int) -> None:
    """Without a second tier, host memory must hold every expert that may have to leave its slot."""
    cache, held = program.cache, most_held(program)
    assert cache is not None
    if [tier.name for tier in cache.tiers] != ["host"] or slots >= held:
        return
    found = host_experts(program)
    if found < held:
        need = _room(held * sum(layer_bytes(program).values()))
        message = f"the host tier has room for {found} of the {held} experts that a rank holds of each layer"
        help = f"give it {need} per rank, or declare an `nvme` tier for the rest"
        raise CompileError(Diagnostic("E0333", message, help=help))
