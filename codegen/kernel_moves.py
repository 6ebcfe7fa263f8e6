"""The kernels that move rows, as one list: what each operation launches, compiled and costed.

`route`, `group_rows` (and `group_pairs`, which moves none), `reduce_rows` and `combine` of the operation table, and
`quantise_rows`, which products with fp8 experts launch first where rows are multiplied in e4m3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moec.codegen.devices import Device
from moec.codegen.kernel_route import Route, render_route, route_signature
from moec.codegen.kernel_rows import (
    GroupRows,
    ReduceRows,
    group_signatures,
    reduce_signature,
    render_group,
    render_reduce,
)
from moec.codegen.kernel_store import Compiled, compiled
from moec.codegen.layer_cost import RowsCost, group_cost, reduce_cost, route_bytes
from moec.codegen.offline import Launch, Signature
from moec.codegen.quantise_rows import GROUP, QuantiseRows, quantise_rows_signature, render_quantise_rows
from moec.codegen.renderer import Comment
from moec.codegen.targets import Target

Moving = Route | GroupRows | ReduceRows | QuantiseRows
INVERT = Signature(
    {"pairs": "*i64", "places": "*i32", "num_pairs": "i32", "num_places": "i32", "INTERPRET": "constexpr"},
    {"INTERPRET": False},
)


@dataclass(frozen=True)
class Moves:
    """Tokens and routed rows of a step: `tokens` of `top` choices, `useful` rows served here, of `row_bytes` each."""

    tokens: int
    top: int
    useful: int
    row_bytes: int


def render_moving(values: Moving, comments: Iterable[Comment] = ()) -> str:
    """The text of the kernels of an operation."""
    if isinstance(values, Route):
        return render_route(values, comments)
    if isinstance(values, QuantiseRows):
        return render_quantise_rows(values, comments)
    return render_group(values, comments) if isinstance(values, GroupRows) else render_reduce(values, comments)


def compile_moving(values: Moving, target: Target, is_inverting: bool = False) -> list[tuple[str, Compiled]]:
    """Each kernel that the operation launches, by name. `is_inverting`: places of pairs are found first."""
    source = render_moving(values)
    return [
        (name, compiled(source, name, signature, target, Launch(f"{name} of {values.name}", values.warps, 1)))
        for name, signature in _launches(values, is_inverting)
    ]


def _launches(values: Moving, is_inverting: bool) -> Sequence[tuple[str, Signature]]:
    if isinstance(values, Route):
        return [("route", route_signature(values))]
    if isinstance(values, GroupRows):
        return list(group_signatures(values).items())
    if isinstance(values, QuantiseRows):
        return [("quantise_rows", quantise_rows_signature(values))]
    reduce = ("reduce_rows", reduce_signature(values))
    return [("invert_pairs", INVERT), reduce] if is_inverting else [reduce]


def moving_cost(values: Moving, moves: Moves, device: Device, is_inverting: bool = False) -> RowsCost:
    """Bytes and launches of the operation."""
    if isinstance(values, Route):
        return RowsCost("route", route_bytes(moves.tokens, values.experts, moves.top), 1, device)
    if isinstance(values, GroupRows):
        return group_cost(values, moves.tokens, moves.useful, moves.row_bytes * values.copies, device)
    if isinstance(values, QuantiseRows):
        written = values.groups * (GROUP + 4)
        return RowsCost("quantise_rows", float(moves.useful * (moves.row_bytes + written)), 1, device)
    cost = reduce_cost(moves.tokens, moves.top, moves.useful, moves.row_bytes, device)
    if not is_inverting:
        return cost
    # Places are cleared and written (4 bytes), pairs read (8): two launches more.
    return RowsCost("combine", cost.moved + 16.0 * moves.useful, cost.launches + 2, device)
