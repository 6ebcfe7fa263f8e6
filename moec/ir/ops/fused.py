"""The experts' products joined with what brings their rows and what sums their results, in the operation table.

`group_pairs` is `group_rows` without its rows: `gathered_gate_up` reads each where it lies, through its pair.
`reduced_linear` is `grouped_linear` and `reduce_rows` in one, in no fixed order of the sums. Results lie as those of
the operations that they stand for would. Symbols: see `moec.ir.ops.exchange`.
"""

from __future__ import annotations

from moec.ir.ops.moe import held
from moec.ir.ops.scales import require_scales, without_scales
from moec.ir.ops.table import OPS, TRITON, Call, Op, Places, Shapes, local_dim, refuse, register, symbol


def _pairs_shape(call: Call) -> Shapes:
    return ((held(call),), "i32"), ((symbol("X", call.shape(0)[0]),), "i64")


def _pairs_place(call: Call, axis: str, places: Places) -> Places:
    return OPS["group_rows"].place(call, axis, places * 2)[:1] * 2


def _gathered_shape(call: Call) -> Shapes:
    (rows, hidden), (offsets,), (pairs,), (num_experts, out, inner) = (call.shape(i) for i in range(4))
    require_scales(call)
    call.same_dims(pairs, symbol("X", rows), "pairs and pairs of the rows")
    call.same_dims(offsets, num_experts, "offsets and experts held")
    call.same_dims(hidden, inner, "inner dims")
    return (((pairs, local_dim(out, "rows of gate and up") // 2), call.dtype(0)),)


def _gathered_place(call: Call, axis: str, places: Places) -> Places:
    """As `group_rows`, then `grouped_gate_up`."""
    rows, offsets, pairs, w = without_scales(call, axis, places)
    grouped = OPS["group_rows"].place(call, axis, (rows, rows))[0]
    if not grouped == offsets == pairs:
        raise refuse(call, axis, places, "offsets and pairs are of other rows")
    return OPS["grouped_gate_up"].place(call, axis, (grouped, offsets, w))


def _reduced_shape(call: Call) -> Shapes:
    (rows, width), (offsets,), (num_experts, hidden, inner) = (call.shape(i) for i in range(3))
    (pairs,), (out, _) = call.shape(3), call.shape(4)
    call.same_dims(rows, pairs, "rows and pairs")
    call.same_dims(offsets, num_experts, "offsets and experts held")
    call.same_dims(width, inner, "inner dims")
    return (((out, hidden), call.dtype(0)),)


def _reduced_place(call: Call, axis: str, places: Places) -> Places:
    """As `grouped_linear`, then `reduce_rows`."""
    rows, offsets, w, pairs, weights = places
    (given,) = OPS["grouped_linear"].place(call, axis, (rows, offsets, w))
    return OPS["reduce_rows"].place(call, axis, (given, pairs, weights))


GATHERED = ("float", "i32", "i64", "weight", "fp32")
REDUCED = ("float", "i32", "float", "i64", "fp32")

register(Op("group_pairs", ("i64",), _pairs_shape, _pairs_place, ("table",), num_results=2, kernels=TRITON))
register(
    Op("gathered_gate_up", GATHERED, _gathered_shape, _gathered_place, ("table", "top"), num_optional=1, kernels=TRITON)
)
register(Op("reduced_linear", REDUCED, _reduced_shape, _reduced_place, ("table",), kernels=TRITON))
