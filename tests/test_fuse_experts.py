"""Pass fuse-experts over random programs, what the verifier and the proof hold of its operations, and its rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moec.checked import Plan
from moec.cost.gather import is_gathering_better
from moec.cost.sizes import sizes_of
from moec.diagnostics import CompileError
from moec.ir.program import Program, op_of
from moec.ir.proof.program import prove
from moec.ir.verifier.program import verify
from moec.passes.fuse_experts import FuseExperts
from moec.topology import Cluster, Device
from tests.programs import compiled, edited, evaluate, few, moe, plan, random_plan, random_steps, weights_of

FUSED = {"group_pairs", "gathered_gate_up", "reduced_linear"}


def fused(chosen: Plan, sums: str = "any", phase: str = "prefill") -> tuple[Program, Program]:
    """A program before and after the pass."""
    before, after = (compiled(chosen, "cache-experts", phase=phase) for _ in range(2))
    before.sums = after.sums = sums
    FuseExperts("triton").run(after)
    return before, after


def operations(program: Program) -> set[str]:
    return {op_of(node).name for _, node in program.nodes()}


def test_it_preserves_random_programs() -> None:
    """The same bits in the reference evaluator, which adds in order; each row still reaches its experts."""
    seen: set[str] = set()
    for seed in range(30):
        chosen = replace(random_plan(seed), cache=None)
        before, after = fused(chosen, "any" if seed % 2 else "fixed")
        if operations(before) == operations(after):
            continue
        verify(after)
        prove(after)
        seen |= operations(after) & FUSED
        weights, steps = weights_of(compiled(chosen, "split-stages"), seed), random_steps(seed)
        assert torch.equal(evaluate(after, weights, steps), evaluate(before, weights, steps)), f"seed {seed}"
    assert seen == FUSED


@pytest.mark.parametrize(
    ("exchange", "combine", "wanted"),
    [
        ("gather", "reduced", FUSED),
        ("flat", "reduced", {"reduced_linear"}),
        ("padded", "reduced", {"reduced_linear"}),
        ("flat", "ordered", set()),
    ],
)
def test_rows_that_came_in_messages_are_sorted(exchange: str, combine: str, wanted: set[str]) -> None:
    chosen = plan([moe()], dp=2, ep=2)
    phase = replace(chosen.prefill, exchange=exchange, combine=combine)
    _, after = fused(replace(chosen, prefill=phase))
    assert operations(after) & FUSED == wanted


def test_cached_experts_stay_one_operation() -> None:
    before, after = fused(replace(plan([moe()]), cache=few(1)))
    assert "cached_experts" in operations(before) and operations(before) == operations(after)


@pytest.mark.parametrize("tokens", [1, 64, 1024, 4096, 65536])
@pytest.mark.parametrize(("hidden", "inner", "count", "top"), [(2048, 768, 128, 8), (4096, 14336, 8, 2)])
def test_rows_are_gathered_where_a_copy_costs_more_than_instructions(
    tokens: int, hidden: int, inner: int, count: int, top: int
) -> None:
    """On an H200 in bf16, Qwen3-30B-A3B's experts are too narrow for a copy; Mixtral's wide ones pay for it in prompts.

    By hand for Mixtral at 4096 tokens, X = 8192 rows: copying takes 2 x 8192 x 4096 x 2 bytes / 4.8 TB/s = 28 us; the
    product's 1.92 TFLOP / 989 TFLOP/s = 1945 us, of which gathering takes 5.7 / 128 = 4.5 % more: 87 us.
    """
    h200 = Cluster("h200", 1, 1, Device(memory_gbps=4800.0, tflops=(("bf16", 989.0),)))
    chosen = replace(plan([moe(count=count, top=top, inner=inner)], hidden=hidden), compute="bf16")
    for cluster in (h200, Cluster("unknown", 1, 1)):
        program = compiled(replace(chosen, prefill=replace(chosen.prefill, tokens=tokens)), "fuse-gate-up")
        program.cluster = cluster
        body, product = next((b, n) for b, n in program.nodes() if op_of(n).name == "grouped_gate_up")
        is_better = inner == 768 or tokens <= 64
        assert is_gathering_better(sizes_of(program, body), product) == is_better


# --- what is refused ---------------------------------------------------------------------------------------------

PAIRS = "%17, %18 = group_pairs(%15, table=routed) : i32[8]<attention>, i64[X]<attention> !1:1\n"
TWICE = (PAIRS, PAIRS + "  " + PAIRS.replace("%17, %18", "%30, %31"))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ((("routed, top=2) : fp32[X", "routed, top=1) : fp32[X"),), "gathered_gate_up takes rows of 1 choices each"),
        ((TWICE, ("(%13, %17, %18", "(%13, %30, %18")), "offsets and pairs that are not of one group_pairs"),
        ((TWICE, ("(%19, %17,", "(%19, %30,")), "reduced_linear takes offsets of other rows"),
        ((TWICE, ("down, %18,", "down, %31,")), "takes rows that were grouped by another group_pairs"),
    ],
)
def test_the_verifier_holds_what_belongs_together(changes: tuple[tuple[str, str], ...], why: str) -> None:
    """%15 and %16 are what route gives, %13 the rows."""
    program = fused(plan([moe()]))[1]
    verify(program)
    with pytest.raises(CompileError, match=why):
        verify(edited(program, *changes))
