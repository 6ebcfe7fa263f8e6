"""The operation table: what each operation of a Program is called, gives, and may be served by.

One entry fixes name, attributes, number of results, shape rule, layout rule, side effects and kernels. A layout rule
speaks of one mesh axis at a time: given how each argument lies on that axis it gives how the result lies, or refuses.
The refusals are the compiler's type system: a `Partial` is never added to a `Replicate`, routed rows are never
read as token rows. Layers: this file has the dense operations; `ops_moe` routing and experts; `ops_comm` what moves.

Legend: T rows, D hidden, H heads, K KV heads, d head dim, V vocabulary, E experts, M experts held, k top-k, I inner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moec.ir import Dim, Layout, Partial, Place, Replicate, Shard, Type
from moec.mesh import Mesh
from moec.placement import Placement


class OpError(ValueError):
    """An operation was given what its rules refuse. The text says what and why."""


@dataclass(frozen=True)
class Call:
    """One use of an operation: types of its arguments, attributes, and the program's tables."""

    op: Op
    types: tuple[Type, ...]
    attrs: dict[str, Any]
    mesh: Mesh
    placements: dict[str, Placement]

    def shape(self, index: int) -> tuple[Dim, ...]:
        return self.types[index].shape

    def dtype(self, index: int) -> str:
        return self.types[index].dtype

    def require(self, holds: bool, why: str) -> None:
        if not holds:
            raise OpError(why)

    def same_dims(self, a: Dim, b: Dim, what: str) -> None:
        self.require(a == b, f"{what} differ: {a} and {b}")


Places = tuple[Place, ...]
ShapeRule = Callable[[Call], tuple[tuple[tuple[Dim, ...], str], ...]]
PlaceRule = Callable[[Call, str, Places], Places]


@dataclass(frozen=True)
class Op:
    """One operation. `effects`: `kv` reads and appends this layer's KV state; `comm` is a collective on `group`."""

    name: str
    shape: ShapeRule = field(repr=False)
    place: PlaceRule = field(repr=False)
    attrs: tuple[str, ...] = ()
    num_args: tuple[int, int] = (1, 1)
    num_results: int = 1
    effects: frozenset[str] = frozenset()
    kernels: tuple[str, ...] = ("torch",)
    relayout: Callable[[Call], Layout] | None = field(default=None, repr=False)

    @property
    def __name__(self) -> str:  # torch.fx names nodes by it
        return self.name.replace(".", "_")

    def __call__(self, *args: object, **attrs: object) -> object:
        raise TypeError(f"{self.name} is an operation of a Program, run by moec.runtime or moec.ir_eval")

    def __deepcopy__(self, memo: object) -> Op:
        return self

    def infer(
        self, types: tuple[Type, ...], attrs: dict[str, Any], mesh: Mesh, placements: dict[str, Placement]
    ) -> tuple[Type, ...]:
        """Types of the results. Raises OpError where the rules refuse."""
        call = Call(self, types, attrs, mesh, placements)
        low, high = self.num_args
        call.require(low <= len(types) <= high, f"{self.name} takes {low} to {high} operands, not {len(types)}")
        unknown = sorted(set(attrs) ^ set(self.attrs))
        call.require(not unknown, f"{self.name} has the attributes {', '.join(self.attrs)}; check {', '.join(unknown)}")
        pending = self.name == "all_to_all.wait"
        call.require(all(t.pending == (pending and i == 0) for i, t in enumerate(types)), "only a wait reads a start")
        shapes = self.shape(call)
        layouts = self._layouts(call)
        return tuple(
            Type(shape, dtype, lay, pending=self.name.endswith(".start"))
            for (shape, dtype), lay in zip(shapes, layouts, strict=True)
        )

    def _layouts(self, call: Call) -> tuple[Layout, ...]:
        if self.relayout is not None:
            return (self.relayout(call),)
        views = {t.layout.view for t in call.types if t.layout.view is not None}
        call.require(len(views) == 1, f"{self.name} mixes the views {' and '.join(sorted(views))}: relayout first")
        view = views.pop()
        by_axis = {}
        for axis in call.mesh.axes(view):
            by_axis[axis] = self.place(call, axis, tuple(t.layout.on(axis) for t in call.types))
        return tuple(
            Layout(view, tuple((axis, places[i]) for axis, places in by_axis.items())) for i in range(self.num_results)
        )


#: Every operation by name. Filled by `register` in this module, `ops_moe` and `ops_comm`.
OPS: dict[str, Op] = {}


def register(op: Op) -> Op:
    OPS[op.name] = op
    return op


