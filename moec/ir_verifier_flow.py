"""The part of the verifier that follows values through a body: collectives, routing metadata, KV states."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from moec.ir import Body, Program, Replicate, Shard, State, Type, is_op, op_of, results_of, type_of

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
    """A combine ends the one dispatch its rows come from, with the weights of the ids that were dispatched; a parameter
    that joins gate and up is read as the two.
    """
    for node in body.graph.nodes:
        if not is_op(node):
            continue
        name = op_of(node).name
        if name == "combine":
            yield from _combine_faults(node)
        elif name == "moe" and not _is_route_of(node.args[1], node.args[2]):
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


def _combine_faults(node: fx.Node) -> Faults:
    rows, order, weights = node.args
    dispatch = _maker(order)
    if dispatch is None or op_of(dispatch).name != "dispatch" or order is not results_of(dispatch)[2]:
        yield "combine takes its order from no dispatch"
        return
    if any(dispatch.kwargs[key] != node.kwargs[key] for key in ("table", "local")):
        yield "combine and its dispatch are of different kinds"
    if not _is_route_of(dispatch.args[1], weights):
        yield "combine weighs with other weights than those routed with the dispatched ids"
    if _dispatches_behind(rows) != {dispatch}:
        yield "combine takes rows that were moved or grouped by another dispatch's counts"


def _maker(value: object) -> fx.Node | None:
    """The operation that makes a value."""
    if not isinstance(value, fx.Node) or value.op != "call_function":
        return None
    return value if is_op(value) else value.all_input_nodes[0]


def _is_route_of(ids: object, weights: object) -> bool:
    """Ids and weights are the two results of one route, each perhaps all-gathered."""
    route = _route_result(ids, 0)
    return route is not None and route is _route_result(weights, 1)


def _route_result(value: object, index: int) -> fx.Node | None:
    """The route whose result `index` a value is, through an all-gather."""
    maker = _maker(value)
    if maker is not None and op_of(maker).name == "all_gather_rows":
        value, maker = maker.args[0], _maker(maker.args[0])
    if maker is None or op_of(maker).name != "route" or value is not results_of(maker)[index]:
        return None
    return maker


def _dispatches_behind(value: object) -> set[fx.Node]:
    """Every dispatch whose rows, counts or order went into a value."""
    found: set[fx.Node] = set()
    waiting, seen = [_maker(value)], set()
    while waiting:
        maker = waiting.pop()
        if maker is None or maker in seen:
            continue
        seen.add(maker)
        if op_of(maker).name == "dispatch":
            found.add(maker)
        else:
            waiting += [_maker(argument) for argument in maker.args]
    return found


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
