"""What the experts' operations ask of weights in fp8: operands behind all others, with the scales of their blocks.

Weights in another dtype have none. Scales lie as their weights do: a rank that holds part of a matrix holds whole
blocks of it.
"""

from __future__ import annotations

from torch import fx

from moec.blocks import num_blocks
from moec.ir.ops.table import Call, Places, local_dim, refuse
from moec.ir.program import op_of, operands, type_of

#: Operation -> (place of weights among its operands, place of their scales).
SCALES_AT: dict[str, tuple[tuple[int, int], ...]] = {
    "moe": ((3, 6), (4, 7), (5, 8)),
    "grouped_linear": ((2, 3),),
    "grouped_gate_up": ((2, 3),),
    "gathered_gate_up": ((3, 4),),
    "cached_experts": ((3, 5), (4, 6)),
}
#: Operations whose first weights are gate and up, one after the other, each in blocks of its own.
JOINING = ("grouped_gate_up", "gathered_gate_up", "cached_experts")


def has_fp8(node: fx.Node) -> bool:
    """Whether an operation multiplies with weights in fp8. Needs a typed Program."""
    return any(type_of(operands(node)[weights]).dtype == "fp8" for weights, _ in SCALES_AT.get(op_of(node).name, ()))


def require_scales(call: Call) -> None:
    """Hold scales against the shapes of their weights. Raises OpError."""
    name = call.op.name
    for place, (weights, scales) in enumerate(SCALES_AT[name]):
        is_fp8 = call.dtype(weights) == "fp8"
        call.require(is_fp8 == (scales < len(call.types)), "weights in fp8, and no others, have scales")
        if not is_fp8:
            continue
        experts, out, inner = call.shape(weights)
        sides = 2 if place == 0 and name in JOINING else 1
        rows = sides * num_blocks(local_dim(out, "rows of an expert") // sides)
        want = (experts, rows, num_blocks(local_dim(inner, "columns of an expert")))
        call.require(call.shape(scales) == want, f"scales of fp8 weights are {call.shape(scales)}, not {want}")


def without_scales(call: Call, axis: str, places: Places) -> Places:
    """How the other operands lie, where all scales lie as their weights. Raises OpError where one does not."""
    given = [(weights, scales) for weights, scales in SCALES_AT.get(call.op.name, ()) if scales < len(places)]
    for weights, scales in given:
        if places[scales] != places[weights]:
            raise refuse(call, axis, places, "scales lie otherwise than their weights")
    return places[: min((scales for _, scales in given), default=len(places))]
