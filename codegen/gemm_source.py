"""The text of a grouped GEMM kernel, its arguments, and its machine code."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from moec.codegen.gemm_variant import Store
from moec.codegen.grouped_gemm import GroupedGemm
from moec.codegen.offline import Launch, Report, Signature, compile_kernel
from moec.codegen.renderer import BUG, Comment, render
from moec.codegen.targets import find_target
from moec.codegen.tiles import Form
from moec.diagnostics import fail


def tile_fault(values: GroupedGemm) -> str | None:
    """Why one kernel cannot be made of these tiles, or None."""
    first = values.tiles[0]
    if any(large.m % small.m for large, small in itertools.pairwise(values.tiles)):
        return "rows are cut from the largest down, each a multiple of the next"
    if any((tile.n, tile.k) != (first.n, first.k) for tile in values.tiles):
        return "one box of weights serves all, so they have the same columns and depth"
    if values.form is Form.TMA and values.is_deep_ragged:
        return f"descriptors take whole steps, and {values.depth} is no multiple of {first.k}"
    return None


def render_grouped_gemm(values: GroupedGemm, comments: Iterable[Comment] = ()) -> str:
    """The kernel's source text; `comments` are the `.moe` lines it serves, one each. The kernel is `grouped_gemm`.

    Raises E0529 for tiles that one kernel cannot be made of.
    """
    if (fault := tile_fault(values)) is not None:
        tiles = ", ".join(str(tile) for tile in values.tiles)
        raise fail("E0529", f"`{values.name}` cannot be made of the tiles {tiles}: {fault}", BUG)
    return render("triton/grouped_gemm.py.jinja", k=values, serves=tuple(comments))


def grouped_gemm_signature(values: GroupedGemm) -> Signature:
    """Argument types of the rendered `grouped_gemm`."""
    dtype, tile = values.dtype.value, values.tiles[0]
    types = {
        "rows": f"*{dtype}",
        "row_box": f"tensordesc<{dtype}[{tile.m}, {tile.k}]>",
        "offsets": "*i32",
        "pairs": "*i64",
        "pair_weights": "*fp32",
        "w": f"*{dtype}",
        "out": "*fp32" if values.store is Store.ACCUMULATED else f"*{dtype}",
        "num_rows": "i32",
    }
    if values.form is Form.TMA:
        types["w"] = f"tensordesc<{dtype}[1, {tile.n}, {tile.k}]>"
        types["w_pair"] = f"tensordesc<{dtype}[2, {tile.n}, {tile.k}]>"
    chosen = {name: types[name] for name in values.arguments}
    return Signature(chosen | {"INTERPRET": "constexpr"}, {"INTERPRET": False})


def compile_grouped_gemm(values: GroupedGemm, source: str | None = None) -> Report:
    """Compile for its target and judge; `source` is its text, where rendered already."""
    text = source if source is not None else render_grouped_gemm(values)
    launch = Launch(values.name, values.warps, values.stages)
    return compile_kernel(text, "grouped_gemm", grouped_gemm_signature(values), find_target(values.target.text), launch)