def refuse(call: Call, axis: str, places: Places, why: str = "") -> OpError:
    """The error of a layout rule that has no line for these placements."""
    shown = ", ".join(map(str, places))
    return OpError(f"{call.op.name} cannot take ({shown}) on axis {axis}" + (f": {why}" if why else ""))


def rowwise(call: Call, axis: str, places: Places) -> Places:
    """Each row of every argument stands for itself: all whole, or all cut along dim 0. Parameters are whole."""
    rows = [p for p, t in zip(places, call.types, strict=True) if t.layout.view is not None or p != Replicate()]
    if all(p == Replicate() for p in places):
        return (Replicate(),) * call.op.num_results
    if rows and all(p == Shard(0) for p in rows):
        return (Shard(0),) * call.op.num_results
    raise refuse(call, axis, places, _partial_hint(places))


def _partial_hint(places: Places) -> str:
    return "a partial sum must be reduced first" if Partial() in places else ""


def like_first(call: Call) -> tuple[tuple[tuple[Dim, ...], str], ...]:
    return ((call.shape(0), call.dtype(0)),)


def local_dim(value: Dim, what: str) -> int:
    """A dim that must be a number, not a run-time symbol."""
    if not isinstance(value, int):
        raise OpError(f"{what} must be a known number, not {value}")
    return value


# --- rows in, rows out -------------------------------------------------------------------------------------------


def _embed_shape(call: Call) -> tuple[tuple[tuple[Dim, ...], str], ...]:
    return (((call.shape(0)[0], call.shape(1)[1]), call.dtype(1)),)


def _take_shape(call: Call) -> tuple[tuple[tuple[Dim, ...], str], ...]:
    return (((call.shape(1)[0], *call.shape(0)[1:]), call.dtype(0)),)


def _norm_shape(call: Call) -> tuple[tuple[tuple[Dim, ...], str], ...]:
    call.same_dims(call.shape(0)[-1], call.shape(1)[0], "last dim and weight")
    return like_first(call)


def _heads_or_rows(call: Call, axis: str, places: Places) -> Places:
    """Row-wise, and also head by head where the value is [T, H, d]."""
    first, *rest = places
    heads = len(call.shape(0)) == 3 and isinstance(first, Shard) and first.dim == 1
    if heads and all(p == Replicate() for p in rest):
        return (first,) * call.op.num_results
    return rowwise(call, axis, places)


def _linear_shape(call: Call) -> tuple[tuple[tuple[Dim, ...], str], ...]:
    x, w = call.shape(0), call.shape(1)
    call.same_dims(x[-1], w[1], "inner dims")
    return (((*x[:-1], w[0]), call.dtype(0)),)


def _linear_place(call: Call, axis: str, places: Places) -> Places:
    x, w = places
    if w == Replicate() and x in (Replicate(), Shard(0)):
        return (x,)
    if x == Replicate() and isinstance(w, Shard) and w.dim == 0:  # column parallel
        return (Shard(1, w.copies),)
    if x == Shard(1) and w == Shard(1):  # row parallel: each rank has a part of the inner dim
        return (Partial(),)
    raise refuse(call, axis, places, _partial_hint(places))


def _bias_place(call: Call, axis: str, places: Places) -> Places:
    x, b = places
    if isinstance(x, Shard) and x.dim == 1 and b == Shard(0, x.copies):
        return (x,)
    if x == Partial():
        raise refuse(call, axis, places, "the bias would be added once per rank")
    return rowwise(call, axis, places)


def _add_place(call: Call, axis: str, places: Places) -> Places:
    a, b = places
    if a == b:
        return (a,)
    hint = "a whole value added to a partial sum is counted once per rank" if Partial() in places else ""
    raise refuse(call, axis, places, hint)


def _same_shape(call: Call) -> tuple[tuple[tuple[Dim, ...], str], ...]:
    call.require(call.shape(0) == call.shape(1), f"shapes differ: {call.shape(0)} and {call.shape(1)}")
    return like_first(call)


def _product_place(call: Call, axis: str, places: Places) -> Places:
    gate, up = places
    if gate == up and gate != Partial():
        return (gate,)
    raise refuse(call, axis, places, _partial_hint(places))


