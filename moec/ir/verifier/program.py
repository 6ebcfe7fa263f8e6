"""What must hold of a Program at each stage. Runs after every pass; a program read from disk passes through it too.

Each check yields faults as text with the place in the `.moe` file; `verify` raises them together. Checks come in
stages, each of which may rely on the ones before: the program's tables, each body's structure and types (this file),
how its values flow (`flow`, `rows`, `cache`), and what the passes that have run
promise (`promises`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

from torch import fx

from moec.diagnostics import CompileError, Diagnostic
from moec.ir.build import INPUTS, infer, input_type, param_type, stream_of
from moec.ir.ops.table import OPS, OpError
from moec.ir.params import layout_fault, param_fault
from moec.ir.program import Body, Program, Type, is_op, op_of, results_of
from moec.ir.promises import PROMISES
from moec.ir.verifier.cache import check_cache, check_settings
from moec.ir.verifier.flow import check_collectives, check_joined, check_shared, check_states, returned_type
from moec.ir.verifier.rows import check_rows

Faults = Iterator[str]


def verify(program: Program, after: str = "") -> None:
    """Raise CompileError E0403 with every fault of the first stage that finds any; `after` names the pass just run."""
    faults = [*_mesh(program), *_placements(program), *_runs(program), *check_settings(program)]
    if not faults:
        for body in program.bodies.values():
            faults += [f"{body.name}: {fault}" for fault in _body(program, body)]
    if not faults and program.is_typed:
        faults = [*_chain(program)]
    for name in program.done if not faults else ():
        faults += [*PROMISES.get(name, _nothing)(program)]
    if faults:
        where = f" after {after}" if after else ""
        help = "this is a bug in moec: please report it with the `.moe` file"
        raise CompileError(
            *(Diagnostic("E0403", f"the program is wrong{where}: {fault}", help=help) for fault in faults)
        )


def _nothing(program: Program) -> Faults:
    yield from ()


# --- the whole program -------------------------------------------------------------------------------------------


def _mesh(program: Program) -> Faults:
    mesh = program.mesh
    if mesh.dp * mesh.tp != mesh.edp * mesh.ep * mesh.etp:
        yield f"mesh {mesh.describe()}: dp * tp is not edp * ep * etp"
    elif max(mesh.tp, mesh.etp) % min(mesh.tp, mesh.etp):
        yield f"mesh {mesh.describe()}: one of tp and etp must divide the other"


def _placements(program: Program) -> Faults:
    for table, placement in program.placements.items():
        if table not in program.experts:
            yield f"placement {table} is of no experts"
        elif fault := placement.fault(program.experts[table], program.mesh.ep):
            yield f"placement {table}: {fault}"
        elif program.mesh.ep == 1 and placement.flat != tuple(range(placement.num_experts)):
            yield f"placement {table}: on one rank experts lie in their own order"


def _runs(program: Program) -> Faults:
    """Prologue, then every layer exactly once and in order, then epilogue."""
    names = [run.body for run in program.runs]
    for name in sorted(set(names) ^ set(program.bodies)):
        yield f"body {name} is run but missing, or is never run"
    layers = [layer for run in program.runs for layer in run.layers]
    first = layers[0] if layers and program.stage else 0
    if layers != list(range(first, first + len(layers))):
        yield f"layers run as {layers}, not once each in order"
    if [run.body for run in program.runs if not run.layers] != ["prologue", "epilogue"] or (
        names[:1] + names[-1:] != ["prologue", "epilogue"]
    ):
        yield "a program runs its prologue once, then layers, then its epilogue once"
    embed = program.bodies["prologue"].params.get("embed") if "prologue" in program.bodies else None
    if program.stage == 0 and (embed is None or len(embed.shape) != 2):
        yield "the prologue has no embedding"
    if not 0 <= program.stage < program.mesh.pp:
        yield f"this is stage {program.stage} of {program.mesh.pp}"
    if not program.is_typed and any("type" in node.meta for _, node in program.nodes()):
        yield "values have types, yet infer-shapes has not run"


def _chain(program: Program) -> Faults:
    """Each body reads what the one before it returns."""
    value: Type | None = None
    for run in program.runs:
        body = program.bodies[run.body]
        read = [n.meta["type"] for n in body.graph.nodes if n.op == "placeholder" and n.target == "x"]
        if value is not None and read != [value]:
            yield f"{body.name} reads {read}, the body before it returns {value}"
        value = returned_type(body)
        if len(run.layers) > 1 and read != [value]:
            yield f"{body.name} returns {value}, its next layer reads {read}"


# --- one body ----------------------------------------------------------------------------------------------------


def _body(program: Program, body: Body) -> list[str]:
    """Faults of the first stage that finds any."""
    for stage in STAGES:
        if faults := [fault for check in stage for fault in check(program, body)]:
            return faults
    return []


def _structure(program: Program, body: Body) -> Faults:
    outputs = [node for node in body.graph.nodes if node.op == "output"]
    if len(outputs) != 1:
        yield f"{len(outputs)} values are returned"
    seen: set[fx.Node] = set()
    for node in body.graph.nodes:
        yield from (f"{node} reads {a}, which comes later" for a in node.all_input_nodes if a not in seen)
        seen.add(node)
        if node.op == "placeholder" and node.target not in INPUTS:
            yield f"there is no input {node.target}"
        if is_op(node):
            yield from _operation(program, node)


def _operation(program: Program, node: fx.Node) -> Faults:
    op = op_of(node)
    found = {str(user.args[1]) for user in node.users if user.target is operator.getitem}
    count = op.count(node.kwargs)
    if count > 1 and len(found) != count:
        yield f"{op.name} has {len(found)} of its {count} results"
    if "loc" not in node.meta:
        yield f"{op.name} has no place in the source"
    if fault := op.fault(len(node.args), dict(node.kwargs)):
        yield f"at {node.meta.get('loc')}: {fault}"
    elif node.meta.get("stream") != stream_of(program, node):
        yield f"{op.name} is on stream {node.meta.get('stream')}, not {stream_of(program, node)}"


def _uses(program: Program, body: Body) -> Faults:
    """Nothing is given, computed, received or loaded for nobody."""
    for node in body.graph.nodes:
        is_for_later = node.target is OPS["prefetch.start"]  # another layer's wait belongs to it
        if is_op(node) and not is_for_later and not any(result.users for result in results_of(node)):
            yield f"nobody reads the result of {op_of(node).name}"
        if node.op == "placeholder" and not node.users:
            yield f"nobody reads the input {node.target}"
    read = {str(node.target) for node in body.graph.nodes if node.op == "get_attr" and node.users}
    for name in body.params:
        if name not in read:
            yield f"parameter {name} is never read"
    yield from (f"{name} is no parameter" for name in sorted(read - set(body.params)))


def _params(program: Program, body: Body) -> Faults:
    """Each logical parameter is read once, and lies as a parameter or a state can."""
    parts = [part for param in body.params.values() for part in param.names]
    yield from (f"{part} is a part of two parameters" for part in sorted({p for p in parts if parts.count(p) > 1}))
    for name, param in body.params.items():
        if fault := param_fault(program, param):
            yield f"parameter {name}: {fault}"
    for name, state in body.states.items():
        if fault := layout_fault(program, state.layout, state.shape):
            yield f"state {name}: {fault}"


def _types(program: Program, body: Body) -> Faults:
    """Inputs are as the stage has them, and every type is what the operation's rules give for its arguments."""
    if not program.is_typed:
        return
    for node in body.graph.nodes:
        if is_op(node):
            try:
                wanted = infer(program, op_of(node), node.args, dict(node.kwargs))
            except OpError as error:
                yield f"{op_of(node).name} at {node.meta['loc']}: {error}"
                return  # what follows would only repeat it
            values = results_of(node)
        elif node.op == "placeholder":
            wanted = (input_type(program, str(node.target), is_split="shard-attention" in program.done),)
            values = (node,)
        elif node.op == "get_attr":
            wanted, values = (param_type(program, body.params[str(node.target)]),), (node,)
        else:
            continue
        for value, type in zip(values, wanted, strict=True):
            if (found := value.meta.get("type")) != type:
                yield f"{value} of {node.target} at {node.meta.get('loc')} is typed {found}, not {type}"
                return


STAGES: tuple[tuple[Callable[[Program, Body], Faults], ...], ...] = (
    (_structure,),
    (_uses, _params),
    (_types,),
    (check_collectives, check_joined, check_shared, check_rows, check_cache, check_states),
)
