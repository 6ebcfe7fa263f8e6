"""What moves data between ranks, or from one view of the mesh to the other."""

from __future__ import annotations

from moec.ir import Dim, Layout, Partial, Place, Replicate, Routed, Shard
from moec.ops import Call, Op, OpError, Places, refuse, register
from moec.ops_moe import Shapes, held

COMM = frozenset({"comm"})


def _group_axis(call: Call) -> str:
    """The mesh axis a collective reduces or moves over: `experts.ep` is ep."""
    return str(call.attrs["group"]).partition(".")[2]


def _counts_shape(call: Call) -> Shapes:
    table = call.attrs["table"]
    call.same_dims(call.shape(0)[0], call.placements[table].num_experts, "counts and expert slots")
    return (((call.mesh.ep, held(call, table)), "i64"),)


def _out_place(call: Call, axis: str, places: Places) -> Places:
    """From home to the expert on the group's axis; the other axes stay."""
    if axis != _group_axis(call):
        return _all_alike(call, axis, places)
    table = call.attrs["table"]
    if places == (Routed(table, "home"),):
        return (Routed(table, "expert"),)
    raise refuse(call, axis, places)


def _all_to_all_shape(call: Call) -> Shapes:
    width: Dim = call.shape(0)[1]
    return ((("P" if call.attrs["back"] else "R", width), call.dtype(0)),)


def _all_to_all_place(call: Call, axis: str, places: Places) -> Places:
    rows, counts, recv = places
    if axis != _group_axis(call):
        if counts == recv and (rows == counts or (rows == Partial() and counts == Replicate())):
            return (rows,)
        raise refuse(call, axis, places)
    home, expert = (Routed(call.attrs["table"], at) for at in ("home", "expert"))
    source, target = (expert, home) if call.attrs["back"] else (home, expert)
    if rows == source and counts == home and recv == expert:
        return (target,)
    raise refuse(call, axis, places)


def _all_alike(call: Call, axis: str, places: Places) -> Places:
    if len(set(places)) == 1:
        return (places[0],)
    raise refuse(call, axis, places)


def _gather_rows_place(call: Call, axis: str, places: Places) -> Places:
    if axis == _group_axis(call):
        if places == (Shard(0), Replicate()):
            return (Replicate(),)
        raise refuse(call, axis, places, "only rows cut over the group can be gathered")
    return places[:1]


def _sizes_place(call: Call, axis: str, places: Places) -> Places:
    return (Replicate(),) if axis == _group_axis(call) and places == (Shard(0),) else _all_alike(call, axis, places)


def _reduce_scatter_place(call: Call, axis: str, places: Places) -> Places:
    if axis == _group_axis(call):
        if places == (Partial(), Replicate()):
            return (Shard(0),)
        raise refuse(call, axis, places, "only partial sums can be reduced")
    return places[:1]


def _all_reduce_place(call: Call, axis: str, places: Places) -> Places:
    if axis == _group_axis(call):
        if places == (Partial(),):
            return (Replicate(),)
        raise refuse(call, axis, places, "a whole value would be summed once per rank")
    return places


def _all_gather_shape(call: Call) -> Shapes:
    shape = list(call.shape(0))
    dim = call.attrs["dim"]
    if not isinstance(shape[dim], int):
        raise OpError(f"all_gather joins equal pieces, dim {dim} is {shape[dim]}")
    shape[dim] = int(shape[dim]) * call.mesh.axis_size(_group_axis(call))
    return ((tuple(shape), call.dtype(0)),)


def _all_gather_place(call: Call, axis: str, places: Places) -> Places:
    if axis == _group_axis(call):
        if places == (Shard(call.attrs["dim"]),):
            return (Replicate(),)
        raise refuse(call, axis, places, f"only a value cut along dim {call.attrs['dim']} can be gathered")
    return places


# --- relayout: the only change of view ---------------------------------------------------------------------------


def _relayout_shape(call: Call) -> Shapes:
    rows = call.shape(0)[0]
    moved: Dim = rows if call.attrs["how"] == "keep" else {"T": "S", "S": "T"}.get(str(rows), rows)
    return (((moved, *call.shape(0)[1:]), call.dtype(0)),)


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
    call.require(call.attrs["parts"] == mesh.split_parts, f"relayout in {mesh.split_parts} parts on this mesh")
    return Layout(to, tuple((axis, Shard(0) if axis in cut[to] else Replicate()) for axis in mesh.axes(to)))


def _not_per_axis(call: Call, axis: str, places: Places) -> Places:
    raise AssertionError("relayout has a rule for the whole layout")


register(Op("exchange_counts", _counts_shape, _out_place, ("table", "group"), effects=COMM))
register(
    Op(
        "all_to_all.start",
        _all_to_all_shape,
        _all_to_all_place,
        ("table", "group", "back"),
        (3, 3),
        effects=COMM,
    )
)
register(Op("all_to_all.wait", lambda call: ((call.shape(0), call.dtype(0)),), lambda call, axis, places: places))
register(Op("exchange_sizes", lambda call: (((call.mesh.ep,), "i64"),), _sizes_place, ("group",), effects=COMM))
register(
    Op(
        "all_gather_rows",
        lambda call: ((("G", *call.shape(0)[1:]), call.dtype(0)),),
        _gather_rows_place,
        ("group",),
        (2, 2),
        effects=COMM,
    )
)
register(
    Op(
        "reduce_scatter_rows",
        lambda call: ((("S" if call.mesh.split_parts > 1 else "T", *call.shape(0)[1:]), call.dtype(0)),),
        _reduce_scatter_place,
        ("group",),
        (2, 2),
        effects=COMM,
    )
)
register(Op("all_reduce", lambda call: ((call.shape(0), call.dtype(0)),), _all_reduce_place, ("group",), effects=COMM))
register(Op("all_gather", _all_gather_shape, _all_gather_place, ("dim", "group"), effects=COMM))
register(
    Op(
        "relayout",
        _relayout_shape,
        _not_per_axis,
        ("to", "how", "parts", "group"),
        effects=COMM,
        relayout=_relayout_layout,
    )
)
