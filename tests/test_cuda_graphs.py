"""Decode as graphs of kernels, as far as that shows without a GPU: which programs, which buckets, which memory.

A capture here runs a step again each time it is replayed, on the buffers that it was captured with: so a graph that
reads anything of the step but its buffers gives the logits of the step before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moec.checked import Plan
from moec.compiler import pipeline
from moec.ir.program import Program
from moec.passes.runner import run_passes
from moec.runtime import capturable
from moec.runtime.cuda_graphs import Bucket, Capture, Graphs, bucket_of
from moec.runtime.generate import Request, Result, generate
from moec.runtime.kernels import triton_products
from moec.runtime.launch.job import run_ranks
from moec.runtime.launch.rank import Rank
from moec.runtime.session import Session, open_session
from moec.runtime.step import Extent, Piece, make_step
from tests import checkpoints
from tests.parity import compile_checkpoint
from tests.programs import few, moe, plan, program_of


def decoding(chosen: Plan, kernels: str = "triton") -> Program:
    program = program_of(chosen, "decode")
    run_passes(program, pipeline(kernels))
    return program


def exchanging(exchange: str, combine: str = "reduced", **settings: object) -> Plan:
    made = plan([moe()], dp=2, ep=2)
    return replace(made, decode=replace(made.decode, exchange=exchange, combine=combine, **settings))  # type: ignore[arg-type]


# --- which programs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "chosen",
    [
        plan([moe(shared=1), moe(shared=12)]),
        plan([moe()], tp=2, etp=2),
        exchanging("padded"),
        plan([moe()], dp=2, edp=2),
    ],
    ids=("one rank", "tensors cut", "padded", "copies"),
)
def test_what_waits_for_nothing_is_captured(chosen: Plan) -> None:
    program = decoding(chosen)
    assert capturable.obstacle(program) == ""
    assert capturable.notes([program], "cuda") == []


@pytest.mark.parametrize(
    ("chosen", "kernels", "op", "why"),
    [
        (plan([moe()]), "torch", "route", "by torch waits for the device"),
        (exchanging("flat"), "triton", "fan_out", "makes as many messages as were routed"),
        (exchanging("flat", "ordered"), "triton", "fan_out", "makes as many messages as were routed"),
        (exchanging("gather"), "triton", "exchange_sizes", "moves as many rows as were routed"),
        (exchanging("padded", tokens=8, capacity=0.25, drop=True), "triton", "fan_out", "counts the rows"),
        (plan([moe(), moe()], pp=2), "triton", "send", "hands rows from stage to stage"),
        (plan([moe()], dp=4, ep=2, etp=2), "triton", "relayout", "asks each rank for its rows"),
        (replace(plan([moe()]), cache=few(1)), "triton", "prefetch.wait", "waits for experts to be copied"),
    ],
)
def test_what_stands_against_a_graph_is_named(chosen: Plan, kernels: str, op: str, why: str) -> None:
    program = decoding(chosen, kernels)
    assert capturable.obstacle(program).startswith(f"`{op}` {why}")
    (note,) = capturable.notes([program_of(chosen), program, program], "cuda")
    assert note.startswith(f"decode runs kernel by kernel, not as one graph: `{op}`")
    assert capturable.notes([program], "cpu") == []


# --- which buckets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("live", "extent", "bucket"),
    [
        (1, Extent(1, 5), Bucket(1, 256)),
        (3, Extent(3, 256), Bucket(4, 256)),
        (3, Extent(5, 257), Bucket(6, 512)),
        (0, Extent(2, 600), Bucket(2, 700)),
        (6, Extent(6, 700), Bucket(6, 700)),
        (2, None, None),
        (2, Extent(7, 9), None),
        (2, Extent(2, 701), None),
    ],
)
def test_a_steps_bucket_is_that_of_the_largest_rank(live: int, extent: Extent | None, bucket: Bucket | None) -> None:
    """Powers of two, as far as the plan's batch (6) and context (700) go."""
    program = replace(program_of(plan([moe()]), "decode"), slots=6, context=700)
    step = make_step([Piece([7], slot, 4) for slot in range(live)], extent=extent)
    assert bucket_of(program, step) == bucket


