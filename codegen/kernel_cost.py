"""What a grouped GEMM costs for given rows of each expert: bytes, tiles, cycles and microseconds.

Bytes count each datum once that later tiles find in L2: the weights of an expert (its tiles are neighbours), and rows
gathered more than once as far as all rows fit. The least any kernels could move is `reference`: weights of the experts
in use once, the layer's rows in (gate and up) and out (down).

A tile takes the longest of what it issues, multiplies and loads, after its first operands have come:
    issue     (steps x slots of the body's loop + slots around it) x warps / 4 schedulers
    multiply  2 m n k / (peak per multiprocessor and cycle), or what that reads of shared memory if it takes longer
    load      (m + n) k bytes over the port to L2
Tiles go to multiprocessors in turn, as the persistent grid deals them out; the busiest one counts. A kernel takes the
longest of that, its bytes over the rate of memory, and all tiles' loads over the rate of L2; then comes a launch.
Constants are those of `moec.codegen.devices`; the measure of slots is that of `moec.codegen.machine_loops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moec.codegen.devices import (
    FILL_NS,
    LAUNCH_US,
    MEMORY_SHARE,
    PORT_BYTES,
    SCHEDULERS,
    SHARED_BYTES,
    Device,
    Occupancy,
    occupancy,
)
from moec.codegen.expected_rows import Rows
from moec.codegen.gemm_variant import RowSource, Store, Weights
from moec.codegen.grouped_gemm import GroupedGemm
from moec.codegen.machine_code import MachineCode
from moec.codegen.machine_loops import MatrixLoop
from moec.codegen.targets import find_target
from moec.codegen.tiles import Tile

Floats = NDArray[np.float64]
#: Bytes of a weight, and weights that share a scale of 4 bytes (fp8: blocks of 128 x 128; int4: groups of 128).
WEIGHT_BYTES = {Weights.FP8: 1.0, Weights.INT8: 1.0, Weights.INT4: 0.5}
SCALED = {Weights.FP8: 128 * 128, Weights.INT8: 128, Weights.INT4: 128}
#: Warps that execute one matrix instruction together; a block's tensor memory is fed by one thread.
GROUP_WARPS = {"HGMMA": 4, "QGMMA": 4, "IGMMA": 4, "HMMA": 1, "IMMA": 1, "MFMA": 1}


@dataclass(frozen=True)
class Traffic:
    """Bytes of memory: `moved` by the kernel, and its part of the layer's `minimum`."""

    moved: float
    minimum: float


@dataclass(frozen=True)
class GemmCost:
    """A kernel's cost. Times are microseconds; `issue_us` and `tensor_us` are of all multiprocessors at work evenly.

    `busiest_us` is the time of the busiest multiprocessor. `predicted_us` includes the launch.
    """

    traffic: Traffic
    useful_rows: int
    padded_rows: int
    tiles: int
    memory_us: float
    l2_us: float
    tensor_us: float
    issue_us: float
    busiest_us: float
    roof_us: float
    occupancy: Occupancy | None

    @property
    def least_us(self) -> float:
        """What the kernel cannot beat, whatever its machine code: memory, L2 and arithmetic."""
        return max(self.memory_us, self.l2_us, self.tensor_us)

    @property
    def predicted_us(self) -> float:
        return LAUNCH_US + max(self.memory_us / MEMORY_SHARE, self.l2_us, self.busiest_us)

    @property
    def roof_share(self) -> float:
        """Part of the roof that the prediction reaches."""
        return self.roof_us / self.predicted_us if self.predicted_us else 0.0


