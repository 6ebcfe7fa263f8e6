"""Bytes that a Program takes on one rank: weights, KV memory, expert slots, and the largest body's values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from moec.cache_sizes import arena_bytes, cached_params
from moec.cost.sizes import bounds, choices_of, num_chunks
from moec.ir.ops.table import WIDTH
from moec.ir.program import Body, Memory, Program, Type, is_op, op_of
from moec.ir.slots import is_cached
from moec.layout import Placed

#: Table of experts -> how many of them a rank holds.
Held = Mapping[str, int]


def memory_by_rank(program: Program) -> tuple[Memory, ...]:
    """What each rank takes. Needs a typed Program."""
    found = {held: memory_of(program, dict(held)) for held in set(_held_by_ep_rank(program))}
    held = _held_by_ep_rank(program)
    return tuple(found[held[program.mesh.coordinate(rank, "ep")]] for rank in range(program.mesh.size))


def most_memory(program: Program) -> int:
    """Bytes on the rank that takes most."""
    return max(memory_of(program, dict(held)).total for held in set(_held_by_ep_rank(program)))


def memory_of(program: Program, held: Held) -> Memory:
    """What a rank takes that holds so many experts.

    Buffers are a sum over all values of one body at the step's largest size, as if none were freed: rows received are
    bounded by every token of the group choosing only this rank's experts. What is freed earlier makes room for what
    kernels need inside (fp32 copies of their rows), which is counted nowhere else.
    """
    buffers = max(_buffers(program, body, held) for body in program.bodies.values())
    return Memory(_weights(program, held), _kv(program), buffers, _slot_bytes(program))


def _held_by_ep_rank(program: Program) -> list[tuple[tuple[str, int], ...]]:
    """(table, experts held) of each rank of an ep group."""
    tables = program.placements.items()
    return [tuple((table, placed.counts[rank]) for table, placed in tables) for rank in range(program.mesh.ep)]


def _weights(program: Program, held: Held) -> int:
    total = 0
    for body in program.bodies.values():
        times = len(program.layers_of(body.name)) or 1
        for name, param in body.params.items():
            if param.is_borrowed or name in cached_params(program, body):
                continue  # counted where it belongs
            shape = param.local_shape(program.mesh, program.placements)
            tables = [p.table for _, p in param.layout.places if isinstance(p, Placed)]
            dims = [held[tables[0]] if d == "M" else d for d in shape]
            total += times * WIDTH[param.dtype] * math.prod(map(int, dims))
    return total


def _slot_bytes(program: Program) -> int:
    """Bytes of the slots of a rank's experts, where some have no slot of their own."""
    cache = program.cache
    return arena_bytes(program, cache.slots) if cache and cache.slots and is_cached(program) else 0


def _kv(program: Program) -> int:
    per_token = sum(
        len(program.layers_of(body.name)) * math.prod(state.local_shape(program.mesh)) * WIDTH[state.dtype]
        for body in program.bodies.values()
        for state in body.states.values()
    )
    return per_token * program.slots * program.context


def _buffers(program: Program, body: Body, held: Held) -> int:
    largest = _bounds(program, body, held)

    def size(type: Type) -> int:
        return WIDTH[type.dtype] * math.prod(dim if isinstance(dim, int) else largest[dim] for dim in type.shape)

    values = [node.meta.get("type") for node in body.graph.nodes if node.op != "get_attr"]
    return sum(size(value) for value in values if isinstance(value, Type))


def _bounds(program: Program, body: Body, held: Held) -> dict[str, int]:
    """The largest value of each symbol; of a chunk, with its part of the tokens."""
    routes = [n for n in body.graph.nodes if is_op(n) and op_of(n).name == "route"]
    top = max(map(choices_of, routes), default=0)
    most = max((held[str(n.kwargs["table"])] for n in routes), default=0)
    whole = bounds(program, body, top, most)
    parts = num_chunks(body)
    chunk = bounds(replace(program, tokens=-(-program.tokens // parts)), body, top, most)
    return whole | {f"{name}.{index}": size for name, size in chunk.items() for index in range(parts)}
