"""When two Programs say the same, whatever their nodes are called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx

if TYPE_CHECKING:
    from moec.ir.program import Body, Program


def program_key(program: Program) -> tuple[Any, ...]:
    """Everything a program says, with values named by position: equal programs have equal keys."""
    plain = {k: v for k, v in vars(program).items() if k not in ("bodies", "routing", "fitting")}
    return plain, [_body_key(body) for body in program.bodies.values()]


def _body_key(body: Body) -> tuple[Any, ...]:
    """Parameters are named, not counted: in which order their nodes stand says nothing."""
    listed = [node for node in body.graph.nodes if node.op != "get_attr"]
    names = {node: f"%{i}" for i, node in enumerate(listed)}
    names |= {node: f"@{node.target}" for node in body.graph.nodes if node.op == "get_attr"}
    nodes = [
        (
            node.op,
            "output" if node.op == "output" else node.target,
            [names[a] if isinstance(a, fx.Node) else a for a in node.args],
            dict(node.kwargs),
            dict(node.meta),
        )
        for node in listed
    ]
    return body.name, body.params, body.states, nodes
