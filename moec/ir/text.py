"""The one deterministic text of a Program. `parse(print_program(p)) == p` at every stage.

No ids, paths, times or versions: values are renumbered `%0, %1, ...` in order, keywords sorted. An artifact stores this
text and goldens are written in it. The grammar in `moec.ir.parse` is its reference.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

from torch import fx

from moec.ir.params import Shared
from moec.ir.program import Body, Cache, Loc, Program, Run, Type, is_op, loc_of, op_of, results_of, type_of
from moec.layout import Layout
from moec.topology import Link


def print_program(program: Program) -> str:
    """The text of the whole program, ending in a newline."""
    p = program
    mesh = p.mesh
    lines = [
        f"program {p.phase} {_text(p.name)} from {_text(p.source)}",
        f"mesh dp={mesh.dp} tp={mesh.tp} edp={mesh.edp} ep={mesh.ep} etp={mesh.etp}"
        f"{_unless(1, nodes=mesh.nodes)}{_unless(1, pp=mesh.pp)}",
        *_cluster_lines(p),
        f"step tokens={p.tokens} slots={p.slots} context={p.context} dtype={p.dtype}"
        f" exchange={p.exchange} strategy={p.strategy}{_unless('ordered', combine=p.combine)}"
        f"{_unless(None, capacity=p.capacity)}{_unless(False, drop=p.drop)}{_unless(0, stage=p.stage)}"
        f"{_unless('off', overlap=p.overlap)}{_unless('fixed', sums=p.sums)}",
        *(_cache_lines(p.cache) if p.cache is not None else ()),
        *(f"experts {table}={count}" for table, count in p.experts.items()),
        *(f"placement {table} {_slots(t.slots)}" for table, t in p.placements.items()),
        *(
            f"memory {rank} weights={m.weights} kv={m.kv} buffers={m.buffers}{_unless(0, slots=m.slots)}"
            for rank, m in enumerate(p.memory)
        ),
        f"done {' '.join(p.done)}".rstrip(),
    ]
    for body in p.bodies.values():
        lines += ["", *print_body(body)]
    lines += ["", *(_run(run) for run in p.runs)]
    return "\n".join(lines) + "\n"


def _unless(usual: object, **setting: Any) -> str:
    """` name=value`, or nothing where the value is the usual one."""
    ((name, value),) = setting.items()
    return "" if value == usual else f" {name}={_value(value)}"


def _text(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _cluster_lines(program: Program) -> list[str]:
    c, d = program.cluster, program.cluster.device
    words = [f"cluster {_text(c.name)} nodes={c.num_nodes} devices={c.devices_per_node}"]
    if d.memory_bytes is not None:
        words.append(f"memory={d.memory_bytes}")
    if d.memory_gbps is not None:
        words.append(f"memory_gbps={d.memory_gbps!r}")
    words += [f"tflops.{dtype}={rate!r}" for dtype, rate in d.tflops]
    words += [
        f"{name}={_link(link)}"
        for name in ("intra", "inter", "host", "nvme")
        if isinstance(link := getattr(c, name), Link)
    ]
    return [" ".join(words)]


def _link(link: Link) -> str:
    return f"{link.gbps!r}/{link.latency_us!r}/{link.concurrency}"


def _cache_lines(cache: Cache) -> list[str]:
    """What the cache is told, then its tiers, the fastest first."""
    options = "".join(_unless(None, **{name: getattr(cache, name)}) for name in ("slots", "hbm", "share", "hit_rate"))
    guess = f"{_unless('none', prefetch=cache.prefetch)}{_unless(1, ahead=cache.ahead)}"
    pinned = f" {_slots((cache.pinned,))}" if cache.pinned else ""
    tiers = [
        f"tier {t.name}{_unless(None, bytes=t.bytes)}{f' link={_link(t.link)}' if t.link is not None else ''}"
        for t in cache.tiers
    ]
    return [f"cache evict={cache.evict}{options}{guess}{pinned}", *tiers]


def _slots(slots: tuple[tuple[int, ...], ...]) -> str:
    """`[0-7] [8-15]`: consecutive ids as a range."""
    return " ".join("[" + " ".join(_ranges(held)) + "]" for held in slots)


def _ranges(ids: tuple[int, ...]) -> list[str]:
    out: list[list[int]] = []
    for i in ids:
        if out and out[-1][-1] + 1 == i:
            out[-1].append(i)
        else:
            out.append([i])
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in out]


def _run(run: Run) -> str:
    if not run.layers:
        return f"run {run.body}"
    return f"run {run.body} {run.layers.start}..{run.layers.stop - 1}"


def print_body(body: Body) -> list[str]:
    """Lines of one body: parameters, states, inputs, operations, the value returned."""
    lines = [f"body {body.name} {{"]
    for name, p in body.params.items():
        made = f" = {'+'.join(p.parts)} dim={p.dim}{_unless((), sizes=p.sizes)}{_shared(p.shared)}"
        parts = made if p.parts != (name,) or p.shared else ""
        lines.append(f"  param {name}{parts} : {_type(Type(p.shape, p.dtype, p.layout))}")
    lines += [f"  state {name} : {_type(Type(s.shape, s.dtype, s.layout))}" for name, s in body.states.items()]
    names: dict[fx.Node, str] = {}
    numbers = itertools.count()
    for node in body.graph.nodes:
        lines += [f"  {line}" for line in _node_lines(node, names, numbers)]
    return [*lines, "}"]


def _shared(shared: Shared | None) -> str:
    return "" if shared is None else f" with {shared.count} of {'+'.join(shared.parts)} dim={shared.dim}"


def _node_lines(node: fx.Node, names: dict[fx.Node, str], numbers: Iterator[int]) -> list[str]:
    if node.op == "placeholder":
        names[node] = f"%{node.target}"
        return [f"in {names[node]}" + (f" : {_type(type_of(node))}" if "type" in node.meta else "")]
    if node.op == "get_attr":
        names[node] = f"@{node.target}"
        return []
    if node.op == "output":
        (value,) = node.args
        assert isinstance(value, fx.Node)
        return [f"return {names[value]}"]
    if not is_op(node):
        return []
    results = results_of(node)
    for result in results:
        names[result] = f"%{next(numbers)}"
    return [_operation(node, results, names)]


def _operation(node: fx.Node, results: tuple[fx.Node, ...], names: dict[fx.Node, str]) -> str:
    args = [names[a] for a in node.args if isinstance(a, fx.Node)]
    args += [f"{key}={_value(value)}" for key, value in sorted(node.kwargs.items())]
    text = f"{', '.join(names[r] for r in results)} = {op_of(node).name}({', '.join(args)})"
    if "type" in results[0].meta:
        text += " : " + ", ".join(_type(type_of(r)) for r in results)
    if (stream := node.meta["stream"]) != "compute":
        text += f" on {stream}"
    if "kernel" in node.meta:
        text += f" by {node.meta['kernel']}"
    return f"{text} {_loc(loc_of(node))}"


def _loc(loc: Loc) -> str:
    """`!3:12`, or `!shared/models.moe:3:12`: a file's name stands in quotes where it is not plain."""
    file = loc.file if re.fullmatch(r"[\w./+-]*", loc.file) else _text(loc.file)
    return f"!{file}:{loc.line}:{loc.column}" if file else f"!{loc.line}:{loc.column}"


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_value, value)) + ")"
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return _text(value) if value in ("none", "true", "false") else value
    return repr(value)


def _type(type: Type) -> str:
    dims = ", ".join(map(str, type.shape))
    return f"{'pending ' if type.pending else ''}{type.dtype}[{dims}]{_layout(type.layout)}"


def _layout(layout: Layout) -> str:
    if layout.view is None:
        return ""
    return f"<{' '.join([layout.view, *(f'{axis}={place}' for axis, place in layout.places)])}>"
