"""Program text -> Program: the inverse of `moec.ir_text`, with every line of its grammar below.

The text may come from an artifact somebody edited, so a fault is one `MoecError` with the line, never a traceback; what
the program then means is the verifier's business.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

from lark import Lark, Token, Transformer, UnexpectedInput, v_args
from lark.exceptions import VisitError
from torch import fx

from moec.diagnostics import MoecError, fail
from moec.ir import (
    Body,
    Layout,
    Loc,
    Memory,
    Param,
    Partial,
    Place,
    Placed,
    Program,
    Replicate,
    Routed,
    Run,
    Shard,
    State,
    Type,
)
from moec.ir_build import Builder
from moec.mesh import Mesh
from moec.ops import OPS
from moec.placement import Placement
from moec.topology import Cluster, Device, Link

GRAMMAR = r"""
start: header mesh cluster step experts* placement* memory* done body* run*

header: "program" NAME STRING "from" STRING
mesh: "mesh" setting*
cluster: "cluster" STRING (setting | link)*
step: "step" setting*
experts: "experts" NAME "=" INT
placement: "placement" NAME held*
held: "[" (INT | RANGE)* "]"
memory: "memory" INT setting*
done: "done" NAME*
setting: NAME "=" (INT | FLOAT | NAME)
link: NAME "=" (INT | FLOAT) "/" (INT | FLOAT)

body: "body" NAME "{" (param | state | input | node | returned)* "}"
param: "param" NAME ["=" NAME ("+" NAME)* "dim" "=" INT] ":" type
state: "state" NAME ":" type
input: "in" VALUE [":" type]
node: VALUE ("," VALUE)* "=" NAME "(" [argument ("," argument)*] ")" [":" type ("," type)*] ["on" NAME] ["by" NAME] LOC
argument: VALUE -> operand
        | PARAM -> operand
        | NAME "=" literal -> attribute
literal: INT -> integer
       | FLOAT -> floating
       | NAME -> word
       | "(" [literal ("," literal)*] ")" -> sequence
type: [PENDING] NAME "[" [dim ("," dim)*] "]" [layout]
dim: INT | NAME
layout: "<" NAME place* ">"
place: NAME "=" NAME ["(" NAME ")"]
returned: "return" VALUE
run: "run" NAME [RANGED]

