"""Values of the grouped GEMM kernels with quantised weights: FP8 blocks, INT8 and INT4 groups, 128 columns a scale.

Two ways to multiply. Rows in e4m3 meet FP8 weights on the tensor cores of devices that multiply e4m3 (sm_90, sm_100).
Rows in bf16 or fp16 meet weights of any format, which are decoded in registers to the rows' dtype: exactly, since
scales are applied to what each group of 128 columns adds. Weights are then always on the left of the product, where
tensor cores take them from registers. `moec.runtime.quantise` has the formats.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moec.codegen.devices import device_for
from moec.codegen.gemm_variant import Projection, RowSource, Store, Weights
from moec.codegen.grouped_gemm import GroupedGemm
from moec.codegen.offline import Launch, Report, Signature, compile_kernel
from moec.codegen.quantise_rows import GROUP, has_fp8_products
from moec.codegen.quantised_sizes import GROUP_BYTES, LINES, Sizes, fitting_sizes, group_bytes, wanted_sizes
from moec.codegen.renderer import Comment, render
from moec.codegen.targets import Dtype, Target, find_target
from moec.codegen.tiles import MANY_ROWS, Form, Tile
from moec.diagnostics import fail


@dataclass(frozen=True)
class QuantisedGemm(GroupedGemm):
    """Values of `triton/grouped_gemm_quantised.py.jinja`. `quantised_rows`: rows are e4m3 with scales of their own.

    `dtype` is that of the results, and of rows which are not quantised.
    """

    quantised_rows: bool

    @property
    def depth(self) -> int:
        """The summed dimension; of quantised rows, as stored in whole groups."""
        depth = super().depth
        return -(-depth // GROUP) * GROUP if self.quantised_rows else depth

    @property
    def row_bytes(self) -> float:
        return 1 + 4 / GROUP if self.quantised_rows else super().row_bytes

    @property
    def multiplied(self) -> str:
        return "fp8" if self.quantised_rows else super().multiplied

    @property
    def groups(self) -> int:
        return -(-self.depth // GROUP)

    @property
    def blocks(self) -> int:
        """Blocks of 128 lines that each side has."""
        return -(-self.width // GROUP)

    @property
    def group_words(self) -> int:
        """32-bit words that 128 columns of one line take."""
        return GROUP_BYTES[self.weights] // 4

    @property
    def arguments(self) -> tuple[str, ...]:
        names = [name for name in super().arguments if name != "w_pair"]
        names.insert(names.index("w") + 1, "scales")
        if self.quantised_rows:
            names.insert(names.index("offsets"), "row_scales")
        return tuple(names)

    @property
    def magic_base(self) -> float:
        """From here on the rows' dtype counts in ones: the power of two with as many bits of fraction below it."""
        return 128.0 if self.dtype is Dtype.BF16 else 1024.0

    @property
    def magic(self) -> int:
        """A word of two such numbers."""
        return 0x43004300 if self.dtype is Dtype.BF16 else 0x64006400

    @property
    def code_shift(self) -> int:
        """Bits of fraction that the rows' dtype has more than e4m3."""
        return 4 if self.dtype is Dtype.BF16 else 7

    @property
    def code_bits(self) -> int:
        """Exponents and fractions of two e4m3 numbers that are shifted so."""
        return (0x7F << self.code_shift) * 0x10001

    @property
    def code_factor(self) -> float:
        """2 to the difference of the exponents' biases: 127, or 15, and 7."""
        return 2.0**120 if self.dtype is Dtype.BF16 else 2.0**8

    @property
    def name(self) -> str:
        """File and report name: `gate_up_d7168_i2048_m256_e4m3_fp8_t128`, with what rows and weights are."""
        plain = super().name
        return plain.replace(f"_{self.dtype.value}_", "_e4m3_") if self.quantised_rows else plain

    def shared_bytes(self, target: Target) -> int:
        sizes = Sizes(self.sizes, self.warps, self.stages, self.has_wide)
        return sizes.shared_bytes(*group_bytes(self.weights, self.dtype, self.quantised_rows, target), target)


