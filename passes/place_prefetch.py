"""Begin copies of a later layer's experts where they are hidden, and not where they would only cost."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import fx

from moec.cost.exchange import copy_body
from moec.ir.build import Builder
from moec.ir.program import Body, Program, Run, is_op, op_of, operands, output_of, results_of
from moec.passes.base import Pass
from moec.plan.pairs import Pair, pairs, predictor_of
from moec.plan.prefetch import Option, Prefetch, plan_prefetches, reads_ffn_norm


@dataclass(frozen=True)
class PlacePrefetch(Pass):
    """Put a `prefetch.start` in the layers whose later layer's experts are cached, at the place that the costs name.

    The guess is the later router's, on this layer's hidden state, or what used to follow this layer's choice. Ranks of
    an ep group add up their guesses, so that each fetches what the others will send it rows for. Layers that have no
    such later layer get a body of their own, and so do those which bring back what the first layers use most.

    before: %9 = rms_norm(%8, @ffn_norm, ...)                       (one expert missed a step, room for it before)
    after:  %9 = guess(%8, @next.ffn_norm, @next.router.weight, ...); %10 = count_experts(%9, table=routed)
            %11 = prefetch.start(%10, ahead=1, by=next_router, most=1, table=routed); %12 = rms_norm(...)
    """

    name: ClassVar[str] = "place-prefetch"

    def run(self, program: Program) -> None:
        if program.cache is None or program.cache.prefetch == "none":
            return
        chosen = {pair: found.chosen for pair, found in self.compare(program).items() if found.chosen is not None}
        if not chosen:
            program.cache = replace(program.cache, prefetch="none")
            return
        before = {name: copy_body(body) for name, body in program.bodies.items()}
        for name, groups in _groups(program, chosen).items():
            largest = max(groups, key=lambda pair: len(groups[pair]))
            for pair, layers in groups.items():
                body = program.bodies[name]
                if pair != largest:
                    is_last = pair is None or pair[2] < 0
                    body = _peel(program, before[name], layers, "last" if is_last else "lead")
                if pair is not None:
                    _start(program, body, before[pair[1]], pair, chosen[pair])

    def compare(self, program: Program) -> dict[Pair, Prefetch]:
        """What is decided for each kind of layer of a program that has no prefetch yet, and why."""

        def start(tried: Program, pair: Pair, option: Option) -> None:
            _start(tried, tried.bodies[pair[0]], program.bodies[pair[1]], pair, option)

        return plan_prefetches(program, start)


def _groups(program: Program, chosen: Mapping[Pair, Option]) -> dict[str, dict[Pair | None, list[int]]]:
    """Body -> pair for which it prefetches, or None -> layers."""
    found: dict[str, dict[Pair | None, list[int]]] = {}
    for pair, layers in pairs(program).items():
        found.setdefault(pair[0], {}).setdefault(pair if pair in chosen else None, []).extend(layers)
    return found


def _peel(program: Program, original: Body, layers: list[int], suffix: str) -> Body:
    """A copy of a body for some of its layers, by a name that no body has."""
    name, copied = original.name, copy_body(original)
    numbered = (f"{name}_{suffix}{number}" for number in itertools.count(2))
    copied.name = next(n for n in itertools.chain([f"{name}_{suffix}"], numbered) if n not in program.bodies)
    bodies = list(program.bodies.items())
    bodies.insert([n for n, _ in bodies].index(name) + 1, (copied.name, copied))
    program.bodies = dict(bodies)
    runs: list[Run] = []
    for run in program.runs:
        for layer in run.layers if run.body == name else ():
            body = copied.name if layer in layers else name
            if runs and runs[-1].body == body and runs[-1].layers.stop == layer:
                runs[-1] = Run(body, range(runs[-1].layers.start, layer + 1))
            else:
                runs.append(Run(body, range(layer, layer + 1)))
        if run.body != name:
            runs.append(run)
    program.runs = runs
    return copied


def _start(program: Program, body: Body, target: Body, pair: Pair, option: Option) -> None:
    """Guess, count, add up, start; what is used most needs no guess."""
    by, ahead = predictor_of(program, pair), pair[2]
    build = Builder(program, body)
    route = _only(target, "route")
    table = str(route.kwargs["table"])
    settings: dict[str, Any] = {"ahead": ahead, "most": option.most, "by": by, "table": table}
    if by == "frequency":
        with build.before(output_node(body)):
            build.emit("prefetch.start", output_of(body), at=_place(body, option.place), **settings)
        return
    if by == "history":
        at = _only(body, "route")
        where = build.before(results_of(at)[-1].next)
    else:
        at = _place(body, option.place)
        x = output_of(body) if option.place == "exit" else operands(at)[0]
        where = build.before(output_node(body)) if option.place == "exit" else build.before(at)
    with where:
        ids = _guess(build, x, target, ahead, at) if by == "next_router" else results_of(_only(body, "route"))[0]
        counts = build.emit("count_experts", ids, at=at, table=table)
        if program.mesh.ep > 1:
            counts = build.emit("sum_counts", counts, at=at, group="experts.ep")
        build.emit("prefetch.start", counts, at=at, **settings)


def _guess(build: Builder, x: fx.Node, target: Body, ahead: int, at: fx.Node) -> fx.Node:
    """The experts that the router of `target`, `ahead` layers later, chooses for the rows x."""
    route, norm = _only(target, "route"), next(n for n in target.graph.nodes if reads_ffn_norm(n))
    moved = [n for n in target.graph.nodes if is_op(n) and op_of(n).name == "relayout" and n.kwargs["to"] == "experts"]
    if moved:
        x = build.emit("relayout", x, at=at, **moved[0].kwargs)
    weights = []
    for name in ("ffn_norm", "router.weight", *(["router.bias"] if len(route.args) == 2 else [])):
        param = target.params[name]
        build.body.params[f"next.{name}"] = replace(param, parts=(f"next{ahead}.{name}",))
        weights.append(build.param(f"next.{name}"))
    choice = {key: route.kwargs[key] for key in ("score", "top", "groups", "keep")}
    ids: fx.Node = build.emit("guess", x, *weights, at=at, eps=norm.kwargs["eps"], **choice)
    return ids


def _place(body: Body, place: str) -> fx.Node:
    """The operation in front of which a guess is made, or whose source line it takes at the end."""
    nodes: list[fx.Node] = [node for node in body.graph.nodes if is_op(node)]
    if place == "ffn":
        return next(node for node in nodes if reads_ffn_norm(node))
    return nodes[0] if place == "entry" else nodes[-1]


def output_node(body: Body) -> fx.Node:
    """The node by which a body returns."""
    found: fx.Node = next(node for node in body.graph.nodes if node.op == "output")
    return found


def _only(body: Body, name: str) -> fx.Node:
    found: fx.Node = next(node for node in body.graph.nodes if is_op(node) and op_of(node).name == name)
    return found
