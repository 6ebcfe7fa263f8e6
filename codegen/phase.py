"""From a Program to the values of `phase.py.jinja`, the Python module a person reads and a rank runs.

Values get short names from what makes them (`q` from `attention.q`, `rows` from `fan_out`). A name is taken again once
its value has been read for the last time, which also frees that value's memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count, groupby
from typing import Any

from torch import fx

from moec.codegen.renderer import Comment, Text, is_identifier, render
from moec.diagnostics import MoecError, fail
from moec.ir.program import Body, Loc, Program, Type, is_op, loc_of, op_of, results_of, type_of
from moec.layout import Replicate

#: Inputs a step gives to a body beside the value `x` that flows through all of them.
STEP_INPUTS = frozenset({"positions", "select", "tokens"})
#: Names that a function of a phase module has for other things than values of the program: kernels, weights, step.
PARAMETERS = frozenset({"k", "s", "w"})
#: Names that `forward` uses, which no body may have.
FORWARD_NAMES = frozenset({"forward", "k", "layer", "range", "step", "weights", "x"})

#: Names of results by operation; `*` stands for the name of the first operand.
RESULT_NAMES: dict[str, tuple[str, ...]] = {
    "add": ("*",),
    "add_bias": ("*",),
    "all_gather": ("*",),
    "all_gather_rows": ("*",),
    "all_reduce": ("*",),
    "all_to_all.start": ("pending",),
    "all_to_all.wait": ("rows",),
    "attention": ("o",),
    "cached_experts": ("rows",),
    "chunk_rows": ("*",),
    "combine": ("y",),
    "count_experts": ("counts",),
    "count_pairs": ("served",),
    "embed": ("x",),
    "exchange_counts": ("received",),
    "exchange_sizes": ("sizes",),
    "fan_in": ("y",),
    "fan_out": ("rows", "counts", "origin"),
    "gate_up": ("act",),
    "gathered_gate_up": ("act",),
    "guess": ("guesses",),
    "group_pairs": ("offsets", "pairs"),
    "group_rows": ("rows", "offsets", "pairs"),
    "grouped_gate_up": ("act",),
    "grouped_linear": ("rows",),
    "join_rows": ("y",),
    "merge_heads": ("*",),
    "mla_attention": ("o",),
    "moe": ("y",),
    "open_rows": ("rows", "ids", "weights"),
    "pair_order": ("order", "wanted"),
    "paired_experts": ("y",),
    "prefetch.start": ("pending",),
    "prefetch.wait": ("slots",),
    "receive": ("x",),
    "reduce_rows": ("rows",),
    "reduce_scatter_rows": ("*",),
    "reduced_linear": ("rows",),
    "relayout": ("*",),
    "return_rows": ("rows",),
    "rope": ("*",),
    "route": ("ids", "weights"),
    "router_logits": ("logits",),
    "send": ("*",),
    "silu_mul": ("act",),
    "split_heads": ("*",),
    "sum_counts": ("counts",),
    "take": ("*",),
}
#: Names of products with a weight, where not the last part of the weight's own name (`k` are the kernels).
PRODUCT_NAMES = {"embed": "logits", "head": "logits", "k": "key", "q": "query", "v": "value"}
#: Names of the two pieces of a split, by the name of what is split; MLA's query and its compressed key and value.
SPLIT_NAMES = {"query": ("q_nope", "q_rope"), "q_b": ("q_nope", "q_rope"), "kv_a": ("latent", "k_rope")}


@dataclass(frozen=True)
class Call:
    """One line: `targets = k.kernel(s, *args, **attrs)  # note`. An argument is a value's name or a weight's `Text`."""

    targets: tuple[str, ...]
    kernel: tuple[str, ...]
    args: tuple[str | Text, ...]
    attrs: dict[str, Any]
    note: Comment


@dataclass(frozen=True)
class Section:
    """Lines that stand for one place in the `.moe` file."""

    where: Comment
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Function:
    """One body of the program."""

    name: str
    inputs: tuple[str, ...]
    sections: tuple[Section, ...]
    result: str


@dataclass(frozen=True)
class Stage:
    """One line or loop of `forward`: a body once (no layers) or for layers first..stop - 1."""

    body: str
    inputs: tuple[str, ...]
    first: int
    stop: int


def render_phase(program: Program) -> str:
    """The Python module of a phase: one function a body, and `forward(k, weights, step)`.

    Its size follows the number of bodies, not of layers. Raises `MoecError` E0505 for a name in the program that cannot
    stand in a module, E0501 for a value that cannot.
    """
    functions = tuple(_function(program, program.bodies[name]) for name in dict.fromkeys(r.body for r in program.runs))
    inputs = {function.name: function.inputs for function in functions}
    return render(
        "phase.py.jinja",
        phase=program.phase,
        model=Comment(program.name),
        mesh=Comment(program.mesh.describe()),
        source=Comment(program.source),
        functions=functions,
        stages=tuple(Stage(r.body, inputs[r.body], r.layers.start, r.layers.stop) for r in program.runs),
    )


def _function(program: Program, body: Body) -> Function:
    inputs = tuple(str(node.target) for node in body.graph.nodes if node.op == "placeholder")
    if not is_identifier(body.name) or body.name in FORWARD_NAMES:
        raise _unusable("name", body.name, body, "it is not a free Python name")
    for name in sorted(set(inputs) - STEP_INPUTS - {"x"}):
        raise _unusable("input", name, body, f"a step gives {', '.join(sorted(STEP_INPUTS))} and the value x")
    names = name_values(body)
    operations = [node for node in body.graph.nodes if is_op(node)]
    sections = tuple(
        Section(_where(program, loc, nodes), tuple(_call(node, names) for node in nodes))
        for loc, nodes in ((loc, list(group)) for loc, group in groupby(operations, key=loc_of))
    )
    (result,) = next(node for node in body.graph.nodes if node.op == "output").args
    assert isinstance(result, fx.Node)
    return Function(body.name, inputs, sections, names[result])


def _unusable(what: str, name: str, body: Body, why: str) -> MoecError:
    message = f"the {what} `{name}` of body `{body.name}` cannot stand in the phase's module: {why}"
    return fail("E0505", message, "compile the `.moe` file again")


def _call(node: fx.Node, names: dict[fx.Node, str]) -> Call:
    op, kernel = op_of(node), node.meta.get("kernel", "torch")
    results = results_of(node)
    args = tuple(Text(str(a.target)) if a.op == "get_attr" else names[a] for a in node.args if isinstance(a, fx.Node))
    attrs = {key: _attribute(value) for key, value in sorted(node.kwargs.items())}
    note = "; ".join(describe(type_of(r)) for r in results if "type" in r.meta)
    return Call(
        tuple(names[r] for r in results),
        (op.__name__,) if kernel == "torch" else (kernel, op.__name__),
        args,
        attrs,
        Comment(note),
    )


def _attribute(value: Any) -> Any:
    return Text(value) if isinstance(value, str) else value


def describe(type: Type) -> str:
    """A type for a reader: `bf16 [T, 8, 64] tp=S1`. Axes on which the value is whole are left out."""
    places = [f"{axis}={place}" for axis, place in type.layout.places if place != Replicate()]
    return " ".join([type.dtype, f"[{', '.join(map(str, type.shape))}]", *places])


def _where(program: Program, loc: Loc, nodes: list[fx.Node]) -> Comment:
    """`tiny.moe:14 attention`: the place, and what the lines' first weight belongs to (or their first operation)."""
    weights = [str(a.target) for node in nodes for a in node.args if isinstance(a, fx.Node) and a.op == "get_attr"]
    owners = [name.split(".")[0] for name in weights if "." in name]
    topic = chain(owners, weights, [op_of(nodes[0]).name])
    return Comment(f"{loc.file or program.source}:{loc.line} {next(topic)}")


