"""Give every value its shape, dtype and layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moec.ir import Program, Type, layout
from moec.ir_build import reinfer
from moec.passes.base import Pass


@dataclass(frozen=True)
class InferShapes(Pass):
    """Infer types from the inputs on, everything whole on every rank.

    before: %0 = linear(%x, @attention.q)
    after:  %0 = linear(%x, @attention.q) : fp32[T, 64]<attention dp=R tp=R>
    """

    name: ClassVar[str] = "infer-shapes"

    def run(self, program: Program) -> None:
        for body in program.bodies.values():
            for node in body.graph.nodes:
                if node.op == "placeholder":
                    node.meta["type"] = _input_type(program, str(node.target))
            reinfer(program, body)


def _input_type(program: Program, name: str) -> Type:
    """Hidden rows `x`, token ids and positions have T rows; `select` names the L rows whose logits are wanted."""
    whole = layout(program.mesh, "attention")
    if name == "x":
        return Type(("T", program.hidden), program.dtype, whole)
    return Type(("L" if name == "select" else "T",), "i64", whole)
