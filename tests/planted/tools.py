"""What the planted mistakes are made of: base programs, the registry, and small changes to a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from moec.checked import Swiglu
from moec.ir.build import Builder, drop_unused_params, erase, reinfer
from moec.ir.ops.table import OpError
from moec.ir.program import Body, Program, is_op, op_of, results_of
from moec.layout import layout
from tests.programs import SPAN, few, gqa, moe, plan

SPARSE = moe(8, 4, shared=4)
#: So many experts that a step uses few of them, and fetching some ahead pays.
WIDE = moe(64, 4, shared=4, top=1)
BASES: dict[str, dict[str, Any]] = {
    "flat": {"ffns": [SPARSE], "attention": gqa(4, 2, bias=True), "dp": 2, "tp": 2, "ep": 2, "etp": 2},
    "reduced": {"ffns": [SPARSE], "combine": "reduced", "dp": 2, "tp": 2, "ep": 2, "etp": 2},
    "two_hop": {"ffns": [SPARSE], "exchange": "two_hop", "dp": 4, "ep": 4, "nodes": 2},
    "padded": {"ffns": [SPARSE], "exchange": "padded", "dp": 2, "ep": 2},
    "chunks": {"ffns": [SPARSE], "combine": "reduced", "overlap": "4", "dp": 2, "ep": 2},
    "entry": {"ffns": [SPARSE], "combine": "reduced", "overlap": "2:layer", "dp": 2, "ep": 2},
    "stage": {"ffns": [SPARSE, SPARSE], "pp": 2},
    "gather": {"ffns": [SPARSE], "exchange": "gather", "dp": 2, "tp": 2, "ep": 2, "etp": 2},
    "split": {"ffns": [SPARSE], "tp": 2, "ep": 2},
    "layers": {"ffns": [SPARSE, SPARSE, Swiglu(4, SPAN)], "dp": 2, "ep": 2},
    "dense": {"ffns": [Swiglu(4, SPAN)], "tp": 2, "edp": 2},
    "copies": {"ffns": [Swiglu(4, SPAN)], "attention": gqa(4, 2), "tp": 4, "edp": 4},
    "local": {"ffns": [SPARSE], "dp": 2, "edp": 2},
    "pair": {"ffns": [moe(2, 4, top=1)], "exchange": "gather", "dp": 2, "ep": 2},
    "fp8": {"ffns": [moe(8, 6)], "dp": 4, "edp": 2, "ep": 2, "expert_dtype": "fp8"},
    "cached": {"ffns": [WIDE, WIDE], "dp": 2, "tp": 2, "ep": 2, "etp": 2, "cache": few(1, "next_router")},
}


@dataclass(frozen=True)
class Mistake:
    """`plant` spoils the program of `base` behind pass `behind`; the verifier's message holds `words`."""

    base: str
    words: str
    plant: Callable[[Program], None]
    behind: str | None = None

    @property
    def plan(self) -> Any:
        return plan(**BASES[self.base])


MISTAKES: dict[str, Mistake] = {}
UNSEEN: dict[str, Mistake] = {}


def mistake(base: str, words: str, behind: str | None = None) -> Callable[[Callable[[Program], None]], None]:
    def add(plant: Callable[[Program], None]) -> None:
        MISTAKES[plant.__name__.strip("_")] = Mistake(base, words, plant, behind)

    return add


def unseen(base: str) -> Callable[[Callable[[Program], None]], None]:
    def add(plant: Callable[[Program], None]) -> None:
        UNSEEN[plant.__name__.strip("_")] = Mistake(base, "", plant)

    return add


# --- tools -----------------------------------------------------------------------------------------------------------


def layer(program: Program) -> Body:
    return next(body for body in program.bodies.values() if body.name not in ("prologue", "epilogue"))


def ops(body: Body, name: str) -> list[fx.Node]:
    return [node for node in body.graph.nodes if is_op(node) and op_of(node).name == name]


def put(program: Program, body: Body, behind: fx.Node, name: str, *args: fx.Node, **attrs: Any) -> tuple[fx.Node, ...]:
    """A new operation behind another, untyped."""
    build = Builder(program, body)
    with build.after(behind):
        results = build.raw(name, args, attrs, (), behind.meta["loc"])
    made = results[0] if is_op(results[0]) else results[0].all_input_nodes[0]
    made.meta["kernel"] = op_of(made).kernels[0]
    return results


def bypass(node: fx.Node) -> None:
    """Whoever reads the node reads its first operand."""
    node.replace_all_uses_with(node.args[0])


def lay(program: Program, body: Body, name: str, view: str, **places: Any) -> None:
    body.params[name] = replace(body.params[name], layout=layout(program.mesh, view, **places))


def tidy(program: Program) -> None:
    """Drop operations nobody reads, as dead-code elimination would, and infer types again as far as the rules go."""
    for body in program.bodies.values():
        for node in reversed(list(body.graph.nodes)):
            is_read = is_op(node) and any(result.users for result in results_of(node))
            is_kept = is_op(node) and ("keep" in node.meta or op_of(node).name == "prefetch.start")
            if is_op(node) and not is_read and not is_kept:
                erase(body, node)
        for node in list(body.graph.nodes):
            if node.op == "get_attr" and not node.users:
                drop_unused_params(body)
        try:
            if program.is_typed:
                reinfer(program, body)
        except (OpError, ValueError):
            continue
