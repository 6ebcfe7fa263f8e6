"""Move the tokens from the attention view to the experts view before they are routed, and back behind the experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from moec.ir.build import Builder, reinfer
from moec.ir.program import Body, Program, is_op, op_of, operands
from moec.passes.base import Pass


@dataclass(frozen=True)
class SplitTokens(Pass):
    """Relayout around the router and its experts, so that no token is routed by two ranks that hold it.

    Where tp is wider than etp each rank takes its piece of the tokens it shares (`slice`) and the pieces are joined
    again behind the experts (`gather`); where etp is wider it is the other way round.

    before: %1 = router_logits(%0, @router.weight); ...; %4 = moe(%0, ...)
    after:  %1 = relayout(%0, to=experts, how=slice); %2 = router_logits(%1, ...); ...
            %5 = moe(%1, ...); %6 = relayout(%5, to=attention, how=gather)
    """

    name: ClassVar[str] = "split-tokens"

    def run(self, program: Program) -> None:
        mesh = program.mesh
        if mesh.tp == mesh.ep == mesh.etp == 1:
            return  # the two views differ in nothing
        for body in program.bodies.values():
            for node in list(body.graph.nodes):
                if is_op(node) and op_of(node).name == "moe":
                    _move(program, body, node)
            reinfer(program, body)


def _move(program: Program, body: Body, moe: fx.Node) -> None:
    build = Builder(program, body)
    x = operands(moe)[0]
    router = next(user for user in x.users if op_of(user).name == "router_logits")
    with build.before(router):
        there = build.emit("relayout", x, at=router, **_relayout(program, "experts"))
    for user in (router, moe):
        user.replace_input_with(x, there)
    reinfer(program, body, until=moe)
    with build.after(moe):
        back = build.emit("relayout", moe, at=moe, **_relayout(program, "attention"))
    moe.replace_all_uses_with(back, lambda user: user is not back)


def _relayout(program: Program, to: str) -> dict[str, object]:
    mesh = program.mesh
    narrow = (mesh.tp > mesh.etp) == (to == "experts")
    how = "keep" if mesh.tp == mesh.etp else "slice" if narrow else "gather"
    return {"to": to, "how": how, "parts": mesh.split_parts, "group": "split"}
