"""How token rows travel to their experts and back: the operations every lowering of an exchange is made of.

One hop takes rows to one part of their way: `fan_out` makes one message per row and destination (a row that several
experts at one destination want goes there once), an all-to-all moves the messages, `open_rows` reads them. At the
experts' rank `group_rows` sorts (row, expert) pairs by expert; `reduce_rows` weighs and sums what the experts gave
for each row. On the way back `fan_in` sums, per row, what its destinations returned.

Where a row is, on the ep axis: at `home`; half-way, in the right `node` or at the right `local` place of another; at
its `expert`s' rank as it arrived; or there `grouped` by expert. Symbols: P messages leave home, H arrive half-way, Q
leave from there, R arrive at the experts, X pairs are served there, K pairs come back home; numbers where padded.

A step cut in chunks has the symbols of each chunk apart: T.0, P.0, X.0 and T.1, P.1, X.1.

What happens to the rows at their experts is in `moec.ir.ops.pairs`. Legend: D hidden, W bytes of a message, k top-k,
n ranks of the group.
"""

from __future__ import annotations

from collections.abc import Sequence

from moec.ir.ops.comm import collective
from moec.ir.ops.table import (
    WIDTH,
    Call,
    Op,
    OpError,
    Places,
    Shapes,
    base_symbol,
    group_axis,
    local_dim,
    refuse,
    register,
    symbol,
)
from moec.ir.program import Dim
from moec.layout import Partial, Place, Replicate, Routed, Shard

#: Operations with which a hop out begins, and those with which its way back ends.
LEAVES, RETURNS = ("fan_out", "all_gather_rows"), ("fan_in", "combine", "reduce_scatter_rows")
#: Where an all-to-all over a group takes rows from one place.
HOPS = {
    ("experts.ep", "home"): "expert",
    ("links.node", "home"): "node",
    ("links.local", "home"): "local",
    ("links.local", "node"): "expert",
    ("links.node", "local"): "expert",
}
_BACK = {(group, there): here for (group, here), there in HOPS.items()}
#: Rows that leave a place, and rows that arrive at it.
_SENT = {"home": "P", "node": "Q", "local": "Q"}
_ARRIVED = {"node": "H", "local": "H", "expert": "R"}