def _gate_up_shape(call: Call) -> tuple[tuple[tuple[Dim, ...], str], ...]:
    call.same_dims(call.shape(0)[-1], call.shape(1)[1], "inner dims")
    return (((*call.shape(0)[:-1], local_dim(call.shape(1)[0], "rows of gate and up") // 2), call.dtype(0)),)


# --- attention ---------------------------------------------------------------------------------------------------


def _split_heads_shape(call: Call) -> tuple[tuple[tuple[Dim, ...], str], ...]:
    rows, width = call.shape(0)
    heads, rest = divmod(local_dim(width, "width"), call.attrs["head_dim"])
    call.require(rest == 0 and heads > 0, f"{width} does not divide into heads of {call.attrs['head_dim']}")
    return (((rows, heads, call.attrs["head_dim"]), call.dtype(0)),)


def _merge_heads_shape(call: Call) -> tuple[tuple[tuple[Dim, ...], str], ...]:
    rows, heads, dim = call.shape(0)
    return (((rows, local_dim(heads, "heads") * local_dim(dim, "head dim")), call.dtype(0)),)


def _keep_place(call: Call, axis: str, places: Places) -> Places:
    if places[0] == Partial():
        raise refuse(call, axis, places, _partial_hint(places))
    return places


def _split_shape(call: Call) -> tuple[tuple[tuple[Dim, ...], str], ...]:
    *rows, width = call.shape(0)
    call.same_dims(sum(call.attrs["sizes"]), width, "sum of sizes and last dim")
    return tuple(((*rows, size), call.dtype(0)) for size in call.attrs["sizes"])


def _split_place(call: Call, axis: str, places: Places) -> Places:
    """The last dim is cut in two, so it may not be sharded itself."""
    (x,) = places
    if isinstance(x, Shard) and x.dim == len(call.shape(0)) - 1:
        raise refuse(call, axis, places, "the dim that is split is sharded")
    return _keep_place(call, axis, places) * 2


def _attention_shape(call: Call) -> tuple[tuple[tuple[Dim, ...], str], ...]:
    (_, heads, dim), (_, kv_heads, kv_dim), v = (call.shape(i) for i in range(3))
    call.same_dims(dim, kv_dim, "head dims of q and k")
    call.same_dims(kv_heads, v[1], "heads of k and v")
    call.require(local_dim(heads, "heads") % local_dim(kv_heads, "kv heads") == 0, f"{heads} heads on {kv_heads} KV heads")
    return (((call.shape(0)[0], heads, v[2]), call.dtype(0)),)


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


def _mla_shape(call: Call) -> tuple[tuple[tuple[Dim, ...], str], ...]:
    (rows, heads, nope), (_, heads_r, rope), (_, rank), (_, rope_k), (width, rank_w) = (call.shape(i) for i in range(5))
    call.same_dims(heads, heads_r, "heads of the two query parts")
    call.same_dims(rope, rope_k, "rope dims of q and k")
    call.same_dims(rank, rank_w, "latent rank and kv_b")
    value = call.attrs["value"]
    per_head = local_dim(nope, "nope dim") + value
    call.same_dims(local_dim(heads, "heads") * per_head, width, "heads * (nope + value) and kv_b")
    return (((rows, heads, value), call.dtype(0)),)


def _mla_place(call: Call, axis: str, places: Places) -> Places:
    q_nope, q_rope, latent, k_rope, kv_b = places
    if q_nope == q_rope == Shard(1) and kv_b == Shard(0) and latent == k_rope == Replicate():
        return (Shard(1),)
    if q_nope == q_rope == latent == k_rope and q_nope in (Replicate(), Shard(0)) and kv_b == Replicate():
        return (q_nope,)
    raise refuse(call, axis, places, "query heads and kv_b must be cut alike, the latent must be whole")


KV = frozenset({"kv"})

register(Op("embed", _embed_shape, rowwise, num_args=(2, 2)))
register(Op("take", _take_shape, rowwise, num_args=(2, 2)))
register(Op("rms_norm", _norm_shape, _heads_or_rows, ("eps",), (2, 2)))
register(Op("linear", _linear_shape, _linear_place, num_args=(2, 2)))
register(Op("add_bias", _norm_shape, _bias_place, num_args=(2, 2)))
register(Op("add", _same_shape, _add_place, num_args=(2, 2)))
register(Op("silu_mul", _same_shape, _product_place, num_args=(2, 2)))
register(Op("gate_up", _gate_up_shape, _linear_place, num_args=(2, 2)))
register(Op("split_heads", _split_heads_shape, _keep_place, ("head_dim",)))
register(Op("merge_heads", _merge_heads_shape, _keep_place))
register(Op("split", _split_shape, _split_place, ("sizes",), num_results=2))
register(Op("rope", like_first, _heads_or_rows, ("theta", "pairs", "yarn"), (2, 2)))
register(Op("attention", _attention_shape, _attention_place, ("scale",), (3, 3), effects=KV))
register(Op("mla_attention", _mla_shape, _mla_place, ("scale", "value", "form"), (5, 5), effects=KV))
