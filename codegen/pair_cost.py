"""What the kernels of a few pairs cost: bytes, instructions, programs on multiprocessors, microseconds.

Weights of an expert count once for memory, since its pairs run at the same time, and once for each pair for L2. A
multiprocessor takes for a program the longest of what it issues, multiplies on the plain units, loads over the port,
and of its life over the programs that live at one time, which is Little's law:

    life      an id and its slot, then the first weights, then what it issues or steps / (stages - 1) loads in turn

Constants are those of `moec.codegen.devices`.
"""

from __future__ import annotations

from moec.codegen.devices import FILL_NS, PORT_BYTES, SCHEDULERS, Device, occupancy
from moec.codegen.expected_rows import Rows
from moec.codegen.gemm_variant import Projection
from moec.codegen.kernel_cost import GemmCost, Traffic
from moec.codegen.machine_code import MachineCode
from moec.codegen.pair_product import PairProduct
from moec.codegen.targets import find_target

#: Nanoseconds of the two loads out of L2 that begin a program, one after the other (H100: Chips and Cheese, 2023).
LOOKUPS_NS = 2 * 150.0
#: Fused multiply-adds of a multiprocessor in a cycle.
PLAIN_UNITS = 128


def pair_cost(
    values: PairProduct, rows: Rows, tokens: int, device: Device, code: MachineCode | None = None, shared: int = 0
) -> GemmCost:
    """The cost for `rows` [M] of `tokens` tokens; without machine code nothing is issued, which makes a lower bound.

    `shared`: bytes of shared memory that a launch asks for. Programs are counted as tiles.
    """
    useful = int(rows.sum())
    expert_bytes = float(values.op.sides * values.width * values.depth * values.dtype.num_bytes)
    moved = traffic(values, rows, tokens, expert_bytes)
    apart = useful if values.op is Projection.GATE_UP else min(tokens, useful)
    programs = apart * values.num_columns
    fits = None
    if code is not None:
        own = max(0, code.static_shared - device.reserved)  # what a cubin says has the reserved bytes in it
        fits = occupancy(device, find_target(values.target.text), values.warps, code.registers, shared + own)
    share = useful * expert_bytes / max(1, programs)  # of the weights, of a program
    issue = issue_slots(values, code) * values.warps / SCHEDULERS
    plain = share / values.dtype.num_bytes / PLAIN_UNITS
    resident = max(1, min(fits.blocks if fits else 1, -(-programs // device.num_sms)))
    waits = -(-values.num_steps // max(1, values.stages - 1)) * FILL_NS * device.clock_ghz
    life = (LOOKUPS_NS + FILL_NS) * device.clock_ghz + max(issue, waits) if fits else 0.0
    cycles = max(issue, plain, share / PORT_BYTES, life / resident)
    per_us = device.num_sms * device.cycles_per_us
    flops = 2.0 * useful * values.op.sides * values.width * values.depth
    return GemmCost(
        traffic=moved,
        useful_rows=useful,
        padded_rows=useful,
        tiles=programs,
        memory_us=moved.moved / (device.memory_gbps * 1e3),
        l2_us=useful * expert_bytes / (device.l2_gbps * 1e3),
        tensor_us=programs * plain / per_us,
        issue_us=programs * issue / per_us,
        busiest_us=-(-programs // device.num_sms) * cycles / device.cycles_per_us,
        roof_us=device.roof_us(moved.minimum, flops, values.dtype),
        occupancy=fits,
    )


def traffic(values: PairProduct, rows: Rows, tokens: int, expert_bytes: float) -> Traffic:
    """Bytes for `rows` [M] of `tokens` tokens, of which the layer's rows in or out are part of the minimum."""
    useful, width = int(rows.sum()), values.dtype.num_bytes
    weights = int((rows > 0).sum()) * expert_bytes
    layer_rows = min(tokens, useful) * values.hidden * width
    activations = useful * values.inner * width
    lists = tokens * values.top * (8 if values.op is Projection.GATE_UP else 12)  # ids, and weights of pairs
    return Traffic(weights + layer_rows + activations + lists, weights + layer_rows)


def issue_slots(values: PairProduct, code: MachineCode | None) -> float:
    """Instructions that a warp of a program issues: its text once, and the loop over steps as often as it runs."""
    if code is None:
        return 0.0
    loop = code.reading
    if loop is None:  # all steps stand in the text
        return float(code.instructions)
    unrolled = max(1, round(loop.loads / values.step_loads))
    return code.instructions + loop.slots * (values.num_steps / unrolled - 1)
