"""Cut the tokens of a sparse layer in chunks, so that one chunk's exchange can travel while another computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from moec.ir import Body, Program, is_op, op_of, operands
from moec.ir_build import Builder, erase
from moec.passes.base import Pass


@dataclass(frozen=True)
class ChunkTokens(Pass):
    """Give each of `program.overlap` chunks of the routed tokens a `moe` of its own.

    before: %4 = moe(%1, %2, %3, ...)
    after:  %4 = chunk_rows(%1, index=0, parts=2); ...; %7 = moe(%4, %5, %6, ...); ...; %12 = join_rows(%7, %11)
    """

    name: ClassVar[str] = "chunk-tokens"
    exact: ClassVar[bool] = False

    def run(self, program: Program) -> None:
        if program.overlap in ("off", "1"):
            return
        for body in program.bodies.values():
            for node in list(body.graph.nodes):
                if is_op(node) and op_of(node).name == "moe":
                    _chunk(program, body, node, int(program.overlap))


def _chunk(program: Program, body: Body, moe: fx.Node, parts: int) -> None:
    build = Builder(program, body)
    *rows, gate, up, down = operands(moe)
    with build.before(moe):
        served = []
        for index in range(parts):
            pieces = [build.emit("chunk_rows", value, at=moe, parts=parts, index=index) for value in rows]
            served.append(build.emit("moe", *pieces, gate, up, down, at=moe, table=moe.kwargs["table"]))
        whole = build.emit("join_rows", *served, at=moe)
    moe.replace_all_uses_with(whole)
    erase(body, moe)
