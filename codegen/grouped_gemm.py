"""Values of the grouped GEMM kernels: each row times the weights of its expert, one launch for all experts.

Two projections: gate and up with the fused activation, and down, which may weight its results and add them up. A kernel
is specialised by shapes, dtype and target; its rows are known only when it runs. One template serves every variant.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from moec.codegen.gemm_variant import Projection, RowSource, Store, Weights
from moec.codegen.renderer import Comment
from moec.codegen.targets import Dtype, Target
from moec.codegen.tiles import (
    MANY_ROWS,
    MIN_SIDE,
    Form,
    Tile,
    count_tiles,
    cut_rows,
    default_blocking,
    descriptor_depth,
    power_of_two,
)
from moec.diagnostics import fail

#: Row tiles that pass over all columns together: 16 x 128 rows and the columns in flight stay in the L2 cache.
BAND = 16


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
    fallback: Comment

    @property
    def depth(self) -> int:
        """The summed dimension."""
        return self.op.turned(self.hidden, self.inner)[0]

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.op.turned(self.hidden, self.inner)[1]

    @property
    def sides(self) -> int:
        return self.op.sides

    @property
    def stages(self) -> int:
        return max(tile.stages for tile in self.tiles)

    @property
    def row_bytes(self) -> float:
        """Bytes of a number of a row, with its part of a scale."""
        return float(self.dtype.num_bytes)

    @property
    def multiplied(self) -> str:
        """What the tensor cores multiply, as devices' rates are named."""
        return self.dtype.value

    @property
    def num_columns(self) -> int:
        """Column tiles: how many tiles share their rows."""
        return -(-self.width // self.tiles[0].n)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The kernel's arguments in order, but for the last one, INTERPRET."""
        wanted = {
            "row_box": self.has_row_box,
            "pairs": self.has_pairs,
            "pair_weights": self.store is not Store.PLAIN,
            "w_pair": self.has_weight_pairs,
        }
        order = ("rows", "row_box", "offsets", "pairs", "pair_weights", "w", "w_pair", "out", "num_rows")
        return tuple(name for name in order if wanted.get(name, True))

    @property
    def passed(self) -> tuple[str, ...]:
        """The arguments that the kernel's bodies take."""
        return tuple(name for name in self.arguments if name not in ("offsets", "num_rows"))

    @property
    def has_wide(self) -> bool:
        return not all(tile.swapped for tile in self.tiles)

    @property
    def has_swapped(self) -> bool:
        return any(tile.swapped for tile in self.tiles)

    @property
    def has_pairs(self) -> bool:
        return self.rows is RowSource.GATHERED or self.store is not Store.PLAIN

    @property
    def has_row_box(self) -> bool:
        """Whether the one wide body loads rows by descriptor; those of other bodies are few and loaded by pointers."""
        num_wide = sum(not tile.swapped for tile in self.tiles)
        return self.form is Form.TMA and self.rows is RowSource.SORTED and num_wide == 1

    @property
    def has_weight_pairs(self) -> bool:
        """Whether the wide body loads gate and up as one box."""
        return self.form is Form.TMA and self.op is Projection.GATE_UP and self.has_wide

    @property
    def gathers(self) -> bool:
        """Whether a body loads rows by pointers."""
        return self.has_swapped or not self.has_row_box

    @property
    def loads_by_pointer(self) -> bool:
        return self.gathers or self.form is Form.POINTER

    @property
    def side_names(self) -> tuple[str, ...]:
        """What the products that make a column of the result are called."""
        return ("gate", "up") if self.op is Projection.GATE_UP else ("result",)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each tile."""
        return tuple(tile.m for tile in self.tiles)

    @property
    def rest(self) -> int:
        """Rows of one more body, in place of the last tile's where an expert has no more rows left; 0 for none.

        It reads the same weights and halves the padding. Not worth its code where steps are so small that all tiles are
        the last one.
        """
        last = self.tiles[-1]
        is_worth = len(self.tiles) > 1 and last.swapped and self.is_cuda and self.weights is Weights.PLAIN
        return last.m // 2 if is_worth and last.m == MIN_SIDE else 0

    @property
    def bodies(self) -> tuple[Tile, ...]:
        """What the kernel has code for: `tiles`, and the rest's."""
        return (*self.tiles, replace(self.tiles[-1], m=self.rest)) if self.rest else self.tiles

    @property
    def is_deep_ragged(self) -> bool:
        """Whether the last step reaches past the summed dimension."""
        return self.depth % self.tiles[0].k != 0

    @property
    def is_wide_ragged(self) -> bool:
        """Whether the last column tile reaches past the result's columns."""
        return self.width % self.tiles[0].n != 0

    @property
    def is_cuda(self) -> bool:
        return self.target.text.startswith("cuda")

    @property
    def block_experts(self) -> int:
        return max(2, power_of_two(self.experts))

    @property
    def triton_dtype(self) -> str:
        return self.dtype.triton

    @property
    def band(self) -> int:
        """Row tiles of an expert that are run for all columns before the next ones are."""
        return BAND

    @property
    def name(self) -> str:
        """File and report name: `gate_up_d2048_i768_m128_bf16_t128`; `gathered_` or `weighted_` where it does that."""
        variant = "" if self.rows is RowSource.SORTED else "gathered_"
        variant += "" if self.store is Store.PLAIN else f"{self.store.value}_"
        kind = self.dtype.value if self.weights is Weights.PLAIN else f"{self.dtype.value}_{self.weights.value}"
        return f"{variant}{self.op.value}_d{self.hidden}_i{self.inner}_m{self.experts}_{kind}_t{self.tiles[0].m}"

    def num_tiles(self, counts: Iterable[int]) -> tuple[int, ...]:
        """Row tiles of each of `tiles` that the rows of all experts are cut into, as on the device.

        `counts` is the rows of each expert. Each row tile is run for `num_columns` column tiles.
        """
        return count_tiles(counts, self.sizes)

    def count_rests(self, counts: Iterable[int]) -> int:
        """How many of the last of `tiles` run as the smaller body, `rest` rows high."""
        last = self.sizes[-1]
        return sum(bool(cut_rows(rows, self.sizes)[-1]) and 0 < rows % last <= self.rest for rows in counts)

    def most_tiles(self, num_rows: int) -> int:
        """Tiles that `num_rows` rows are cut into at most, column tiles included."""
        return (num_rows // self.tiles[-1].m + self.experts) * self.num_columns if num_rows else 0

    def padded_rows(self, counts: Iterable[int]) -> int:
        """Rows that are computed, with those that pad the tiles."""
        rows = list(counts)
        tiled = sum(number * tile.m for number, tile in zip(self.num_tiles(rows), self.tiles, strict=True))
        return tiled - (self.sizes[-1] - self.rest) * self.count_rests(rows)

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
    rows_per_expert: int = MANY_ROWS,
    form: Form | None = None,
) -> GroupedGemm:
    """The default choice of tiles, warps and programs for `experts` experts held, and of the form unless it is given.

    `rows_per_expert` is what an expert is expected to receive in a step. Raises E0522 for dimensions that the kernel
    cannot index and E0523 where no tile fits the target's shared memory.
    """
    if min(hidden, inner, experts, top) < 1 or hidden * inner >= 2**31:
        raise fail(
            "E0522",
            f"a grouped {op.value} kernel cannot serve {experts} experts of hidden {hidden} and inner {inner}",
            "each must be at least 1 and hidden * inner below 2^31",
        )
    depth, width = op.turned(hidden, inner)
    if form is None:
        form = Form.TMA if target.has_tma and descriptor_depth(depth, dtype) else Form.POINTER
    is_added = store is Store.ACCUMULATED
    blocking = default_blocking(depth, width, op.sides, dtype, target, form, rows_per_expert, is_added)
    return GroupedGemm(
        op, hidden, inner, experts, top, dtype, weights, rows, store, form,
        blocking.tiles, blocking.warps, blocking.programs, Comment(target.name), Comment(blocking.reason),
    )  # fmt: skip
