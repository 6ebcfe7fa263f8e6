"""Read the tokens once for gate and up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from moec.ir.build import Builder, drop_unused_params, erase
from moec.ir.params import Param
from moec.ir.program import Body, Program, is_op, op_of, operands
from moec.passes.base import Pass

#: Product that is fused -> the fused operation, and the dim along which gate and up rows are joined.
FUSED = {"linear": ("gate_up", 0), "grouped_linear": ("grouped_gate_up", 1)}


@dataclass(frozen=True)
class FuseGateUp(Pass):
    """Join gate and up into one parameter and one product with the activation behind it; of fp8 the scales likewise.

    before: %1 = linear(%0, @ffn.gate); %2 = linear(%0, @ffn.up); %3 = silu_mul(%1, %2)
    after:  %1 = gate_up(%0, @ffn.gate_up)          param ffn.gate_up = ffn.gate+ffn.up
    """

    name: ClassVar[str] = "fuse-gate-up"

    def run(self, program: Program) -> None:
        for body in program.bodies.values():
            for node in list(body.graph.nodes):
                if is_op(node) and op_of(node).name == "silu_mul":
                    _fuse(program, body, node)
            drop_unused_params(body)


def _fuse(program: Program, body: Body, act: fx.Node) -> None:
    gate, up = operands(act)
    if not (is_op(gate) and is_op(up) and gate.target is up.target and op_of(gate).name in FUSED):
        return
    (rows, params), (other_rows, other_params) = _split(body, gate), _split(body, up)
    if rows != other_rows or len(gate.users) != 1 or len(up.users) != 1:
        return
    pairs = list(zip(params, other_params, strict=True))
    if any((first.layout, first.dtype) != (second.layout, second.dtype) for first, second in pairs):
        return
    name, dim = FUSED[op_of(gate).name]
    joined = {first.parts[0].replace(".gate", ".gate_up"): _join(first, second, dim) for first, second in pairs}
    body.params |= joined
    build = Builder(program, body)
    with build.before(act):
        fused = build.emit(name, *rows, *map(build.param, joined), at=act)
    act.replace_all_uses_with(fused)
    for node in (act, gate, up):
        erase(body, node)


def _split(body: Body, product: fx.Node) -> tuple[list[fx.Node], list[Param]]:
    """What a product multiplies, and with which parameters: weights, and their scales where they have some."""
    values, named = operands(product), [str(value.target) for value in operands(product) if value.op == "get_attr"]
    return [value for value in values if value.op != "get_attr"], [body.params[name] for name in named]


def _join(first: Param, second: Param, dim: int) -> Param:
    shape = list(first.shape)
    shape[dim] += second.shape[dim]
    return Param(first.parts + second.parts, tuple(shape), first.dtype, first.layout, dim)
