"""Cut the tokens of a sparse layer in chunks, so that one chunk's exchange can travel while another computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from moec.ir.build import Builder, erase
from moec.ir.program import Body, Program, is_op, op_of, operands, output_of, results_of
from moec.passes.base import Pass


@dataclass(frozen=True)
class ChunkTokens(Pass):
    """Give each chunk of the tokens its own copy of a sparse layer's operations, by `program.overlap`.

    `2`: of the `moe` alone, whose rows, ids and weights are cut. `2:layer`: of the whole layer, whose inputs are, so
    that the attention of one chunk runs while another is on its way to its experts; `attention` and `relayout` are told
    which chunk they are given.

    before: %4 = moe(%1, %2, %3, ...)
    after:  %4 = chunk_rows(%1, index=0, parts=2); ...; %7 = moe(%4, %5, %6, ...); ...; %12 = join_rows(%7, %11)
    """

    name: ClassVar[str] = "chunk-tokens"
    exact: ClassVar[bool] = False

    def run(self, program: Program) -> None:
        count, _, entry = program.overlap.partition(":")
        if count in ("off", "1"):
            return
        parts = int(count)
        for body in program.bodies.values():
            for moe in [node for node in body.graph.nodes if is_op(node) and op_of(node).name == "moe"]:
                if entry == "layer":
                    inputs = [node for node in body.graph.nodes if node.op == "placeholder"]
                    _cut(program, body, inputs, list(filter(is_op, body.graph.nodes)), output_of(body), parts)
                else:
                    _cut(program, body, operands(moe)[:3], [moe], moe, parts)


def _cut(
    program: Program, body: Body, rows: Sequence[fx.Node], nodes: Sequence[fx.Node], result: fx.Node, parts: int
) -> None:
    """Copy `nodes`, which make `result` of `rows`, for each chunk of them; the results joined take its place."""
    build = Builder(program, body)
    with build.before(nodes[-1]):
        served = []
        for index in range(parts):
            made = {value: build.emit("chunk_rows", value, at=nodes[0], parts=parts, index=index) for value in rows}
            for node in nodes:
                _copy(build, node, made, (index, parts))
            served.append(made[result])
        whole = build.emit("join_rows", *served, at=nodes[-1])
    result.replace_all_uses_with(whole)
    for node in reversed(nodes):
        erase(body, node)


def _copy(build: Builder, node: fx.Node, made: dict[fx.Node, fx.Node], chunk: tuple[int, int]) -> None:
    """The operation on what `made` has for its operands, told of its chunk where it asks; its results enter `made`."""
    op = op_of(node)
    attrs = {**node.kwargs, "chunk": chunk} if "chunk" in op.options else node.kwargs
    values = build.emit(op.name, *(made.get(value, value) for value in operands(node)), at=node, **attrs)
    made.update(zip(results_of(node), values if isinstance(values, tuple) else (values,), strict=True))
