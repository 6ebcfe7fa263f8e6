"""Values of the kernels for steps of a few tokens: each pair of a row and an expert is multiplied for itself.

Nothing is sorted. `pair_gate_up` gives a pair's activations, `pair_down` a row's sum over its pairs, in fp32 and in a
fixed order, so a layer is two launches behind its router. They multiply on the plain units, which one row for each
expert leaves idle most of the time. An expert that several rows chose is read for each of them, from the L2 cache but
for the first time; up to how many rows that pays is for the compiler to say (`moec.cost.pairs`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moec.codegen.devices import device_for
from moec.codegen.gemm_variant import Projection
from moec.codegen.kernel_store import Compiled, compiled
from moec.codegen.offline import Launch, Signature
from moec.codegen.renderer import Comment, render
from moec.codegen.targets import Dtype, Target, find_target
from moec.codegen.tiles import power_of_two
from moec.diagnostics import fail

#: Bytes of a line that a warp of 32 lanes reads at once, 16 a lane; and lines that four warps read in a step.
LINE_BYTES, LINES = 512, 32
#: Pairs of a row that are multiplied at once.
MOST_PAIRS = 8
#: Fewest columns of a program: with fewer, what a program does once weighs more than its loads.
LEAST_COLUMNS = 4
#: Steps of weights that are asked for ahead, and one in use. Four programs of 16 KiB steps keep 190 KiB in flight on a
#: multiprocessor of an H200, where 4.8 TB/s for 0.6 us are 22.
STAGES = 4


@dataclass(frozen=True)
class PairProduct:
    """Values of `triton/pair_gate_up.py.jinja` and `triton/pair_down.py.jinja`.

    A program computes `columns` columns of the result for a pair (gate_up: and as many of up) or a row (down),
    `step` of the summed dimension at a time. Of `experts` experts, `held` are on this rank.
    """

    op: Projection
    hidden: int
    inner: int
    experts: int
    held: int
    top: int
    dtype: Dtype
    columns: int
    step: int
    stages: int
    warps: int
    target: Comment

    @property
    def depth(self) -> int:
        """The summed dimension."""
        return self.op.turned(self.hidden, self.inner)[0]

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.op.turned(self.hidden, self.inner)[1]

    @property
    def block_pairs(self) -> int:
        """Pairs whose weights are read at once."""
        return 1 if self.op is Projection.GATE_UP else pairs_at_once(self.top)

    @property
    def is_deep_ragged(self) -> bool:
        """Whether the last step reaches past the summed dimension."""
        return self.depth % self.step != 0

    @property
    def is_wide_ragged(self) -> bool:
        """Whether the last program's columns reach past the result's."""
        return self.width % self.columns != 0

    @property
    def is_top_ragged(self) -> bool:
        """Whether the last pairs that are read at once reach past a row's."""
        return self.top % self.block_pairs != 0

    @property
    def num_columns(self) -> int:
        """Programs that share a pair, or a row."""
        return -(-self.width // self.columns)

    @property
    def num_steps(self) -> int:
        """Steps of a program."""
        groups = -(-self.top // self.block_pairs) if self.op is Projection.DOWN else 1
        return groups * -(-self.depth // self.step)

    @property
    def step_bytes(self) -> int:
        """Weights of a step."""
        return self.op.sides * self.block_pairs * self.columns * self.step * self.dtype.num_bytes

    @property
    def step_loads(self) -> int:
        """Loads of a thread in a step: weights, and the rows that they are multiplied with."""
        lanes = self.warps * 32
        line = self.depth * self.dtype.num_bytes
        widest = next(size for size in (16, 8, 4, 2) if line % size == 0)  # lines begin at multiples of it
        return sum(max(1, num_bytes // (lanes * widest)) for num_bytes in (self.step_bytes, self.row_bytes))

    @property
    def row_bytes(self) -> int:
        """Rows of a step."""
        return self.block_pairs * self.step * self.dtype.num_bytes

    @property
    def kernel(self) -> str:
        """Name of the rendered kernel."""
        return f"pair_{self.op.value}"

    @property
    def name(self) -> str:
        """File and report name: `pair_down_d2048_i768_e128_m128_k8_bf16`."""
        experts = f"e{self.experts}_m{self.held}_k{self.top}"
        return f"{self.kernel}_d{self.hidden}_i{self.inner}_{experts}_{self.dtype.value}"

    def num_programs(self, num_rows: int) -> int:
        """Programs for so many rows."""
        return num_rows * (self.top if self.op is Projection.GATE_UP else 1) * self.num_columns


def pairs_at_once(top: int) -> int:
    """Pairs of a row whose down products one program computes together."""
    return min(MOST_PAIRS, power_of_two(top))


def specialise_pairs(
    op: Projection, hidden: int, inner: int, experts: int, held: int, top: int, dtype: Dtype, target: Target
) -> PairProduct:
    """The kernel of a projection. Raises E0522 for dimensions that it cannot index."""
    if min(hidden, inner, held, top) < 1 or hidden * inner >= 2**31:
        raise fail(
            "E0522",
            f"a {op.value} kernel of pairs cannot serve {held} experts of hidden {hidden} and inner {inner}",
            "each must be at least 1 and hidden * inner below 2^31",
        )
    depth, width = op.turned(hidden, inner)
    together, apart = (op.sides, top) if op is Projection.GATE_UP else (pairs_at_once(top), 1)
    columns = min(LINES // together, power_of_two(width))
    enough = 2 * device_for(target).num_sms
    while columns > LEAST_COLUMNS and -(-width // columns) * apart < enough:  # of one row
        columns //= 2
    step = min(LINE_BYTES // dtype.num_bytes, power_of_two(depth))
    stages = 2 if target.backend == "hip" else STAGES  # there the next step waits in registers
    return PairProduct(
        op, hidden, inner, experts, held, top, dtype, columns, step, stages, 4, Comment(target.name)
    )  # fmt: skip


def render_pairs(values: PairProduct, comments: Iterable[Comment] = ()) -> str:
    """The kernel's source text; `comments` are the `.moe` lines it serves, one each."""
    return render(f"triton/{values.kernel}.py.jinja", k=values, serves=tuple(comments))


def pair_signature(values: PairProduct) -> Signature:
    """Argument types of the rendered kernel."""
    dtype = f"*{values.dtype.value}"
    types = {"rows": dtype, "ids": "*i64", "slots": "*i64"}
    types |= {"flag": "*i32"} if values.op is Projection.GATE_UP else {"weights": "*fp32"}
    return Signature(
        types | {"w": dtype, "out": dtype, "num_rows": "i32", "INTERPRET": "constexpr"}, {"INTERPRET": False}
    )


def compile_pairs(values: PairProduct) -> Compiled:
    """Machine code for the kernel's target, kept or made."""
    launch = Launch(values.name, values.warps, values.stages)
    target = find_target(values.target.text)
    return compiled(render_pairs(values), values.kernel, pair_signature(values), target, launch)
