"""What must hold of a Program at each stage. Runs after every pass; a program read from disk passes through it too.

Each check yields faults as text with the place in the `.moe` file; `verify` raises them together. What a pass promises
(`PROMISES`) is held from the moment that pass is in `program.done`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import fx

from moec.diagnostics import CompileError, Diagnostic
from moec.ir import Body, Partial, Program, Replicate, Routed, Shard, State, Type, is_op, op_of, results_of, type_of
from moec.ir_build import infer, param_type, stream_of
from moec.ops import OpError

Faults = Iterator[str]


def verify(program: Program, after: str = "") -> None:
    """Raise CompileError E0403 with every fault found; `after` names the pass that has just run."""
    faults = [*_runs(program), *_placements(program)]
    for body in program.bodies.values():
        faults += [f"{body.name}: {fault}" for check in BODY_CHECKS for fault in check(program, body)]
    if not faults and program.is_typed:
        faults += _chain(program)
    for name in program.done:
        faults += PROMISES.get(name, _nothing)(program)
    if faults:
        where = f" after {after}" if after else ""
        help = "this is a bug in moec: please report it with the `.moe` file"
        raise CompileError(*(Diagnostic("E0403", f"the program is wrong{where}: {fault}", help=help) for fault in faults))


def _nothing(program: Program) -> Faults:
    yield from ()


# --- the whole program -------------------------------------------------------------------------------------------


def _runs(program: Program) -> Faults:
    """Prologue, then every layer exactly once and in order, then epilogue."""
    names = [run.body for run in program.runs]
    for name in sorted(set(names) ^ set(program.bodies)):
        yield f"body {name} is run but missing, or is never run"
    layers = [layer for run in program.runs for layer in run.layers]
    if layers != list(range(len(layers))):
        yield f"layers run as {layers}, not once each in order"
    if names[:1] != ["prologue"] or names[-1:] != ["epilogue"]:
        yield "a program starts with its prologue and ends with its epilogue"


def _placements(program: Program) -> Faults:
    for table, placement in program.placements.items():
        if table not in program.experts:
            yield f"placement {table} is of no experts"
        elif fault := placement.fault(program.experts[table], program.mesh.ep):
            yield f"placement {table}: {fault}"
        elif program.mesh.ep == 1 and placement.flat != tuple(range(placement.num_experts)):
            yield f"placement {table}: on one rank experts lie in their own order"


def _chain(program: Program) -> Faults:
    """Each body reads what the one before it returns."""
    value: Type | None = None
    for run in program.runs:
        body = program.bodies[run.body]
        read = [type_of(n) for n in body.graph.nodes if n.op == "placeholder" and n.target == "x"]
        if value is not None and read != [value]:
            yield f"{body.name} reads {read}, the body before it returns {value}"
        (result,) = _output(body).args
        assert isinstance(result, fx.Node)
        value = type_of(result)
        if len(run.layers) > 1 and read != [value]:
            yield f"{body.name} returns {value}, its next layer reads {read}"


# --- one body ----------------------------------------------------------------------------------------------------


def _output(body: Body) -> fx.Node:
    return next(node for node in body.graph.nodes if node.op == "output")


def _structure(program: Program, body: Body) -> Faults:
    outputs = [node for node in body.graph.nodes if node.op == "output"]
    if len(outputs) != 1:
        yield f"{len(outputs)} values are returned"
    seen: set[fx.Node] = set()
    for node in body.graph.nodes:
        yield from (f"{node} reads {a}, which comes later" for a in node.all_input_nodes if a not in seen)
        seen.add(node)
        if is_op(node):
            if "loc" not in node.meta:
                yield f"{op_of(node).name} has no place in the source"
            if node.meta.get("stream") != stream_of(program, node):
                yield f"{op_of(node).name} is on stream {node.meta.get('stream')}, not {stream_of(program, node)}"


def _uses(program: Program, body: Body) -> Faults:
    """Nothing is computed, received or loaded for nobody."""
    for node in body.graph.nodes:
        if is_op(node) and not any(result.users for result in results_of(node)):
            yield f"nobody reads the result of {op_of(node).name}"
    read = {str(node.target) for node in body.graph.nodes if node.op == "get_attr" and node.users}
    for name in body.params:
        if name not in read:
            yield f"parameter {name} is never read"
    yield from (f"{name} is no parameter" for name in sorted(read - set(body.params)))


def _types(program: Program, body: Body) -> Faults:
    """Every type is what the operation's rules give for its arguments."""
    if not program.is_typed:
        return
    for node in body.graph.nodes:
        if node.op == "get_attr" and node.target in body.params:
            try:
                if node.meta.get("type") != param_type(program, body.params[str(node.target)]):
                    yield f"parameter {node.target} has the type {node.meta.get('type')}"
            except (ValueError, KeyError) as error:
                yield f"parameter {node.target}: {error}"
                return
        elif is_op(node):
            try:
                found = infer(program, op_of(node), node.all_input_nodes and node.args, dict(node.kwargs))
            except OpError as error:
                yield f"{op_of(node).name} at {node.meta.get('loc')}: {error}"
                return  # what follows would only repeat it
            if tuple(r.meta.get("type") for r in results_of(node)) != found:
                yield f"{op_of(node).name} at {node.meta.get('loc')} is typed {node.meta.get('type')}, its rules give {found}"


