"""Dense operations of the table in `moec.ir.ops.table`: rows in, rows out.

Legend: T rows, D hidden, H heads, d head dim, V vocabulary, I inner.
"""

from __future__ import annotations

from moec.ir.ops.table import (
    CPP,
    Call,
    Op,
    Places,
    Shapes,
    is_by_head,
    like_first,
    local_dim,
    partial_hint,
    refuse,
    register,
    rows_and_param,
    rowwise,
)
from moec.layout import Partial, Replicate, Shard


def _embed_shape(call: Call) -> Shapes:
    (rows,), (_, width) = call.shape(0), call.shape(1)
    return (((rows, width), call.dtype(1)),)


def _take_shape(call: Call) -> Shapes:
    (_, width), (rows,) = call.shape(0), call.shape(1)
    return (((rows, width), call.dtype(0)),)


def _norm_shape(call: Call) -> Shapes:
    (width,) = call.shape(1)
    call.same_dims(call.shape(0)[-1], width, "last dim and weight")
    return like_first(call)


def _norm_place(call: Call, axis: str, places: Places) -> Places:
    return places[:1] if is_by_head(call, places) else rows_and_param(call, axis, places)


def _linear_shape(call: Call) -> Shapes:
    (rows, inner), (out, w_inner) = call.shape(0), call.shape(1)
    call.same_dims(inner, w_inner, "inner dims")
    return (((rows, out), call.dtype(0)),)


def _linear_place(call: Call, axis: str, places: Places) -> Places:
    x, w = places
    if w == Replicate() and x in (Replicate(), Shard(0)):
        return (x,)
    if x == Replicate() and isinstance(w, Shard) and w.dim == 0:  # column parallel
        return (Shard(1, w.copies),)
    if x == Shard(1) and w == Shard(1):  # row parallel: each rank has a part of the inner dim
        return (Partial(),)
    raise refuse(call, axis, places, partial_hint(places))


def _merged_shape(call: Call) -> Shapes:
    (((rows, out), dtype),) = _linear_shape(call)
    call.same_dims(sum(call.attrs["sizes"]), out, "sum of sizes and rows of the weight")
    return tuple(((rows, size), dtype) for size in call.attrs["sizes"])


def _merged_place(call: Call, axis: str, places: Places) -> Places:
    """Of each result as `linear`'s: a rank's rows of the weight are its rows of every part."""
    return _linear_place(call, axis, places) * len(call.attrs["sizes"])


def _bias_place(call: Call, axis: str, places: Places) -> Places:
    x, b = places
    if isinstance(x, Shard) and x.dim == 1 and b == Shard(0, x.copies):
        return (x,)
    if x == Partial():
        raise refuse(call, axis, places, "the bias would be added once per rank")
    return rows_and_param(call, axis, places)


def _add_place(call: Call, axis: str, places: Places) -> Places:
    a, b = places
    if a == b:
        return (a,)
    hint = "a whole value added to a partial sum is counted once per rank" if Partial() in places else ""
    raise refuse(call, axis, places, hint)


def _same_shape(call: Call) -> Shapes:
    for a, b in zip(call.shape(0), call.shape(1), strict=True):
        call.same_dims(a, b, "dims")
    call.require(call.dtype(0) == call.dtype(1), f"dtypes differ: {call.dtype(0)} and {call.dtype(1)}")
    return like_first(call)


def _product_place(call: Call, axis: str, places: Places) -> Places:
    gate, up = places
    if gate == up and gate != Partial():
        return (gate,)
    raise refuse(call, axis, places, partial_hint(places))


def _gate_up_shape(call: Call) -> Shapes:
    (((rows, out), dtype),) = _linear_shape(call)
    return (((rows, local_dim(out, "rows of gate and up") // 2), dtype),)


def _gate_up_place(call: Call, axis: str, places: Places) -> Places:
    (place,) = _linear_place(call, axis, places)
    if place == Partial():
        raise refuse(call, axis, places, "the activation of a part of a sum is no part of the activation")
    return (place,)


register(Op("embed", ("i64", "float"), _embed_shape, rows_and_param, kernels=CPP))
register(Op("take", ("float", "i64"), _take_shape, rowwise))
register(Op("rms_norm", ("float", "float"), _norm_shape, _norm_place, ("eps",), kernels=CPP))
register(Op("linear", ("float", "float"), _linear_shape, _linear_place, kernels=CPP))
register(Op("merged_linear", ("float", "float"), _merged_shape, _merged_place, ("sizes",), num_results=0, kernels=CPP))
register(Op("add_bias", ("float", "float"), _norm_shape, _bias_place))
register(Op("add", ("float", "float"), _same_shape, _add_place, kernels=CPP))
register(Op("silu_mul", ("float", "float"), _same_shape, _product_place))
register(Op("gate_up", ("float", "float"), _gate_up_shape, _gate_up_place, kernels=CPP))
