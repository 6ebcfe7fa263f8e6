"""Tiles of a grouped product: their sizes, the shared memory they ask for, and how an expert's rows are cut into them.

A kernel has a few row tiles, largest first, which share their columns and depth (one box of weights serves them all).
An expert's rows are cut from the largest down and padded to the smallest only: with 128, 64, 32 and 16, 237 rows are
one tile each of 128, 64, 32 and 16. Kernels cut alike, on the device, from the ends of the experts' rows.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from moec.codegen.devices import device_for
from moec.codegen.targets import Dtype, Target
from moec.diagnostics import fail

#: Triton's smallest side of a matrix product.
MIN_SIDE = 16
#: Fewest bytes that `cp.async` copies. Lines that do not begin at multiples of them come element by element, through
#: registers, of which a deeper step than the shallowest takes too many.
COPIED_BYTES = 4
#: Rows an expert is expected to have, up to which the tiles are those of decode and those of short prompts; and above.
FEW_ROWS, SOME_ROWS, MANY_ROWS = 8, 96, 128


class Form(enum.Enum):
    """How weights are loaded: by pointers (`cp.async` on sm_80) or by tensor descriptors (TMA, from sm_90 on)."""

    POINTER = "pointer"
    TMA = "tma"


@dataclass(frozen=True)
class Tile:
    """`m` rows, `n` columns of the result, `k` of the summed dimension a step, `stages` of loads in flight.

    A gate and up product computes `n` columns of gate and as many of up. `swapped`: the weights are the left side of
    the product, whose instructions want 64 there, and the few rows the right side, which may be as narrow as 8.
    """

    m: int
    n: int
    k: int
    swapped: bool = False
    stages: int = 2

    def __str__(self) -> str:
        """`128x128x64, 2 stages`."""
        return f"{self.m}x{self.n}x{self.k}{' swapped' if self.swapped else ''}, {self.stages} stages"

    def shared_bytes(self, sides: int, dtype: Dtype, target: Target) -> int:
        """Bytes of the staged tiles, `sides` products wide (2 for gate and up), and of the barriers that TMA signals.

        stages x (m + sides x n) x k x bytes. Without wgmma the tile in use is in registers, and one stage less is held
        (sgl-project/sglang#28038). What a kernel asks for besides is known when it is compiled.
        """
        buffers = self.stages if target.has_tma else max(1, self.stages - 1)
        return buffers * (self.m + sides * self.n) * self.k * dtype.num_bytes + target.barrier_bytes


def cut_rows(rows: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Tiles of each of `sizes` (largest first, each a multiple of the next) that hold one expert's `rows`."""
    padded = -(-rows // sizes[-1]) * sizes[-1]
    counts = []
    for size in sizes:
        counts.append(padded // size)
        padded %= size
    return tuple(counts)


def count_tiles(rows: Iterable[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Tiles of each of `sizes` that hold the rows of all experts."""
    totals = [0] * len(sizes)
    for count in rows:
        totals = [total + tiles for total, tiles in zip(totals, cut_rows(count, sizes), strict=True)]
    return tuple(totals)


def size_class(rows_per_expert: int) -> int:
    """The largest number of rows an expert with the same default tiles: few kernels serve all sizes of steps."""
    return next((size for size in (FEW_ROWS, SOME_ROWS) if rows_per_expert <= size), MANY_ROWS)


@dataclass(frozen=True)
class Blocking:
    """Tiles of a kernel, its warps, and how many programs keep a device busy. `reason`: why it is a smaller one."""

    tiles: tuple[Tile, ...]
    warps: int
    programs: int
    reason: str = ""

    def __str__(self) -> str:
        """`128+64+32+16 x 256 x 128, 2 stages, 8 warps`."""
        largest, rows = self.tiles[0], "+".join(str(tile.m) for tile in self.tiles)
        return f"{rows} x {largest.n} x {largest.k}, {largest.stages} stages, {self.warps} warps"


def default_blocking(
    depth: int,
    width: int,
    sides: int,
    dtype: Dtype,
    target: Target,
    form: Form,
    rows_per_expert: int,
    is_accumulated: bool = False,
) -> Blocking:
    """What a kernel uses where nothing was measured: large tiles for prompts, thin ones that stream weights for decode.

    The largest that was wanted or the nearest smaller one whose shared memory fits: fewer stages, then less depth,
    columns and rows. Raises E0523 where not even the smallest does.
    """
    tiles, warps = _wanted(sides, dtype, target, form, rows_per_expert, is_accumulated)
    k = min(tiles[0].k, product_side(depth))
    if form is Form.TMA:
        k = descriptor_depth(depth, dtype, tiles[0].k)
    elif depth * dtype.num_bytes % COPIED_BYTES:
        k = MIN_SIDE
    n = min(tiles[0].n, product_side(width))
    if is_accumulated and form is Form.POINTER:  # adding takes an address for each result: n columns of them spill
        n = max(MIN_SIDE, n // 2)
    stages = min(4, tiles[0].stages * max(1, tiles[0].k // k))
    wanted = tuple(replace(tile, n=n, k=k, stages=stages) for tile in tiles)
    tiles, needed = wanted, _shared_bytes(wanted, sides, dtype, target)
    while _shared_bytes(tiles, sides, dtype, target) > target.shared_limit:
        tiles = _smaller(tiles, sides, dtype, target)
    device = device_for(target)
    programs = device.num_sms * max(1, min(2, device.shared // (_shared_bytes(tiles, sides, dtype, target) + 1024)))
    chosen = Blocking(tiles, warps, programs)
    if tiles == wanted:
        return chosen
    limit, large = target.shared_limit, Blocking(wanted, warps, programs)
    return replace(
        chosen, reason=f"{chosen} instead of {large}, which needs {needed} of {limit} bytes of shared memory"
    )


def descriptor_depth(depth: int, dtype: Dtype, largest: int = 128) -> int:
    """The largest step up to `largest` that descriptors may take along `depth`, or 0.

    Whole steps only: partial ones have been mis-compiled in descriptor loads (triton-lang/triton#10927). Lines begin
    at multiples of 16 bytes.
    """
    if depth * dtype.num_bytes % 16:
        return 0
    return next((k for k in (largest, largest // 2, largest // 4) if depth % k == 0 and k >= MIN_SIDE), 0)


def _wanted(
    sides: int, dtype: Dtype, target: Target, form: Form, rows_per_expert: int, is_accumulated: bool
) -> tuple[tuple[Tile, ...], int]:
    """Tiles and warps, by experiment with the offline compiler: no spills, fewest instructions a product."""
    if dtype is Dtype.FP32:  # in plain fp32, without tensor cores
        return _tiles(64 // sides, 32, 2, (64, 16), ()), 8
    if target.has_tma and form is Form.TMA:
        if rows_per_expert <= FEW_ROWS:
            return _tiles(128 // sides, 128, 3, (), (16,)), 4
        if rows_per_expert <= SOME_ROWS:
            return _tiles(128 // sides, 128, 2, (), (64, 32, 16)), 4
        wide, stages = (256, 2) if target.name == "cuda:90" else (128, 3)
        tails = (64, 16) if is_accumulated else (64, 32, 16)  # adding spills with one more
        return _tiles(wide // sides, 128, stages, (128,), tails), 8
    stages = 2 if target.backend == "hip" else 3
    if rows_per_expert <= FEW_ROWS:
        return _tiles(128 // sides, 64, stages, (), (32, 16)), 4
    if rows_per_expert <= SOME_ROWS:
        return _tiles(128 // sides, 64, stages, (), (64, 32, 16)), 4
    return _tiles(128 // sides, 64, stages, (128,), (64, 32, 16)), 8


def _tiles(n: int, k: int, stages: int, wide: Sequence[int], swapped: Sequence[int]) -> tuple[Tile, ...]:
    return tuple(Tile(m, n, k, m in swapped, stages) for m in (*wide, *swapped))


def _shared_bytes(tiles: Sequence[Tile], sides: int, dtype: Dtype, target: Target) -> int:
    return max(tile.shared_bytes(sides, dtype, target) for tile in tiles)


def _smaller(tiles: tuple[Tile, ...], sides: int, dtype: Dtype, target: Target) -> tuple[Tile, ...]:
    first = tiles[0]
    if first.stages > 2:
        return tuple(replace(tile, stages=tile.stages - 1) for tile in tiles)
    if first.k > 32:
        return tuple(replace(tile, k=tile.k // 2) for tile in tiles)
    if first.n > 32:
        return tuple(replace(tile, n=tile.n // 2) for tile in tiles)
    if len(tiles) > 1:
        return tiles[1:]
    raise fail(
        "E0523",
        f"no tile fits the {target.shared_limit} bytes of shared memory of {target.name}",
        f"the smallest, {first}, needs {first.shared_bytes(sides, dtype, target)}",
    )


def product_side(size: int) -> int:
    """The smallest power of two that holds `size` and that a matrix product takes."""
    return max(MIN_SIDE, power_of_two(size))


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`, which is at least 1."""
    return 1 << (size - 1).bit_length()
