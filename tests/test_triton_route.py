"""The routing kernel in Triton's interpreter, against fp64 and against torch's kernel.

Shapes: S tokens, E experts, k choices. The numbers B12 ... B39 are faults that real engines shipped.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moec.codegen import kernel_module
from moec.codegen.kernel_route import Score, specialise_route
from moec.runtime.context import Context
from moec.runtime.kernels import torch_moe, triton_route
from moec.runtime.kernels.triton_route import route
from tests.contexts import context
from tests.covering import covering

pytest.importorskip("triton")
#: numpy, in which the interpreter computes, warns of the infinities and NaN that some rows are made of.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

INF, NAN = float("inf"), float("nan")

FACTORS: dict[str, tuple[object, ...]] = {
    "tokens": (0, 1, 7, 64, 257),
    "experts": (1, 5, 8, 64, 160),
    "choices": ("one", "some", "all"),
    "grouping": ("none", "some", "single"),
    "logits": ("spread", "equal", "negative"),
    "score": ("softmax", "sigmoid"),
    "bias": ("none", "spread", "-10", "12"),
    "renormalize": (False, True),
    "scale": (1.0, 2.5),
}


def choose(logits: Tensor, bias: Tensor | None = None, ctx: Context | None = None, **options: Any) -> tuple:
    defaults = {"score": "softmax", "top": 2, "groups": 1, "keep": 1, "renormalize": True, "scale": 1.0}
    return route(ctx or context(), logits, bias, table="routed", **defaults | options)


def spread(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Numbers from -3 to 3 in each row, as far from each other as they can be, in some order."""
    order = torch.rand(rows, columns, generator=generator).argsort(dim=-1)
    return torch.linspace(-3, 3, columns)[order] if columns > 1 else torch.randn(rows, 1, generator=generator)


def reference(logits: Tensor, bias: Tensor | None, top: int, groups: int, keep: int, score: str) -> tuple:
    """Ids, and the chosen scores in fp64. The choice is of fp32 numbers, as it is specified."""
    scores = logits.double().softmax(-1) if score == "softmax" else logits.double().sigmoid()
    biased = scores.float() if bias is None else scores.float() + bias
    grouped = biased.view(len(logits), groups, biased.shape[1] // groups)
    best = grouped.sort(dim=-1, descending=True).values[:, :, : 1 if bias is None else 2].sum(-1)
    kept = best.sort(dim=-1, descending=True, stable=True).indices[:, :keep]
    is_kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, kept, True)
    eligible = grouped.masked_fill(~is_kept[:, :, None], -INF).flatten(1)
    ids = eligible.sort(dim=-1, descending=True, stable=True).indices[:, :top]
    return ids, scores.gather(1, ids)


