"""Tiles of the grouped GEMM kernels with quantised weights: rows, warps and stages that fit a device without spills."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moec.codegen.gemm_variant import Weights
from moec.codegen.quantise_rows import GROUP
from moec.codegen.targets import Dtype, Target
from moec.codegen.tiles import FEW_ROWS, MANY_ROWS, SOME_ROWS
from moec.diagnostics import fail

#: Lines of weights of a tile, gate and up together: two instructions of 64.
LINES = 128
#: Bytes that 128 columns of one line take.
GROUP_BYTES = {Weights.FP8: 128, Weights.INT8: 128, Weights.INT4: 64}


@dataclass(frozen=True)
class Sizes:
    """Row tiles, largest first, with the warps and stages of loads of all; `is_wide`: the largest is on the left."""

    rows: tuple[int, ...]
    warps: int
    stages: int
    is_wide: bool = False

    def __str__(self) -> str:
        """`128+64+32+16 rows, 4 stages, 8 warps`."""
        return f"{'+'.join(map(str, self.rows))} rows, {self.stages} stages, {self.warps} warps"

    def shared_bytes(self, row_bytes: int, line_bytes: int, target: Target) -> int:
        """Shared memory of the staged tiles, whose rows and lines have so many bytes in 128 columns, and a scale.

        What an instruction takes from registers is there when it is in use, and one stage less is held: weights on the
        left of the product, and everything where there is no wgmma.
        """
        rows = self.stages if target.has_tma else self.stages - 1
        lines = rows if self.is_wide else self.stages - 1
        staged = rows * self.rows[0] * (row_bytes + 4) + lines * LINES * (line_bytes + 4)
        return staged + target.barrier_bytes


def group_bytes(weights: Weights, dtype: Dtype, quantised_rows: bool, target: Target) -> tuple[int, int]:
    """Bytes that 128 columns take in shared memory, of a row and of a line of weights.

    MFMA wants its operands spread over lanes as words are not, so that decoded weights pass through shared memory.
    """
    decoded = GROUP * dtype.num_bytes
    lines = decoded if target.backend == "hip" else GROUP_BYTES[weights]
    return (GROUP if quantised_rows else decoded), lines


def wanted_sizes(target: Target, quantised_rows: bool, rows_per_expert: int) -> Sizes:
    """Tiles by experiment with the offline compiler: no spills of DeepSeek-V3's experts, in all formats."""
    if target.backend == "hip":
        return Sizes((16,) if rows_per_expert <= FEW_ROWS else (64, 32, 16), 4, 2)
    stages = 4 if target.has_tma else 3
    if rows_per_expert <= FEW_ROWS:
        return Sizes((16,), 4, stages)
    if rows_per_expert > SOME_ROWS and quantised_rows:
        return Sizes((MANY_ROWS, 64, 32, 16), 8, stages, is_wide=True)
    if rows_per_expert > SOME_ROWS and target.name == "cuda:90":
        return Sizes((MANY_ROWS, 64, 32, 16), 8, 3)
    return Sizes((64, 32, 16), 8, stages)


def fitting_sizes(sizes: Sizes, row_bytes: int, line_bytes: int, target: Target) -> Sizes:
    """`sizes` or the nearest that fits shared memory: fewer stages, then fewer rows. Raises E0523 where none does."""
    while (needed := sizes.shared_bytes(row_bytes, line_bytes, target)) > target.shared_limit:
        if sizes.stages > 2:
            sizes = replace(sizes, stages=sizes.stages - 1)
        elif len(sizes.rows) > 1:
            sizes = replace(sizes, rows=sizes.rows[1:], is_wide=False)
        else:
            what = f"no tile fits the {target.shared_limit} bytes of shared memory of {target.name}"
            raise fail("E0523", what, f"the smallest, {sizes}, needs {needed}")
    return sizes
