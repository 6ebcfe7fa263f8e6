"""The tiles that were chosen for a grouped product, as plan.json keeps them for the run time.

A choice is for a kind of product and for steps that bring each expert about so many rows; other steps have the default.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

from moec.codegen.gemm_variant import Projection, RowSource, Store
from moec.codegen.grouped_gemm import GroupedGemm
from moec.codegen.renderer import Comment
from moec.codegen.targets import Dtype
from moec.codegen.tiles import Form, Tile, size_class

#: Types of a tile's numbers.
TILE = (int, int, int, bool, int)


@dataclass(frozen=True)
class Product:
    """A kind of grouped product: what of a kernel its tiles leave open. `rows_per_expert` is a size class."""

    op: Projection
    hidden: int
    inner: int
    experts: int
    dtype: Dtype
    rows: RowSource
    store: Store
    rows_per_expert: int


@dataclass(frozen=True)
class Chosen:
    """Tiles, warps and programs of a product's kernel."""

    form: Form
    tiles: tuple[Tile, ...]
    warps: int
    programs: int


def product_of(values: GroupedGemm, rows_per_expert: int) -> Product:
    """The kind of product that a kernel computes, in steps of so many rows an expert."""
    v = values
    return Product(v.op, v.hidden, v.inner, v.experts, v.dtype, v.rows, v.store, size_class(rows_per_expert))


def with_choice(values: GroupedGemm, rows_per_expert: int, chosen: Mapping[Product, Chosen]) -> GroupedGemm:
    """The default kernel, or the one chosen for such a step. Pointers stay: descriptors want aligned tensors."""
    found = chosen.get(product_of(values, rows_per_expert))
    if found is None or (values.form is Form.POINTER and found.form is Form.TMA):
        return values
    return replace(values, **vars(found), fallback=Comment(""))


def write_choice(values: GroupedGemm, rows_per_expert: int) -> dict[str, Any]:
    """A chosen kernel as JSON."""
    given = asdict(product_of(values, rows_per_expert))
    plain = {name: getattr(value, "value", value) for name, value in given.items()}
    tiles = [list(astuple(tile)) for tile in values.tiles]
    return plain | {"form": values.form.value, "tiles": tiles, "warps": values.warps, "programs": values.programs}


def read_choices(entries: Iterable[Mapping[str, Any]], target: str) -> dict[Product, Chosen]:
    """The choices for `target` among the kernels of plan.json. Raises ValueError for one that cannot be read."""
    found: dict[Product, Chosen] = {}
    for entry in entries:
        if "choice" in entry and entry["target"] == target:
            product, chosen = _read(entry["choice"])
            found.setdefault(product, chosen)
    return found


def _read(given: Mapping[str, Any]) -> tuple[Product, Chosen]:
    try:
        numbers = [given[name] for name in ("hidden", "inner", "experts", "rows_per_expert", "warps", "programs")]
        hidden, inner, experts, rows_per_expert, warps, programs = numbers
        dtype, source, store = Dtype(given["dtype"]), RowSource(given["rows"]), Store(given["store"])
        product = Product(Projection(given["op"]), hidden, inner, experts, dtype, source, store, rows_per_expert)
        chosen = Chosen(Form(given["form"]), tuple(Tile(*tile) for tile in given["tiles"]), warps, programs)
    except (KeyError, TypeError) as error:
        raise ValueError(f"a kernel's choice is not complete: {error}") from None
    are_counts = all(type(number) is int and number > 0 for number in numbers)
    if not (are_counts and chosen.tiles and all(tuple(map(type, tile)) == TILE for tile in given["tiles"])):
        raise ValueError(f"a kernel's choice has other numbers than sizes and tiles: {dict(given)}")
    return product, chosen
