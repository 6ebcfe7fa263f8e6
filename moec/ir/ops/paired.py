"""A layer's experts on the rows of a step in one operation, which few rows make without sorting.

`paired_experts` is `group_rows`, both products and `reduce_rows` in one. Steps of up to `rows` rows are multiplied pair
by pair, larger ones sorted; `sums`: in which order those may be added. Symbols: see `moec.ir.ops.exchange`.
"""

from __future__ import annotations

from moec.ir.ops.moe import held
from moec.ir.ops.table import OPS, TRITON, Call, Op, Places, Shapes, register


def _paired_shape(call: Call) -> Shapes:
    x, ids, weights, (num_gated, lines, hidden), (num_experts, out, inner) = (call.shape(i) for i in range(5))
    call.require(ids == weights, f"ids are {ids}, weights {weights}")
    call.same_dims(x[0], ids[0], "rows and rows of ids")
    call.require(num_gated == num_experts == held(call), f"experts are {num_gated}, {num_experts}, held {held(call)}")
    fits = x[1] == hidden == out and isinstance(inner, int) and lines == 2 * inner
    call.require(fits, f"experts {call.shape(3)}, {call.shape(4)} on rows {x}")
    return ((x, call.dtype(0)),)


def _paired_place(call: Call, axis: str, places: Places) -> Places:
    """As `group_rows`, `grouped_gate_up`, `grouped_linear` and `reduce_rows`, one after the other."""
    x, ids, weights, gate_up, down = places
    grouped = OPS["group_rows"].place(call, axis, (x, ids))[0]
    (act,) = OPS["grouped_gate_up"].place(call, axis, (grouped, grouped, gate_up))
    (given,) = OPS["grouped_linear"].place(call, axis, (act, grouped, down))
    return OPS["reduce_rows"].place(call, axis, (given, grouped, weights))


PAIRED = ("float", "i64", "fp32", "float", "float")

register(Op("paired_experts", PAIRED, _paired_shape, _paired_place, ("rows", "sums", "table"), kernels=TRITON))
