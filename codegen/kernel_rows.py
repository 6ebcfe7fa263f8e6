"""Values of the templates that bring rows to their experts and sum what comes back.

Rows are moved in tiles that a warp reads and writes 16 bytes a lane; how many rows a program takes follows from how
many there are, so that a decode step is spread over the device and a prompt's chunks stay few.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moec.codegen.offline import Launch, Report, Signature, compile_kernel
from moec.codegen.renderer import Comment, render
from moec.codegen.targets import Dtype, Target
from moec.codegen.tiles import power_of_two
from moec.diagnostics import fail

#: Bytes that a warp of 32 lanes moves at once.
WARP_BYTES = 512
#: Choices up to which the loop over them is unrolled: what does not depend on the columns is then computed once, and
#: loads do not wait for each other. Eight chosen experts and two shared ones.
MOST_UNROLLED = 10
#: Programs at most, and chunks that a step's rows are cut in until chunks are as large as they get: a few for each of
#: 132 processors.
CHUNKS = 256
#: Fewest and most pairs of a chunk: each is compared with all others of its chunk.
CHUNK_PAIRS = (16, 256)
#: Counts, and comparisons, that a program of four warps holds at once.
TILE = 4096
#: Numbers of pairs are 32 bits in the kernels.
MOST_PAIRS = 2**31 - 1
MOST_EXPERTS = 4096


@dataclass(frozen=True)
class GroupRows:
    """Values of `triton/group_rows.py.jinja`: `rows` a chunk; without `copies` only places are computed.

    `alone`: there is one chunk, which one program sorts in one launch; it copies nothing, which takes many programs.
    `is_several`: a program takes several chunks, one after the other. `stride` is in elements, from a row to the next
    where rows are views into messages.
    """

    experts: int
    held: int
    top: int
    hidden: int
    dtype: Dtype
    stride: int
    copies: bool
    rows: int
    alone: bool = False
    is_several: bool = False

    @property
    def block_top(self) -> int:
        return power_of_two(self.top)

    @property
    def block_held(self) -> int:
        return power_of_two(self.held)

    @property
    def block_pairs(self) -> int:
        return self.rows * self.block_top

    @property
    def block_compared(self) -> int:
        return max(1, min(self.block_pairs, TILE // self.block_pairs))

    @property
    def block_chunks(self) -> int:
        return max(1, TILE // self.block_held)

    @property
    def block_hidden(self) -> int:
        widest = max(WARP_BYTES // self.dtype.num_bytes, TILE // 2 // self.rows)
        return min(power_of_two(self.hidden), widest)

    @property
    def is_ragged(self) -> bool:
        return self.hidden % self.block_hidden != 0

    @property
    def unrolls(self) -> bool:
        return self.top <= MOST_UNROLLED

    @property
    def warps(self) -> int:
        return 8 if self.block_pairs >= CHUNK_PAIRS[1] else 4

    @property
    def name(self) -> str:
        """File and report name: `group_rows_d2048_e128_m128_k8_bf16_r16`; without copies `group_pairs_e128...`."""
        experts = f"e{self.experts}_m{self.held}_k{self.top}"
        rows = f"r{self.rows}{'_several' if self.is_several else ''}"
        if not self.copies:
            return f"{'sort' if self.alone else 'group'}_pairs_{experts}_{rows}"
        return f"group_rows_d{self.hidden}_{experts}_{self.dtype.value}_{rows}"

    def parts(self, num_rows: int) -> int:
        """Chunks that a program takes one after the other: programs read each other's counts, so they stay few."""
        return max(1, -(-num_rows // (self.rows * CHUNKS))) if self.is_several else 1

    def num_programs(self, num_rows: int) -> int:
        return -(-num_rows // (self.rows * self.parts(num_rows)))


@dataclass(frozen=True)
class ReduceRows:
    """Values of `triton/reduce_rows.py.jinja`: `rows` a program; `stride` is in weights, from a row to the next."""

    top: int
    hidden: int
    dtype: Dtype
    is_weighted: bool
    stride: int
    rows: int

    @property
    def warps(self) -> int:
        return 4

    @property
    def block_hidden(self) -> int:
        return min(power_of_two(self.hidden), 2 * WARP_BYTES // self.dtype.num_bytes)

    @property
    def tiles_hidden(self) -> int:
        return -(-self.hidden // self.block_hidden)

    @property
    def is_ragged(self) -> bool:
        return self.hidden % self.block_hidden != 0

    @property
    def unrolls(self) -> bool:
        return self.top <= MOST_UNROLLED

    @property
    def block_pairs(self) -> int:
        """Pairs a program of `invert_pairs`."""
        return 512

    @property
    def triton_dtype(self) -> str:
        return self.dtype.triton

    @property
    def name(self) -> str:
        """File and report name: `reduce_rows_d2048_k8_bf16`, or `sum_rows_...` where weights are in the rows."""
        return f"{'reduce' if self.is_weighted else 'sum'}_rows_d{self.hidden}_k{self.top}_{self.dtype.value}"

    def num_programs(self, num_rows: int) -> int:
        return -(-num_rows // self.rows) * self.tiles_hidden


def specialise_group(
    experts: int,
    held: int,
    top: int,
    hidden: int,
    dtype: Dtype,
    num_rows: int,
    *,
    stride: int | None = None,
    copies: bool = True,
) -> GroupRows:
    """The kernels that sort about `num_rows` rows. Raises E0527 for numbers they cannot serve."""
    if not 1 <= held <= MOST_EXPERTS or top < 1 or hidden < 1 or num_rows * top > MOST_PAIRS:
        raise fail(
            "E0527",
            f"rows cannot be sorted: {num_rows} rows of {hidden} by {top} choices among {held} experts",
            f"at most {MOST_EXPERTS} experts a rank and {MOST_PAIRS} pairs: split the step or use more ranks",
        )
    chunk, alone = chunk_rows(num_rows, top), False
    if not copies and max(num_rows, 1) * power_of_two(top) <= CHUNK_PAIRS[1]:
        chunk, alone = max(chunk, power_of_two(max(num_rows, 1))), True
    is_several = num_rows > chunk * CHUNKS
    stride = hidden if stride is None else stride
    return GroupRows(experts, held, top, hidden, dtype, stride, copies, chunk, alone, is_several)


def chunk_rows(num_rows: int, top: int) -> int:
    """Rows of a chunk, a power of two: as many as make `CHUNKS` chunks, within the pairs that a chunk may have."""
    least, most = (max(1, pairs // power_of_two(top)) for pairs in CHUNK_PAIRS)
    return min(most, max(least, power_of_two(-(-max(num_rows, 1) // CHUNKS))))


def specialise_reduce(
    top: int, hidden: int, dtype: Dtype, *, is_weighted: bool = True, stride: int | None = None
) -> ReduceRows:
    """The kernel that sums rows. Raises E0527 for numbers it cannot serve."""
    if top < 1 or hidden < 1:
        raise fail("E0527", f"rows of {hidden} cannot be summed over {top} choices", "both must be at least 1")
    return ReduceRows(top, hidden, dtype, is_weighted, top if stride is None else stride, rows=4)


def render_group(values: GroupRows, comments: Iterable[Comment] = ()) -> str:
    """Source text of the sorting kernels; `comments` are the `.moe` lines they serve, one each."""
    return render("triton/group_rows.py.jinja", k=values, serves=tuple(comments))


def render_reduce(values: ReduceRows, comments: Iterable[Comment] = ()) -> str:
    """Source text of `reduce_rows` and `invert_pairs`; `comments` are the `.moe` lines they serve, one each."""
    return render("triton/reduce_rows.py.jinja", k=values, serves=tuple(comments))


def group_signatures(values: GroupRows) -> dict[str, Signature]:
    """Argument types of each of the rendered sorting kernels."""
    if values.alone:
        return {"sort_pairs": sort_signature()}
    return {"count_pairs": count_signature(values), "place_pairs": place_signature(values)}


def sort_signature() -> Signature:
    """Argument types of the rendered `sort_pairs`."""
    given = {"ids": "*i64", "slots": "*i64", "flag": "*i32"}
    return _signature(given | {"offsets": "*i32", "pairs": "*i64", "places": "*i32", "num_rows": "i32"})


def count_signature(values: GroupRows) -> Signature:
    """Argument types of the rendered `count_pairs`."""
    parts = {"parts": "i32"} if values.is_several else {}
    return _signature({"ids": "*i64", "slots": "*i64", "counts": "*i32", "flag": "*i32", "num_rows": "i32"} | parts)


def place_signature(values: GroupRows) -> Signature:
    """Argument types of the rendered `place_pairs`."""
    rows = {"rows": f"*{values.dtype.value}"} if values.copies else {}
    out = {"out": f"*{values.dtype.value}"} if values.copies else {}
    sorting = {"ids": "*i64", "slots": "*i64", "counts": "*i32"}
    sorted_ = {"offsets": "*i32", "pairs": "*i64", "places": "*i32"}
    parts = {"parts": "i32"} if values.is_several else {}
    return _signature(rows | sorting | out | sorted_ | {"num_rows": "i32"} | parts)


def reduce_signature(values: ReduceRows) -> Signature:
    """Argument types of the rendered `reduce_rows`."""
    dtype = f"*{values.dtype.value}"
    weights = {"weights": "*fp32"} if values.is_weighted else {}
    return _signature({"rows": dtype, "places": "*i32"} | weights | {"out": dtype, "num_rows": "i32"})


def _signature(types: dict[str, str]) -> Signature:
    return Signature(types | {"INTERPRET": "constexpr"}, {"INTERPRET": False})


def compile_group(values: GroupRows, target: Target) -> tuple[Report, ...]:
    """Compile the sorting kernels offline."""
    source = render_group(values)
    return tuple(
        compile_kernel(source, name, signature, target, Launch(f"{name} of {values.name}", values.warps, 1))
        for name, signature in group_signatures(values).items()
    )


def compile_reduce(values: ReduceRows, target: Target) -> Report:
    """Compile a summing kernel offline."""
    launch = Launch(values.name, values.warps, 1)
    return compile_kernel(render_reduce(values), "reduce_rows", reduce_signature(values), target, launch)
