"""Tiles that a grouped GEMM may be made of, beside the ones that it is specialised with.

Columns count both sides of a gate and up product; depth is of 2-byte elements. The first that fits what is known of an
architecture is what `specialise` takes; these are the others worth a thought: fewer columns where tiles are few, or
more, shallower stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moec.codegen.devices import device_for
from moec.codegen.gemm_variant import Weights
from moec.codegen.grouped_gemm import GroupedGemm
from moec.codegen.renderer import Comment
from moec.codegen.targets import Target, find_target
from moec.codegen.tiles import COPIED_BYTES, Tile, product_side

#: Rows of a wide tile.
WIDE_ROWS = 128


@dataclass(frozen=True)
class _Shape:
    """Columns of a tile, its depth, stages and warps; for kernels with a wide body, or with swapped bodies only."""

    columns: int
    depth: int
    stages: int
    warps: int
    is_wide: bool


WGMMA = (
    _Shape(256, 128, 2, 8, True),
    _Shape(256, 64, 4, 8, True),
    _Shape(128, 128, 3, 4, False),
    _Shape(256, 128, 2, 8, False),
)
MMA = (
    _Shape(128, 64, 3, 8, True),
    _Shape(128, 32, 4, 8, True),
    _Shape(128, 64, 4, 4, False),
    _Shape(64, 64, 4, 4, False),
)
MFMA = (_Shape(128, 64, 2, 8, True), _Shape(128, 32, 2, 4, True), _Shape(64, 64, 2, 4, False))


def candidates(wanted: GroupedGemm) -> list[GroupedGemm]:
    """`wanted` first, then those of other tiles that shared memory has room for. None differs in what it computes.

    Kernels of quantised weights have one shape for each size of steps (`quantised_sizes`).
    """
    if wanted.weights is not Weights.PLAIN:
        return [wanted]
    target = find_target(wanted.target.text)
    shapes = WGMMA if target.has_tma else MMA if target.backend == "cuda" else MFMA
    others = [values for shape in shapes for values in _shaped(wanted, shape, target)]
    return list(dict.fromkeys([wanted, *others]))


def _shaped(wanted: GroupedGemm, shape: _Shape, target: Target) -> Iterator[GroupedGemm]:
    """`wanted` in another shape, where that fits it."""
    n = shape.columns // wanted.sides
    k = shape.depth * 2 // wanted.dtype.num_bytes
    if n > product_side(wanted.width) or k > product_side(wanted.depth):
        return
    rows = [(tile.m, tile.swapped) for tile in wanted.tiles if shape.is_wide or tile.swapped]
    if shape.is_wide and not wanted.has_wide:
        rows.insert(0, (WIDE_ROWS, False))
    if not rows or len(rows) == 2:  # steps of one row tile get no wide one
        return
    if wanted.tiles[0].k != k and wanted.depth % k and not wanted.depth % wanted.tiles[0].k:
        return  # a depth of whole steps stays one
    if wanted.depth * wanted.dtype.num_bytes % COPIED_BYTES and k > wanted.tiles[0].k:
        return  # what comes element by element stays in the shallowest steps
    tiles = tuple(Tile(m, n, k, is_swapped, shape.stages) for m, is_swapped in rows)
    values = replace(wanted, tiles=tiles, warps=shape.warps, fallback=Comment(""))
    if (needed := values.shared_bytes(target)) <= target.shared_limit:
        device = device_for(target)
        yield replace(values, programs=device.num_sms * max(1, min(2, device.shared // (needed + device.reserved))))
