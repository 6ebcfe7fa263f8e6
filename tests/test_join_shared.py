"""Pass join-shared over random programs, where it leaves shared experts alone, and what the verifier holds of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from moec.checked import Plan
from moec.compiler_uses import load_of
from moec.cost.memory import memory_by_rank
from moec.cost.sizes import sizes_of
from moec.diagnostics import CompileError, MoecError
from moec.ir.parse import parse
from moec.ir.program import Program, op_of
from moec.ir.proof import local
from moec.ir.proof.program import prove
from moec.ir.text import print_program
from moec.ir.verifier.program import verify
from moec.passes.fuse_experts import FuseExperts
from moec.passes.join_shared import JoinShared
from moec.routing import RandomRouting, TracedRouting, WithShared
from moec.runtime.weights import logical_shapes, wanted
from tests.programs import (
    STEPS,
    Weights,
    compiled,
    edited,
    evaluate,
    few,
    moe,
    plan,
    program_of,
    random_plan,
    random_steps,
    weights_of,
)
from tests.test_preservation import close

JOIN = JoinShared("triton")


def joined(chosen: Plan, phase: str = "prefill") -> tuple[Program, Program]:
    """A program before and after the pass."""
    before, after = (compiled(chosen, "cache-experts", phase=phase) for _ in range(2))
    JOIN.run(after)
    return before, after


def counts_of(program: Program) -> list[int]:
    """Shared experts of each body that has joined them."""
    shared = [body.params["experts.down"].shared for body in program.bodies.values() if "experts.down" in body.params]
    return [found.count for found in shared if found is not None]


def scales_beside(program: Program, weights: Weights) -> Weights:
    """Scales of 1 for what the program reads in fp8 and the one before it does not."""
    shapes = logical_shapes(wanted([program]))
    return {name: torch.ones(shape, dtype=torch.float64) for name, shape in shapes.items() if name not in weights}


def test_it_preserves_random_programs() -> None:
    """What the layers compute, and that every row reaches each of its experts once; read back from their text."""
    met: Counter[str] = Counter()
    for seed in range(180):
        chosen = replace(random_plan(seed), cache=None)
        before, after = joined(chosen)
        if not (counts := counts_of(after)):
            assert print_program(after) == print_program(before)
            continue
        mesh = after.mesh
        met.update({"several": max(counts) > 1, "etp": mesh.etp > 1, "copies": mesh.edp > 1, "alone": mesh.size == 1})
        after.sums = "any" if seed % 2 else "fixed"
        FuseExperts("triton").run(after)
        verify(after)
        prove(after)
        assert parse(print_program(after)) == after
        weights, steps = weights_of(program_of(chosen), seed), random_steps(seed)
        scaled = weights | scales_beside(after, weights)
        assert close(evaluate(after, scaled, steps), evaluate(before, weights, steps)), f"seed {seed}"
    assert min(met[what] for what in ("several", "etp", "copies", "alone")) >= 3, met


@pytest.mark.parametrize(
    ("shared", "degrees", "why"),
    [
        (6, {}, ""),
        (18, {"dp": 2, "edp": 2}, ""),
        (12, {"dp": 2, "tp": 2, "edp": 2, "etp": 2}, ""),
        (8, {}, "they are 8 wide on a rank, which is no multiple of 6"),
        (6, {"dp": 2, "ep": 2}, "the routed ones compute other rows"),
        (6, {"tp": 2, "ep": 2}, "the routed ones compute other rows"),
        (6, {"tp": 2, "edp": 2}, "the routed ones compute other rows"),
        (6, {"dp": 2, "etp": 2}, "the routed ones compute other rows"),
    ],
)
def test_shared_experts_join_on_the_rows_of_the_routed_ones(shared: int, degrees: dict[str, int], why: str) -> None:
    for exchange in ("flat", "gather"):
        _, after = joined(plan([moe(shared=shared)], exchange=exchange, **degrees))
        assert JOIN.outcome(after) == {"sparse": why}
        assert counts_of(after) == ([] if why else [shared // 6])


def test_beside_experts_in_fp8_they_are_read_in_fp8_too() -> None:
    """With scales of 1 that is what they were; cut in experts only between blocks."""
    chosen = plan([moe(shared=6)], expert_dtype="fp8")
    before, after = joined(chosen)
    assert (
        JOIN.outcome(after) == {"sparse": ""} and memory_by_rank(after)[0].weights < memory_by_rank(before)[0].weights
    )
    verify(after)
    prove(after)
    weights = weights_of(program_of(chosen))
    ones = scales_beside(after, weights)
    assert len(ones) == 3
    assert close(evaluate(after, weights | ones, STEPS), evaluate(before, weights, STEPS))
    twice = {name: 2 * scales for name, scales in ones.items()}
    assert not close(evaluate(after, weights | twice, STEPS), evaluate(before, weights, STEPS))
    _, apart = joined(plan([moe(shared=12)], expert_dtype="fp8"))
    assert JOIN.outcome(apart) == {"sparse": "each is 6 wide, which is not whole blocks of 128"}


def test_a_cache_keeps_them_apart() -> None:
    for slots in (1, 8):  # some experts wait elsewhere; none does
        _, after = joined(replace(plan([moe(shared=6)]), cache=few(slots)))
        assert JOIN.outcome(after) == {"sparse": "a cache has slots for routed experts only"}


def test_other_kernels_than_those_of_a_gpu_leave_them_alone() -> None:
    program = compiled(plan([moe(shared=6)]))
    assert "shared.down" in program.bodies["sparse"].params and JoinShared().outcome(program) == {}


def test_layers_of_one_table_may_differ() -> None:
    _, after = joined(plan([moe(shared=6), moe(), moe(shared=8), moe(shared=12)]))
    assert after.experts == {"routed": 8, "routed.shared1": 9, "routed.shared2": 10}
    assert {name: table.counts for name, table in after.placements.items()} == {
        "routed": (8,),
        "routed.shared1": (9,),
        "routed.shared2": (10,),
    }
    assert counts_of(after) == [1, 2]
    verify(after)
    prove(after)


def test_memory_and_weights_are_those_of_before() -> None:
    """Both phases read the same parameters, which have as many numbers as those that they replace."""
    chosen = plan([moe(shared=12)], tp=2, etp=2)
    programs = [joined(chosen, phase) for phase in ("prefill", "decode")]
    for before, after in programs:
        assert [m.weights for m in memory_by_rank(before)] == [m.weights for m in memory_by_rank(after)]
    assert "layers.0.experts.gate_up" in wanted([after for _, after in programs])


# --- costs -------------------------------------------------------------------------------------------------------


def test_every_token_is_counted_at_its_shared_experts() -> None:
    """8 experts of which a token chooses 2, and 2 shared ones; 16 tokens a step."""
    _, after = joined(plan([moe(shared=12)]))
    sizes = sizes_of(after, after.bodies["sparse"])
    assert (sizes.top, sizes.dim("X")) == (4, 64.0)
    load = load_of(sizes)
    assert (load.top, load.experts, load.rows.sum(), list(load.rows[8:])) == (4, 10, 64, [16, 16])
    assert sizes.active_experts() == pytest.approx(2 + 8 * (1 - 0.75**16))


def test_shared_experts_are_counted_as_choices_of_every_token_are() -> None:
    """A trace in which each token has them says the same."""
    rng = np.random.default_rng(0)
    chosen = np.stack([rng.permutation(6)[:2] for _ in range(50)])
    beside = np.broadcast_to([6, 7], (50, 2))
    expected, found = TracedRouting(np.hstack([chosen, beside]), 8), WithShared(TracedRouting(chosen, 6), 2)
    parts = (0, 0, 1, 1, 2, 2, 1, 3)
    for count in ("touched", "pairs"):
        assert np.allclose(getattr(expected, count)(parts, 4), getattr(found, count)(parts, 4))
    assert np.allclose(expected.active(parts, 4, 3.0), found.active(parts, 4, 3.0))
    assert WithShared(RandomRouting(6, 2), 2).pairs(parts, 4).sum() == pytest.approx(4)


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            ("with 1 of shared.down dim=1", "with 2 of shared.down dim=1"),
            "adds 1 shared experts, the parameters have 1 or",
        ),
        (("experts.down dim=0 with 1 of shared.down dim=1", "experts.down dim=0"), "the parameters have 0 or 1"),
        ((", shared=1", ""), "experts routed to and experts placed differ"),
        (("shared=1", "shared=0"), "shared is 0, not a count"),
    ],
)
def test_the_verifier_holds_what_belongs_together(change: tuple[str, str], why: str) -> None:
    program = joined(plan([moe(shared=6)]))[1]
    verify(program)
    with pytest.raises(CompileError, match=why):
        verify(edited(program, change))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("with 1 of shared.down", "with 9 of shared.down"), "9 slots along dim 1"),
        (("with 1 of shared.gate+shared.up", "with 1 of shared.gate"), "1 parts of shared experts beside 2"),
        (("of shared.down dim=1", "of shared.down dim=2"), "1 slots along dim 2"),
    ],
)
def test_a_text_of_impossible_slots_is_refused(change: tuple[str, str], why: str) -> None:
    with pytest.raises(MoecError, match=why):
        edited(joined(plan([moe(shared=6)]))[1], change)


def test_the_proof_sees_a_shared_expert_that_nobody_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    program = joined(plan([moe(shared=6)]))[1]
    real = local.pairs_of
    monkeypatch.setattr(local, "pairs_of", lambda here, ids, expert: real(here, ids, expert)[: 99 * (expert < 8)])
    with pytest.raises(CompileError, match=r"choice 2 \(expert 8\): computed never"):
        prove(program)


def test_the_operations_stay_those_of_routed_experts() -> None:
    before, after = ({op_of(node).name for _, node in p.nodes()} for p in joined(plan([moe(shared=6)])))
    assert before - after == {"gate_up"}
