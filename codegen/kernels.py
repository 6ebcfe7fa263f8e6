"""From a plan's numbers to the values of a kernel template: which form, which tile, which constants.

A kernel is specialised by shapes, dtype and target; its rows are known only when it runs. The tile is a small static
choice checked against the shared memory of the target, and a smaller tile than the wanted one is always reported.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace

from moec.codegen.renderer import Comment, render
from moec.codegen.targets import Dtype, Target
from moec.diagnostics import fail

#: Triton's smallest side of a matrix product.
MIN_SIDE = 16
#: Rows of a tile, smallest first: the first that holds the rows an expert is expected to have is taken.
ROW_TILES = (16, 64, 128)


class Form(enum.Enum):
    """How tiles are loaded: by pointers (`cp.async` on sm_80) or by tensor descriptors (TMA, from sm_90 on)."""

    POINTER = "pointer"
    TMA = "tma"


@dataclass(frozen=True)
class Tile:
    """One program's tile: `m` rows, `n` columns of gate and as many of up, `k` of the summed dimension a step."""

    m: int
    n: int
    k: int
    stages: int
    warps: int

    def shared_bytes(self, dtype: Dtype, target: Target) -> int:
        """Upper bound of the shared memory a program asks for: staged tiles, and barriers where TMA signals them.

        stages x (tile_m + tile_n) x tile_k x bytes, with tile_n the columns of gate and up together. Without wgmma
        the tile in use is in registers, and one stage less is held (sgl-project/sglang#28038).
        """
        buffers = self.stages if target.has_tma else self.stages - 1
        return buffers * (self.m + 2 * self.n) * self.k * dtype.num_bytes + target.barrier_bytes


@dataclass(frozen=True)
class GateUp:
    """Values of `triton/grouped_gate_up.py.jinja`. `fallback` says why the tile is smaller than wanted, or nothing."""

    hidden: int
    inner: int
    experts: int
    dtype: Dtype
    form: Form
    tile: Tile
    target: Comment
    fallback: Comment

    @property
    def tiles_n(self) -> int:
        """Programs that share a tile's rows."""
        return -(-self.inner // self.tile.n)

    @property
    def search_steps(self) -> int:
        """Halvings that find one of `experts` + 1 row groups."""
        return self.experts.bit_length()

    @property
    def is_ragged(self) -> bool:
        """Whether a tile can reach past the hidden or the inner dimension."""
        return self.hidden % self.tile.k != 0 or self.inner % self.tile.n != 0

    @property
    def triton_dtype(self) -> str:
        return {Dtype.FP32: "float32", Dtype.FP16: "float16", Dtype.BF16: "bfloat16"}[self.dtype]

    @property
    def name(self) -> str:
        """File and report name: `grouped_gate_up_d2048_i768_m128_bf16_t128`."""
        shape = f"d{self.hidden}_i{self.inner}_m{self.experts}"
        return f"grouped_gate_up_{shape}_{self.dtype.value}_t{self.tile.m}"

    def num_programs(self, num_rows: int) -> int:
        """Programs to launch for `num_rows` rows, all on the first grid axis (the others end at 65,535)."""
        return (num_rows // self.tile.m + self.experts + 1) * self.tiles_n if num_rows else 0


def specialise_gate_up(
    hidden: int, inner: int, experts: int, dtype: Dtype, target: Target, rows_per_expert: int = ROW_TILES[-1]
) -> GateUp:
    """Choose form and tile of the grouped gate and up projection of `experts` experts [2 * inner, hidden].

    `rows_per_expert` is what an expert is expected to receive in a step. The descriptor form is taken where the hidden
    dimension is whole tiles: partial tiles along the summed dimension have been mis-compiled in descriptor loads
    (triton-lang/triton#10927). Raises E0522 for dimensions the kernel cannot index and E0523 where no tile fits.
    """
    if min(hidden, inner, experts) < 1 or hidden * inner >= 2**31:
        raise fail(
            "E0522",
            f"a grouped gate-up kernel cannot serve {experts} experts of hidden {hidden} and inner {inner}",
            "each must be at least 1 and hidden * inner below 2^31",
        )
    wanted = wanted_tile(hidden, inner, dtype, target, rows_per_expert)
    tile = select_tile(wanted, dtype, target)
    reason = ""
    if tile != wanted:
        needs, has = wanted.shared_bytes(dtype, target), target.shared_limit
        reason = f"{describe(tile)} instead of {describe(wanted)}, which needs {needs} of {has} bytes of shared memory"
    form = Form.TMA if target.has_tma and hidden % tile.k == 0 else Form.POINTER
    return GateUp(hidden, inner, experts, dtype, form, tile, Comment(target.name), Comment(reason))


def wanted_tile(hidden: int, inner: int, dtype: Dtype, target: Target, rows_per_expert: int) -> Tile:
    """The tile to use where shared memory allows: large ones for prefill, thin ones that stream weights for decode."""
    m = row_tile(rows_per_expert)
    if target.has_tma:
        n, k, stages, warps = (128, 64, 4, 8) if m == 128 else (64, 128, 4, 4) if m == MIN_SIDE else (64, 64, 4, 4)
    elif target.backend == "cuda":  # 64 deep, sm_80 spills
        n, k, stages, warps = (64, 32, 4, 8) if m == 128 else (64, 64, 4, 4)
    else:
        n, k, stages, warps = (128, 64, 2, 8) if m == 128 else (64, 64, 2, 4)
    k = k * 2 // dtype.num_bytes
    return Tile(m, min(n, _power_of_two(inner)), min(k, _power_of_two(hidden)), stages, warps)


def row_tile(rows_per_expert: int) -> int:
    """Rows of the tile for experts that are expected to receive so many rows each."""
    return next((size for size in ROW_TILES if rows_per_expert <= size), ROW_TILES[-1])


def select_tile(wanted: Tile, dtype: Dtype, target: Target) -> Tile:
    """`wanted` or the nearest smaller tile whose shared memory fits: fewer stages, then columns, depth and rows.

    Raises E0523 when not even the smallest does.
    """
    tile = wanted
    while tile.shared_bytes(dtype, target) > target.shared_limit:
        if tile.stages > 2:
            tile = replace(tile, stages=tile.stages - 1)
        elif tile.n > 32:
            tile = replace(tile, n=tile.n // 2)
        elif tile.k > 32:
            tile = replace(tile, k=tile.k // 2)
        elif tile.m > MIN_SIDE:
            tile = replace(tile, m=tile.m // 2, warps=4)
        else:
            raise fail(
                "E0523",
                f"no tile fits the {target.shared_limit} bytes of shared memory of {target.name}",
                f"the smallest, {describe(tile)}, needs {tile.shared_bytes(dtype, target)}",
            )
    return tile


def render_gate_up(values: GateUp, comments: Iterable[Comment] = ()) -> str:
    """The kernel's source text; `comments` are the `.moe` lines it serves, one each."""
    return render("triton/grouped_gate_up.py.jinja", k=values, serves=tuple(comments))


def describe(tile: Tile) -> str:
    """A tile in words: `128x(2x128)x64, 4 stages, 8 warps`."""
    return f"{tile.m}x(2x{tile.n})x{tile.k}, {tile.stages} stages, {tile.warps} warps"


def _power_of_two(size: int) -> int:
    """The smallest power of two that holds `size` and that a matrix product takes."""
    return max(MIN_SIDE, 1 << (size - 1).bit_length())
