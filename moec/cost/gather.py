"""Whether the experts' first product should read its rows through their pairs, or a sorted copy of them.

Gathering saves the copy: each routed row is written once and read once less. But rows then come by loads of single
threads instead of whole tiles at a time, which takes more instructions per matrix instruction. So it costs where the
tensor cores are waited for, and more than the copy only where experts are wide: with the rates of an H200 in bf16 from
about 3,500 inner columns on, however many rows there are.
"""

from __future__ import annotations

from torch import fx

from moec.cost.local import work
from moec.cost.sizes import Sizes
from moec.ir.program import operands, type_of

#: Floating-point operations per byte from which on a product waits for its arithmetic, where a cluster gives no rates:
#: that of an H200 in bf16 (989 TFLOP/s over 4.8 TB/s).
RIDGE = 206.0
#: Time of the tensor cores that goes to issuing other instructions, as a part of the rest: slots of a 64x256x16 matrix
#: instruction on sm_90, compiled from the templates, over the 128 cycles that it takes.
SORTED_ISSUE, GATHERED_ISSUE = 13.8 / 128, 19.5 / 128


def is_gathering_better(sizes: Sizes, product: fx.Node) -> bool:
    """Whether a `grouped_gate_up` takes less time with rows that it gathers than with sorted ones and their copy."""
    flops, moved = work(sizes, product)
    device = sizes.program.cluster.device
    peak = dict(device.tflops).get(sizes.program.dtype)
    ridge = peak * 1e12 / (device.memory_gbps * 1e9) if peak and device.memory_gbps else RIDGE
    rows = sizes.bytes(type_of(operands(product)[0]))
    # In bytes that memory could move in the time.
    sorted_rows = max(flops / ridge * (1 + SORTED_ISSUE), moved) + rows
    gathered = max(flops / ridge * (1 + GATHERED_ISSUE), moved - rows)
    return gathered < sorted_rows