def gemm_cost(
    values: GroupedGemm, rows: Rows, tokens: int, device: Device, code: MachineCode | None = None, shared: int = 0
) -> GemmCost:
    """The cost for `rows` [M] of `tokens` tokens; without machine code nothing is issued, which makes a lower bound.

    `shared`: bytes of shared memory that a launch asks for.
    """
    target = find_target(values.target.text)
    useful, padded = int(rows.sum()), values.padded_rows(rows.tolist())
    moved = traffic(values, rows, tokens, device)
    loops = [None] * len(values.bodies) if code is None else match_loops(values, code.loops)
    fits = None
    if code is not None:
        own = max(0, code.static_shared - device.reserved)  # what a cubin says has the reserved bytes in it
        fits = occupancy(device, target, values.warps, code.registers, shared + own)
    pairs = list(zip(values.bodies, loops, strict=True))
    issue = np.array([issue_cycles(values, tile, loop) for tile, loop in pairs])
    tensor = np.array([tensor_cycles(values, tile, device, loop) for tile, loop in pairs])
    load = np.array([tile_bytes(values, tile) for tile in values.bodies])
    order = body_order(values, rows)
    tiles = np.bincount(order, minlength=len(pairs))
    per_us = device.num_sms * device.cycles_per_us
    lasting = FILL_NS * device.clock_ghz / max(1, fits.blocks) if fits else 0.0
    cycles = np.maximum(np.maximum(issue, tensor), load / PORT_BYTES) + lasting
    flops = 2.0 * useful * values.sides * values.width * values.depth
    return GemmCost(
        traffic=moved,
        useful_rows=useful,
        padded_rows=padded,
        tiles=int(tiles.sum()),
        memory_us=moved.moved / (device.memory_gbps * 1e3),
        l2_us=float(tiles @ load) / (device.l2_gbps * 1e3),
        tensor_us=float(tiles @ tensor) / per_us,
        issue_us=float(tiles @ issue) / per_us,
        busiest_us=busiest(order, cycles, values.programs, device.num_sms) / device.cycles_per_us,
        roof_us=device.roof_us(moved.minimum, flops, values.multiplied),
        occupancy=fits,
    )


def traffic(values: GroupedGemm, rows: Rows, tokens: int, device: Device) -> Traffic:
    """Bytes for `rows` [M] of `tokens` tokens, of which the layer's rows in or out are part of the minimum."""
    useful, width = int(rows.sum()), values.dtype.num_bytes
    weights = int((rows > 0).sum()) * values.sides * values.width * values.depth * weight_bytes(values)
    layer_rows = min(tokens, useful) * values.hidden * width
    read = useful * values.depth * values.row_bytes
    if values.rows is RowSource.GATHERED:
        once = min(tokens, useful) * values.depth * values.row_bytes
        again = max(0.0, 1.0 - device.l2_bytes / max(1.0, once))  # part of the repeated reads that miss L2
        read = once + (read - once) * again
    written = useful * values.width * width
    if values.store is Store.ACCUMULATED:  # fp32 sums: cleared, read and written by atomics in L2, cast at the end
        written = 2 * min(tokens, useful) * values.width * 4 + layer_rows
    lists = 4 * len(rows) + (8 * useful if values.rows is RowSource.GATHERED or values.store is not Store.PLAIN else 0)
    return Traffic(weights + read + written + lists, weights + layer_rows)


def weight_bytes(values: GroupedGemm) -> float:
    """Bytes of a weight with its part of a scale."""
    if values.weights is Weights.PLAIN:
        return float(values.dtype.num_bytes)
    return WEIGHT_BYTES[values.weights] + 4 / SCALED[values.weights]


