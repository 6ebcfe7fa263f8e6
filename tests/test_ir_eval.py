"""The reference evaluator against numbers worked out elsewhere: B06, B12, B28 and B29 of the fault list."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moec.diagnostics import CompileError
from moec.ir.evaluator import local as ir_eval_local
from moec.ir.evaluator.program import Sequence
from moec.ir.program import Type, type_of
from tests.planted import BASES, layer, ops
from tests.programs import STEPS, compiled, evaluate, mla, moe, plan, program_of, weights_of


def route(logits: list[list[float]], bias: list[float] | None = None, **given: Any) -> tuple[Tensor, Tensor]:
    settings = {
        "score": "softmax",
        "groups": 1,
        "keep": 1,
        "renormalize": False,
        "scale": 1.0,
        "table": "routed",
    } | given
    program = program_of(plan([moe()]))
    context = ir_eval_local.Context(program, 0, 0, [], {})
    biases = None if bias is None else torch.tensor(bias, dtype=torch.float64)
    return ir_eval_local.route(context, torch.tensor(logits, dtype=torch.float64), biases, **settings)


LOGITS = [2.0, 1.0, 0.0, -1.0]
FULL = torch.tensor(LOGITS, dtype=torch.float64).softmax(-1)


@pytest.mark.parametrize(
    ("top", "renormalize", "weights"),
    [
        (2, False, [0.643914, 0.236883]),
        (2, True, [0.731059, 0.268941]),
        (1, False, [0.643914]),
        (1, True, [1.0]),
        (4, False, FULL.tolist()),
        (4, True, FULL.tolist()),
    ],
)
def test_b06_weights_are_of_all_experts_unless_renormalised(top: int, renormalize: bool, weights: list[float]) -> None:
    ids, found = route([LOGITS] * 3, top=top, renormalize=renormalize)
    assert ids.tolist() == [list(range(top))] * 3
    assert torch.allclose(found, torch.tensor([weights] * 3, dtype=torch.float64), atol=1e-6)


def test_b12_the_bias_selects_and_does_not_weigh() -> None:
    ids, weights = route([[1.0, 0.0, -1.0, -2.0]], [0.0, 0.0, 1.0, 1.0], score="sigmoid", top=2, renormalize=True)
    assert ids.tolist() == [[2, 3]]
    assert torch.allclose(weights, torch.tensor([[0.692890, 0.307110]], dtype=torch.float64), atol=1e-6)


@pytest.mark.parametrize(("renormalize", "weight"), [(True, 1 / 3), (False, 0.125)])
def test_b28_ties_go_to_the_lowest_expert(renormalize: bool, weight: float) -> None:
    ids, weights = route([[0.0] * 8], top=3, renormalize=renormalize)
    assert ids.tolist() == [[0, 1, 2]]
    assert torch.allclose(weights, torch.full((1, 3), weight, dtype=torch.float64), atol=1e-12)


def test_groups_are_weighed_by_their_two_best_where_a_bias_selects() -> None:
    """Scores 0.5 + bias; group 0 has the best expert, group 1 the best two."""
    bias = [0.4, 0.0, 0.0, 0.3, 0.3, 0.0]
    ids, _ = route([[0.0] * 6], bias, score="sigmoid", top=2, groups=2, keep=1)
    assert ids.tolist() == [[3, 4]]
    ids, _ = route([[0.4, 0.0, 0.0, 0.3, 0.3, 0.0]], score="sigmoid", top=2, groups=2, keep=1)
    assert ids.tolist() == [[0, 1]]  # without a bias by the best one


def test_b29_more_chosen_than_there_are_is_refused_with_both_numbers() -> None:
    with pytest.raises(CompileError, match="top 4 of 3 eligible experts"):
        compiled(plan([moe(3, top=4)]))


def test_a_value_that_is_whole_by_its_type_alone_is_noticed() -> None:
    """The evaluator compares the ranks of every axis that a layout calls whole."""
    program = compiled(plan(**BASES["dense"]))
    reduced = ops(layer(program), "all_reduce")[0]
    part = reduced.all_input_nodes[0]
    reduced.replace_all_uses_with(part)
    part.meta["type"] = Type(type_of(part).shape, "fp32", type_of(reduced).layout)
    with pytest.raises(AssertionError, match="is said to be whole on tp, ranks 0 and 1 differ"):
        evaluate(program, weights_of(program_of(plan(**BASES["dense"]))), STEPS)


def test_a_step_in_pieces_gives_the_logits_of_the_whole() -> None:
    """Cached tokens are attended to as if they had come in one step, in the latent form too."""
    for spec in (plan(**BASES["flat"]), plan([moe()], mla(), tp=2, ep=2)):
        program, weights = compiled(spec), weights_of(program_of(spec))
        whole = evaluate(program, weights, [[Sequence((1, 2, 3, 4), 0)]])
        pieces = evaluate(program, weights, [[Sequence((1, 2), 0)], [Sequence((3,), 0, 2)], [Sequence((4,), 0, 3)]])
        assert torch.allclose(whole, pieces, rtol=0, atol=1e-12)
