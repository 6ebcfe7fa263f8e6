"""Up to how many rows a step's experts are multiplied pair by pair, in two launches, and not sorted in four or five.

What sorting saves is to read an expert once for all of its rows. Multiplied one by one, pairs of the same expert run at
the same time: all but the first read its weights out of the L2 cache, which gives more bytes a second than memory. So
repeating costs nothing as long as the bytes of all pairs take no longer out of L2 than those of the experts in use take
out of memory; launches are saved in any case. All of that is modelled, not measured.

L2 gives an H200 1.5 times what kernels that only read get out of its memory (6.6 over 0.9 x 4.8 TB/s, as fitted in
`moec.codegen.devices`; A100, H100 and MI300X have more of it). Half of that is used: tokens agree in their choices more
than random ones do.
"""

from __future__ import annotations

from moec.cost.flow import active_experts, served_pairs
from moec.cost.sizes import Sizes

#: Pairs for each expert in use, up to which they are multiplied one by one.
MOST_REPEATS = 1.25


def most_rows(sizes: Sizes, bound: int) -> int:
    """Rows of a step, 1 to `bound`, up to which its pairs are best multiplied one by one.

    Counted on the busiest rank, with the routing that costs are counted over.
    """
    assert sizes.route is not None
    pairs_of_row = served_pairs(sizes.route) / sizes.program.mesh.ep
    rows = 1
    while rows < bound and (rows + 1) * pairs_of_row <= MOST_REPEATS * active_experts(sizes.route, rows + 1):
        rows += 1
    return rows
