"""Builds a Program while `moec.ir.parse` reads its text: one method per rule of the grammar there.

Whatever a number or a name of the text can say is either taken or refused with `ReadError`: the text may be damaged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from lark import Token, Transformer, v_args
from torch import fx

from moec.ir.build import Builder
from moec.ir.ops.table import OPS
from moec.ir.params import Param, Shared, State, param_fault
from moec.ir.program import Body, Cache, Memory, Program, Run, Tier, Type
from moec.ir.read_type import integer, location, number, require, sizes, string
from moec.mesh import Mesh
from moec.placement import Placement
from moec.topology import Cluster, Device, Link

#: Most ranks, layers and experts of a program: beyond every machine, and small enough to list.
MOST = 1 << 16
STEP: dict[str, type] = {"tokens": int, "slots": int, "context": int, "dtype": str, "exchange": str, "strategy": str}
STEP_OPTIONS: dict[str, type] = {"combine": str, "capacity": float, "drop": str, "stage": int, "overlap": str}
STEP_OPTIONS |= {"sums": str}
MESH: dict[str, type] = dict.fromkeys(("dp", "tp", "edp", "ep", "etp"), int)
MESH_OPTIONS: dict[str, type] = {"nodes": int, "pp": int}
CACHE: dict[str, type] = {"evict": str}
CACHE_OPTIONS: dict[str, type] = {"slots": int, "hbm": int, "share": float, "hit_rate": float}
CACHE_OPTIONS |= {"prefetch": str, "ahead": int}
MEMORY: dict[str, type] = dict.fromkeys(("weights", "kv", "buffers"), int)
LINKS = ("intra", "inter", "host", "nvme")
WORDS: dict[str, bool | None] = {"none": None, "true": True, "false": False}


def _settings(
    line: str,
    given: tuple[tuple[str, Any], ...],
    wanted: Mapping[str, type],
    options: Mapping[str, type] = MappingProxyType({}),
) -> dict[str, Any]:
    """The settings of a line by name: all those wanted, perhaps some options, no number negative."""
    found, known = dict(given), {**wanted, **options}
    is_complete = len(found) == len(given) and set(wanted) <= set(found) <= set(known)
    require(is_complete, f"`{line}` has the settings {', '.join(known)}")
    for name, value in given:
        fits = type(value) is known[name] and not (isinstance(value, int | float) and value < 0)
        require(fits, f"`{line}`: {name}={value}")
    return found


@v_args(inline=True)
class Reader(Transformer[Token, Any]):
    """One method per rule. Lines become (kind, value); bodies are read once the program's tables are known."""

    def __init__(self, read_type: Callable[[str], Type]) -> None:
        super().__init__()
        self.read_type = read_type

    def start(self, *parts: Any) -> Program:
        found: dict[str, list[Any]] = {}
        for kind, value in filter(None, parts):
            found.setdefault(kind, []).append(value)
        phase, name, source = found["header"][0]
        memory = found.get("memory", [])
        require([rank for rank, _ in memory] == list(range(len(memory))), "memory lines count the ranks in order")
        program = Program(
            name=name,
            phase=phase,
            source=source,
            mesh=found["mesh"][0],
            cluster=found["cluster"][0],
            **found["step"][0],
            cache=_cache(found),
            experts=_by_name("experts", found),
            placements=_by_name("placement", found),
            runs=found.get("run", []),
            memory=tuple(value for _, value in memory),
            done=found["done"][0],
        )
        for name, lines in _by_name("body", found).items():
            program.bodies[name] = _read_body(program, name, lines)
        return program

    def header(self, phase: Token, name: Token, source: Token) -> Any:
        require(phase in ("prefill", "decode"), f"there is no phase {phase}")
        return "header", (str(phase), string(name), string(source))

    def mesh(self, *settings: Any) -> Any:
        mesh = Mesh(**_settings("mesh", settings, MESH, MESH_OPTIONS))
        ranks = (mesh.dp * mesh.tp, mesh.edp * mesh.ep * mesh.etp)
        require(all(1 <= n <= MOST for n in ranks), f"a mesh of {ranks[0]} and {ranks[1]} ranks")
        require(1 <= mesh.pp <= MOST, f"a mesh of {mesh.pp} stages")
        return "mesh", mesh

    def step(self, *settings: Any) -> Any:
        read = tuple(
            (name, str(value) if name == "overlap" else value) for name, value in settings
        )  # a word or a count
        found = _settings("step", read, STEP, STEP_OPTIONS)
        overlap = found.get("overlap", "off")
        require(re.fullmatch(r"off|auto|1|[2-8](:layer)?", overlap) is not None, f"overlap={overlap}")
        return "step", found | {"drop": found.get("drop") == "true"}

    def cluster(self, name: Token, *settings: Any) -> Any:
        given = dict(settings)
        counts = {key: given.pop(key, 0) for key in ("nodes", "devices")}
        require(all(type(n) is int and n > 0 for n in counts.values()), f"a cluster of {counts}")
        tflops = tuple((key.partition(".")[2], value) for key, value in settings if key.startswith("tflops."))
        device = Device(given.pop("memory", None), given.pop("memory_gbps", None), tflops)
        links = {key: given.pop(key, None) for key in LINKS}
        rates = (device.memory_bytes or 1, device.memory_gbps or 1, *dict(tflops).values())
        require(all(isinstance(rate, int | float) and rate > 0 for rate in rates), f"rates {rates}")
        require(all(isinstance(link, Link | None) for link in links.values()), f"links {links}")
        require(set(given) == {f"tflops.{dtype}" for dtype, _ in tflops}, f"a cluster has no {', '.join(given)}")
        return "cluster", Cluster(string(name), counts["nodes"], counts["devices"], device, **links)

    def cache(self, *parts: Any) -> Any:
        *settings, pinned = parts
        return "cache", {**_settings("cache", tuple(settings), CACHE, CACHE_OPTIONS), "pinned": pinned or ()}

    def tier(self, name: Token, *parts: Any) -> Any:
        *settings, link = parts
        require(name in ("host", "nvme"), f"there is no tier {name}")
        size = _settings(f"tier {name}", tuple(settings), {}, {"bytes": int}).get("bytes")
        return "tier", (str(name), Tier(str(name), size, link))

    def experts(self, table: Token, count: Token) -> Any:
        require(0 < integer(count) <= MOST, f"{count} experts")
        return "experts", (str(table), int(count))

    def placement(self, table: Token, *slots: tuple[int, ...]) -> Any:
        return "placement", (str(table), Placement(slots))

    def held(self, *ids: Token) -> tuple[int, ...]:
        out: list[int] = []
        for token in ids:
            first, _, last = token.partition("-")
            require(0 <= integer(first) <= integer(last or first) < MOST, f"expert ids {token}")
            out += range(int(first), int(last or first) + 1)
        return tuple(out)

    def memory(self, rank: Token, *settings: Any) -> Any:
        return "memory", (integer(rank), Memory(**_settings("memory", settings, MEMORY, {"slots": int})))

    def done(self, *names: Token) -> Any:
        return "done", tuple(map(str, names))

    def setting(self, name: Token, value: Token) -> Any:
        return str(name), number(value)

    def link(self, name: Token, gbps: Token, latency: Token, concurrency: Token) -> Any:
        return str(name), _link(name, gbps, latency, concurrency)

    def rate(self, gbps: Token, latency: Token, concurrency: Token) -> Link:
        return _link("a tier", gbps, latency, concurrency)

    def run(self, body: Token, ranged: Token | None) -> Any:
        if ranged is None:
            return "run", Run(str(body))
        first, last = map(integer, ranged.split(".."))
        require(first <= last < MOST, f"layers {ranged}")
        return "run", Run(str(body), range(first, last + 1))

    def body(self, name: Token, *lines: Any) -> Any:
        return "body", (str(name), lines)

    def param(self, name: Token, *rest: Any) -> Any:
        *parts, dim, cut, shared, type = rest if rest[0] is not None else (name, "0", None, None, rest[-1])
        lies = (sizes(name, type), type.dtype, type.layout)
        require(integer(dim) >= 0, f"parameter {name} joined along dim {dim}")
        require(all(isinstance(size, int) for size in cut or ()), f"parameter {name} of parts of {cut}")
        return "param", (str(name), Param(tuple(map(str, parts)), *lies, int(dim), shared, cut or ()))

    def shared(self, count: Token, *rest: Token) -> Shared:
        *parts, dim = rest
        require(integer(dim) >= 0, f"shared experts cut along dim {dim}")
        return Shared(tuple(map(str, parts)), integer(count), int(dim))

    def state(self, name: Token, type: Type) -> Any:
        return "state", (str(name), State(sizes(name, type), type.dtype, type.layout))

    def input(self, name: Token, type: Type | None) -> Any:
        return "in", (str(name), type)

    def node(self, *parts: Any) -> Any:
        results = [str(p) for p in parts if isinstance(p, Token) and p.type == "VALUE"]
        op = next(p for p in parts if isinstance(p, Token) and p.type == "NAME")
        arguments = [p for p in parts if isinstance(p, tuple)]
        types = [p for p in parts if isinstance(p, Type)]
        stream, kernel, loc = parts[-3:]
        return "node", (results, op, arguments, types, stream or "compute", kernel, location(loc))

    def operand(self, name: Token) -> Any:
        return None, str(name)

    def attribute(self, name: Token, value: Any) -> Any:
        return str(name), value

    def scalar(self, token: Token) -> Any:
        if token.type == "STRING":
            return string(token)
        return WORDS[token] if token in WORDS else number(token)

    def sequence(self, *values: Any) -> tuple[Any, ...]:
        return () if values == (None,) else values

    def type(self, text: Token) -> Type:
        return self.read_type(str(text))

    def returned(self, value: Token) -> Any:
        return "return", str(value)


