"""FP8 weights: e4m3 numbers in blocks of 128 x 128, each block with one fp32 scale; a weight is number times scale.

The format of DeepSeek-V3's checkpoints (arXiv 2412.19437, section 3.3.2), whose `weight_scale_inv` is that scale. The
last blocks of a matrix may be smaller. No torch.
"""

from __future__ import annotations

BLOCK = 128

#: Ends the name of the parameter that holds the scales of another: `experts.gate_scales` those of `experts.gate`.
SCALES = "_scales"


def num_blocks(size: int) -> int:
    """Blocks along a dimension."""
    return -(-size // BLOCK)


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of matrices [..., N, K]."""
    *stack, rows, columns = shape
    return *stack, num_blocks(rows), num_blocks(columns)
