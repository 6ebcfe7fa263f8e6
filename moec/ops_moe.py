"""Routing and expert operations of the table in `moec.ops`.

Rows of a routing table lie `home` (the rank of their token) or at their `expert`; the rules below let only the
exchange move them and only `combine` end them.
"""

from __future__ import annotations

from moec.ir import Dim, Partial, Placed, Replicate, Routed, Shard
from moec.ops import Call, Op, Places, like_first, local_dim, refuse, register, rowwise

Shapes = tuple[tuple[tuple[Dim, ...], str], ...]


def held(call: Call, table: str) -> Dim:
    """Experts on this rank under a placement table: a number, or M where ranks differ."""
    placement = call.placements[table]
    return placement.counts[0] if placement.is_even else "M"


def _router_shape(call: Call) -> Shapes:
    call.same_dims(call.shape(0)[1], call.shape(1)[1], "hidden dims")
    return (((call.shape(0)[0], call.shape(1)[0]), "fp32"),)


def _route_shape(call: Call) -> Shapes:
    rows, num_experts = call.shape(0)
    if len(call.types) == 2:
        call.same_dims(num_experts, call.shape(1)[0], "experts and selection biases")
    top, groups, keep = (call.attrs[name] for name in ("top", "groups", "keep"))
    count = local_dim(num_experts, "number of experts")
    call.require(count % groups == 0 and keep <= groups, f"{count} experts in {groups} groups of which {keep} are kept")
    call.require(top <= count // groups * keep, f"top {top} of {count // groups * keep} eligible experts")
    return (((rows, top), "i64"), ((rows, top), "fp32"))


def _moe_shape(call: Call) -> Shapes:
    x, ids, weights, gate, up, down = (call.shape(i) for i in range(6))
    call.require(ids == weights, f"ids are {ids}, weights {weights}")
    call.same_dims(x[0], ids[0], "rows of tokens and of ids")
    call.require(gate == up, f"gate is {gate}, up {up}")
    call.require(gate[2] == x[1] == down[1] and gate[1] == down[2], f"experts {gate}, {down} on tokens {x}")
    return like_first(call)


def _moe_place(call: Call, axis: str, places: Places) -> Places:
    x, ids, weights, gate, up, down = places
    if ids == x == weights and gate == up:
        if x in (Replicate(), Shard(0)) and gate == down and gate in (Replicate(), Placed(call.attrs["table"])):
            if x == Replicate() and gate != Replicate():
                raise refuse(call, axis, places, "tokens must be split over the ranks that split the experts")
            return (x,)
        if x == Replicate() and gate == Shard(1) and down == Shard(2):
            return (Partial(),)
    raise refuse(call, axis, places)


def _dispatch_shape(call: Call) -> Shapes:
    call.same_dims(call.shape(0)[0], call.shape(1)[0], "rows of tokens and of ids")
    table, local = call.attrs["table"], call.attrs["local"]
    rows: Dim = "R" if local else "P"
    slots: Dim = held(call, table) if local else call.placements[table].num_experts
    return (((rows, call.shape(0)[1]), call.dtype(0)), ((slots,), "i64"), ((rows,), "i64"))


def _dispatch_place(call: Call, axis: str, places: Places) -> Places:
    table, local = call.attrs["table"], call.attrs["local"]
    x, ids = places
    if x == ids and axis == "ep":
        if local and x == Replicate():
            return (Routed(table, "expert"),) * 3
        if not local and x == Shard(0):
            return (Routed(table, "home"),) * 3
    elif x == ids and x in (Replicate(), Shard(0)):
        return (x,) * 3
    raise refuse(call, axis, places)


def _group_shape(call: Call) -> Shapes:
    rows, width = call.shape(0)
    return (((rows, width), call.dtype(0)), ((call.shape(1)[1],), "i32"), ((rows,), "i64"))


def _at_expert(call: Call, axis: str, places: Places) -> Places:
    """All arguments lie alike, and on the ep axis at their experts."""
    if len(set(places)) == 1 and (axis != "ep" or _is_at(places[0], "expert")) and places[0] != Partial():
        return (places[0],) * call.op.num_results
    raise refuse(call, axis, places)


def _is_at(place: object, where: str) -> bool:
    return isinstance(place, Routed) and place.at == where


def _ungroup_place(call: Call, axis: str, places: Places) -> Places:
    rows, perm = places
    if rows == perm or (rows == Partial() and perm == Replicate()):
        return (rows,)
    raise refuse(call, axis, places)


def _grouped_shape(call: Call) -> Shapes:
    (rows, width), (num_offsets,), (num_experts, out, inner) = (call.shape(i) for i in range(3))
    call.same_dims(num_offsets, num_experts, "offsets and experts held")
    call.same_dims(width, inner, "inner dims")
    return (((rows, out), call.dtype(0)),)


def _grouped_gate_up_shape(call: Call) -> Shapes:
    (((rows, out), dtype),) = _grouped_shape(call)
    return (((rows, local_dim(out, "rows of gate and up") // 2), dtype),)


def _grouped_place(call: Call, axis: str, places: Places) -> Places:
    rows, offsets, w = places
    if _is_at(rows, "expert") and offsets == rows and isinstance(rows, Routed) and w == Placed(rows.table):
        return (rows,)
    if rows == offsets and rows in (Replicate(), Shard(0)) and w == Replicate() and axis != "ep":
        return (rows,)
    if offsets == Replicate() and rows == Replicate() and w == Shard(1):  # inner dim of the expert, cut over etp
        return (Shard(1),)
    if offsets == Replicate() and rows == Shard(1) and w == Shard(2):
        return (Partial(),)
    raise refuse(call, axis, places)


def _combine_shape(call: Call) -> Shapes:
    call.same_dims(call.shape(0)[0], call.shape(1)[0], "rows and order")
    return (((call.shape(2)[0], call.shape(0)[1]), call.dtype(0)),)


def _combine_place(call: Call, axis: str, places: Places) -> Places:
    rows, order, weights = places
    table = call.attrs["table"]
    if axis == "ep":
        if call.attrs["local"] and rows == order == Routed(table, "expert") and weights == Replicate():
            return (Partial(),)
        if not call.attrs["local"] and rows == order == Routed(table, "home") and weights == Shard(0):
            return (Shard(0),)
    elif order == weights and (rows == order or (rows == Partial() and order == Replicate())):
        return (rows,)
    raise refuse(call, axis, places)


ROUTE = ("score", "top", "groups", "keep", "renormalize", "scale", "table")

register(Op("router_logits", _router_shape, rowwise, num_args=(2, 2)))
register(Op("route", _route_shape, rowwise, ROUTE, (1, 2), num_results=2))
register(Op("moe", _moe_shape, _moe_place, ("table",), (6, 6), kernels=()))
register(Op("dispatch", _dispatch_shape, _dispatch_place, ("table", "local"), (2, 2), num_results=3))
register(Op("offsets", lambda call: ((call.shape(0), "i32"),), _at_expert))
register(Op("group_rows", _group_shape, _at_expert, num_args=(2, 2), num_results=3))
register(Op("ungroup_rows", like_first, _ungroup_place, num_args=(2, 2)))
register(Op("grouped_linear", _grouped_shape, _grouped_place, num_args=(3, 3)))
register(Op("grouped_gate_up", _grouped_gate_up_shape, _grouped_place, num_args=(3, 3), kernels=("torch", "triton")))
register(Op("combine", _combine_shape, _combine_place, ("table", "local"), (3, 3)))
