"""What the experts' operations ask of weights in fp8: an operand behind all others with the scales of their blocks.

Weights in another dtype have none. Scales lie as their weights do: a rank that holds part of a matrix holds whole
blocks of it.
"""

from __future__ import annotations

from moec.blocks import num_blocks
from moec.ir.ops.table import Call, Places, local_dim, refuse

#: (place of weights among the operands, place of their scales).
Pairs = tuple[tuple[int, int], ...]


def require_scales(call: Call, pairs: Pairs, sides: int = 1) -> None:
    """Hold scales against the shapes of their weights, of `sides` matrices joined (2 for gate and up)."""
    for weights, scales in pairs:
        is_fp8 = call.dtype(weights) == "fp8"
        call.require(is_fp8 == (scales < len(call.types)), "weights in fp8, and no others, have scales")
        if not is_fp8:
            continue
        experts, out, inner = call.shape(weights)
        rows = sides * num_blocks(local_dim(out, "rows of an expert") // sides)
        want = (experts, rows, num_blocks(local_dim(inner, "columns of an expert")))
        call.require(call.shape(scales) == want, f"scales of fp8 weights are {call.shape(scales)}, not {want}")


def without_scales(call: Call, axis: str, places: Places, pairs: Pairs) -> Places:
    """How the other operands lie, where all scales lie as their weights. Raises OpError where one does not."""
    given = [(weights, scales) for weights, scales in pairs if scales < len(places)]
    for weights, scales in given:
        if places[scales] != places[weights]:
            raise refuse(call, axis, places, "scales lie otherwise than their weights")
    return places[: min((scales for _, scales in given), default=len(places))]
