"""Pass pair-experts over random programs, and what the verifier and the proof hold of its operation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moec.checked import Plan
from moec.compiler import pipeline
from moec.compiler_uses import uses
from moec.cost.operations import node_cost
from moec.cost.sizes import sizes_of
from moec.diagnostics import CompileError
from moec.ir.program import Program, op_of
from moec.ir.proof.program import prove
from moec.ir.text import print_program
from moec.ir.verifier.program import verify
from moec.passes.fuse_experts import FuseExperts
from moec.passes.pair_experts import PairExperts
from moec.passes.runner import run_passes
from moec.runtime import capturable
from moec.topology import Cluster, Device
from tests.programs import compiled, edited, evaluate, few, moe, plan, program_of, random_plan, random_steps, weights_of


def paired(chosen: Plan, sums: str = "fixed", phase: str = "decode") -> tuple[Program, Program]:
    """A program before and after the pass."""
    before, after = (compiled(chosen, "cache-experts", phase=phase) for _ in range(2))
    for program in (before, after):
        program.sums = sums
        FuseExperts("triton").run(program)
    PairExperts("triton").run(after)
    return before, after


def operations(program: Program) -> set[str]:
    return {op_of(node).name for _, node in program.nodes()}


def test_it_preserves_random_programs() -> None:
    """The same bits in the reference evaluator; each row still reaches its experts, once, with its weight."""
    num_paired = 0
    for seed in range(30):
        chosen = replace(random_plan(seed), cache=None)
        before, after = paired(chosen, "any" if seed % 2 else "fixed")
        if "paired_experts" not in operations(after):
            assert operations(before) == operations(after)
            continue
        num_paired += 1
        verify(after)
        prove(after)
        weights, steps = weights_of(compiled(chosen, "split-stages", phase="decode"), seed), random_steps(seed)
        assert torch.equal(evaluate(after, weights, steps), evaluate(before, weights, steps)), f"seed {seed}"
    assert num_paired > 3


@pytest.mark.parametrize(
    ("exchange", "is_paired"), [("gather", True), ("flat", False), ("padded", False), ("two_hop", False)]
)
def test_rows_that_came_in_messages_are_sorted(exchange: str, is_paired: bool) -> None:
    chosen = plan([moe()], dp=2, ep=2)
    _, after = paired(replace(chosen, decode=replace(chosen.decode, exchange=exchange, combine="reduced")))
    assert ("paired_experts" in operations(after)) == is_paired


def test_cached_experts_and_prefills_stay_as_they_are() -> None:
    for before, after in (paired(replace(plan([moe()]), cache=few(1))), paired(plan([moe()]), phase="prefill")):
        assert operations(before) == operations(after) and "paired_experts" not in operations(after)


def test_it_costs_what_the_operations_apart_move_but_for_what_is_sorted() -> None:
    h200 = Cluster("h200", 1, 1, Device(memory_gbps=4800.0, tflops=(("bf16", 989.0),)))
    chosen = replace(plan([moe(count=128, top=8, inner=768)], hidden=2048), compute="bf16")
    before, after = paired(replace(chosen, decode=replace(chosen.decode, tokens=8)))
    apart = ("group_pairs", "gathered_gate_up", "grouped_linear", "reduce_rows")
    moved = []
    for program, names in ((before, apart), (after, ("paired_experts",))):
        program.cluster = h200
        costs = [node_cost(sizes_of(program, b), n) for b, n in program.nodes() if op_of(n).name in names]
        assert len(costs) == len(names) and all(cost.us for cost in costs)
        moved.append((sum(cost.bytes[0] for cost in costs), sum(cost.flops for cost in costs)))
    (bytes_apart, flops_apart), (bytes_together, flops_together) = moved
    assert flops_together == flops_apart
    assert 0.99 < bytes_together / bytes_apart < 1.0


def test_a_step_may_be_captured_where_triton_serves_it() -> None:
    program = program_of(plan([moe()]), "decode")
    run_passes(program, pipeline("triton"))
    assert capturable.obstacle(program) == ""
    for _, node in program.nodes():
        if op_of(node).name == "paired_experts":
            node.meta["kernel"] = "torch"
    assert capturable.obstacle(program).startswith("`paired_experts` by torch waits for the device")


@pytest.mark.parametrize(
    ("batch", "sums", "wanted"),
    [
        (2, "fixed", {"decode": ["route", "pair_gate_up", "pair_down"]}),
        (
            64,
            "fixed",
            {
                "decode": ["route", "group_pairs", "gathered_gate_up", "grouped_linear", "reduce_rows"],
                "decode_few": ["route", "pair_gate_up", "pair_down"],
            },
        ),
        (
            64,
            "any",
            {
                "decode": ["route", "group_pairs", "gathered_gate_up", "reduced_linear"],
                "decode_few": ["route", "pair_gate_up", "pair_down"],
            },
        ),
    ],
)
def test_kernels_are_listed_of_full_steps_and_of_small_ones(
    batch: int, sums: str, wanted: dict[str, list[str]]
) -> None:
    """2 choices among 8 experts: up to 2 rows are few. Each is costed with the rows of its own step."""
    made = plan([moe()])
    program = program_of(replace(made, decode=replace(made.decode, tokens=batch, sums=sums)), "decode")
    run_passes(program, pipeline("triton"))
    found = list(uses(program))
    assert {phase: [use.op for use in found if use.phase == phase] for phase in wanted} == wanted
    assert {use.load.tokens for use in found if use.phase == "decode"} == {batch}
    assert {use.load.tokens for use in found if use.is_few} <= {2}


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (("rows=2", "rows=0"), "rows is 0, not a count"),
        (("sums=fixed", "sums=sorted"), "sums is sorted, not fixed or any"),
        (("@experts.gate_up, @experts.down", "@experts.down, @experts.gate_up"), "experts"),
        (("(%13, %15, %16", "(%13, %15, %30"), "weighs with other weights"),
    ],
)
def test_the_verifier_holds_what_belongs_together(changes: tuple[str, str], why: str) -> None:
    """%15 and %16 are what route gives, %13 the rows."""
    program = paired(plan([moe()]))[1]
    verify(program)
    given = [changes]
    if "%30" in changes[1]:  # a second route, of the same scores
        line = next(line for line in print_program(program).splitlines() if "%15, %16 = route" in line)
        given.insert(0, (line + "\n", line + "\n" + line.replace("%15, %16", "%31, %30") + "\n"))
    with pytest.raises(CompileError, match=why):
        verify(edited(program, *given))
