"""Cached experts of one rank as the tiers take them: what one consists of, and reading one from the checkpoint."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from moec.cache_sizes import cached_params
from moec.checkpoint.map import Sources
from moec.ir.params import Param
from moec.ir.program import Program
from moec.mesh import Mesh
from moec.runtime.experts.file import Contents, Key, LayerBlobs
from moec.runtime.weights import cut, pieces, wanted
from moec.runtime.weights_reader import TORCH_DTYPES, ShardReader


@dataclass(frozen=True)
class ExpertParam:
    """One parameter of cached experts: its name in the body, and the ranges of one part that a rank holds, by dim."""

    name: str
    param: Param
    ranges: tuple[range, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one expert on the rank, all parts joined."""
        shape = [len(held) for held in self.ranges]
        shape[self.param.dim] *= len(self.param.parts)
        return tuple(shape[1:])


@dataclass(frozen=True)
class CachedLayer:
    """A layer whose experts are cached: its number, what an expert consists of in the order of a slot's bytes, and the
    experts held."""

    number: int
    params: tuple[ExpertParam, ...]
    experts: tuple[int, ...]


def cached_layers(program: Program, rank: int) -> list[CachedLayer]:
    """The layers of a program that read experts from slots, in order, as `rank` holds them."""
    params, found = wanted([program]), []
    for body in program.bodies.values():
        names = cached_params(program, body)
        for layer in program.layers_of(body.name) if names else ():
            cuts = {
                name: cut(params[f"layers.{layer}.{name}"], program.mesh, program.placements, rank) for name in names
            }
            mine = (ExpertParam(n, params[f"layers.{layer}.{n}"], tuple(ranges)) for n, (ranges, _) in cuts.items())
            found.append(CachedLayer(layer, tuple(mine), cuts[names[0]][1]))
    return sorted(found, key=lambda layer: layer.number)


def contents_of(layers: Sequence[CachedLayer], mesh: Mesh, rank: int, fingerprint: object) -> Contents:
    """What the tiers of `rank` hold. `fingerprint`: of the checkpoint, as JSON."""
    part = mesh.coordinate(rank, "etp") if mesh.etp > 1 else 0
    digest = hashlib.sha256(json.dumps([fingerprint, mesh.etp, part], sort_keys=True).encode()).hexdigest()
    blobs = [
        LayerBlobs(
            f"layers.{layer.number}", layer.experts, tuple((p.name, p.param.dtype, p.shape) for p in layer.params)
        )
        for layer in layers
    ]
    return Contents(digest, tuple(blobs))


class ExpertReader:
    """Reads single experts from the checkpoint. Not for two threads at once."""

    def __init__(self, sources: Sources, layers: Sequence[CachedLayer]) -> None:
        self._sources, self._layers = sources, layers
        self._shards = ShardReader(sources.checkpoint.folder)

    def __call__(self, key: Key, into: Tensor) -> None:
        """Fill `into` (uint8 [blob bytes]) with an expert. Raises E0745, E0746."""
        index, expert = key
        start = 0
        for mine in self._layers[index].params:
            dtype = TORCH_DTYPES[mine.param.dtype]
            stop = start + math.prod(mine.shape) * dtype.itemsize
            whole = into[start:stop].view(dtype).view(1, *mine.shape)
            for block, rows, columns, target in pieces(self._sources, mine.param, whole, mine.ranges, [expert]):
                self._shards.read(block, rows, columns, target)
            start = stop

    def close(self) -> None:
        self._shards.close()