def _collectives(program: Program, body: Body) -> Faults:
    """Groups exist, cover the world once, and each start has one wait."""
    groups = program.mesh.groups()
    for node in body.graph.nodes:
        if not is_op(node):
            continue
        name, group = op_of(node).name, node.kwargs.get("group")
        moves = "comm" in op_of(node).effects and node.kwargs.get("how", "gather") == "gather"
        if moves and group not in groups:
            yield f"{name} runs on {group}, which this mesh does not have"
        if name == "all_to_all.start":
            waits = [user for user in node.users if is_op(user) and op_of(user).name == "all_to_all.wait"]
            if len(waits) != 1 or len(node.users) != 1:
                yield f"all_to_all.start at {node.meta.get('loc')} has {len(waits)} waits and {len(node.users)} readers"


def _routing(program: Program, body: Body) -> Faults:
    """A combine ends the dispatch it belongs to: its order, and the weights of the ids that were dispatched."""
    for node in body.graph.nodes:
        if not (is_op(node) and op_of(node).name == "combine"):
            continue
        rows, order, weights = node.args
        dispatch = _maker(order)
        if dispatch is None or op_of(dispatch).name != "dispatch" or order is not results_of(dispatch)[2]:
            yield "combine takes its order from no dispatch"
        elif dispatch.kwargs["table"] != node.kwargs["table"] or dispatch.kwargs["local"] != node.kwargs["local"]:
            yield "combine and its dispatch are of different kinds"
        elif _route_result(weights, 1) is None or _route_result(weights, 1) is not _route_result(dispatch.args[1], 0):
            yield "combine weighs with other weights than those routed with the dispatched ids"
        if _counts_behind(rows) is not dispatch:
            yield "combine takes rows that were grouped by another dispatch's counts"


def _maker(value: object) -> fx.Node | None:
    """The operation that makes a value."""
    if not isinstance(value, fx.Node) or value.op != "call_function":
        return None
    return value if is_op(value) else value.all_input_nodes[0]


def _route_result(value: object, index: int) -> fx.Node | None:
    """The route whose result `index` a value is, through an all-gather."""
    maker = _maker(value)
    if maker is not None and op_of(maker).name == "all_gather_rows":
        value, maker = maker.args[0], _maker(maker.args[0])
    if maker is None or op_of(maker).name != "route" or value is not results_of(maker)[index]:
        return None
    return maker


def _counts_behind(value: object) -> fx.Node | None:
    """The dispatch whose counts grouped the rows of `value`: through products, moves and regroupings."""
    while (maker := _maker(value)) is not None and op_of(maker).name != "dispatch":
        name = op_of(maker).name
        if name in ("grouped_linear", "grouped_gate_up"):
            made = _maker(maker.args[1])
            value = made.args[0] if made is not None and op_of(made).name == "offsets" else maker.args[0]
        elif name == "all_to_all.start":
            value = maker.args[1]
        else:
            value = maker.args[0]
    return maker


def _states(program: Program, body: Body) -> Faults:
    """KV memory is cut as the heads that are written to it."""
    for node in body.graph.nodes:
        if not (program.is_typed and is_op(node) and "kv" in op_of(node).effects):
            continue
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
    elif state.local_shape(program.mesh) != value.shape[1:]:
        yield f"state {name} holds {state.local_shape(program.mesh)} per token, {value.shape[1:]} is written"


BODY_CHECKS: tuple[Callable[[Program, Body], Faults], ...] = (
    _structure,
    _uses,
    _types,
    _collectives,
    _routing,
    _states,
)


# --- what each pass promises -------------------------------------------------------------------------------------


def _all_typed(program: Program) -> Faults:
    for body in program.bodies.values():
        yield from (f"{body.name}: {n} has no type" for n in body.graph.nodes if n.op != "output" and "type" not in n.meta)


def _all_placed(program: Program) -> Faults:
    yield from (f"experts {table} are not placed" for table in program.experts if table not in program.placements)


def _batch_split(program: Program) -> Faults:
    """Each dp rank has its own rows, and what a body returns is whole on tp."""
    for body in program.bodies.values():
        for node in body.graph.nodes:
            if node.op == "placeholder" and program.mesh.dp > 1 and type_of(node).layout.on("dp") != Shard(0):
                yield f"{body.name}: input {node.target} is not split over dp"
        (value,) = _output(body).args
        assert isinstance(value, fx.Node)
        if type_of(value).layout.on("tp") != Replicate() or isinstance(type_of(value).layout.on("dp"), Partial | Routed):
            yield f"{body.name}: returns {type_of(value)}, which is not whole on tp"


def _experts_split(program: Program) -> Faults:
    for body in program.bodies.values():
        for name, param in body.params.items():
            if name.startswith("experts.") and param.layout.view != "experts" and program.mesh.ep * program.mesh.etp > 1:
                yield f"{body.name}: {name} lies whole on every rank"


def _no_coarse(program: Program) -> Faults:
    yield from (f"{body.name}: moe is left" for body, node in program.nodes() if op_of(node).name == "moe")
    if program.mesh.ep == 1:
        for body, node in program.nodes():
            if node.kwargs.get("group") == "experts.ep":
                yield f"{body.name}: {op_of(node).name} without an ep axis"


def _memory_known(program: Program) -> Faults:
    if len(program.memory) != program.mesh.size:
        yield f"memory is planned for {len(program.memory)} of {program.mesh.size} ranks"


def _all_served(program: Program) -> Faults:
    for body, node in program.nodes():
        if node.meta.get("kernel") not in op_of(node).kernels:
            yield f"{body.name}: no kernel {node.meta.get('kernel')} serves {op_of(node).name}"


PROMISES: dict[str, Callable[[Program], Faults]] = {
    "place-experts": _all_placed,
    "infer-shapes": _all_typed,
    "shard-attention": _batch_split,
    "shard-experts": _experts_split,
    "insert-exchange": _no_coarse,
    "plan-memory": _memory_known,
    "choose-kernels": _all_served,
}
