"""Values of the template that quantises rows to e4m3, token by token and 128 columns at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moec.codegen.offline import Launch, Report, Signature, compile_kernel
from moec.codegen.renderer import Comment, render
from moec.codegen.targets import Dtype, Target
from moec.diagnostics import fail

#: Columns that share a scale.
GROUP = 128


@dataclass(frozen=True)
class QuantiseRows:
    """Values of `triton/quantise_rows.py.jinja`: rows of `depth` columns in `dtype`."""

    depth: int
    dtype: Dtype

    @property
    def groups(self) -> int:
        return -(-self.depth // GROUP)

    @property
    def block_groups(self) -> int:
        """Groups of a program: four loads of 16 bytes in each of 128 lanes."""
        return 64 // self.dtype.num_bytes

    @property
    def warps(self) -> int:
        return 4

    @property
    def least_scale(self) -> float:
        """Below it a group is all but zero, and quotients by it would overflow."""
        return 2.0**-126

    @property
    def name(self) -> str:
        """File and report name: `quantise_rows_d7168_bf16`."""
        return f"quantise_rows_d{self.depth}_{self.dtype.value}"

    def num_programs(self, num_rows: int) -> int:
        return -(-num_rows * self.groups // self.block_groups)


def has_fp8_products(target: Target) -> bool:
    """Whether a device multiplies e4m3: from sm_90 on. CDNA3 has e4m3fnuz, another format, and sm_80 none."""
    return target.has_tma


def specialise_quantise_rows(depth: int, dtype: Dtype, target: Target) -> QuantiseRows:
    """The kernel for rows of `depth` columns. Raises E0531 where nothing could take its result."""
    if depth < 1 or not has_fp8_products(target):
        raise fail(
            "E0531",
            f"rows of {depth} in {dtype.value} cannot be quantised to e4m3 for {target.name}",
            "it is done for cuda:90 and cuda:100, which multiply e4m3; elsewhere FP8 weights take rows in bf16 or fp16",
        )
    return QuantiseRows(depth, dtype)


def render_quantise_rows(values: QuantiseRows, comments: Iterable[Comment] = ()) -> str:
    """The kernel's source text; `comments` are the `.moe` lines it serves, one each."""
    return render("triton/quantise_rows.py.jinja", k=values, serves=tuple(comments))


def quantise_rows_signature(values: QuantiseRows) -> Signature:
    """Argument types of the rendered `quantise_rows`."""
    types = {"x": f"*{values.dtype.value}", "values": "*fp8e4nv", "scales": "*fp32", "num_groups": "i32"}
    return Signature(types | {"INTERPRET": "constexpr"}, {"INTERPRET": False})


def compile_quantise_rows(values: QuantiseRows, target: Target) -> Report:
    """Compile offline for `target`."""
    launch = Launch(values.name, values.warps, 1)
    return compile_kernel(
        render_quantise_rows(values), "quantise_rows", quantise_rows_signature(values), target, launch
    )
