"""What moves whole values between ranks, or from one view of the mesh to the other."""

from __future__ import annotations

from moec.ir.ops.table import (
    Call,
    LayoutRule,
    Op,
    PlaceRule,
    Places,
    ShapeRule,
    Shapes,
    base_symbol,
    group_axis,
    local_dim,
    refuse,
    register,
    require_chunk,
    symbol,
)
from moec.layout import Layout, Partial, Place, Replicate, Shard


def _all_alike(call: Call, axis: str, places: Places) -> Places:
    if len(set(places)) == 1:
        return (places[0],)
    raise refuse(call, axis, places)


def _gather_rows_place(call: Call, axis: str, places: Places) -> Places:
    if axis == group_axis(call):
        if places == (Shard(0), Replicate()):
            return (Replicate(),)
        raise refuse(call, axis, places, "only rows cut over the group can be gathered")
    return _with_sizes(call, axis, places)


def _with_sizes(call: Call, axis: str, places: Places) -> Places:
    """On the axes that a row collective does not run over its rows stay, and sizes are known where the rows are."""
    x, sizes = places
    if x == sizes or (x == Partial() and sizes == Replicate()):
        return (x,)
    raise refuse(call, axis, places)


def _sizes_place(call: Call, axis: str, places: Places) -> Places:
    return (Replicate(),) if axis == group_axis(call) and places == (Shard(0),) else _all_alike(call, axis, places)


def _reduce_scatter_place(call: Call, axis: str, places: Places) -> Places:
    if axis == group_axis(call):
        if places == (Partial(), Replicate()):
            return (Shard(0),)
        raise refuse(call, axis, places, "only partial sums can be reduced")
    return _with_sizes(call, axis, places)


def all_reduce_place(call: Call, axis: str, places: Places) -> Places:
    """Parts of a sum over the group become the whole sum on each of its ranks."""
    if axis == group_axis(call):
        if places == (Partial(),):
            return (Replicate(),)
        raise refuse(call, axis, places, "a whole value would be summed once per rank")
    return places


def _all_gather_shape(call: Call) -> Shapes:
    shape = list(call.shape(0))
    dim = call.attrs["dim"]
    shape[dim] = local_dim(shape[dim], "the dim that all_gather joins") * call.mesh.axis_size(group_axis(call))
    return ((tuple(shape), call.dtype(0)),)


def _all_gather_place(call: Call, axis: str, places: Places) -> Places:
    if axis == group_axis(call):
        if places == (Shard(call.attrs["dim"]),):
            return (Replicate(),)
        raise refuse(call, axis, places, f"only a value cut along dim {call.attrs['dim']} can be gathered")
    return places


# --- relayout: the only change of view ---------------------------------------------------------------------------


def _relayout_shape(call: Call) -> Shapes:
    rows, width = call.shape(0)
    here, there = ("T", "S") if call.attrs["to"] == "experts" else ("S", "T")
    if call.attrs["how"] == "keep":
        here = there = "T"
    call.same_dims(base_symbol(rows), here, "rows and rows that relayout moves")
    require_chunk(call, rows)
    return (((symbol(there, rows), width), call.dtype(0)),)


def _relayout_layout(call: Call) -> Layout:
    """Token rows: cut over dp (whole over tp) in one view is cut over edp and ep (whole over etp) in the other."""
    mesh, to, source = call.mesh, call.attrs["to"], call.types[0].layout
    cut = {"attention": ("dp",), "experts": ("edp", "ep")}
    call.require(source.view in cut and source.view != to, f"relayout to {to} of a value on {source.view}")
    for axis, place in source.places:
        wanted: Place = Shard(0) if axis in cut[str(source.view)] else Replicate()
        call.require(place == wanted, f"relayout needs {wanted} on axis {axis}, the value has {place}")
    narrow = (mesh.tp > mesh.etp) == (to == "experts")
    how = "keep" if mesh.tp == mesh.etp else "slice" if narrow else "gather"
    call.require(call.attrs["how"] == how, f"relayout to {to} on this mesh is {how}, not {call.attrs['how']}")
    call.require(call.attrs["group"] == "split", "relayout moves over the group split")
    call.require(call.attrs["parts"] == mesh.split_parts, f"relayout in {mesh.split_parts} parts on this mesh")
    return Layout(to, tuple((axis, Shard(0) if axis in cut[to] else Replicate()) for axis in mesh.axes(to)))


def _not_per_axis(call: Call, axis: str, places: Places) -> Places:
    raise AssertionError("relayout has a rule for the whole layout")


def _sizes_shape(call: Call) -> Shapes:
    return (((call.mesh.ep,), "i64"),)


def _gather_rows_shape(call: Call) -> Shapes:
    (rows, width), (ranks,) = call.shape(0), call.shape(1)
    call.same_dims(ranks, call.mesh.ep, "sizes and ranks of the group")
    return (((symbol("G", rows), width), call.dtype(0)),)


def _reduce_scatter_shape(call: Call) -> Shapes:
    (rows, width), (ranks,) = call.shape(0), call.shape(1)
    call.same_dims(base_symbol(rows), "G", "rows and rows gathered")
    call.same_dims(ranks, call.mesh.ep, "sizes and ranks of the group")
    return (((symbol("S" if call.mesh.split_parts > 1 else "T", rows), width), call.dtype(0)),)


# --- between pipeline stages ------------------------------------------------------------------------------------


def _receive_shape(call: Call) -> Shapes:
    (rows,) = call.shape(0)
    return (((rows, call.attrs["hidden"]), call.attrs["dtype"]),)


def _as_the_rows(call: Call, axis: str, places: Places) -> Places:
    """What a stage hands on lies as its token rows: cut over dp, whole over tp."""
    if places[0] in (Replicate(), Shard(0)):
        return places
    raise refuse(call, axis, places)


def _same_value(call: Call) -> Shapes:
    return ((call.shape(0), call.dtype(0)),)


def collective(
    name: str,
    args: tuple[str, ...],
    shape: ShapeRule,
    place: PlaceRule,
    *attrs: str,
    relayout: LayoutRule | None = None,
    num_optional: int = 0,
    options: tuple[str, ...] = (),
) -> None:
    """Register an operation that every rank of its `group` takes part in."""
    effects = frozenset({"comm"})
    register(Op(name, args, shape, place, (*attrs, "group"), options, num_optional, effects=effects, relayout=relayout))


collective("exchange_sizes", ("any",), _sizes_shape, _sizes_place)
collective("all_gather_rows", ("any", "i64"), _gather_rows_shape, _gather_rows_place)
collective("reduce_scatter_rows", ("float", "i64"), _reduce_scatter_shape, _reduce_scatter_place)
collective("all_reduce", ("float",), _same_value, all_reduce_place)
collective("all_gather", ("float",), _all_gather_shape, _all_gather_place, "dim")
collective(
    "relayout",
    ("float",),
    _relayout_shape,
    _not_per_axis,
    *("to", "how", "parts"),
    relayout=_relayout_layout,
    options=("chunk",),
)

STAGE = frozenset({"stage"})
register(Op("receive", ("i64",), _receive_shape, _as_the_rows, ("hidden", "dtype"), effects=STAGE))
register(Op("send", ("float",), _same_value, _as_the_rows, effects=STAGE))
