"""The verifier refuses each planted mistake by name, accepts correct programs, and what it cannot see is listed."""

from __future__ import annotations

import pytest

from moec.diagnostics import CompileError
from moec.ir.program import type_of
from moec.ir.verifier.program import verify
from tests.planted import BASES, MISTAKES, UNSEEN, Mistake, layer, ops, tidy
from tests.programs import STEPS, compiled, evaluate, plan, program_of, weights_of


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_programs_that_are_spoiled_below_are_correct(base: str, phase: str) -> None:
    program = compiled(plan(**BASES[base]), phase=phase)
    tidy(program)
    verify(program)


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_each_planted_mistake_is_refused_by_name(mistake: Mistake) -> None:
    program = compiled(mistake.plan, stop_after=mistake.behind)
    mistake.plant(program)
    tidy(program)
    with pytest.raises(CompileError) as refused:
        verify(program, "some-pass")
    text = refused.value.render()
    assert mistake.words in text
    assert "error[E0403]: the program is wrong after some-pass: " in text


@pytest.mark.parametrize("mistake", UNSEEN.values(), ids=UNSEEN)
def test_what_no_type_shows_is_shown_by_the_evaluator(mistake: Mistake) -> None:
    """These pass the verifier, so tests that compare numbers must stay: preservation, and parity with transformers."""
    weights = weights_of(program_of(mistake.plan))
    program = compiled(mistake.plan)
    correct = evaluate(program, weights, STEPS)
    mistake.plant(program)
    tidy(program)
    verify(program)
    assert (evaluate(program, weights, STEPS) - correct).abs().max() > 1e-3


def test_a_type_that_was_copied_and_not_inferred_is_refused() -> None:
    """fx copies meta with a node; a type must come from the rules."""
    program = compiled(plan(**BASES["flat"]))
    reduced = ops(layer(program), "all_reduce")[0]
    operand = reduced.all_input_nodes[0]
    reduced.meta["type"] = type_of(operand)
    with pytest.raises(CompileError, match=r"is typed .*, not "):
        verify(program)


def test_faults_of_several_bodies_come_together() -> None:
    program = compiled(plan(**BASES["layers"]))
    for name in ("sparse", "dense"):
        del ops(program.bodies[name], "attention")[0].meta["loc"]
    with pytest.raises(CompileError) as refused:
        verify(program)
    assert len(refused.value.diagnostics) == 2