def _by_name(kind: str, found: dict[str, list[Any]]) -> dict[str, Any]:
    lines = found.get(kind, [])
    require(len(dict(lines)) == len(lines), f"two lines of {kind} have one name")
    return dict(lines)


def _link(name: str, gbps: Token, latency: Token, concurrency: Token) -> Link:
    require(integer(concurrency) > 0, f"{name} carries {concurrency} messages at once")
    return Link(number(gbps), number(latency), integer(concurrency))


def _cache(found: dict[str, list[Any]]) -> Cache | None:
    if "cache" not in found:
        return None
    (settings,) = found["cache"]
    return Cache(tiers=tuple(_by_name("tier", found).values()), **settings)


def _read_body(program: Program, name: str, lines: tuple[Any, ...]) -> Body:
    body = Body(name)
    build = Builder(program, body)
    values: dict[str, fx.Node] = {}
    for kind, line in lines:
        if kind == "param":
            require(line[0] not in body.params, f"{name} has two parameters {line[0]}")
            fault = param_fault(program, line[1])
            require(not fault, f"parameter {line[0]} of {name}: {fault}")
            body.params[line[0]] = line[1]
        elif kind == "state":
            require(line[0] not in body.states, f"{name} has two states {line[0]}")
            body.states[line[0]] = line[1]
        elif kind == "in":
            _add(values, [line[0]], (build.input(line[0][1:], line[1]),))
        elif kind == "return":
            body.graph.output(_lookup(values, line, f"body {name}"))
        else:
            _read_node(build, values, line)
    return body


