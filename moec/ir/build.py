"""The one function that makes nodes: place and loc from the node it stands for, types from the operation's rules."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import fx

from moec.ir.ops import (  # noqa: F401  (importing them fills the table)
    attention,
    cache,
    comm,
    dense,
    exchange,
    fused,
    moe,
    paired,
    pairs,
)
from moec.ir.ops.table import OPS, Op
from moec.ir.params import Param
from moec.ir.program import Body, Loc, Program, Type, is_op, loc_of, op_of, results_of, type_of
from moec.layout import Shard, layout


class Builder:
    """Adds nodes to one body. Before `infer-shapes` has run they get no types; after it they must."""

    def __init__(self, program: Program, body: Body) -> None:
        self.program, self.body = program, body

    @contextmanager
    def before(self, node: fx.Node) -> Iterator[None]:
        """New nodes go in front of `node`."""
        with self.body.graph.inserting_before(node):
            yield

    @contextmanager
    def after(self, node: fx.Node) -> Iterator[None]:
        """New nodes go behind `node` and its numbered results."""
        last = results_of(node)[-1] if is_op(node) else node
        with self.body.graph.inserting_after(last):
            yield

    def param(self, name: str) -> fx.Node:
        """The node that stands for parameter `name` of the body, made on first use, in front of all operations."""
        node: fx.Node
        for node in self.body.graph.nodes:
            if node.op == "get_attr" and node.target == name:
                return node
        first = next((n for n in self.body.graph.nodes if n.op not in ("placeholder", "get_attr")), None)
        with self.body.graph.inserting_before(first) if first else _here():
            node = self.body.graph.create_node("get_attr", name)
        if self.program.is_typed:
            node.meta["type"] = param_type(self.program, self.body.params[name])
        return node

    def input(self, name: str, type: Type | None = None) -> fx.Node:
        node = self.body.graph.placeholder(name)
        if type is not None:
            node.meta["type"] = type
        return node

    def emit(self, name: str, *args: fx.Node, at: Loc | fx.Node, **attrs: Any) -> Any:
        """One operation; its value, or the tuple of its values where it has several. Raises OpError."""
        types = infer(self.program, OPS[name], args, attrs) if self.program.is_typed else ()
        loc = loc_of(at) if isinstance(at, fx.Node) else at
        results = self.raw(name, args, attrs, types, loc)
        return results[0] if len(results) == 1 else results

    def raw(
        self, name: str, args: Sequence[fx.Node], attrs: dict[str, Any], types: Sequence[Type], loc: Loc
    ) -> tuple[fx.Node, ...]:
        """A node with the types given (none: not inferred yet), unchecked: for the parser. Returns its results."""
        op = OPS[name]
        node = self.body.graph.create_node("call_function", op, tuple(args), attrs)
        node.meta["loc"] = loc
        node.meta["stream"] = stream_of(self.program, node)
        is_single = op.count(attrs) == 1
        if types:
            node.meta["type"] = types[0] if is_single else tuple(types)
        return (node,) if is_single else self._results(node, tuple(types))

    def _results(self, node: fx.Node, types: tuple[Type, ...]) -> tuple[fx.Node, ...]:
        found = []
        previous = node
        for index in range(op_of(node).count(node.kwargs)):
            with self.body.graph.inserting_after(previous):
                previous = self.body.graph.create_node("call_function", operator.getitem, (node, index))
            if types:
                previous.meta["type"] = types[index]
            found.append(previous)
        return tuple(found)


@contextmanager
def _here() -> Iterator[None]:
    yield


def param_type(program: Program, param: Param) -> Type:
    """Type of one rank's part of a parameter. Raises ValueError where a dim does not divide."""
    return Type(param.local_shape(program.mesh, program.placements), param.dtype, param.layout)


#: What a body may read besides its parameters, and the symbol that counts its rows.
INPUTS = {"tokens": "T", "positions": "T", "x": "T", "select": "L"}


def input_type(program: Program, name: str, is_split: bool) -> Type:
    """Type of an input: hidden rows `x`, token ids, positions, or `select`, the rows whose logits are wanted.

    `is_split`: each dp rank has its own rows; before that every rank has all of them.
    """
    lies = layout(program.mesh, "attention", **({"dp": Shard(0)} if is_split else {}))
    if name == "x":
        return Type((INPUTS[name], program.hidden), program.dtype, lies)
    return Type((INPUTS[name],), "i64", lies)


def infer(program: Program, op: Op, args: tuple[fx.Node, ...], attrs: dict[str, Any]) -> tuple[Type, ...]:
    """Types of the results of `op` on `args` by its rules. Raises OpError."""
    return op.infer(tuple(type_of(a) for a in args), attrs, program.mesh, program.placements)


def stream_of(program: Program, node: fx.Node) -> str:
    """`compute`, `copy` for what fetches experts, or the class of links a collective's widest group crosses."""
    effects = op_of(node).effects
    if "cache" in effects:
        return "copy"
    if "stage" not in effects and ("comm" not in effects or node.kwargs.get("how", "gather") != "gather"):
        return "compute"
    name = "stages" if "stage" in effects else str(node.kwargs.get("group"))
    groups = program.mesh.groups().get(name, ())
    crossing = any(program.cluster.link_class(ranks) == "inter" for ranks in groups)
    return "inter" if crossing else "intra"


def reinfer(program: Program, body: Body, until: fx.Node | None = None) -> None:
    """Give the nodes of a body (up to `until`) the types that the operations' rules give now. Raises OpError."""
    for node in body.graph.nodes:
        if node.op == "get_attr":
            node.meta["type"] = param_type(program, body.params[node.target])
        elif is_op(node):
            types = infer(program, op_of(node), node.args, dict(node.kwargs))
            node.meta["type"] = types[0] if len(types) == 1 else types
        elif node.op == "call_function":
            source, index = node.args
            node.meta["type"] = source.meta["type"][index]
        if node is until:
            break


def erase(body: Body, node: fx.Node) -> None:
    """Remove an operation and its numbered results; nothing may use them any more."""
    for result in reversed(results_of(node)):
        if result is not node:
            body.graph.erase_node(result)
    body.graph.erase_node(node)


def drop_unused_params(body: Body) -> None:
    """Forget parameters that no operation reads."""
    for node in list(body.graph.nodes):
        if node.op == "get_attr" and not node.users:
            del body.params[node.target]
            body.graph.erase_node(node)