def test_only_steps_of_one_selected_row_a_sequence_have_a_bucket() -> None:
    program = replace(program_of(plan([moe()]), "decode"), slots=6, context=700)
    for pieces in ([Piece([1, 2], 0)], [Piece([1], 0, select="none")]):
        assert bucket_of(program, make_step(pieces, extent=Extent(1, 2))) is None


# --- which memory ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Replayed:
    run: Callable[[], Tensor]
    into: Tensor

    def replay(self) -> None:
        self.into.copy_(self.run())


@dataclass
class Counting:
    """Captures by running again, and counts what it captured."""

    captured: list[Replayed] = field(default_factory=list)

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Replayed, Tensor]:
        self.captured.append(Replayed(run, run()))
        return self.captured[-1], self.captured[-1].into


PROMPTS = [[5, 9, 3], [8, 1, 1, 2, 44], [7], [6, 6], [30, 2], [1, 2, 3, 4]]


def _generate(session: Session) -> Result:
    """Sequences end one after the other, and two waves follow each other in the same slots."""
    request = Request(PROMPTS, 8, eos=frozenset(range(0, 102, 5)))
    return generate(session, request, session.limits, session.place)


@pytest.mark.parametrize(
    ("mesh", "exchange", "family"),
    [(None, "flat", "mixtral"), ("ep=2", "padded", "mixtral"), ("tp=2", "padded", "deepseek_v3")],
)
def test_graphs_give_the_tokens_of_kernels(mesh: str | None, exchange: str, family: str, tmp_path: Path) -> None:
    """Fewer sequences from step to step, ranks without any, rows of slots whose sequences have ended."""
    checkpoints.make(family, tmp_path / family)
    artifact = compile_checkpoint(tmp_path / family, tmp_path, mesh, exchange, "torch", "plan.decode.batch=3")

    def main(rank: Rank) -> object:
        plain = _generate(open_session(artifact, tmp_path / family, rank)).tokens
        session, capture = open_session(artifact, tmp_path / family, rank), Counting()
        session.decode_phase.capture(capture)
        graphs = session.decode_phase._graphs
        assert graphs is not None
        found = _generate(session).tokens
        return plain, found, len(capture.captured), sorted(bucket.rows for bucket in graphs.buffers)

    ranks = run_ranks(main, artifact.num_ranks, threads=1)
    plain, found, num_captured, rows = ranks[0]  # type: ignore[misc]
    assert found == plain and all(rank[1:] == ranks[0][1:] for rank in ranks)  # type: ignore[index]
    assert len({len(tokens) for tokens in plain}) > 1, "no sequence ended before the others"
    assert 1 <= num_captured <= len(rows) and len(rows) > 1


def test_the_second_step_of_a_bucket_is_captured_and_the_third_replayed() -> None:
    program = replace(program_of(plan([moe()]), "decode"), slots=4, context=300)
    calls: list[list[int]] = []

    def forward(step: object) -> Tensor:
        calls.append(step.tokens.tolist())  # type: ignore[attr-defined]
        return step.positions[:, None].float().clone()  # type: ignore[attr-defined]

    capture = Counting()
    graphs = Graphs(program, forward, capture)
    for position in range(4):
        pieces = [Piece([10 + slot], slot, position + slot) for slot in (3, 0, 1)]
        found = graphs.run(make_step(pieces, extent=Extent(4, position + 4)))
        assert found is not None and found.flatten().tolist() == [position + 3, position, position + 1]
        (held,) = graphs.buffers.values()
        assert held.step.tokens.tolist() == [10, 11, 0, 13]
        assert held.step.positions.tolist() == [position, position + 1, 0, position + 3]
        assert len(capture.captured) == (position > 0)
    assert graphs.run(make_step([Piece([1, 2], 0)])) is None