@pytest.mark.parametrize(tuple(FACTORS), covering(FACTORS))
def test_interpreted_kernel_equals_fp64(
    tokens: int,
    experts: int,
    choices: str,
    grouping: str,
    logits: str,
    score: str,
    bias: str,
    renormalize: bool,
    scale: float,
) -> None:
    """Every pair of sizes, numbers of choices, groups, logits, scores and biases."""
    generator = torch.Generator().manual_seed(tokens * 1000 + experts)
    groups = {"none": 1, "single": experts}.get(grouping, next(g for g in (8, 4, 5, 1) if experts % g == 0))
    keep = -(-groups // 2)
    eligible = experts // groups * keep
    top = {"one": 1, "some": min(6, eligible), "all": eligible}[choices]
    logits_SE = spread(tokens, experts, generator) * (logits != "equal") - 30.0 * (logits == "negative")
    shift = {"spread": 0.0, "-10": -10.0, "12": 12.0}.get(bias)
    bias_E = None if shift is None else spread(1, experts, generator)[0] * (bias == "spread") + shift
    ids, weights = choose(
        logits_SE, bias_E, score=score, top=top, groups=groups, keep=keep, renormalize=renormalize, scale=scale
    )
    wanted_ids, wanted = reference(logits_SE, bias_E, top, groups, keep, score)
    if renormalize:
        wanted = wanted / (wanted.sum(-1, keepdim=True) + 1e-20)
    assert ids.dtype == torch.int64 and weights.dtype == torch.float32
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights.double(), wanted * scale, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("shape", [(256, 8, 4, 8), (160, 8, 3, 6), (24, 4, 2, 3), (15, 5, 1, 3)])
def test_groups_are_chosen_as_torch_chooses_them(shape: tuple[int, int, int, int]) -> None:
    """B37, DeepSeek-V3's gate and DeepSeek-V2's: also where groups are no powers of two, and far below zero."""
    experts, groups, keep, top = shape
    generator = torch.Generator().manual_seed(experts)
    logits = torch.randn(40, experts, generator=generator)
    for bias in (torch.randn(experts, generator=generator) - 5, None):
        options: dict[str, Any] = {"score": "sigmoid", "top": top, "groups": groups, "keep": keep, "scale": 2.5}
        ids, weights = choose(logits, bias, **options)
        wanted = torch_moe.route(context(), logits, bias, renormalize=True, table="routed", **options)
        assert torch.equal(ids, wanted[0])
        torch.testing.assert_close(weights, wanted[1], rtol=1e-5, atol=0)


@pytest.mark.parametrize(("experts", "top", "shared"), [(5, 1, 1), (64, 6, 2), (15, 8, 3)])
def test_shared_experts_come_behind_the_chosen_ones(experts: int, top: int, shared: int) -> None:
    """DeepSeek-V2-Lite has 6 and 2; their weight is 1, whatever the scale; a row that chose badly has them too."""
    logits = torch.randn(7, experts, generator=torch.Generator().manual_seed(experts))
    for score, scale in (("softmax", 1.0), ("sigmoid", 2.5)):
        options: dict[str, Any] = {"score": score, "top": top, "scale": scale}
        plain, found = choose(logits, **options), choose(logits, shared=shared, **options)
        torchs = torch_moe.route(
            context(), logits, groups=1, keep=1, renormalize=True, table="routed", shared=shared, **options
        )
        for ids, weights in (found, torchs):
            assert ids.is_contiguous() and weights.is_contiguous()
            assert torch.equal(ids[:, :top], plain[0])
            torch.testing.assert_close(weights[:, :top], plain[1], rtol=1e-5, atol=0)
            assert ids[:, top:].tolist() == [list(range(experts, experts + shared))] * 7
            assert weights[:, top:].tolist() == [[1.0] * shared] * 7


def test_a_groups_two_best_may_be_equal() -> None:
    """0.6 + 0.6 in group 0 is more than 0.7 + 0.4 in group 1."""
    scores = torch.tensor([[0.6, 0.6, 0.1, 0.4, 0.7, 0.1]])
    ids, _ = choose(scores.logit(), torch.zeros(6), score="sigmoid", groups=2, keep=1)
    assert ids.tolist() == [[0, 1]]


@pytest.mark.parametrize("shift", [-1000.0, 1000.0])
def test_softmax_of_large_logits_is_that_of_small_ones(shift: float) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    ids, weights = choose(logits + shift, renormalize=False)
    assert ids.tolist() == [[0, 1]]
    assert weights[0].tolist() == pytest.approx([0.643914, 0.236883], abs=1e-6)


def test_b12_bias_is_not_in_the_weights() -> None:
    ids, weights = choose(torch.tensor([[1.0, 0.0, -1.0, -2.0]]), torch.tensor([0.0, 0.0, 1.0, 1.0]), score="sigmoid")
    assert ids.tolist() == [[2, 3]]
    assert weights[0].tolist() == pytest.approx([0.692890, 0.307110], abs=1e-6)  # biased: 0.531350, 0.468650


@pytest.mark.parametrize("experts", [8, 16, 32, 64, 128, 160, 256, 384])
@pytest.mark.parametrize("top", [1, 2, 8])
def test_b12_every_shape_follows_the_formula(experts: int, top: int) -> None:
    generator = torch.Generator().manual_seed(experts + top)
    logits, bias = spread(5, experts, generator), spread(1, experts, generator)[0]
    ids, weights = choose(logits, bias, top=top, score="sigmoid")
    wanted_ids, wanted = reference(logits, bias, top, 1, 1, "sigmoid")
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights.double(), wanted / wanted.sum(-1, keepdim=True), rtol=1e-5, atol=0)


def test_a_large_bias_does_not_swallow_small_scores() -> None:
    """Taking `biased - bias` for the score loses it all (flashinfer PR 3875)."""
    logits = torch.tensor([[-18.0, -18.5, -30.0]])
    ids, weights = choose(logits, torch.tensor([12.0, 12.0, 12.0]), score="sigmoid")
    wanted = logits[0, ids[0]].double().sigmoid()
    torch.testing.assert_close(weights[0].double(), wanted / wanted.sum(), rtol=1e-5, atol=0)


def test_scores_that_are_all_zero_give_no_nan() -> None:
    _, weights = choose(torch.full((1, 4), -200.0), score="sigmoid")
    assert weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("experts", [1, 5, 7, 60, 160, 257, 384, 512])
