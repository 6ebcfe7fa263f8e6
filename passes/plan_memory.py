"""Add up what each rank holds: weights, KV memory, and the largest body's values."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from moec.cache_sizes import arena_bytes, cached_params
from moec.cost_sizes import bounds, num_chunks
from moec.diagnostics import CompileError, Diagnostic
from moec.ir import Body, Memory, Program, Type, is_op, op_of
from moec.ir_slots import is_cached
from moec.layout import Placed
from moec.ops import WIDTH
from moec.passes.base import Pass


@dataclass(frozen=True)
class PlanMemory(Pass):
    """Write the bytes per rank, and refuse a plan that a device of the cluster cannot hold.

    Buffers are a sum over all values of one body at the step's largest size, as if none were freed: rows received are
    bounded by every token of the group choosing only this rank's experts.

    before: (no memory lines)
    after:  memory 0 weights=16777216 kv=4194304 buffers=1048576        (and, of an expert cache, slots=4194304)
    """

    name: ClassVar[str] = "plan-memory"

    def run(self, program: Program) -> None:
        planned: list[Memory] = []
        alike: dict[tuple[int, ...], Memory] = {}  # ranks that hold as many experts hold as much
        for rank in range(program.mesh.size):
            held = tuple(_held(program, rank, table) for table in program.placements)
            if held not in alike:
                alike[held] = Memory(
                    _weights(program, rank), _kv(program), _buffers(program, rank), _slot_bytes(program)
                )
            planned.append(alike[held])
        program.memory = tuple(planned)
        limit = program.cluster.device.memory_bytes
        worst = max(range(program.mesh.size), key=lambda rank: program.memory[rank].total)
        if limit is not None and program.memory[worst].total > limit:
            raise CompileError(_too_large(program, worst, limit))


def _too_large(program: Program, rank: int, limit: int) -> Diagnostic:
    need = program.memory[rank]
    parts = {"weights": need.weights, "kv": need.kv, "buffers": need.buffers}
    parts |= {"expert slots": need.slots} if need.slots else {}
    shown = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in parts.items())
    return Diagnostic(
        "E0330",
        f"{program.phase} needs {need.total / 2**30:.1f} GiB on rank {rank}, a device of {program.cluster.name} has"
        f" {limit / 2**30:.1f} GiB ({shown} GiB)",
        help="use more devices, a smaller `context` or `batch`, "
        + ("or a wider `ep`" if need.slots or not program.experts else "a wider `ep`, or a `cache` of some experts"),
    )


def _held(program: Program, rank: int, table: str) -> int:
    return program.placements[table].counts[program.mesh.coordinate(rank, "ep")]


def _weights(program: Program, rank: int) -> int:
    total = 0
    for body in program.bodies.values():
        times = len(program.layers_of(body.name)) or 1
        for name, param in body.params.items():
            if param.is_borrowed or name in cached_params(program, body):
                continue  # counted where it belongs
            shape = param.local_shape(program.mesh, program.placements)
            tables = [p.table for _, p in param.layout.places if isinstance(p, Placed)]
            dims = [_held(program, rank, tables[0]) if d == "M" else d for d in shape]
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


def _buffers(program: Program, rank: int) -> int:
    return max(_body_buffers(program, body, _bounds(program, body, rank)) for body in program.bodies.values())


def _bounds(program: Program, body: Body, rank: int) -> dict[str, int]:
    """The largest value of each symbol on this rank; of a chunk, with its part of the tokens."""
    routes = [n for n in body.graph.nodes if is_op(n) and op_of(n).name == "route"]
    top = max((int(str(n.kwargs["top"])) for n in routes), default=0)
    held = max((_held(program, rank, str(n.kwargs["table"])) for n in routes), default=0)
    whole = bounds(program, top, held)
    parts = num_chunks(body)
    chunk = bounds(replace(program, tokens=-(-program.tokens // parts)), top, held)
    return whole | {f"{name}.{index}": size for name, size in chunk.items() for index in range(parts)}


def _body_buffers(program: Program, body: Body, bounds: dict[str, int]) -> int:
    def size(type: Type) -> int:
        return WIDTH[type.dtype] * math.prod(dim if isinstance(dim, int) else bounds[dim] for dim in type.shape)

    values = [node.meta.get("type") for node in body.graph.nodes if node.op != "get_attr"]
    return sum(size(value) for value in values if isinstance(value, Type))