def message_bytes(hidden: int, dtype: str, top: int) -> int:
    """Bytes of one message: the row, padded to 8 bytes, then k expert ids (i32) and k weights (fp32)."""
    return -(-hidden * WIDTH[dtype] // 8) * 8 + 8 * top


class Hops:
    """Numbers hops in the order in which they begin, and knows a hop's end by a value that its beginning had too.

    That is where its rows came from, their weights, or how many each rank has; of calls of kernels, or of nodes.
    """

    def __init__(self) -> None:
        self._begun: dict[int, int] = {}
        self._count = 0

    def number(self, name: str, operands: Sequence[object], results: Sequence[object]) -> int | None:
        """Of the hop that the operation begins or ends; None for any other."""
        if name in LEAVES:
            kept = (results[2], operands[2]) if name == "fan_out" else (operands[1],)
            self._begun |= {id(value): self._count for value in kept}
            self._count += 1
            return self._count - 1
        if name in RETURNS:
            return self._begun.get(id(operands[2 if name == "combine" else 1]))
        return None


def at(place: Place) -> str:
    """Where routed rows lie; rows of tokens are at home."""
    return place.at if isinstance(place, Routed) else "home" if place == Shard(0) else ""


def group_size(call: Call) -> int:
    group = call.attrs["group"]
    call.require(group in call.mesh.groups(), f"{call.op.name} runs on {group}, which this mesh does not have")
    return len(call.mesh.groups()[group][0])


def _where(call: Call, index: int) -> str:
    return at(call.types[index].layout.on("ep"))


def rows_only(call: Call, axis: str, places: Places) -> Places:
    """On the other axes rows stay as they are: cut, or whole."""
    if len(set(places)) == 1 and places[0] in (Replicate(), Shard(0)):
        return (places[0],) * call.op.num_results
    raise refuse(call, axis, places)


def sum_of_parts(call: Call, axis: str, rows: Place, *others: Place) -> Places:
    """A sum over rows of values that may be partial on this axis, where the rest is whole."""
    known = set(others)
    if len(known) == 1 and (rows in known or (rows == Partial() and known == {Replicate()})):
        return (rows,)
    raise refuse(call, axis, (rows, *others))


# --- out ---------------------------------------------------------------------------------------------------------


def _fan_out_shape(call: Call) -> Shapes:
    (rows, hidden), ids, weights = (call.shape(i) for i in range(3))
    call.require(ids == weights, f"ids are {ids}, weights {weights}")
    call.same_dims(rows, ids[0], "rows and rows of ids")
    bound, num_ranks = call.attrs["bound"], group_size(call)
    sent: Dim = symbol(_SENT.get(_where(call, 0), "?"), rows) if bound is None else bound * num_ranks
    width = message_bytes(local_dim(hidden, "hidden"), call.dtype(0), local_dim(ids[1], "top"))
    return (((sent, width), "bytes"), ((num_ranks,), "i64"), ((sent,), "i64"))


def _fan_out_place(call: Call, axis: str, places: Places) -> Places:
    table = call.attrs["table"]
    if len(set(places)) != 1:
        raise refuse(call, axis, places)
    if axis != "ep":
        return rows_only(call, axis, places)
    where = at(places[0])
    if (call.attrs["group"], where) in HOPS and places[0] in (Shard(0), Routed(table, where)):
        return (Routed(table, where),) * 3
    raise refuse(call, axis, places, f"from here rows do not go over {call.attrs['group']}")


def _counts_shape(call: Call) -> Shapes:
    call.require(call.shape(0) == (group_size(call),), f"{call.shape(0)} counts for {group_size(call)} ranks")
    return ((call.shape(0), "i64"),)


def _forward(call: Call, axis: str, places: Places) -> Places:
    if axis != group_axis(call):
        return rows_only(call, axis, places)
    table, where = call.attrs["table"], at(places[0])
    if places == (Routed(table, where),) and (call.attrs["group"], where) in HOPS:
        return (Routed(table, HOPS[call.attrs["group"], where]),)
    raise refuse(call, axis, places)


def _all_to_all_shape(call: Call) -> Shapes:
    rows, width = call.shape(0)
    where, group, back = _where(call, 0), call.attrs["group"], call.attrs["back"]
    num_ranks = group_size(call)
    if len(call.types) == 1:  # equal pieces
        call.require(
            local_dim(rows, "rows of a padded exchange") % num_ranks == 0, f"{rows} rows for {num_ranks} ranks"
        )
        return (((rows, width), call.dtype(0)),)
    call.require(call.shape(1) == call.shape(2) == (num_ranks,), f"{call.shape(1)} counts for {num_ranks} ranks")
    hop = _BACK.get((group, where)) if back else HOPS.get((group, where))
    if hop is None:
        raise OpError(f"no hop of {group} {'comes back from' if back else 'starts at'} {where}")
    if back and base_symbol(rows) == "X":
        return (((symbol("K", rows), width), call.dtype(0)),)
    call.same_dims(base_symbol(rows), _ARRIVED[where] if back else _SENT[where], "rows and rows that travel")
    return (((symbol(_SENT[hop] if back else _ARRIVED[hop], rows), width), call.dtype(0)),)


def _all_to_all_place(call: Call, axis: str, places: Places) -> Places:
    rows, *counts = places
    if axis != group_axis(call):
        others = set(counts) or {rows}
        if len(others) == 1 and (rows in others or (rows == Partial() and others == {Replicate()})):
            return (rows,)
        raise refuse(call, axis, places)
    table, group, where = call.attrs["table"], call.attrs["group"], at(rows)
    hop = _BACK.get((group, where)) if call.attrs["back"] else HOPS.get((group, where))
    if hop is None or rows != Routed(table, where):
        raise refuse(call, axis, places, f"rows {where or 'here'} do not go over {group}")
    here, there = (
        Routed(table, hop if call.attrs["back"] else where),
        Routed(table, where if call.attrs["back"] else hop),
    )
    if counts in ([], [here, there]):
        return (Routed(table, hop),)
    raise refuse(call, axis, places, "counts are of another hop")


def _wait_shape(call: Call) -> Shapes:
    return ((call.shape(0), call.dtype(0)),)


def _open_shape(call: Call) -> Shapes:
    hidden, top, dtype = (call.attrs[name] for name in ("hidden", "top", "dtype"))
    rows, width = call.shape(0)
    call.same_dims(width, message_bytes(hidden, dtype, top), "bytes of a message")
    return (((rows, hidden), dtype), ((rows, top), "i64"), ((rows, top), "fp32"))


def _open_place(call: Call, axis: str, places: Places) -> Places:
    return places * 3


# --- back --------------------------------------------------------------------------------------------------------


def _fan_in_shape(call: Call) -> Shapes:
    (rows, hidden), (origins,), (out, _) = (call.shape(i) for i in range(3))
    call.same_dims(rows, origins, "rows and origins")
    return (((out, hidden), call.dtype(0)),)


def _fan_in_place(call: Call, axis: str, places: Places) -> Places:
    rows, origin, ids = places
    if axis != "ep":
        return sum_of_parts(call, axis, rows, origin, ids)
    table, where = call.attrs["table"], at(ids)
    if rows == origin == Routed(table, where) and ids in (Shard(0), Routed(table, where)) and where != "expert":
        return (ids,)
    raise refuse(call, axis, places)


ROWS = ("float", "i64", "fp32")

register(Op("fan_out", ROWS, _fan_out_shape, _fan_out_place, ("table", "group", "bound", "drop"), num_results=3))
collective("exchange_counts", ("i64",), _counts_shape, _forward, "table")
collective(
    "all_to_all.start", ("row", "i64", "i64"), _all_to_all_shape, _all_to_all_place, "table", "back", num_optional=2
)
register(Op("all_to_all.wait", ("row",), _wait_shape, lambda call, axis, places: places))
register(Op("open_rows", ("bytes",), _open_shape, _open_place, ("hidden", "top", "dtype"), num_results=3))
register(Op("fan_in", ("float", "i64", "i64"), _fan_in_shape, _fan_in_place, ("table",)))