@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_b24_the_last_expert_can_be_chosen(experts: int, tokens: int, score: str) -> None:
    logits = torch.zeros(tokens, experts)
    logits[:, -1] = 4.0
    ids, weights = choose(logits, top=1, score=score)
    assert ids.unique().tolist() == [experts - 1] and weights.unique().tolist() == [1.0]


def test_b28_scores_equal_in_bf16_are_not_equal() -> None:
    ids, _ = choose(torch.tensor([[0.0, 1.000, 0.0, 1.002]]), top=1)
    assert ids.tolist() == [[3]]


@pytest.mark.parametrize(("renormalize", "weight"), [(True, 1 / 3), (False, 0.125)])
def test_b28_equal_scores_go_to_the_lowest_ids(renormalize: bool, weight: float) -> None:
    for _ in range(2):
        ids, weights = choose(torch.zeros(9, 8), top=3, renormalize=renormalize)
        assert ids.tolist() == [[0, 1, 2]] * 9
        torch.testing.assert_close(weights, torch.full((9, 3), weight))


def test_zero_and_minus_zero_are_equal() -> None:
    """Scores of 0 under biases of 0 and -0, then scores that a bias takes to 0 from above: all the lower id first."""
    ids, _ = choose(torch.full((1, 3), -INF), torch.tensor([-0.0, 0.0, -0.0]), score="sigmoid", top=3)
    assert ids.tolist() == [[0, 1, 2]]
    ids, _ = choose(torch.tensor([[0.0, -INF, 0.0]]), torch.tensor([-0.5, -0.0, -0.5]), score="sigmoid", top=3)
    assert ids.tolist() == [[0, 1, 2]]


def test_infinite_logits_that_leave_numbers() -> None:
    ids, weights = choose(torch.tensor([[-INF, 1.0, INF, 1.0]]), score="sigmoid", renormalize=False, top=4)
    assert ids.tolist() == [[2, 1, 3, 0]]
    assert weights[0].tolist() == pytest.approx([1.0, 0.731059, 0.731059, 0.0], abs=1e-6)
    ids, weights = choose(torch.tensor([[-INF, 1.0, -INF, 1.0]]), top=3)
    assert ids.tolist() == [[1, 3, 0]] and weights.tolist() == [[0.5, 0.5, 0.0]]


@pytest.mark.parametrize("rows", [0, 65_537])
def test_b39_any_number_of_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rows launch nothing (B36); more rows than a grid's second axis holds are all served."""
    if not rows:
        monkeypatch.setattr(triton_route, "launch_route", lambda *_: pytest.fail("launched"))
    monkeypatch.setattr(triton_route, "INTERPRETED_ROWS", 2**14)
    ids, weights = choose(torch.arange(2.0).expand(rows, 2), top=1)
    assert ids.shape == weights.shape == (rows, 1)
    assert ids.eq(1).all() and weights.eq(1).all()


def test_programs_serve_as_many_rows_as_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row a program from 128 experts on, more below; the text is the same that the interpreter runs with 64."""
    monkeypatch.setattr(triton_route, "INTERPRETED_ROWS", 1)
    for experts, rows in ((160, 1), (8, 16)):
        values = specialise_route(
            experts, 2, Score.SOFTMAX, groups=1, keep=1, has_bias=False, renormalize=True, scale=1.0
        )
        assert values.rows == rows and values.num_programs(33) == -(-33 // rows)
        logits = spread(33, experts, torch.Generator().manual_seed(1))
        assert torch.equal(choose(logits)[0], reference(logits, None, 2, 1, 1, "softmax")[0])


def test_the_templates_own_combine_functions_do_what_the_interpreters_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter puts numpy's sums in the place of `add`, `larger` and `smaller`, which compiled kernels call."""
    logits, bias = spread(3, 10, torch.Generator().manual_seed(7)), torch.linspace(-1, 1, 10)
    options: dict[str, Any] = {"score": "softmax", "groups": 5, "keep": 3, "top": 3}
    fast = choose(logits, bias, **options)
    monkeypatch.setattr(kernel_module, "FAST_COMBINES", {})
    triton_route._kernel.cache_clear()
    kernel_module.load_kernel.cache_clear()
    slow = choose(logits, bias, **options)
    triton_route._kernel.cache_clear()
    kernel_module.load_kernel.cache_clear()
    assert torch.equal(fast[0], slow[0])
    torch.testing.assert_close(fast[1], slow[1])
