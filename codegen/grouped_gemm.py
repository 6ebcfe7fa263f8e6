"""Values of the grouped GEMM kernels: each row times the weights of its expert, one launch for all experts.

Two projections: gate and up with the fused activation, and down, which may weight its results and add them up. A kernel
is specialised by shapes, dtype and target; its rows are known only when it runs. One template serves every variant.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from moec.codegen.offline import Report, Signature
from moec.codegen.renderer import Comment
from moec.codegen.targets import Dtype, Target
from moec.codegen.tiles import Form, Tile, count_tiles


class Projection(enum.Enum):
    """Which of an expert's two products."""

    GATE_UP = "gate_up"
    DOWN = "down"


class Weights(enum.Enum):
    """How weights are stored: in the rows' dtype, or quantised with scales."""

    PLAIN = "plain"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"


class RowSource(enum.Enum):
    """Rows are sorted by expert in memory, or the row of sorted position p is `rows[pairs[p] // top]`."""

    SORTED = "sorted"
    GATHERED = "gathered"


class Store(enum.Enum):
    """Results as they are; or times `pair_weights[pairs[p]]`; or that added (atomically) to fp32 `out[pairs[p] // top]`."""

    PLAIN = "plain"
    WEIGHTED = "weighted"
    ACCUMULATED = "accumulated"


@dataclass(frozen=True)
class GroupedGemm:
    """Values of `triton/grouped_gemm.py.jinja`. `fallback` says why a tile is smaller than wanted, or nothing.

    `tiles` are largest first; `programs` is how many are launched (fewer tiles need fewer).
    """

    op: Projection
    hidden: int
    inner: int
    experts: int
    top: int
    dtype: Dtype
    weights: Weights
    rows: RowSource
    store: Store
    form: Form
    tiles: tuple[Tile, ...]
    warps: int
    programs: int
    target: Comment
    fallback: Comment = Comment("")

    @property
    def depth(self) -> int:
        """The summed dimension."""
        return self.hidden if self.op is Projection.GATE_UP else self.inner

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.inner if self.op is Projection.GATE_UP else self.hidden

    @property
    def sides(self) -> int:
        """Products that a column of the result is made of: gate and up, or one."""
        return 2 if self.op is Projection.GATE_UP else 1

    @property
    def stages(self) -> int:
        return max(tile.stages for tile in self.tiles)

    @property
    def num_columns(self) -> int:
        """Column tiles: how many tiles share their rows."""
        return -(-self.width // self.tiles[0].n)

    @property
    def name(self) -> str:
        """File and report name: `gate_up_d2048_i768_m128_bf16_t128`."""
        raise NotImplementedError

    def num_tiles(self, counts: Iterable[int]) -> tuple[int, ...]:
        """Row tiles of each of `tiles` that the rows of all experts are cut into, as on the device.

        `counts` is the rows of each expert. Each row tile is run for `num_columns` column tiles.
        """
        return count_tiles(counts, [tile.m for tile in self.tiles])

    def padded_rows(self, counts: Iterable[int]) -> int:
        """Rows that are computed, with those that pad the tiles."""
        return sum(number * tile.m for number, tile in zip(self.num_tiles(counts), self.tiles, strict=True))

    def shared_bytes(self, target: Target) -> int:
        """Shared memory of the staged tiles: the largest body's, since bodies run one after the other."""
        return max(tile.shared_bytes(self.sides, self.dtype, target) for tile in self.tiles)


def specialise(
    op: Projection,
    hidden: int,
    inner: int,
    experts: int,
    dtype: Dtype,
    target: Target,
    *,
    top: int = 1,
    weights: Weights = Weights.PLAIN,
    rows: RowSource = RowSource.SORTED,
    store: Store = Store.PLAIN,
    rows_per_expert: int = 128,
) -> GroupedGemm:
    """The default choice of form, tiles, warps and programs for `experts` experts held.

    `rows_per_expert` is what an expert is expected to receive in a step. Raises E0522 for dimensions that the kernel
    cannot index and E0523 where no tile fits the target's shared memory.
    """
    raise NotImplementedError


def render_grouped_gemm(values: GroupedGemm, comments: Iterable[Comment] = ()) -> str:
    """The kernel's source text; `comments` are the `.moe` lines it serves, one each. The kernel is `grouped_gemm`."""
    raise NotImplementedError


def grouped_gemm_signature(values: GroupedGemm) -> Signature:
    """Argument types of the rendered `grouped_gemm`."""
    raise NotImplementedError


def compile_grouped_gemm(values: GroupedGemm, source: str | None = None) -> Report:
    """Compile for its target and judge; `source` is its text, where rendered already."""
    raise NotImplementedError
