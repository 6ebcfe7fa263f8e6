"""Decode steps as graphs of kernels, which one launch puts on the device: for few rows, launching takes the longest.

A graph has fixed shapes and reads fixed memory. So a step's rows are copied to buffers of its own: row b belongs to KV
slot b, up to a power of two of slots, and all read their KV memory, where it lies, as far as the longest needs, also to
a power of two. There is one graph for each pair of these. All ranks know the largest of all dp ranks, so that all take
the same graphs; then their collectives fit together too. The first step of each pair runs kernel by kernel, on the same
buffers: it compiles kernels and makes what is kept from step to step. The second is captured.

The row of a slot without a live sequence is token 0 at place 0; nothing reads what it leaves there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from moec.codegen.tiles import power_of_two
from moec.ir.program import Program
from moec.runtime.step import Fixed, Step

#: Fewest places of KV memory that the sequences of a graph read.
LEAST_REACH = 256

LOG = logging.getLogger("moec")
Forward = Callable[[Step], Tensor]


class Recording(Protocol):
    """What was launched on the device, to be launched again on the same memory."""

    def replay(self) -> None: ...


#: Runs a function once while recording what it launches, without launching it; the recording, and the function's value.
Capture = Callable[[Callable[[], Tensor]], tuple[Recording, Tensor]]


class CudaCapture:
    """Captures by `torch.cuda.graph` (HIP graphs on AMD). All graphs share one pool: never two run at the same time.

    A result is read before the next graph runs, and no graph reads what another has left.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Recording, Tensor]:
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process (NCCL's watchdog, a copier of weights) may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()
        return graph, result


@dataclass(frozen=True)
class Bucket:
    """Rows of a graph, one for each KV slot, and how far each reads KV memory."""

    rows: int
    reach: int


@dataclass(eq=False)
class Buffers:
    """The memory that one bucket's graph reads: a step in it, and once captured the graph and its logits."""

    step: Step
    recording: Recording | None = None
    logits: Tensor | None = None


def bucket_of(program: Program, step: Step) -> Bucket | None:
    """The bucket of a step; None for one that no graph runs: several rows a sequence, or not every rank's step."""
    extent = step.extent
    is_plain = step.num_tokens == step.num_sequences == len(step.select)
    if extent is None or not is_plain or not 0 < extent.slots <= program.slots or extent.tokens > program.context:
        return None
    reach = min(program.context, max(LEAST_REACH, power_of_two(extent.tokens)))
    return Bucket(min(program.slots, power_of_two(extent.slots)), reach)


@dataclass(eq=False)
class Graphs:
    """The graphs of one program on one rank. `forward` computes logits [L, V] of a step, kernel by kernel."""

    program: Program
    forward: Forward
    capture: Capture
    buffers: dict[Bucket, Buffers] = field(default_factory=dict)
    is_refused: bool = False

    def run(self, step: Step) -> Tensor | None:
        """Logits [L, V] of a step; None for one that no graph runs."""
        bucket = bucket_of(self.program, step)
        if bucket is None or self.is_refused:
            return None
        is_first = bucket not in self.buffers
        if is_first:
            self.buffers[bucket] = Buffers(_fixed_step(bucket, step.tokens.device))
        held = self.buffers[bucket]
        slots = torch.tensor(step.slots, dtype=torch.int64).to(step.tokens.device)
        _fill(held.step, step, slots)
        if is_first or (held.recording is None and not self._record(held)):
            return self.forward(held.step)[slots]
        assert held.recording is not None and held.logits is not None
        held.recording.replay()
        return held.logits[slots]

    def _record(self, held: Buffers) -> bool:
        """Capture a bucket's graph. Where the device's library refuses, all steps go on kernel by kernel."""
        try:
            held.recording, held.logits = self.capture(lambda: self.forward(held.step))
        except RuntimeError as error:
            self.is_refused = True
            LOG.warning("decode runs kernel by kernel: no graph could be captured: %s", str(error).partition("\n")[0])
        return not self.is_refused


def _fixed_step(bucket: Bucket, device: torch.device) -> Step:
    rows = bucket.rows
    tokens, positions = torch.zeros((2, rows), dtype=torch.int64, device=device)
    return Step(
        tokens,
        positions,
        select=torch.arange(rows, device=device),
        slots=tuple(range(rows)),
        starts=tuple(range(rows + 1)),
        cached=(bucket.reach - 1,) * rows,
        fixed=Fixed(bucket.reach),
    )


def _fill(into: Step, step: Step, slots: Tensor) -> None:
    """Copy a step's rows to those of their slots; the others are of no sequence."""
    for buffer, given in ((into.tokens, step.tokens), (into.positions, step.positions)):
        buffer.zero_()
        buffer[slots] = given
