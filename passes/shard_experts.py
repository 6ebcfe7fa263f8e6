"""Give each rank its experts (ep) and its part of each of them (etp)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from moec.blocks import SCALES
from moec.ir.build import Builder, reinfer
from moec.ir.program import Body, Program, is_op, op_of, operands, type_of
from moec.layout import Partial, Placed, Shard, layout
from moec.passes.base import Pass

#: Dim that etp cuts, of weights as of the scales of their blocks: the inner width of the expert.
INNER = {"gate": 1, "up": 1, "down": 2}


@dataclass(frozen=True)
class ShardExperts(Pass):
    """Lay expert parameters out by their placement table, and sum over etp what its ranks computed in part.

    before: param experts.down : fp32[12, 64, 24]
    after:  param experts.down : fp32[12, 64, 24]<experts ep=placed(routed) etp=S2>
    """

    name: ClassVar[str] = "shard-experts"
    exact: ClassVar[bool] = False

    def run(self, program: Program) -> None:
        if program.mesh.ep == program.mesh.etp == 1:
            return
        for body in program.bodies.values():
            for node in list(body.graph.nodes):
                if is_op(node) and op_of(node).name == "moe":
                    _shard(program, body, node)


def _shard(program: Program, body: Body, moe: fx.Node) -> None:
    table = str(moe.kwargs["table"])
    for value in operands(moe)[3:]:
        name = str(value.target)
        dim = INNER[name.removeprefix("experts.").removesuffix(SCALES)]
        places = layout(program.mesh, "experts", ep=Placed(table), etp=Shard(dim))
        body.params[name] = replace(body.params[name], layout=places)
    reinfer(program, body, until=moe)
    if type_of(moe).layout.on("etp") == Partial():
        build = Builder(program, body)
        with build.after(moe):
            whole = build.emit("all_reduce", moe, at=moe, group="experts.etp")
        moe.replace_all_uses_with(whole, lambda user: user is not whole)
    reinfer(program, body)
