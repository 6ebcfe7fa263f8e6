"""Rows and the experts they chose, pair by pair: what sorts rows by expert and sums what the experts gave.

A pair is one of a row's k choices. `group_rows` makes the rows of the pairs served here, expert by expert;
`reduce_rows` weighs and sums them again, row by row. With `combine = ordered` the pairs come home one by one:
`return_rows` puts them in the order in which their rows arrived, `count_pairs` and `pair_order` say how many come from
where and in which order, and `combine` sums them there. Symbols: see `moec.ir.ops.exchange`.
"""

from __future__ import annotations

from moec.ir.ops.exchange import ROWS, group_size, rows_only, sum_of_parts
from moec.ir.ops.table import ALL, TRITON, Call, Op, Places, Shapes, base_symbol, refuse, register, symbol
from moec.ir.program import Dim
from moec.layout import Partial, Replicate, Routed, Shard


def held(call: Call) -> Dim:
    """Experts on this rank under the placement table: a number, or M where ranks differ."""
    placement = call.placement()
    return placement.counts[0] if placement.is_even else "M"


def _group_shape(call: Call) -> Shapes:
    (rows, hidden), (routed, _) = call.shape(0), call.shape(1)
    call.same_dims(rows, routed, "rows and rows of ids")
    pairs = symbol("X", rows)
    return (((pairs, hidden), call.dtype(0)), ((held(call),), "i32"), ((pairs,), "i64"))


def _group_place(call: Call, axis: str, places: Places) -> Places:
    """Rows at their experts, or whole on every rank (each then takes the pairs of its own experts)."""
    if axis != "ep":
        return rows_only(call, axis, places)
    table = call.attrs["table"]
    if set(places) in ({Routed(table, "expert")}, {Replicate()}):
        return (Routed(table, "grouped"),) * 3
    raise refuse(call, axis, places)


def _reduce_shape(call: Call) -> Shapes:
    (rows, hidden), (pairs,), (out, _) = (call.shape(i) for i in range(3))
    call.same_dims(rows, pairs, "rows and pairs")
    return (((out, hidden), call.dtype(0)),)


def _reduce_place(call: Call, axis: str, places: Places) -> Places:
    rows, pairs, weights = places
    table = call.attrs["table"]
    if axis == "ep":
        if rows == pairs == Routed(table, "grouped"):
            if weights == Routed(table, "expert"):
                return (weights,)
            if weights == Replicate():
                return (Partial(),)
        raise refuse(call, axis, places)
    return sum_of_parts(call, axis, rows, pairs, weights)


def _return_shape(call: Call) -> Shapes:
    call.same_dims(call.shape(0)[0], call.shape(1)[0], "rows and pairs")
    return ((call.shape(0), call.dtype(0)),)


def _return_place(call: Call, axis: str, places: Places) -> Places:
    rows, pairs = places
    if axis == "ep":
        if isinstance(rows, Routed) and rows.at == "grouped" and pairs == rows:
            return (Routed(rows.table, "expert"),)
        raise refuse(call, axis, places)
    return sum_of_parts(call, axis, rows, pairs)


def _pair_counts_shape(call: Call) -> Shapes:
    call.require(base_symbol(call.shape(0)[0]) == "R", "pairs are counted where rows arrived at their experts")
    return ((call.shape(1), "i64"),)


def _alike(call: Call, axis: str, places: Places) -> Places:
    if len(set(places)) == 1:
        return places[:1]
    raise refuse(call, axis, places)


def _pair_order_shape(call: Call) -> Shapes:
    return (((symbol("K", call.shape(0)[0]),), "i64"), ((group_size(call),), "i64"))


def _pair_order_place(call: Call, axis: str, places: Places) -> Places:
    if axis != "ep":
        return rows_only(call, axis, places)
    if places == (Shard(0),):
        return (Routed(call.attrs["table"], "home"),) * 2
    raise refuse(call, axis, places)


def _combine_shape(call: Call) -> Shapes:
    (rows, hidden), (pairs,), (tokens, _) = (call.shape(i) for i in range(3))
    call.same_dims(rows, pairs, "rows and order")
    return (((tokens, hidden), call.dtype(0)),)


def _combine_place(call: Call, axis: str, places: Places) -> Places:
    rows, order, weights = places
    if axis == "ep":
        if rows == order == Routed(call.attrs["table"], "home") and weights == Shard(0):
            return (Shard(0),)
        raise refuse(call, axis, places)
    return sum_of_parts(call, axis, rows, order, weights)


register(Op("group_rows", ("float", "i64"), _group_shape, _group_place, ("table",), num_results=3, kernels=ALL))
register(Op("reduce_rows", ROWS, _reduce_shape, _reduce_place, ("table",), kernels=ALL))
register(Op("return_rows", ("float", "i64"), _return_shape, _return_place))
register(Op("count_pairs", ("i64", "i64"), _pair_counts_shape, _alike))
register(Op("pair_order", ("i64",), _pair_order_shape, _pair_order_place, ("table", "group"), num_results=2))
register(Op("combine", ROWS, _combine_shape, _combine_place, ("table",), kernels=TRITON))