PENDING: "pending"
RANGED: /\d+\.\.\d+/
RANGE.2: /\d+-\d+/
VALUE: /%\w+/
PARAM: /@[\w.]+/
LOC: /!([^\s!:]+:)?\d+:\d+/
NAME: /[a-zA-Z_][\w.\-]*/
FLOAT.3: /-?\d+(\.\d+)?e[+-]?\d+|-?\d+\.\d+(?!\.)/
INT.1: /-?\d+/
STRING: /"(\\.|[^"\\\n])*"/
%ignore /\s+/
"""


@cache
def _parser() -> Lark:
    return Lark(GRAMMAR, parser="lalr", maybe_placeholders=True, keep_all_tokens=False)


def parse(text: str) -> Program:
    """The program a text says. Raises MoecError E0401 naming the line at fault."""
    try:
        tree = _parser().parse(text)
        return cast(Program, _Reader(visit_tokens=False).transform(tree))
    except UnexpectedInput as error:
        shown = text.splitlines()[error.line - 1].strip() if 0 < error.line <= text.count("\n") + 1 else ""
        raise _fault(f"line {error.line}: cannot read `{shown[:80]}`") from None
    except VisitError as error:
        if isinstance(error.orig_exc, MoecError):
            raise error.orig_exc from None
        raise _fault(f"{type(error.orig_exc).__name__}: {error.orig_exc}") from None


def _fault(what: str) -> MoecError:
    return fail("E0401", f"this is not the text of a program: {what}", help="compile the `.moe` file again")


def _string(token: Token) -> str:
    out, chars = [], iter(token[1:-1])
    for char in chars:
        out.append({"n": "\n"}.get(escaped := next(chars), escaped) if char == "\\" else char)
    return "".join(out)


def _number(token: Token) -> Any:
    return {"INT": int, "FLOAT": float}.get(token.type, str)(token)


@v_args(inline=True)
class _Reader(Transformer[Token, Any]):
    """One method per rule; bodies are read once the program's tables are known."""

    def start(self, *parts: Any) -> Program:
        found: dict[str, list[Any]] = {}
        for kind, value in parts:
            found.setdefault(kind, []).append(value)
        phase, name, source = found["header"][0]
        program = Program(
            name=name,
            phase=phase,
            source=source,
            mesh=Mesh(**found["mesh"][0]),
            cluster=found["cluster"][0],
            **found["step"][0],
            experts=dict(found.get("experts", ())),
            placements=dict(found.get("placement", ())),
            runs=found.get("run", []),
            memory=tuple(found.get("memory", ())),
            done=found["done"][0],
        )
        for name, lines in found.get("body", []):
            program.bodies[name] = _read_body(program, name, lines)
        return program

    def header(self, phase: Token, name: Token, source: Token) -> Any:
        return "header", (str(phase), _string(name), _string(source))

    def mesh(self, *settings: Any) -> Any:
        return "mesh", dict(settings)

    def step(self, *settings: Any) -> Any:
        return "step", dict(settings)

    def cluster(self, name: Token, *settings: Any) -> Any:
        given = dict(settings)
        tflops = tuple((k.partition(".")[2], v) for k, v in settings if k.startswith("tflops."))
        device = Device(given.get("memory"), given.get("memory_gbps"), tflops)
        links = {k: given.get(k) for k in ("intra", "inter", "host", "nvme")}
        return "cluster", Cluster(_string(name), given["nodes"], given["devices"], device, **links)

    def experts(self, table: Token, count: Token) -> Any:
        return "experts", (str(table), int(count))

    def placement(self, table: Token, *slots: tuple[int, ...]) -> Any:
        return "placement", (str(table), Placement(slots))

    def held(self, *ids: Token) -> tuple[int, ...]:
        out: list[int] = []
        for token in ids:
            first, _, last = token.partition("-")
            out += range(int(first), int(last or first) + 1)
        return tuple(out)

    def memory(self, rank: Token, *settings: Any) -> Any:
        return "memory", Memory(**dict(settings))

    def done(self, *names: Token) -> Any:
        return "done", tuple(map(str, names))

    def setting(self, name: Token, value: Token) -> Any:
        return str(name), _number(value)

    def link(self, name: Token, gbps: Token, latency: Token) -> Any:
        return str(name), Link(_number(gbps), _number(latency))

    def run(self, body: Token, ranged: Token | None) -> Any:
        if ranged is None:
            return "run", Run(str(body))
        first, last = ranged.split("..")
        return "run", Run(str(body), range(int(first), int(last) + 1))

    def body(self, name: Token, *lines: Any) -> Any:
        return "body", (str(name), lines)

    def param(self, name: Token, *rest: Any) -> Any:
        *parts, dim, type = (x for x in rest if x is not None) if rest[0] is not None else (name, 0, rest[-1])
        return "param", (str(name), Param(tuple(map(str, parts)), type.shape, type.dtype, type.layout, int(dim)))

    def state(self, name: Token, type: Type) -> Any:
        return "state", (str(name), State(cast(Any, type.shape), type.dtype, type.layout))

    def input(self, name: Token, type: Type | None) -> Any:
        return "in", (str(name), type)

    def node(self, *parts: Any) -> Any:
        names = [str(p) for p in parts if isinstance(p, Token) and p.type == "VALUE"]
        words = [p for p in parts if isinstance(p, Token) and p.type != "VALUE"]
        types = [p for p in parts if isinstance(p, Type)]
        arguments = [p for p in parts if isinstance(p, tuple)]
        stream, kernel = parts[-3], parts[-2]
        return "node", (names, words[0], arguments, types, stream or "compute", kernel, _loc(parts[-1]))

    def operand(self, name: Token) -> Any:
        return "operand", str(name)

    def attribute(self, name: Token, value: Any) -> Any:
        return str(name), value

    def integer(self, token: Token) -> int:
        return int(token)

    def floating(self, token: Token) -> float:
        return float(token)

    def word(self, token: Token) -> Any:
        return {"none": None, "true": True, "false": False}.get(token, str(token))

    def sequence(self, *values: Any) -> tuple[Any, ...]:
        return tuple(values)

    def type(self, *parts: Any) -> Type:
        pending, dtype, *dims, lay = parts
        return Type(tuple(d for d in dims if d is not None), str(dtype), lay or Layout(), pending is not None)

    def dim(self, token: Token) -> int | str:
        return int(token) if token.type == "INT" else str(token)

    def layout(self, view: Token, *places: Any) -> Layout:
        return Layout(str(view), places)

    def place(self, axis: Token, kind: Token, table: Token | None) -> tuple[str, Place]:
        return str(axis), _place(str(kind), str(table))

    def returned(self, value: Token) -> Any:
        return "return", str(value)


def _place(kind: str, table: str) -> Place:
    if kind in ("home", "expert", "grouped"):
        return Routed(table, kind)
    if kind == "placed":
        return Placed(table)
    if kind.startswith("S"):
        dim, _, copies = kind[1:].partition("x")
        return Shard(int(dim), int(copies or 1))
    return {"R": Replicate(), "P": Partial()}[kind]


def _loc(token: Token) -> Loc:
    *file, line, column = token[1:].split(":")
    return Loc(int(line), int(column), ":".join(file))


def _read_body(program: Program, name: str, lines: tuple[Any, ...]) -> Body:
    body = Body(name)
    build = Builder(program, body)
    values: dict[str, fx.Node] = {}
    for kind, line in lines:
        if kind == "param":
            body.params[line[0]] = line[1]
        elif kind == "state":
            body.states[line[0]] = line[1]
        elif kind == "in":
            values[line[0]] = build.input(line[0][1:], line[1])
        elif kind == "return":
            body.graph.output(_lookup(values, line))
        else:
            _read_node(build, values, line)
    return body


def _lookup(values: dict[str, fx.Node], name: str) -> fx.Node:
    if name not in values:
        raise _fault(f"{name} is used before it is made")
    return values[name]


def _read_node(build: Builder, values: dict[str, fx.Node], line: tuple[Any, ...]) -> None:
    """The node as written: types come from the text, so that the verifier can hold them against the rules."""
    names, op, arguments, types, stream, kernel, loc = line
    if op not in OPS or len(names) != OPS[op].num_results:
        raise _fault(f"operation {op} with {len(names)} results")
    args = [
        build.param(v[1:]) if v[0] == "@" and v[1:] in build.body.params else _lookup(values, v)
        for k, v in arguments
        if k == "operand"
    ]
    results = build.raw(op, args, {k: v for k, v in arguments if k != "operand"}, types, loc)
    node = results[0] if len(results) == 1 else results[0].args[0]
    node.meta["stream"] = stream
    if kernel is not None:
        node.meta["kernel"] = str(kernel)
    values |= dict(zip(names, results, strict=True))