# --- names --------------------------------------------------------------------------------------------------------


def name_values(body: Body) -> dict[fx.Node, str]:
    """A name for every input and result of a body; no two values that are both still needed share one."""
    names: dict[fx.Node, str] = {}
    held: dict[str, fx.Node] = {}  # name -> the value it stands for now
    last_use = _last_uses(body)
    for position, node in enumerate(body.graph.nodes):
        results = results_of(node) if is_op(node) else (node,) if node.op == "placeholder" else ()
        wanted = _wanted(body, node, names) if is_op(node) else [str(node.target)]
        for result, base in zip(results, wanted, strict=False):
            names[result] = next(name for name in _spellings(base) if _is_free(name, held, last_use, position))
            held[names[result]] = result
    return names


def _is_free(name: str, held: dict[str, fx.Node], last_use: dict[fx.Node, int], position: int) -> bool:
    """Whether nothing reads the value of this name after the operation at `position`, which may read it itself."""
    return name not in PARAMETERS and (name not in held or last_use[held[name]] <= position)


def _last_uses(body: Body) -> dict[fx.Node, int]:
    """Position of the last operation that reads each value; a result nobody reads is held until its own operation's."""
    order = {node: position for position, node in enumerate(body.graph.nodes)}
    return {node: max((order[user] for user in node.users), default=order[node]) for node in body.graph.nodes}


def _spellings(base: str) -> Iterator[str]:
    """q, q2, q3, ..."""
    yield base
    yield from (f"{base}{number}" for number in count(2))


def _wanted(body: Body, node: fx.Node, names: dict[fx.Node, str]) -> list[str]:
    """The names this operation's results would like to have."""
    op = op_of(node).name
    values = [a for a in node.args if isinstance(a, fx.Node)]
    first = names.get(values[0], "x").rstrip("0123456789") or "x"
    weight = next((str(a.target) for a in values if a.op == "get_attr"), "")
    if op == "split":
        return list(SPLIT_NAMES.get(first, ("left", "right")))
    if op in ("linear", "merged_linear"):
        parts = [weight] if op == "linear" else body.params[weight].parts
        return [PRODUCT_NAMES.get(last, last) for last in (part.rpartition(".")[2] for part in parts)]
    if op == "rms_norm":
        return [first if weight.startswith("attention.") else "h"]
    return [first if name == "*" else name for name in RESULT_NAMES[op]]
