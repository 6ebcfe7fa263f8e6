"""Summing what experts gave, row by row, in Triton's interpreter, against fp64.

Shapes: R rows, k choices, X pairs, D hidden. The numbers B19 and B27 are faults that engines shipped.
"""

from __future__ import annotations

import pytest
import torch

from moec.runtime.kernels import torch_pairs as kernels_torch_pairs
from moec.runtime.kernels.triton_rows import combine, invert_pairs, reduce_rows, sum_rows
from tests.contexts import context
from tests.routed_rows import TOLERANCE, assert_close, exact_sums

pytest.importorskip("triton")
#: numpy, in which the interpreter computes, warns of NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def test_b27_fp16_sums_are_in_fp32_and_saturate() -> None:
    """80,000 - 79,936 is 64; what exceeds fp16 becomes its largest number; NaN and only NaN stays NaN."""
    rows = torch.tensor([[40000.0], [-39968.0]], dtype=torch.float16)
    ctx, pairs = context(), torch.tensor([0, 1])
    assert reduce_rows(ctx, rows, pairs, torch.tensor([[2.0, 2.0]]), table="routed").item() == 64.0
    rows = torch.tensor([[40000.0, -40000.0, torch.nan, torch.inf]], dtype=torch.float16)
    sums = reduce_rows(ctx, rows, torch.tensor([0]), torch.tensor([[4.0]]), table="routed")[0]
    assert sums[[0, 1, 3]].tolist() == [65504.0, -65504.0, 65504.0] and sums[2].isnan()


def test_weights_are_not_rounded_and_sums_round_once_to_even() -> None:
    """In bf16 1 + 2^-8 lies between two numbers: to even. A weight of 1 + 2^-9, rounded first, would give 1."""
    ctx, pairs = context(), torch.tensor([0, 1])
    rows = torch.ones(2, 1, dtype=torch.bfloat16)
    for weights, wanted in (([1.0, 2**-8], 1.0), ([1.0 + 2**-9, 2**-8], 1 + 2**-7), ([1 + 2**-7, 2**-8], 1 + 2**-6)):
        assert reduce_rows(ctx, rows, pairs, torch.tensor([weights]), table="routed").item() == wanted
    rows = torch.tensor([[torch.nan], [1.0]], dtype=torch.bfloat16)
    assert reduce_rows(ctx, rows, pairs, torch.ones(1, 2), table="routed").isnan().all()


def test_sums_follow_the_order_of_the_choices() -> None:
    """1e8 + 1 - 1e8 is 0 in fp32, 1e8 - 1e8 + 1 is 1: by choice, not by expert or place."""
    rows, weights = torch.tensor([[1.0], [1e8], [-1e8]]), torch.ones(1, 3)
    for order, wanted in ([1, 0, 2], 0.0), ([2, 0, 1], 1.0), ([0, 1, 2], 0.0):
        assert reduce_rows(context(), rows, torch.tensor(order), weights, table="routed").item() == wanted


def test_rows_without_pairs_are_zero_whatever_their_weights() -> None:
    """B19: a pair that is not served here is not read, nor is its weight."""
    places = torch.tensor([[-1, -1], [1, -1]], dtype=torch.int32)
    weights = torch.tensor([[torch.nan, torch.inf], [2.0, torch.nan]])
    rows = torch.tensor([[torch.nan], [3.0]])
    assert sum_rows(rows, places, weights).tolist() == [[0.0], [6.0]]
    assert sum_rows(rows, places).tolist() == [[0.0], [3.0]]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("top", [2, 9])
def test_rows_that_are_weighted_already_are_only_added(dtype: torch.dtype, top: int) -> None:
    generator = torch.Generator().manual_seed(top)
    rows_XD = torch.randn(5 * top, 50, generator=generator).to(dtype)
    pairs_X = torch.randperm(5 * top, generator=generator)
    sums = sum_rows(rows_XD, invert_pairs(pairs_X, (5, top)))
    assert_close(sums, exact_sums(rows_XD, pairs_X, torch.ones(5, top)))


def test_combine_is_torchs() -> None:
    generator = torch.Generator().manual_seed(3)
    rows_KD, weights_Nk = torch.randn(40, 33, generator=generator), torch.rand(10, 4, generator=generator)
    order_K = torch.randperm(40, generator=generator)
    wanted = kernels_torch_pairs.combine(context(), rows_KD, order_K, weights_Nk, table="routed")
    torch.testing.assert_close(combine(context(), rows_KD, order_K, weights_Nk, table="routed"), wanted)
