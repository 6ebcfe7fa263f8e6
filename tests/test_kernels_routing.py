"""The router's choice: which experts, in which order, with which weights. B.. are faults that other engines shipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from moec.diagnostics import MoecError
from moec.runtime.kernels.torch_moe import route, router_logits, top_ids
from tests.contexts import context


def choose(logits: Tensor, bias: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    defaults = {"score": "softmax", "top": 2, "groups": 1, "keep": 1, "renormalize": True, "scale": 1.0}
    return route(context(), logits, bias, table="routed", **defaults | options)


def plain(scores: list[float], bias: list[float], top: int, groups: int = 1, keep: int = 1) -> list[int]:
    """The choice in plain Python: best groups, then best experts, the lower id first among equals."""
    biased = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(scores) // groups
    rank = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    kept = sorted(range(groups), key=lambda g: (-rank[g], g))[:keep]
    eligible = [e for e in range(len(scores)) if e // size in kept]
    return sorted(eligible, key=lambda e: (-biased[e], e))[:top]


# --- B06: renormalisation -----------------------------------------------------------------------------------------

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]])


def test_b06_weights_are_renormalised_when_asked() -> None:
    assert choose(LOGITS, renormalize=False)[1][0].tolist() == pytest.approx([0.643914, 0.236883], abs=1e-6)
    assert choose(LOGITS, renormalize=True)[1][0].tolist() == pytest.approx([0.731059, 0.268941], abs=1e-6)


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_b06_one_choice_keeps_its_axis(num_tokens: int) -> None:
    logits = LOGITS.expand(num_tokens, 4)
    for renormalize, weight in ((False, 0.643914), (True, 1.0)):
        ids, weights = choose(logits, top=1, renormalize=renormalize)
        assert ids.shape == weights.shape == (num_tokens, 1)
        assert weights.flatten().tolist() == pytest.approx([weight] * num_tokens, abs=1e-6)


@pytest.mark.parametrize("renormalize", [False, True])
def test_b06_all_experts_chosen_is_the_softmax(renormalize: bool) -> None:
    ids, weights = choose(LOGITS, top=4, renormalize=renormalize)
    assert ids[0].tolist() == [0, 1, 2, 3]
    torch.testing.assert_close(weights, LOGITS.softmax(-1))


def test_scale_multiplies_the_weights_once() -> None:
    assert choose(LOGITS, scale=2.5)[1].sum().item() == pytest.approx(2.5)


# --- B12: the bias chooses and does not weigh ---------------------------------------------------------------------


def test_b12_bias_is_not_in_the_weights() -> None:
    ids, weights = choose(torch.tensor([[1.0, 0.0, -1.0, -2.0]]), torch.tensor([0.0, 0.0, 1.0, 1.0]), score="sigmoid")
    assert ids.tolist() == [[2, 3]]
    assert weights[0].tolist() == pytest.approx([0.692890, 0.307110], abs=1e-6)  # biased: 0.531350, 0.468650


@pytest.mark.parametrize("num_experts", [8, 16, 32, 64, 128, 160, 256, 384])
@pytest.mark.parametrize("top", [1, 2, 8])
def test_b12_every_shape_follows_the_plain_formula(num_experts: int, top: int) -> None:
    generator = torch.Generator().manual_seed(num_experts + top)
    logits = torch.randn(5, num_experts, generator=generator)
    bias = torch.randn(num_experts, generator=generator)
    ids, weights = choose(logits, bias, top=top, score="sigmoid")
    for row, scores in enumerate(logits.sigmoid()):
        wanted = plain(scores.tolist(), bias.tolist(), top)
        assert ids[row].tolist() == wanted
        torch.testing.assert_close(weights[row], scores[wanted] / scores[wanted].sum())


def test_a_large_bias_does_not_swallow_small_scores() -> None:
    """Taking `biased - bias` for the score loses it all (flashinfer PR 3875)."""
    logits = torch.tensor([[-18.0, -18.5, -30.0]])
    ids, weights = choose(logits, torch.tensor([12.0, 12.0, 12.0]), score="sigmoid")
    wanted = logits[0, ids[0]].double().sigmoid()
    torch.testing.assert_close(weights[0].double(), wanted / wanted.sum(), rtol=1e-6, atol=0)


def test_scores_that_are_all_zero_give_no_nan() -> None:
    _, weights = choose(torch.full((1, 4), -200.0), score="sigmoid")
    assert weights.tolist() == [[0.0, 0.0]]


# --- B24: any number of experts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_experts", [1, 5, 7, 60, 160, 257, 384, 512])
@pytest.mark.parametrize("num_tokens", [1, 600])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_b24_the_last_expert_can_be_chosen(num_experts: int, num_tokens: int, score: str) -> None:
    logits = torch.zeros(num_tokens, num_experts)
    logits[:, -1] = 4.0
    ids, weights = choose(logits, top=1, score=score)
    assert ids.unique().tolist() == [num_experts - 1] and weights.unique().tolist() == [1.0]


def test_b24_as_many_choices_as_experts() -> None:
    ids, _ = choose(torch.arange(7.0)[None], top=7)
    assert ids.tolist() == [[6, 5, 4, 3, 2, 1, 0]]


# --- B28: precision and ties --------------------------------------------------------------------------------------


def test_b28_scores_equal_in_bf16_are_not_equal() -> None:
    ids, _ = choose(torch.tensor([[0.0, 1.000, 0.0, 1.002]]), top=1)
    assert ids.tolist() == [[3]]


def test_b28_logits_are_not_rounded_to_the_inputs_dtype() -> None:
    """The rows of expert 1 and 3 differ by one part in 512 of their sum: equal after rounding to bf16."""
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    w = torch.zeros(4, 64, dtype=torch.bfloat16)
    w[1], w[3] = 0.0625, 0.0625
    w[3, 0] += 0.0078125
    logits = router_logits(context(), x, w)
    assert logits.dtype == torch.float32
    assert logits[0, 3] - logits[0, 1] == 0.0078125 and logits[0, 3].bfloat16() == logits[0, 1].bfloat16()


@pytest.mark.parametrize(("renormalize", "weight"), [(True, 1 / 3), (False, 0.125)])
def test_b28_equal_scores_go_to_the_lowest_ids(renormalize: bool, weight: float) -> None:
    for _ in range(3):
        ids, weights = choose(torch.zeros(9, 8), top=3, renormalize=renormalize)
        assert ids.tolist() == [[0, 1, 2]] * 9
        torch.testing.assert_close(weights, torch.full((9, 3), weight))


def test_ties_below_and_above_zero() -> None:
    inf = float("inf")
    scores = torch.tensor([[-0.0, 0.0, 1.0, 1.0, -5.0, -inf, -5.0, inf, 1e-45, -1e-45]])
    assert top_ids(scores, 10).tolist() == [[7, 2, 3, 8, 0, 1, 9, 4, 6, 5]]


def test_top_ids_is_a_stable_sort() -> None:
    scores = torch.randint(-4, 4, (50, 100), generator=torch.Generator().manual_seed(1)).float()
    assert torch.equal(top_ids(scores, 20), scores.sort(dim=-1, descending=True, stable=True).indices[:, :20])


# --- B37: groups --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_experts", "groups", "keep", "top"), [(24, 4, 2, 3), (15, 5, 1, 3), (12, 6, 6, 2), (8, 2, 1, 4)]
)
def test_groups_follow_the_plain_formula(num_experts: int, groups: int, keep: int, top: int) -> None:
    """Biases far below zero: masking dropped groups with 0 instead of -inf would choose from them."""
    generator = torch.Generator().manual_seed(groups)
    logits = torch.randn(40, num_experts, generator=generator)
    bias = torch.randn(num_experts, generator=generator) - 5
    ids, _ = choose(logits, bias, top=top, groups=groups, keep=keep, score="sigmoid")
    for row, scores in enumerate(logits.sigmoid().tolist()):
        assert ids[row].tolist() == plain(scores, bias.tolist(), top, groups, keep)


def test_groups_are_those_of_transformers() -> None:
    config = DeepseekV3Config(
        hidden_size=20, n_routed_experts=24, n_group=4, topk_group=2, num_experts_per_tok=3, routed_scaling_factor=2.5
    )
    torch.manual_seed(1)
    router = DeepseekV3TopkRouter(config)
    router.weight.data.normal_()
    router.e_score_correction_bias.normal_()
    x = torch.randn(30, 20)
    with torch.no_grad():
        _, their_weights, their_ids = router(x)
    ids, weights = choose(
        router_logits(context(), x, router.weight.data),
        router.e_score_correction_bias,
        score="sigmoid", top=3, groups=4, keep=2, scale=2.5,
    )  # fmt: skip
    dense = [torch.zeros(30, 24).scatter(1, i, w) for i, w in ((ids, weights), (their_ids, their_weights))]
    torch.testing.assert_close(*dense, rtol=1e-6, atol=1e-6)


def test_b37_one_group_is_plain_top_k() -> None:
    logits = torch.randn(20, 12, generator=torch.Generator().manual_seed(2))
    bias = torch.linspace(-1, 1, 12)
    grouped = choose(logits, bias, groups=1, keep=1, score="sigmoid")
    for row, scores in enumerate(logits.sigmoid().tolist()):
        assert grouped[0][row].tolist() == plain(scores, bias.tolist(), 2)


def test_b37_one_expert_a_group_counts_by_its_best() -> None:
    logits = torch.randn(20, 8, generator=torch.Generator().manual_seed(3))
    bias = torch.linspace(-1, 1, 8)
    grouped = choose(logits, bias, groups=8, keep=3, top=2, score="sigmoid")
    assert torch.equal(grouped[0], choose(logits, bias, top=2, score="sigmoid")[0])


def test_without_bias_a_group_counts_by_its_best_expert() -> None:
    """Group 0 has the best expert, group 1 the larger sum of two."""
    ids, _ = choose(torch.tensor([[2.2, -9.0, 2.0, 2.0]]), groups=2, keep=1, top=1)
    assert ids.tolist() == [[0]]
    ids, _ = choose(torch.tensor([[2.2, -9.0, 2.0, 2.0]]), torch.zeros(4), groups=2, keep=1, top=1, score="sigmoid")
    assert ids.tolist() == [[2]]


def test_ties_between_groups_go_to_the_lowest() -> None:
    ids, _ = choose(torch.zeros(1, 12), torch.zeros(12), groups=4, keep=2, top=4, score="sigmoid")
    assert ids.tolist() == [[0, 1, 2, 3]]


# --- rows that are not numbers, and no rows -----------------------------------------------------------------------


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_nan_is_refused_by_layer_and_row(score: str) -> None:
    logits = torch.zeros(7, 4)
    logits[5, 2] = float("nan")
    with pytest.raises(MoecError) as error:
        choose(logits, score=score)
    assert error.value.diagnostics[0].code == "E0506" and error.value.exit_code == 6
    assert "layer 3" in str(error.value) and "row 5" in str(error.value)


def test_an_infinite_logit_is_refused_where_it_leaves_no_number() -> None:
    logits = torch.zeros(2, 4)
    logits[1, 0] = float("inf")
    with pytest.raises(MoecError, match="row 1"):
        choose(logits)


@pytest.mark.parametrize("groups", [1, 2])
def test_no_tokens(groups: int) -> None:
    ids, weights = choose(torch.empty(0, 4), torch.zeros(4), groups=groups)
    assert ids.shape == weights.shape == (0, 2) and ids.dtype == torch.int64
