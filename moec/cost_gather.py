"""Whether the experts' first product should read its rows through their pairs, or a sorted copy of them.

Gathering saves the copy: each routed row is written once and read once less. But rows then come by loads of single
threads instead of whole tiles at a time, which takes more instructions per matrix instruction. So it pays where memory
is what a product waits for, and costs where the tensor cores are.
"""

from __future__ import annotations

from torch import fx

from moec.cost_local import work
from moec.cost_sizes import Sizes

#: Floating-point operations per byte from which on a product waits for its arithmetic, where a cluster gives no rates:
#: about that of H100 and H200 in bf16 (989 TFLOP/s over 3.35 to 4.8 TB/s).
RIDGE = 200.0
#: Part of a device's peak that the gathering form reaches at most: its instructions take so many more issue slots.
#: 12.2 of the sorted form's against 19.5, for a 64x256x16 matrix instruction on sm_90 compiled from the templates.
GATHERING_PEAK = 12.2 / 19.5


def is_gathering_better(sizes: Sizes, product: fx.Node) -> bool:
    """Whether a `grouped_gate_up` waits for its bytes even where its rows are gathered."""
    flops, moved = work(sizes, product)
    device = sizes.program.cluster.device
    peak = dict(device.tflops).get(sizes.program.dtype)
    ridge = peak * 1e12 / (device.memory_gbps * 1e9) if peak and device.memory_gbps else RIDGE
    return flops < moved * ridge * GATHERING_PEAK
