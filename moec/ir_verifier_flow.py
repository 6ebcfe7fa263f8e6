"""The part of the verifier that follows values through a body: collectives, routing metadata, KV states."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import fx

from moec.ir import Body, Program, State, Type, is_op, op_of, operands, results_of, type_of
from moec.layout import Replicate, Shard

Faults = Iterator[str]


def returned_type(body: Body) -> Type:
    """Type of the value a body returns."""
    output = next(node for node in body.graph.nodes if node.op == "output")
    (value,) = output.args
    assert isinstance(value, fx.Node)
    return type_of(value)


def check_collectives(program: Program, body: Body) -> Faults:
    """Groups exist, and each start has one wait."""
    groups = program.mesh.groups()
    for node in body.graph.nodes:
        if not is_op(node):
            continue
        name, group = op_of(node).name, node.kwargs.get("group")
        if "comm" in op_of(node).effects and node.kwargs.get("how", "move") != "keep" and group not in groups:
            yield f"{name} runs on {group}, which this mesh does not have"
        if name == "all_to_all.start":
            waits = [user for user in node.users if is_op(user) and op_of(user).name == "all_to_all.wait"]
            if len(waits) != 1 or len(node.users) != 1:
                yield f"all_to_all.start at {node.meta['loc']} has {len(waits)} waits and {len(node.users)} readers"


#: Operations that read gate and up from one parameter, and the dim along which it joins them.
JOINED = {"gate_up": 0, "grouped_gate_up": 1}


# --- routing -----------------------------------------------------------------------------------------------------


def check_routing(program: Program, body: Body) -> Faults:
    """Rows that end a hop or leave their experts are those that started it, with the weights of the ids that did."""
    for node in body.graph.nodes:
        if not is_op(node):
            continue
        name = op_of(node).name
        if name in ENDS:
            yield from ENDS[name](node)
        elif name == "moe" and not _belong(node.args[1], node.args[2]):
            yield "moe weighs with other weights than those routed with its ids"
        elif name in JOINED:
            weight = node.args[-1]
            param = body.params.get(str(weight.target)) if isinstance(weight, fx.Node) else None
            if param is None or len(param.parts) != 2 or param.dim != JOINED[name]:
                yield f"{name} reads gate and up from a parameter that does not join the two along dim {JOINED[name]}"
        else:
            for weight in node.args:
                param = body.params.get(str(weight.target)) if isinstance(weight, fx.Node) else None
                if param is not None and len(param.parts) > 1:
                    yield f"{name} reads {' and '.join(param.parts)} as one parameter"


def _reduce_faults(node: fx.Node) -> Faults:
    rows, pairs, weights = operands(node)
    grouped = _result(pairs, "group_rows", 2)
    if grouped is None:
        yield "reduce_rows takes its pairs from no group_rows"
    elif _start(rows, "group_rows") is not grouped:
        yield "reduce_rows takes rows that were grouped by another group_rows"
    elif not _belong(grouped.args[1], weights):
        yield "reduce_rows weighs with other weights than those that came with the ids of its rows"


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
        is_theirs = told is not None and op_of(told).name == "count_pairs" and started is not None
        if not is_theirs or started is None or started.args[1] is not listed.args[0]:
            yield "an all-to-all of pairs takes counts of other rows"
    elif _result(sent, "fan_out", 1) is not started:
        yield "an all-to-all takes counts of another fan_out than its rows"
    elif told is None or op_of(told).name != "exchange_counts" or told.args[0] is not sent:
        yield "an all-to-all takes counts that were not exchanged for its rows"


ENDS: dict[str, Callable[[fx.Node], Faults]] = {
    "reduce_rows": _reduce_faults,
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


def _start(value: object, name: str) -> fx.Node | None:
    """The operation `name` that rows started from, past the hops that have ended since."""
    while (maker := _maker(value)) is not None and op_of(maker).name != name:
        kind = op_of(maker).name
        if kind == "fan_in":
            ended = _result(maker.args[1], "fan_out", 2)
            value = ended.args[0] if ended is not None else None
        elif kind in ("reduce_rows", "return_rows") and name != "group_rows":
            grouped = _result(maker.args[1], "group_rows", 2)
            value = grouped.args[0] if grouped is not None else None
        else:
            value = maker.args[0] if maker.args else None
    return maker


# --- KV states ---------------------------------------------------------------------------------------------------


def check_states(program: Program, body: Body) -> Faults:
    """KV memory is written once, and cut as the heads that are written to it."""
    writers = [node for node in body.graph.nodes if is_op(node) and "kv" in op_of(node).effects]
    if len(writers) != (1 if body.states else 0):
        yield f"{len(writers)} operations write the states {sorted(body.states)}"
        return
    for node in writers if program.is_typed else ():
        written = {"k": 1, "v": 2} if op_of(node).name == "attention" else {"latent": 2, "rope": 3}
        if set(written) != set(body.states):
            yield f"{op_of(node).name} writes {sorted(written)}, the body has {sorted(body.states)}"
            continue
        for name, index in written.items():
            value = node.args[index]
            assert isinstance(value, fx.Node)
            yield from _state_fault(program, name, body.states[name], type_of(value))


def _state_fault(program: Program, name: str, state: State, value: Type) -> Faults:
    place, held = value.layout.on("tp"), state.layout.on("tp")
    wanted = Shard(0, place.copies) if isinstance(place, Shard) and place.dim == 1 else Replicate()
    if held != wanted:
        yield f"state {name} lies {held} on tp, what is written to it {place}"
    elif (state.dtype, state.local_shape(program.mesh)) != (value.dtype, value.shape[1:]):
        kept = f"{state.dtype}{list(state.local_shape(program.mesh))}"
        yield f"state {name} keeps {kept} per token, {value.dtype}{list(value.shape[1:])} is written"
