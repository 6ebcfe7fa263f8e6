"""Planted mistakes with experts in fp8 and the scales of their blocks."""

from __future__ import annotations

from dataclasses import replace

from moec.ir.program import Program
from moec.layout import Shard
from tests.planted.tools import lay, layer, mistake, ops


@mistake("fp8", "grouped_gate_up scales weights by what are no scales of theirs")
def _scales_of_gate_and_up_swapped(program: Program) -> None:
    body = layer(program)
    scales = body.params["experts.gate_up_scales"]
    body.params["experts.gate_up_scales"] = replace(scales, parts=scales.parts[::-1])


@mistake("fp8", "grouped_linear scales weights by what are no scales of theirs", behind="insert-exchange")
def _scales_of_another_product(program: Program) -> None:
    """Those of gate, which up has as many of."""
    gate, up, _ = ops(layer(program), "grouped_linear")
    up.args = (*up.args[:-1], gate.args[-1])


@mistake("fp8", "weights in fp8, and no others, have scales")
def _scales_forgotten(program: Program) -> None:
    (product,) = ops(layer(program), "grouped_gate_up")
    product.args = product.args[:-1]


@mistake("fp8", "weights in fp8, and no others, have scales")
def _scales_of_what_is_not_in_fp8(program: Program) -> None:
    body = layer(program)
    body.params["experts.down"] = replace(body.params["experts.down"], dtype="fp32")


@mistake("fp8", "scales of fp8 weights are", behind="insert-exchange")
def _scales_of_smaller_blocks(program: Program) -> None:
    body = layer(program)
    scales = body.params["experts.down_scales"]
    body.params["experts.down_scales"] = replace(scales, shape=(*scales.shape[:2], 4))


@mistake("fp8", "scales lie otherwise than their weights", behind="insert-exchange")
def _scales_of_all_experts_on_every_rank(program: Program) -> None:
    """Beside the weights of this rank's, in a number that fits where each rank holds as many."""
    lay(program, layer(program), "experts.down_scales", "experts", edp=Shard(0))
