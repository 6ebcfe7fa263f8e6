"""Experts that wait outside device memory, in the table of `moec.ir.ops.table`: guessing, fetching and serving them.

    guess           the experts that a later layer's router would choose for this layer's rows
    count_experts   rows per expert, of this rank; sum_counts adds up those of an ep group
    prefetch.start  copies of a later layer's experts begin: nobody reads its result, that layer's wait belongs to it.
                    `ahead` is negative for an earlier layer, in the next step: by frequency, which counts nothing,
                    and begins once it is given what its own layer gives
    prefetch.wait   the prefetch for this layer is over: what its rows need and is in no slot is copied before all else
    cached_experts  each expert on its rows, from its slot: first those that are there, the others as they come

A guess may be wrong without harm to any result, so a count that is a part of a sum may be read as it is.
"""

from __future__ import annotations

from moec.ir.ops.comm import all_reduce_place
from moec.ir.ops.moe import held
from moec.ir.ops.scales import require_scales, without_scales
from moec.ir.ops.table import (
    CPP,
    OPS,
    Call,
    Op,
    Places,
    Shapes,
    like_first,
    local_dim,
    refuse,
    register,
    rows_and_param,
)
from moec.layout import Partial, Placed, Replicate, Shard


def _guess_shape(call: Call) -> Shapes:
    (rows, hidden), (width,), (num_experts, inner) = (call.shape(i) for i in range(3))
    call.same_dims(hidden, width, "hidden dims of rows and norm")
    call.same_dims(hidden, inner, "hidden dims of rows and router")
    eligible = local_dim(num_experts, "number of experts") // call.attrs["groups"] * call.attrs["keep"]
    call.require(call.attrs["top"] <= eligible, f"top {call.attrs['top']} of {eligible} eligible experts")
    return (((rows, call.attrs["top"]), "i64"),)


def _counts_shape(call: Call) -> Shapes:
    return (((call.placement().num_experts,), "i64"),)


def _counts_place(call: Call, axis: str, places: Places) -> Places:
    """Rows cut over an axis give parts of one sum."""
    (ids,) = places
    if ids in (Replicate(), Shard(0)):
        return (Partial() if ids == Shard(0) else ids,)
    raise refuse(call, axis, places, "only what routing chose at home is counted")


def _start_shape(call: Call) -> Shapes:
    num_experts = call.placement().num_experts
    if call.attrs["by"] != "frequency":
        call.require(call.dtype(0) == "i64", f"counts are {call.dtype(0)}, not i64")
        call.same_dims(call.shape(0)[0], num_experts, "counts and experts")
    return (((), "i32"),)


def _start_place(call: Call, axis: str, places: Places) -> Places:
    (counts,) = places
    if call.attrs["by"] == "frequency" or counts == Replicate() or (counts == Partial() and axis != "ep"):
        return (Replicate(),)
    raise refuse(call, axis, places, "a rank must know what all ranks of its ep group will send it")


def _wait_shape(call: Call) -> Shapes:
    call.same_dims(call.shape(0)[0], held(call), "offsets and experts held")
    return (((held(call),), "i32"),)


def _as_offsets(call: Call, axis: str, places: Places) -> Places:
    return places


def _served_shape(call: Call) -> Shapes:
    (rows, hidden), (offsets,), (slots,), gate_up, down = (call.shape(i) for i in range(5))
    require_scales(call)
    call.require(offsets == slots == gate_up[0] == down[0], "offsets, slots and experts are as many")
    call.require(gate_up[2] == hidden == down[1], f"experts {gate_up}, {down} on rows of {hidden}")
    call.require(gate_up[1] == 2 * local_dim(down[2], "inner size"), f"gate and up {gate_up}, down {down}")
    return (((rows, hidden), call.dtype(0)),)


def _served_place(call: Call, axis: str, places: Places) -> Places:
    """As its two products one after the other: `grouped_gate_up`, then `grouped_linear`."""
    rows, offsets, slots, gate_up, down = without_scales(call, axis, places)
    if slots != offsets:
        raise refuse(call, axis, places, "slots are of other offsets")
    if isinstance(gate_up, Placed) and gate_up.table != call.attrs["table"]:
        raise refuse(call, axis, places, "experts of another table")
    (act,) = OPS["grouped_gate_up"].place(call, axis, (rows, offsets, gate_up))
    return OPS["grouped_linear"].place(call, axis, (act, offsets, down))


GUESS = ("eps", "score", "top", "groups", "keep")
START = ("table", "ahead", "most", "by")
CACHE, COMM = frozenset({"cache"}), frozenset({"comm"})
SERVED = ("float", "i32", "i32", "weight", "weight", "fp32", "fp32")

register(Op("guess", ("float", "float", "float", "fp32"), _guess_shape, rows_and_param, GUESS, num_optional=1))
register(Op("count_experts", ("i64",), _counts_shape, _counts_place, ("table",)))
register(Op("sum_counts", ("i64",), like_first, all_reduce_place, ("group",), effects=COMM))
register(Op("prefetch.start", ("any",), _start_shape, _start_place, START, effects=CACHE))
register(Op("prefetch.wait", ("i32",), _wait_shape, _as_offsets, ("table",), effects=CACHE))
register(Op("cached_experts", SERVED, _served_shape, _served_place, ("table",), num_optional=2, kernels=CPP))
