"""Weights of one rank: each parameter's own slices, read from the shards straight into owned buffers.

1. `wanted` lists the parameters of a Program by the names of the model's logical parameters.
2. `account` (before a rank starts, and in it) accounts for all of them from the shard headers.
3. `load` cuts each part by the layout, takes its experts in the slot order of the placement table, reads the pieces
   with `preadv` (a memory map would cost several times the memory, and a shard truncated meanwhile would kill the
   process), converts bf16, fp16 and fp32 to the parameter's dtype, and refuses values that are not finite.

Memory beyond the weights: one bounce buffer (`weights_reader.BOUNCE_BYTES`), or one row where a row is longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from moec.cache_sizes import cached_params
from moec.checkpoint.map import Block, Shape, Sources, open_sources
from moec.ir.params import Param, resized
from moec.ir.program import Program
from moec.layout import Placed, Replicate, Shard
from moec.mesh import Mesh
from moec.placement import Placement
from moec.runtime.host_memory import advise_huge
from moec.runtime.weights_reader import TORCH_DTYPES, ShardReader

Progress = Callable[[int, int], None]


def wanted(programs: Sequence[Program]) -> dict[str, Param]:
    """Every parameter of `programs`, by name: `norm`, `layers.3.experts.gate_up`; its parts named in full.

    Programs of one model share their weights, so the same name must mean the same parameter in each.
    """
    found: dict[str, Param] = {}
    for program in programs:
        for run in program.runs:
            for layer in run.layers or (None,):
                _collect(found, program, program.bodies[run.body].params, layer)
    return found


def _collect(found: dict[str, Param], program: Program, params: Mapping[str, Param], layer: int | None) -> None:
    for name, param in params.items():
        full, whole = param, name
        if layer is not None:
            whole, full = f"layers.{layer}.{name}", param.in_layer(layer)
        if found.setdefault(whole, full) != full:
            raise AssertionError(f"{whole} has another layout in {program.phase}")


def cached(programs: Sequence[Program]) -> set[str]:
    """Of the names in `wanted`, those that programs read from slots of an expert cache."""
    return {
        f"layers.{layer}.{name}"
        for program in programs
        for body in program.bodies.values()
        for name in cached_params(program, body)
        for layer in program.layers_of(body.name)
    }


def logical_shapes(params: Mapping[str, Param]) -> dict[str, Shape]:
    """Global shape of each logical parameter that `params` are made of; the parts of one are equal."""
    found: dict[str, Shape] = {}
    for param in chain.from_iterable(param.apart() for param in params.values()):
        shape, shared = _part_shape(param), param.shared
        if shared is not None:
            matrix = tuple(size * shared.count if dim == shared.dim else size for dim, size in enumerate(shape[1:]))
            found |= dict.fromkeys(shared.parts, matrix)
            shape = (param.num_routed, *shape[1:])
        found |= dict.fromkeys(param.parts, shape)
    return found


def account(programs: Sequence[Program], folder: Path) -> Sources:
    """Where all parameters of a model are, accounted for from the headers in `folder`. Raises E0701 to E0743.

    `programs`: of all its pipeline stages.
    """
    return open_sources(folder, logical_shapes(wanted(programs)))


def load_rank(
    programs: Sequence[Program],
    sources: Sources,
    rank: int,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """The tensors of `rank` for `programs`, by the names of `wanted` but the cached. Raises E0745, E0746."""
    away = cached(programs)
    params = {name: param for name, param in wanted(programs).items() if name not in away}
    placements = {name: table for program in programs for name, table in program.placements.items()}
    return load(sources, params, programs[0].mesh, placements, rank, device, progress)


def load(
    sources: Sources,
    params: Mapping[str, Param],
    mesh: Mesh,
    placements: Mapping[str, Placement],
    rank: int,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """Local tensors of `params` on `rank`. Equal parameters under two names (a tied head) share one tensor.

    `progress(done, total)` counts bytes of this rank's tensors. Raises E0745 for a shard that cannot be read to its
    end, E0746 for values that are not finite.
    """
    tensors: dict[Param, Tensor] = {}
    total = sum(_local_bytes(param, mesh, placements, rank) for param in set(params.values()))
    done = 0
    with ShardReader(sources.checkpoint.folder) as reader:
        for param in params.values():
            if param in tensors:
                continue
            shape = _local_shape(param, mesh, placements, rank)
            tensor = advise_huge(torch.empty(shape, dtype=TORCH_DTYPES[param.dtype], device=device))
            tensors[param] = tensor
            filled = 0
            for block, rows, columns, target in _all_pieces(sources, param, tensor, mesh, placements, rank):
                reader.read(block, rows, columns, target)
                filled += target.numel()
                done += target.numel() * target.element_size()
                if progress is not None:
                    progress(done, total)
            if filled != tensor.numel():
                raise AssertionError(f"{'+'.join(param.parts)}: {filled} of {tensor.numel()} values were read")
    return {name: tensors[param] for name, param in params.items()}


def read_whole(sources: Sources, parameter: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """One whole logical parameter, as the checkpoint has it."""
    name = next(name for name, found in TORCH_DTYPES.items() if found == dtype)
    param = Param((parameter,), sources.parameters[parameter], name)
    return load(sources, {parameter: param}, Mesh(), {}, 0)[parameter]


def _all_pieces(
    sources: Sources,
    param: Param,
    tensor: Tensor,
    mesh: Mesh,
    placements: Mapping[str, Placement],
    rank: int,
) -> Iterator[tuple[Block, range, range, Tensor]]:
    """The `pieces` of everything that `rank` holds of a parameter, which is `tensor`."""
    parts = param.apart()
    sizes = [_local_shape(part, mesh, placements, rank)[param.dim] for part in parts]
    for part, target in zip(parts, torch.split(tensor, sizes, param.dim), strict=True):
        yield from pieces(sources, part, target, *cut(part, mesh, placements, rank))


def _part_shape(param: Param) -> Shape:
    shape = list(param.shape)
    shape[param.dim] //= len(param.parts)
    return tuple(shape)


def cut(
    param: Param, mesh: Mesh, placements: Mapping[str, Placement], rank: int
) -> tuple[list[range], tuple[int, ...]]:
    """The ranges of one part that `rank` holds, by dim, and for a stack of experts the ids it holds, in slot order.

    Shared experts have the ids behind the routed ones.
    """
    ranges = [range(size) for size in _part_shape(param)]
    experts: tuple[int, ...] = tuple(ranges[0]) if len(ranges) == 3 else ()
    for axis, place in param.layout.places:
        if isinstance(place, Placed):
            experts = placements[place.table].slots[mesh.coordinate(rank, axis)]
        elif isinstance(place, Shard):
            pieces, index = mesh.axis_size(axis) // place.copies, mesh.coordinate(rank, axis) // place.copies
            held = ranges[place.dim]
            size = len(held) // pieces
            ranges[place.dim] = held[index * size : (index + 1) * size]
        elif not isinstance(place, Replicate):
            raise AssertionError(f"parameter {param.parts} is {place} on {axis}")
    return ranges, experts


def _local_shape(param: Param, mesh: Mesh, placements: Mapping[str, Placement], rank: int) -> Shape:
    if param.sizes:
        shapes = [_local_shape(part, mesh, placements, rank) for part in param.apart()]
        return resized(shapes[0], param.dim, sum(shape[param.dim] for shape in shapes))
    ranges, experts = cut(param, mesh, placements, rank)
    shape = [len(held) for held in ranges]
    if experts or len(shape) == 3:
        shape[0] = len(experts)
    shape[param.dim] *= len(param.parts)
    return tuple(shape)


def _local_bytes(param: Param, mesh: Mesh, placements: Mapping[str, Placement], rank: int) -> int:
    return math.prod(_local_shape(param, mesh, placements, rank)) * TORCH_DTYPES[param.dtype].itemsize


def pieces(
    sources: Sources, param: Param, tensor: Tensor, ranges: Sequence[range], experts: Sequence[int]
) -> Iterator[tuple[Block, range, range, Tensor]]:
    """Block, its rows and columns, and where in `tensor` they go, as a matrix; a vector is one column.

    `tensor` holds `experts` of the parameter, within `ranges` (see `cut`).
    """
    for index, target in enumerate(tensor.chunk(len(param.parts), param.dim)):
        part = param.parts[index]
        if len(ranges) == 3:
            for slot, expert in enumerate(experts):
                yield *_expert(sources, param, index, ranges, expert), target[slot]
        elif len(ranges) == 2:
            yield sources.block(part), ranges[0], ranges[1], target
        else:
            yield sources.block(part), ranges[0], range(1), target.unsqueeze(-1)


def _expert(
    sources: Sources, param: Param, index: int, ranges: Sequence[range], expert: int
) -> tuple[Block, range, range]:
    """Where part `index` of one expert is: a block of its own, or its rows or columns of that of all shared experts."""
    shared, among = param.shared, expert - param.num_routed
    if shared is None or among < 0:
        return sources.block(param.parts[index], expert), ranges[1], ranges[2]
    start = among * _part_shape(param)[1 + shared.dim]
    held = [range(start + r.start, start + r.stop) if d == shared.dim else r for d, r in enumerate(ranges[1:])]
    return sources.block(shared.parts[index]), held[0], held[1]
