"""Attention operations of the table in `moec.ir.ops.table`.

Legend: T rows, H heads (local), K KV heads (local), d head dim, C latent rank.
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
    require_chunk,
    rowwise,
)
from moec.layout import Replicate, Shard


def _split_heads_shape(call: Call) -> Shapes:
    rows, width = call.shape(0)
    heads, rest = divmod(local_dim(width, "width"), call.attrs["head_dim"])
    call.require(rest == 0 and heads > 0, f"{width} does not divide into heads of {call.attrs['head_dim']}")
    return (((rows, heads, call.attrs["head_dim"]), call.dtype(0)),)


def _merge_heads_shape(call: Call) -> Shapes:
    rows, heads, dim = call.shape(0)
    return (((rows, local_dim(heads, "heads") * local_dim(dim, "head dim")), call.dtype(0)),)


def _keep_place(call: Call, axis: str, places: Places) -> Places:
    """Rows or heads may be cut: dim 1 is heads before and behind."""
    (x,) = places
    if x == Replicate() or (isinstance(x, Shard) and x.dim < 2):
        return places
    raise refuse(call, axis, places, partial_hint(places))


def _split_shape(call: Call) -> Shapes:
    *rows, width = call.shape(0)
    call.require(len(call.attrs["sizes"]) == 2, f"{len(call.attrs['sizes'])} sizes of two parts")
    call.same_dims(sum(call.attrs["sizes"]), width, "sum of sizes and last dim")
    return tuple(((*rows, size), call.dtype(0)) for size in call.attrs["sizes"])


def _split_place(call: Call, axis: str, places: Places) -> Places:
    """The last dim is cut in two, so it may not be sharded itself."""
    (x,) = places
    if isinstance(x, Shard) and x.dim == len(call.shape(0)) - 1:
        raise refuse(call, axis, places, "the dim that is split is sharded")
    return _keep_place(call, axis, places) * 2


def _attention_shape(call: Call) -> Shapes:
    (rows, heads, dim), (*kv_rows, kv_dim), (*v_rows, value) = (call.shape(i) for i in range(3))
    call.same_dims(dim, kv_dim, "head dims of q and k")
    call.require(kv_rows == v_rows and kv_rows[0] == rows, "rows or heads of k and v differ")
    repeat = local_dim(heads, "heads") % local_dim(kv_rows[1], "kv heads")
    call.require(repeat == 0, f"{heads} heads on {kv_rows[1]} KV heads")
    require_chunk(call, rows)
    return (((rows, heads, value), call.dtype(0)),)


def _attention_place(call: Call, axis: str, places: Places) -> Places:
    q, k, v = places
    if k == v and q == k and q in (Replicate(), Shard(0)):
        return (q,)
    if q == Shard(1) and k == v and isinstance(k, Shard) and k.dim == 1:
        # copies of a KV head on neighbouring ranks serve their query heads only if each rank has that one head
        if k.copies == 1 or call.shape(1)[1] == 1:
            return (q,)
        raise refuse(call, axis, places, "copied KV heads must be one per rank")
    raise refuse(call, axis, places, "query and KV heads must be cut alike")


def _mla_shape(call: Call) -> Shapes:
    (rows, heads, nope), (_, heads_r, rope), (_, rank), (_, rope_k), (width, rank_w) = (call.shape(i) for i in range(5))
    call.same_dims(heads, heads_r, "heads of the two query parts")
    call.same_dims(rope, rope_k, "rope dims of q and k")
    call.same_dims(rank, rank_w, "latent rank and kv_b")
    value = call.attrs["value"]
    per_head = local_dim(nope, "nope dim") + value
    call.same_dims(local_dim(heads, "heads") * per_head, width, "heads * (nope + value) and kv_b")
    require_chunk(call, rows)
    return (((rows, heads, value), call.dtype(0)),)


def _mla_place(call: Call, axis: str, places: Places) -> Places:
    q_nope, q_rope, latent, k_rope, kv_b = places
    if q_nope == q_rope == Shard(1) and kv_b == Shard(0) and latent == k_rope == Replicate():
        return (Shard(1),)
    if q_nope == q_rope == latent == k_rope and q_nope in (Replicate(), Shard(0)) and kv_b == Replicate():
        return (q_nope,)
    raise refuse(call, axis, places, "query heads and kv_b must be cut alike, the latent must be whole")


def _rope_shape(call: Call) -> Shapes:
    rows, *_, width = call.shape(0)
    (positions,) = call.shape(1)
    call.same_dims(rows, positions, "rows and positions")
    call.require(local_dim(width, "width") % 2 == 0, f"rope rotates pairs, the width is {width}")
    return like_first(call)


def _rope_place(call: Call, axis: str, places: Places) -> Places:
    return places[:1] if is_by_head(call, places) else rowwise(call, axis, places)


KV = frozenset({"kv"})
MLA = ("float",) * 5
#: Attention over a chunk of the step's rows: the chunks before it are in KV memory.
OF_ROWS = ("chunk",)

register(Op("split_heads", ("float",), _split_heads_shape, _keep_place, ("head_dim",)))
register(Op("merge_heads", ("float",), _merge_heads_shape, _keep_place))
register(Op("split", ("float",), _split_shape, _split_place, ("sizes",), num_results=2))
register(Op("rope", ("float", "i64"), _rope_shape, _rope_place, ("theta", "pairs", "yarn"), kernels=CPP))
register(
    Op("attention", ("float",) * 3, _attention_shape, _attention_place, ("scale",), OF_ROWS, effects=KV, kernels=CPP)
)
register(Op("mla_attention", MLA, _mla_shape, _mla_place, ("scale", "value", "form"), OF_ROWS, effects=KV, kernels=CPP))
