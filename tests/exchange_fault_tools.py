"""What faults in exchanges are made of: the programs they spoil, the registry, and small changes to a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from moec.ir.build import Builder, drop_unused_params, erase, reinfer
from moec.ir.ops.table import OpError
from moec.ir.program import Body, Program, is_op, op_of, results_of
from moec.placement import round_robin
from tests.exchange_programs import exchange_plan, exchanged

NODES: dict[str, Any] = {"dp": 4, "ep": 4, "nodes": 2}
BASES: dict[str, dict[str, Any]] = {
    "ordered": {"exchange": "flat", "combine": "ordered", **NODES},
    "reduced": {"exchange": "flat", **NODES},
    "padded": {"exchange": "padded", **NODES},
    "gather": {"exchange": "gather", **NODES},
    "two_hop": {"exchange": "two_hop", **NODES},
    "aggregate": {"exchange": "aggregate", **NODES},
    "parts": {"exchange": "flat", "dp": 2, "tp": 2, "ep": 2, "etp": 2},
    "groups": {"exchange": "gather", "dp": 4, "edp": 2, "ep": 2},
    "local": {"exchange": "flat"},
    "chunks": {"exchange": "two_hop", **NODES},
    "layer": {"exchange": "flat", "dp": 4, "ep": 2, "etp": 2},
}
#: Bases whose tokens are cut in chunks.
OVERLAPS = {"chunks": "2", "layer": "2:layer"}


@dataclass(frozen=True)
class Planted:
    """`plant` spoils the program of `base`; the proof's message then holds `words`."""

    base: str
    words: str
    typed: bool
    plant: Callable[[Program], None]

    def program(self) -> Program:
        made = base_program(self.base)
        self.plant(made)
        return made


def base_program(base: str) -> Program:
    return exchanged(exchange_plan(**BASES[base]), overlap=OVERLAPS.get(base, "off"))


FAULTS: dict[str, Planted] = {}


def fault(base: str, words: str, typed: bool) -> Callable[[Callable[[Program], None]], None]:
    def add(plant: Callable[[Program], None]) -> None:
        FAULTS[plant.__name__.strip("_")] = Planted(base, words, typed, plant)

    return add


# --- tools -------------------------------------------------------------------------------------------------------


def layer(program: Program) -> Body:
    return next(body for body in program.bodies.values() if body.name not in ("prologue", "epilogue"))


def ops(program: Program, name: str) -> list[fx.Node]:
    return [node for node in layer(program).graph.nodes if is_op(node) and op_of(node).name == name]


def put(program: Program, behind: fx.Node, name: str, *args: object, **attrs: Any) -> tuple[fx.Node, ...]:
    """A new operation behind another, untyped."""
    build = Builder(program, layer(program))
    with build.after(behind):
        return build.raw(name, args, attrs, (), behind.meta["loc"])  # type: ignore[arg-type]


def set_attrs(node: fx.Node, **attrs: Any) -> None:
    node.kwargs = {**node.kwargs, **attrs}


def set_args(node: fx.Node, *args: fx.Node) -> None:
    node.args = args


def other_table(program: Program) -> None:
    program.placements["other"] = round_robin(13, program.mesh.ep)
    program.experts["other"] = 13


def tidy(program: Program) -> None:
    """Drop operations nobody reads, and infer types again as far as the rules go."""
    body = layer(program)
    for node in reversed(list(body.graph.nodes)):
        if is_op(node) and not any(result.users for result in results_of(node)):
            erase(body, node)
    drop_unused_params(body)
    try:
        reinfer(program, body)
    except (OpError, ValueError):
        return
