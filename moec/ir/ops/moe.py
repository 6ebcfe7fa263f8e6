"""Routing, and the experts' products, in the operation table. What brings rows to experts is in `exchange`."""

from __future__ import annotations

from moec.ir.ops.scales import require_scales, without_scales
from moec.ir.ops.table import (
    ALL,
    CPP,
    Call,
    Op,
    Places,
    Shapes,
    base_symbol,
    like_first,
    local_dim,
    refuse,
    register,
    rows_and_param,
    rowwise,
)
from moec.ir.program import Dim
from moec.layout import Partial, Placed, Replicate, Routed, Shard


def held(call: Call) -> Dim:
    """Experts on this rank under the placement table: a number, or M where ranks differ."""
    placement = call.placement()
    return placement.counts[0] if placement.is_even else "M"


def _router_shape(call: Call) -> Shapes:
    (rows, hidden), (num_experts, width) = call.shape(0), call.shape(1)
    call.same_dims(hidden, width, "hidden dims")
    return (((rows, num_experts), "fp32"),)


def _route_shape(call: Call) -> Shapes:
    """With `shared = n`, the experts behind those routed to are each row's n last choices."""
    rows, num_experts = call.shape(0)
    shared = call.attrs.get("shared", 0)
    if len(call.types) == 2:
        (biases,) = call.shape(1)
        call.same_dims(num_experts, biases, "experts and selection biases")
    if call.attrs["table"] in call.placements:
        placed = call.placement().num_experts - shared
        call.same_dims(num_experts, placed, "experts routed to and experts placed")
    top, groups, keep = (call.attrs[name] for name in ("top", "groups", "keep"))
    count = local_dim(num_experts, "number of experts")
    call.require(count % groups == 0 and keep <= groups, f"{count} experts in {groups} groups of which {keep} are kept")
    call.require(top <= count // groups * keep, f"top {top} of {count // groups * keep} eligible experts")
    return (((rows, top + shared), "i64"), ((rows, top + shared), "fp32"))


def _moe_shape(call: Call) -> Shapes:
    x, ids, weights, gate, up, down = (call.shape(i) for i in range(6))
    require_scales(call)
    call.require(ids == weights, f"ids are {ids}, weights {weights}")
    call.same_dims(x[0], ids[0], "rows of tokens and of ids")
    call.require(gate == up, f"gate is {gate}, up {up}")
    call.require(gate[2] == x[1] == down[1] and gate[1] == down[2], f"experts {gate}, {down} on tokens {x}")
    return like_first(call)


def _moe_place(call: Call, axis: str, places: Places) -> Places:
    x, ids, weights, gate, up, down = without_scales(call, axis, places)
    if ids == x == weights and gate == up:
        if x in (Replicate(), Shard(0)) and gate == down and gate in (Replicate(), Placed(call.attrs["table"])):
            if x == Replicate() and gate != Replicate():
                raise refuse(call, axis, places, "tokens must be split over the ranks that split the experts")
            return (x,)
        if x == Replicate() and gate == Shard(1) and down == Shard(2):
            return (Partial(),)
    raise refuse(call, axis, places)


def _grouped_shape(call: Call) -> Shapes:
    require_scales(call)
    (rows, width), (num_offsets,), (num_experts, out, inner) = (call.shape(i) for i in range(3))
    call.same_dims(num_offsets, num_experts, "offsets and experts held")
    call.same_dims(width, inner, "inner dims")
    return (((rows, out), call.dtype(0)),)


def _grouped_gate_up_shape(call: Call) -> Shapes:
    (((rows, out), dtype),) = _grouped_shape(call)
    return (((rows, local_dim(out, "rows of gate and up") // 2), dtype),)


def _grouped_place(call: Call, axis: str, places: Places) -> Places:
    rows, offsets, w = without_scales(call, axis, places)
    if isinstance(rows, Routed) and rows.at == "grouped" and offsets == rows and w == Placed(rows.table):
        return (rows,)
    if rows == offsets and rows in (Replicate(), Shard(0)) and w == Replicate() and axis != "ep":
        return (rows,)
    if offsets == Replicate() and rows == Replicate() and w == Shard(1):  # inner dim of the expert, cut over etp
        return (Shard(1),)
    if offsets == Replicate() and rows == Shard(1) and w == Shard(2):
        return (Partial(),)
    raise refuse(call, axis, places)


def _grouped_gate_up_place(call: Call, axis: str, places: Places) -> Places:
    (place,) = _grouped_place(call, axis, places)
    if place == Partial():
        raise refuse(call, axis, places, "the activation of a part of a sum is no part of the activation")
    return (place,)


def _chunk_shape(call: Call) -> Shapes:
    rows, *rest = call.shape(0)
    call.require(call.attrs["index"] < call.attrs["parts"], f"chunk {call.attrs['index']} of {call.attrs['parts']}")
    call.require(base_symbol(rows) == rows and isinstance(rows, str), f"{rows} rows cannot be cut in chunks again")
    return (((f"{rows}.{call.attrs['index']}", *rest), call.dtype(0)),)


def _join_shape(call: Call) -> Shapes:
    rows, *rest = call.shape(0)
    whole = base_symbol(rows)
    for index in range(len(call.types)):
        call.require(call.shape(index) == (f"{whole}.{index}", *rest), f"part {index} is {call.shape(index)}")
    return (((whole, *rest), call.dtype(0)),)


def _join_place(call: Call, axis: str, places: Places) -> Places:
    """Parts of one sum joined are parts of the joined sum."""
    return places[:1] if set(places) == {Partial()} else rowwise(call, axis, places)


#: Most chunks that a step is cut in.
MOST_CHUNKS = 8
ROUTE = ("score", "top", "groups", "keep", "renormalize", "scale", "table")
GROUPED = ("float", "i32", "weight", "fp32")
MOE = ("float", "i64", "fp32", *("weight",) * 3, *("fp32",) * 3)

register(Op("router_logits", ("float", "float"), _router_shape, rows_and_param, kernels=CPP))
register(Op("route", ("fp32", "fp32"), _route_shape, rows_and_param, ROUTE, ("shared",), 1, num_results=2, kernels=ALL))
register(Op("moe", MOE, _moe_shape, _moe_place, ("table",), num_optional=3, kernels=()))
register(Op("grouped_linear", GROUPED, _grouped_shape, _grouped_place, num_optional=1, kernels=ALL))
register(Op("grouped_gate_up", GROUPED, _grouped_gate_up_shape, _grouped_gate_up_place, num_optional=1, kernels=ALL))
register(Op("chunk_rows", ("any",), _chunk_shape, rowwise, ("parts", "index")))
register(Op("join_rows", ("float",) * MOST_CHUNKS, _join_shape, _join_place, num_optional=MOST_CHUNKS - 1))
