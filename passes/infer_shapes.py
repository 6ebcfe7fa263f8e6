"""Give every value its shape, dtype and layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moec.ir.build import input_type, reinfer
from moec.ir.program import Program
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
                    node.meta["type"] = input_type(program, str(node.target), is_split=False)
            reinfer(program, body)
