"""The part of the verifier that follows routed rows: counts, offsets, orders, origins and weights are theirs.

Types say where rows are and how many; two exchanges of one layer can agree in both. So each operation that reads rows
with something about them is followed back to where the two came apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import fx

from moec.ir.program import Body, Program, is_op, op_of, operands, results_of, type_of

Faults = Iterator[str]


def check_rows(program: Program, body: Body) -> Faults:
    """What each operation on routed rows reads beside them is theirs."""
    for node in body.graph.nodes:
        if is_op(node) and (name := op_of(node).name) in RULES:
            yield from RULES[name](node)


def _moe_faults(node: fx.Node) -> Faults:
    if not _belong(node.args[1], node.args[2]):
        yield "moe weighs with other weights than those routed with its ids"


def _fan_out_faults(node: fx.Node) -> Faults:
    rows, ids, weights = operands(node)
    if not _together(rows, ids):
        yield "fan_out takes rows and ids that did not come together"
    elif not _belong(ids, weights):
        yield "fan_out sends other weights than those routed with its ids"


def _group_faults(node: fx.Node) -> Faults:
    rows, ids = operands(node)
    if not _together(rows, ids):
        yield "group_rows takes rows and ids that did not come together"


def _grouped_faults(node: fx.Node) -> Faults:
    rows, offsets = operands(node)[:2]
    grouped = _grouping(offsets, "offsets")
    if grouped is None or _grouped_by(rows) is not grouped:
        yield f"{op_of(node).name} takes offsets of other rows"


def _gathered_faults(node: fx.Node) -> Faults:
    """Offsets and pairs are of the rows that are read through them."""
    rows, offsets, pairs = operands(node)[:3]
    grouped = _grouping(pairs, "pairs")
    if grouped is None or op_of(grouped).name != "group_pairs" or _grouping(offsets, "offsets") is not grouped:
        yield "gathered_gate_up takes offsets and pairs that are not of one group_pairs"
    elif not _together(rows, grouped.args[0]):
        yield "gathered_gate_up takes rows and pairs that did not come together"
    elif type_of(operands(grouped)[0]).shape[1] != node.kwargs["top"]:
        yield f"gathered_gate_up takes rows of {node.kwargs['top']} choices each, they have other ones"


def _paired_faults(node: fx.Node) -> Faults:
    x, ids, weights = operands(node)[:3]
    if not _together(x, ids):
        yield "paired_experts takes rows and ids that did not come together"
    elif not _belong(ids, weights):
        yield "paired_experts weighs with other weights than those that came with its ids"


def _cached_faults(node: fx.Node) -> Faults:
    _, offsets, slots = operands(node)[:3]
    yield from _grouped_faults(node)
    waited = _maker(slots)
    if waited is None or op_of(waited).name != "prefetch.wait" or waited.args[0] is not offsets:
        yield "cached_experts takes slots of other experts than those of its rows"
    elif waited.kwargs["table"] != node.kwargs["table"]:
        yield f"cached_experts of {node.kwargs['table']} takes slots of {waited.kwargs['table']}"


def _return_faults(node: fx.Node) -> Faults:
    rows, pairs = operands(node)
    yield from _pair_faults(node, rows, pairs)


def _pair_faults(node: fx.Node, rows: fx.Node, pairs: fx.Node) -> Faults:
    grouped = _grouping(pairs, "pairs")
    if grouped is None:
        yield f"{op_of(node).name} takes its pairs from no group_rows"
    elif _grouped_by(rows) is not grouped:
        yield f"{op_of(node).name} takes rows that were grouped by another {op_of(grouped).name}"


def _reduce_faults(node: fx.Node) -> Faults:
    rows, pairs, weights = operands(node)
    yield from _pair_faults(node, rows, pairs)
    yield from _weight_faults(node, pairs, weights)


def _reduced_faults(node: fx.Node) -> Faults:
    rows, _, _, pairs, weights = operands(node)
    yield from _grouped_faults(node)
    yield from _pair_faults(node, rows, pairs)
    yield from _weight_faults(node, pairs, weights)


def _weight_faults(node: fx.Node, pairs: fx.Node, weights: fx.Node) -> Faults:
    grouped = _grouping(pairs, "pairs")
    if grouped is not None and not _belong(grouped.args[-1], weights):
        yield f"{op_of(node).name} weighs with other weights than those that came with the ids of its rows"


def _fan_in_faults(node: fx.Node) -> Faults:
    rows, origin, ids = operands(node)
    started = _result(origin, "fan_out", 2)
    if started is None:
        yield "fan_in takes its origins from no fan_out"
    elif started.args[1] is not ids:
        yield "fan_in returns to other rows than those that were fanned out"
    elif _start(rows, "fan_out") is not started:
        yield "fan_in takes rows that were fanned out by another fan_out"


def _combine_faults(node: fx.Node) -> Faults:
    rows, order, weights = operands(node)
    listed, started = _result(order, "pair_order", 0), _start(rows, "fan_out")
    if listed is None:
        yield "combine takes its order from no pair_order"
    elif started is None or started.args[1] is not listed.args[0]:
        yield "combine takes rows of other ids than those it orders by"
    elif not _belong(listed.args[0], weights):
        yield "combine weighs with other weights than those routed with its ids"


def _count_faults(node: fx.Node) -> Faults:
    """Ids are counted by the ranks that their rows came from."""
    ids, received = operands(node)
    told, started = _maker(received), _start(ids, "fan_out")
    counts = told.args[0] if told is not None and op_of(told).name == "exchange_counts" else None
    if started is None or _result(counts, "fan_out", 1) is not started:
        yield "count_pairs counts ids by the ranks that other rows came from"


def _join_faults(node: fx.Node) -> Faults:
    """All rows are in some chunk: types say only which chunk each part is."""
    ops = [n for n in node.graph.nodes if is_op(n)]
    cut = {n.kwargs["parts"] for n in ops if op_of(n).name == "chunk_rows"}
    cut |= {n.kwargs["chunk"][1] for n in ops if "chunk" in n.kwargs}
    for parts in sorted(map(int, cut)):
        if parts != len(node.args):
            yield f"join_rows joins {len(node.args)} chunks of {parts}"


def _all_to_all_faults(node: fx.Node) -> Faults:
    """The two count lists describe one exchange, the one whose rows travel."""
    rows, *counts = operands(node)
    started = _start(rows, "fan_out")
    if started is not None and started.kwargs["group"] != node.kwargs["group"]:
        yield f"an all-to-all over {node.kwargs['group']} takes rows fanned out over {started.kwargs['group']}"
    if not counts:
        if started is None or started.kwargs["bound"] is None:
            yield "an all-to-all of equal pieces takes rows that are not padded"
        return
    sent, received = counts
    told, listed = _maker(received), _result(sent, "pair_order", 1)
    if listed is not None:
        counted = told.args[0] if told is not None and op_of(told).name == "count_pairs" else None
        if started is None or started.args[1] is not listed.args[0] or _start(counted, "fan_out") is not started:
            yield "an all-to-all of pairs takes counts of other rows"
    elif _result(sent, "fan_out", 1) is not started:
        yield "an all-to-all takes counts of another fan_out than its rows"
    elif told is None or op_of(told).name != "exchange_counts" or told.args[0] is not sent:
        yield "an all-to-all takes counts that were not exchanged for its rows"


RULES: dict[str, Callable[[fx.Node], Faults]] = {
    "moe": _moe_faults,
    "fan_out": _fan_out_faults,
    "group_rows": _group_faults,
    "grouped_linear": _grouped_faults,
    "grouped_gate_up": _grouped_faults,
    "gathered_gate_up": _gathered_faults,
    "reduced_linear": _reduced_faults,
    "paired_experts": _paired_faults,
    "cached_experts": _cached_faults,
    "return_rows": _return_faults,
    "reduce_rows": _reduce_faults,
    "count_pairs": _count_faults,
    "join_rows": _join_faults,
    "fan_in": _fan_in_faults,
    "combine": _combine_faults,
    "all_to_all.start": _all_to_all_faults,
}


def _maker(value: object) -> fx.Node | None:
    """The operation that makes a value."""
    if not isinstance(value, fx.Node) or value.op != "call_function":
        return None
    return value if is_op(value) else value.all_input_nodes[0]


def _result(value: object, name: str, index: int) -> fx.Node | None:
    """The operation `name` of which a value is result `index`."""
    maker = _maker(value)
    if maker is None or op_of(maker).name != name or value is not results_of(maker)[index]:
        return None
    return maker


def _grouping(value: object, what: str) -> fx.Node | None:
    """The operation that sorted pairs by expert, of which a value is the `offsets` or the `pairs`."""
    index = {"offsets": 0, "pairs": 1}[what]
    return _result(value, "group_rows", index + 1) or _result(value, "group_pairs", index)


def _grouped_by(rows: object) -> fx.Node | None:
    """The operation that sorted these rows by expert, itself or by the pairs through which they are read."""
    maker = _maker(rows)
    while maker is not None and op_of(maker).name not in ("group_rows", "gathered_gate_up"):
        maker = _maker(maker.args[0]) if maker.args else None
    if maker is None or op_of(maker).name == "group_rows":
        return maker
    return _grouping(maker.args[2], "pairs")


def _belong(ids: object, weights: object) -> bool:
    """Ids and weights came together: from one route (each perhaps cut and all-gathered) or out of one message."""
    first, second = _maker(ids), _maker(weights)
    while first is not None and second is not None and op_of(first).name in ("all_gather_rows", "chunk_rows"):
        if first.target is not second.target or first.kwargs != second.kwargs:
            return False
        ids, weights = first.args[0], second.args[0]
        first, second = _maker(ids), _maker(weights)
    for name, index in (("route", 0), ("open_rows", 1)):
        found = _result(ids, name, index)
        if found is not None:
            return found is _result(weights, name, index + 1)
    return False


def _together(rows: object, ids: object) -> bool:
    """Rows and ids came out of one message, or neither did."""
    opened = _maker(ids)
    if opened is not None and op_of(opened).name == "open_rows":
        return _result(rows, "open_rows", 0) is opened and _result(ids, "open_rows", 1) is opened
    return _result(rows, "open_rows", 0) is None


def _start(value: object, name: str) -> fx.Node | None:
    """The operation `name` that rows started from, past the hops that have ended since."""
    while (maker := _maker(value)) is not None and op_of(maker).name != name:
        kind = op_of(maker).name
        if kind == "fan_in":
            ended = _result(maker.args[1], "fan_out", 2)
            value = ended.args[0] if ended is not None else None
        elif kind in ("reduce_rows", "return_rows", "reduced_linear"):
            grouped = _grouping(maker.args[3 if kind == "reduced_linear" else 1], "pairs")
            value = grouped.args[-1] if grouped is not None else None  # ids, which came with the rows
        elif kind == "paired_experts":
            value = maker.args[1]
        else:
            value = maker.args[0] if maker.args else None
    return maker