def specialise_quantised(
    op: Projection,
    hidden: int,
    inner: int,
    experts: int,
    dtype: Dtype,
    target: Target,
    weights: Weights,
    *,
    quantised_rows: bool = False,
    top: int = 1,
    rows: RowSource = RowSource.SORTED,
    store: Store = Store.PLAIN,
    rows_per_expert: int = MANY_ROWS,
) -> QuantisedGemm:
    """The kernel for `experts` experts whose weights are stored as `weights`.

    `rows_per_expert` is what an expert is expected to receive in a step. Raises E0522 for dimensions that the kernel
    cannot index, E0523 where no tile fits and E0531 for rows and weights that the target cannot multiply.
    """
    _check_served(dtype, target, weights, quantised_rows)
    if min(hidden, inner, experts, top) < 1 or hidden * inner >= 2**31:
        raise fail(
            "E0522",
            f"a grouped {op.value} kernel cannot serve {experts} experts of hidden {hidden} and inner {inner}",
            "each must be at least 1 and hidden * inner below 2^31",
        )
    wanted = wanted_sizes(target, quantised_rows, rows_per_expert)
    row_bytes, line_bytes = group_bytes(weights, dtype, quantised_rows, target)
    sizes = fitting_sizes(wanted, row_bytes, line_bytes, target)
    n = LINES // op.sides
    tiles = tuple(Tile(m, n, GROUP, not (sizes.is_wide and m == sizes.rows[0]), sizes.stages) for m in sizes.rows)
    device, needed = device_for(target), sizes.shared_bytes(row_bytes, line_bytes, target)
    # Kernels of 4 warps leave registers for three of them.
    programs = device.num_sms * max(1, min(12 // sizes.warps, device.shared // (needed + device.reserved)))
    reason = "" if sizes == wanted else f"{sizes} instead of {wanted}, for {target.shared_limit} bytes of shared memory"
    return QuantisedGemm(
        op=op, hidden=hidden, inner=inner, experts=experts, top=top, dtype=dtype, weights=weights, rows=rows,
        store=store, form=Form.TMA if target.has_tma else Form.POINTER, tiles=tiles, warps=sizes.warps,
        programs=programs, target=Comment(target.name), fallback=Comment(reason), quantised_rows=quantised_rows,
    )  # fmt: skip


def _check_served(dtype: Dtype, target: Target, weights: Weights, quantised_rows: bool) -> None:
    rows = "e4m3" if quantised_rows else dtype.value
    wanted = ""
    if weights is Weights.PLAIN:
        wanted = "weights that are not quantised are served by the plain kernels"
    elif quantised_rows and weights is not Weights.FP8:
        wanted = f"give rows in bf16 or fp16: {weights.value} weights are decoded to the rows' dtype"
    elif quantised_rows and not has_fp8_products(target):
        wanted = "give rows in bf16 or fp16: of the targets cuda:90 and cuda:100 multiply e4m3"
    elif dtype is Dtype.FP32:
        wanted = "rows and results are bf16 or fp16"
    if wanted:
        raise fail("E0531", f"{rows} rows cannot be multiplied with {weights.value} weights on {target.name}", wanted)


def render_quantised(values: QuantisedGemm, comments: Iterable[Comment] = ()) -> str:
    """The kernel's source text; `comments` are the `.moe` lines it serves, one each. The kernel is `grouped_gemm`."""
    return render("triton/grouped_gemm_quantised.py.jinja", k=values, serves=tuple(comments))


def quantised_signature(values: QuantisedGemm) -> Signature:
    """Argument types of the rendered `grouped_gemm`."""
    dtype, tile = values.dtype.value, values.tiles[0]
    row_dtype = "fp8e4nv" if values.quantised_rows else dtype
    weight_dtype, columns = ("fp8e4nv", GROUP) if values.quantised_rows else ("i32", values.group_words)
    types = {
        "rows": f"*{row_dtype}",
        "row_box": f"tensordesc<{row_dtype}[{tile.m}, {GROUP}]>",
        "row_scales": "*fp32",
        "offsets": "*i32",
        "pairs": "*i64",
        "pair_weights": "*fp32",
        "w": f"*{weight_dtype}",
        "scales": "*fp32",
        "out": "*fp32" if values.store is Store.ACCUMULATED else f"*{dtype}",
        "num_rows": "i32",
    }
    if values.form is Form.TMA:
        types["w"] = f"tensordesc<{weight_dtype}[{values.sides}, {tile.n}, {columns}]>"
    chosen = {name: types[name] for name in values.arguments}
    return Signature(chosen | {"INTERPRET": "constexpr"}, {"INTERPRET": False})


def compile_quantised(values: QuantisedGemm, source: str | None = None) -> Report:
    """Compile for its target; `source` is its text, where rendered already."""
    text = source if source is not None else render_quantised(values)
    launch = Launch(values.name, values.warps, values.stages)
    return compile_kernel(text, "grouped_gemm", quantised_signature(values), find_target(values.target.text), launch)