def tile_bytes(values: GroupedGemm, tile: Tile) -> float:
    """Bytes of operands that a tile loads."""
    depth = -(-values.depth // tile.k) * tile.k
    return depth * (tile.m * values.row_bytes + values.sides * tile.n * weight_bytes(values))


def tensor_cycles(values: GroupedGemm, tile: Tile, device: Device, loop: MatrixLoop | None = None) -> float:
    """Cycles of a multiprocessor's tensor cores for a tile, or of its shared memory where warp groups wait for that."""
    depth = -(-values.depth // tile.k) * tile.k
    flops = 2.0 * tile.m * values.sides * tile.n * depth
    cycles = flops / (device.peak(values.multiplied) / device.num_sms / device.cycles_per_us)
    if loop is None or loop.op.shape is None or GROUP_WARPS.get(loop.op.name) != 4:
        return cycles
    m, n, k = loop.op.shape
    is_decoded = values.weights is not Weights.PLAIN and values.multiplied != "fp8"  # in registers, the left side
    read = (n if is_decoded else m + n) * k * values.row_bytes / SHARED_BYTES
    return max(cycles, flops / (2.0 * m * n * k) * read)


def issue_cycles(values: GroupedGemm, tile: Tile, loop: MatrixLoop | None) -> float:
    """Cycles that a multiprocessor's schedulers need for the instructions of a tile."""
    if loop is None:
        return 0.0
    slots = iterations(values, tile, loop) * loop.slots + (loop.tile_slots or 0)
    return slots * values.warps / SCHEDULERS


def iterations(values: GroupedGemm, tile: Tile, loop: MatrixLoop) -> float:
    """How often a tile runs its loop: its matrix instructions over those of one turn, or its steps where unknown."""
    steps = -(-values.depth // tile.k)
    if loop.op.shape is None:
        return max(0, steps - (loop.peeled > 0))
    return max(0.0, steps * step_ops(values, tile, loop) - loop.peeled) / loop.num_ops


def step_ops(values: GroupedGemm, tile: Tile, loop: MatrixLoop) -> float:
    """Matrix instructions of a warp, or a warp group, in one step of a tile."""
    assert loop.op.shape is not None
    m, n, k = loop.op.shape
    groups = max(1, values.warps // GROUP_WARPS.get(loop.op.name, values.warps))
    return max(1.0, tile.m * values.sides * tile.n * tile.k / (m * n * k * groups))


def match_loops(values: GroupedGemm, loops: Sequence[MatrixLoop]) -> list[MatrixLoop | None]:
    """The loop of each body: by the columns of its matrix instruction, else by how many a step takes, else in order."""
    return [_match(values, i, tile, loops) for i, tile in enumerate(values.bodies)]


def _match(values: GroupedGemm, i: int, tile: Tile, loops: Sequence[MatrixLoop]) -> MatrixLoop | None:
    if not loops:
        return None
    if len(loops) == len(values.bodies):
        columns = tile.m if tile.swapped else min(256, values.sides * tile.n)
        named = [loop for loop in loops if loop.op.shape and loop.op.name in GROUP_WARPS]
        exact = [loop for loop in named if loop.op.shape and loop.op.shape[1] == columns]
        if len(exact) == 1:
            return exact[0]
    shaped = [loop for loop in loops if loop.op.shape is not None]
    near = [loop for loop in shaped if step_ops(values, tile, loop) == loop.num_ops]
    if len(near) == 1:
        return near[0]
    return loops[min(i, len(loops) - 1)]


def busiest(order: NDArray[np.int64], cycles: Floats, programs: int, num_sms: int) -> float:
    """Cycles of the multiprocessor with most to do: tiles in the device's order, dealt out to programs in turn."""
    if not len(order):
        return 0.0
    dealt = np.arange(len(order)) % programs % num_sms
    return float(np.bincount(dealt, weights=cycles[order], minlength=num_sms).max())


def body_order(values: GroupedGemm, rows: Rows) -> NDArray[np.int64]:
    """Which of `values.bodies` each tile of the grid runs, in order: expert by expert, the largest tiles first."""
    sizes = values.sizes
    left = -(-rows // sizes[-1]) * sizes[-1]
    cut = np.zeros((len(rows), len(values.bodies)), dtype=np.int64)
    for i, size in enumerate(sizes):
        cut[:, i], left = left // size, left % size
    if values.rest:
        over = rows % sizes[-1]
        cut[:, -1] = (cut[:, -2] > 0) & (over > 0) & (over <= values.rest)
        cut[:, -2] -= cut[:, -1]
    kinds = np.tile(np.arange(len(values.bodies)), len(rows))
    return np.repeat(kinds, cut.ravel() * values.num_columns)