def _add(values: dict[str, fx.Node], names: list[str], nodes: tuple[fx.Node, ...]) -> None:
    for name, node in zip(names, nodes, strict=True):
        require(name not in values, f"{name} is made twice")
        values[name] = node


def _lookup(values: dict[str, fx.Node], name: str, where: str) -> fx.Node:
    require(name in values, f"{where}: {name} is used before it is made")
    return values[name]


def _read_node(build: Builder, values: dict[str, fx.Node], line: tuple[Any, ...]) -> None:
    """The node as written: types come from the text, so that the verifier can hold them against the rules."""
    names, op, arguments, types, stream, kernel, loc = line
    where = f"line {op.line}"
    require(op in OPS, f"{where}: there is no operation {op}")
    attrs = [(key, value) for key, value in arguments if key is not None]
    require(len(dict(attrs)) == len(attrs), f"{where}: an attribute is given twice")
    require(len(names) == (count := OPS[op].count(dict(attrs))), f"{where}: {op} has {count} results")
    require(len(types) in (0, len(names)), f"{where}: {len(types)} types of {len(names)} results")
    args = [
        build.param(v[1:]) if v[0] == "@" and v[1:] in build.body.params else _lookup(values, v, where)
        for key, v in arguments
        if key is None
    ]
    results = build.raw(op, args, dict(attrs), types, loc)
    node = results[0] if len(results) == 1 else results[0].args[0]
    assert isinstance(node, fx.Node)
    node.meta["stream"] = str(stream)
    if kernel is not None:
        node.meta["kernel"] = str(kernel)
    _add(values, names, results)