def test_where_no_graph_can_be_captured_kernels_go_on_and_it_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(run: Callable[[], Tensor]) -> tuple[Replayed, Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing\nCompile with ...")

    program = replace(program_of(plan([moe()]), "decode"), slots=4, context=300)
    capture: Capture = refuse
    graphs = Graphs(program, lambda step: step.positions[:, None].float(), capture)
    steps = [make_step([Piece([1], 2, position)], extent=Extent(3, position + 1)) for position in range(3)]
    first, second, third = (graphs.run(step) for step in steps)
    assert first is not None and second is not None and (first.item(), second.item()) == (0, 1)
    assert third is None, "the executor's own way is left"
    assert [record.message for record in caplog.records] == [
        "decode runs kernel by kernel: no graph could be captured: operation not permitted when stream is capturing"
    ]


# --- no operation of a captured step waits -----------------------------------------------------------------------


class NoReading(TorchDispatchMode):
    """Refuses what would make a GPU's host wait: reading a number, or results whose size the values decide."""

    WAITING = ("_local_scalar_dense", "nonzero", "bincount", "masked_select", "unique", "is_nonzero")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        has_mask = name in ("index", "index_put_") and any(
            isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1] if i is not None
        )
        assert name not in self.WAITING and not has_mask, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("family", "mesh", "exchange"),
    [("qwen3_moe", None, "flat"), ("deepseek_v3", "ep=2", "padded"), ("deepseek_v3", None, "flat")],
)
def test_a_captured_step_reads_nothing_back(family: str, mesh: str | None, exchange: str, tmp_path: Path) -> None:
    """Every operation of a capturable program, by the kernels that a GPU would run, in the interpreter."""
    folder, small = tmp_path / family, ("plan.prefill.tokens=4", "plan.decode.batch=2")
    checkpoints.make(family, folder)
    artifact, plain = (
        compile_checkpoint(folder, tmp_path, mesh, exchange, kernels, *small) for kernels in ("triton", "torch")
    )
    assert capturable.obstacle(artifact.decode) == ""

    def main(rank: Rank) -> object:
        wanted = _decode_once(open_session(plain, folder, rank))
        session = open_session(artifact, folder, rank)
        session.decode_phase.capture(watching)
        return float((wanted - _decode_once(session)).abs().max())

    assert max(run_ranks(main, artifact.num_ranks, threads=1)) < 5e-5  # type: ignore[type-var]


def test_what_reads_the_device_is_seen() -> None:
    """The watch itself: a number read, a mask as an index, a list made of a tensor."""
    x = torch.arange(3.0)
    for read in (lambda: bool(x.any()), lambda: x[x > 1], lambda: x.tolist(), lambda: torch.bincount(x.long())):
        with pytest.raises(AssertionError, match=r"waits|reads"):
            watching(lambda read=read: (read(), x)[1])  # type: ignore[misc]


def watching(run: Callable[[], Tensor]) -> tuple[Replayed, Tensor]:
    """Captures, and holds every operation of the captured step against `NoReading`."""
    read = Tensor.tolist

    def tolist(tensor: Tensor) -> list[object]:
        reader = sys._getframe(1).f_globals["__name__"]
        # What the interpreter reads is no read of the host's, nor what kernels check on the CPU alone.
        assert reader.startswith(("triton", "numpy")) or reader == triton_products.__name__, f"{reader} reads"
        return read(tensor)

    with NoReading(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "tolist", tolist)
        return Counting()(run)


def _decode_once(session: Session) -> Tensor:
    """Logits of a second decode step."""
    session.prefill(make_step([Piece([4, 5], 0), Piece([7], 1)]))
    for position in (2, 3):
        pieces = [Piece([position], 0, position), Piece([9], 1, position - 1)]
        logits = session.decode(make_step(pieces, extent=Extent(2, position + 1)))
    return logits.clone()
