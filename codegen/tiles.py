"""Tiles of a grouped product: their sizes, the shared memory they ask for, and how an expert's rows are cut into them.

A kernel has a few row tiles, largest first, which share their columns and depth (one box of weights serves them all).
An expert's rows are cut from the largest down and padded to the smallest only: with 128, 64, 32 and 16, 237 rows are
one tile each of 128, 64, 32 and 16. Kernels cut alike, on the device, from the ends of the experts' rows.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moec.codegen.targets import Dtype, Target

#: Triton's smallest side of a matrix product.
MIN_SIDE = 16


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
