"""Sorting rows by expert in Triton's interpreter, against torch's kernel; and the way back, against fp64.

Shapes: R rows, k choices, X pairs, M experts held, D hidden. The numbers B07 ... B36 are faults that engines shipped.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moec.codegen import kernel_rows
from moec.codegen.kernel_rows import specialise_group
from moec.codegen.targets import Dtype
from moec.diagnostics import MoecError
from moec.placement import Placement, linear
from moec.runtime.device_flags import raise_faults
from moec.runtime.kernels import torch_pairs, triton_rows
from moec.runtime.kernels.triton_rows import (
    group_rows,
    invert_pairs,
    reduce_rows,
    sort_pairs,
    sum_rows,
)
from tests.contexts import context, poisoned_memory
from tests.covering import covering
from tests.routed_rows import TOLERANCE, assert_close, exact_sums

pytest.importorskip("triton")
#: numpy, in which the interpreter computes, warns of NaN, of which all memory that nothing was written to is full.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

FACTORS: dict[str, tuple[object, ...]] = {
    "rows": (0, 1, 7, 64, 257),
    "experts": (1, 5, 8, 64, 160),
    "choices": ("one", "some", "all"),
    "hidden": (16, 33, 50, 1025),
    "dtype": tuple(TOLERANCE),
    "routing": ("spread", "one", "gaps", "repeated"),
    "ranks": (1, 2, 3),
    "chunks": ("small", "large", "several"),
}


def route_to(rows: int, experts: int, top: int, routing: str, generator: torch.Generator) -> Tensor:
    """Ids i64 [R, k]: different experts, the first ones alone, every third, or any, also twice and none (-1)."""
    order = torch.rand(rows, experts, generator=generator).argsort(dim=-1)
    if routing == "one":
        return torch.arange(top).expand(rows, top)
    if routing == "gaps":
        return order[:, :top] // 3 * 3
    if routing == "repeated":
        return torch.randint(-1, experts, (rows, top), generator=generator)
    return order[:, :top]


def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks and programs as a decode step has them."""
    monkeypatch.setattr(triton_rows, "INTERPRETED_ROWS", 1)
    monkeypatch.setattr(triton_rows, "INTERPRETED_SUMS", 4)


@pytest.mark.parametrize(tuple(FACTORS), covering(FACTORS))
def test_interpreted_kernels_equal_torchs(
    rows: int,
    experts: int,
    choices: str,
    hidden: int,
    dtype: torch.dtype,
    routing: str,
    ranks: int,
    chunks: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every pair of sizes, dtypes, routings, ranks and chunk sizes, into memory full of NaN (B19).

    All experts are chosen by few rows at most: the interpreter's time is that of every pair and 16 columns.
    """
    most = max(1, 2**11 // max(rows, 1) // (1 + hidden // 256))
    top = min({"one": 1, "some": 6, "all": experts}[choices], experts, most)
    generator = torch.Generator().manual_seed(rows * 1000 + experts)
    ctx = context(placement=linear(experts, min(ranks, experts)), rank=min(ranks, experts) - 1)
    ids_Rk = route_to(rows, experts, top, routing, generator)
    x_RD = torch.randn(rows, hidden, generator=generator).to(dtype)
    weights_Rk = torch.rand(rows, top, generator=generator)
    if chunks != "large":
        small_chunks(monkeypatch)
    if chunks == "several":  # of each program, one after the other
        monkeypatch.setattr(kernel_rows, "CHUNKS", 3)
    with poisoned_memory():
        found = group_rows(ctx, x_RD, ids_Rk, table="routed")
        sums_RD = reduce_rows(ctx, found[0], found[2], weights_Rk, table="routed")
    wanted = torch_pairs.group_rows(ctx, x_RD, ids_Rk, table="routed")
    for part, torchs in zip(found, wanted, strict=True):
        assert part.dtype == torchs.dtype and torch.equal(part, torchs)
    assert sums_RD.dtype == dtype
    assert_close(sums_RD, exact_sums(wanted[0], wanted[2], weights_Rk))


@pytest.mark.parametrize("choices", [1, 13, 16, 17, 160])
def test_any_number_of_choices_of_160_experts(choices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """k from 1 to E; past 8 the loops over choices are not unrolled."""
    small_chunks(monkeypatch)
    generator = torch.Generator().manual_seed(choices)
    ctx = context(placement=linear(160, 1))
    ids_Rk = route_to(3, 160, choices, "spread", generator)
    x_RD, weights_Rk = torch.randn(3, 33, generator=generator), torch.rand(3, choices, generator=generator)
    rows_XD, ends_M, pairs_X = group_rows(ctx, x_RD, ids_Rk, table="routed")
    wanted = torch_pairs.group_rows(ctx, x_RD, ids_Rk, table="routed")
    assert torch.equal(rows_XD, wanted[0]) and torch.equal(ends_M, wanted[1]) and torch.equal(pairs_X, wanted[2])
    assert_close(
        reduce_rows(ctx, rows_XD, pairs_X, weights_Rk, table="routed"), exact_sums(wanted[0], wanted[2], weights_Rk)
    )


@pytest.mark.parametrize("routing", ["spread", "one", "repeated"])
@pytest.mark.parametrize(("rows", "experts", "top"), [(1, 160, 8), (7, 5, 5), (21, 8, 3), (32, 300, 8), (16, 160, 12)])
def test_few_pairs_are_sorted_in_one_launch(
    rows: int, experts: int, top: int, routing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 256 pairs, with those that fill choices up to a power of two, for a step whose rows stay where they are."""
    launched = []
    real = triton_rows._launcher
    spy = lambda render, values, name, tensor: launched.append(name) or real(render, values, name, tensor)  # noqa: E731
    monkeypatch.setattr(triton_rows, "_launcher", spy)
    ctx = context(placement=linear(experts, 1))
    ids_Rk = route_to(rows, experts, top, routing, torch.Generator().manual_seed(rows))
    x_RD = torch.zeros(rows, 4)
    with poisoned_memory():
        found = sort_pairs(ctx, x_RD, ids_Rk, table="routed", copies=False)
    assert launched == ["sort_pairs"]
    _, ends_M, pairs_X = torch_pairs.group_rows(ctx, x_RD, ids_Rk, table="routed")
    assert torch.equal(found.offsets, ends_M) and torch.equal(found.pairs[: len(pairs_X)], pairs_X)
    assert torch.equal(found.places, invert_pairs(pairs_X, (rows, top)))


def test_more_pairs_and_rows_to_copy_take_two_launches() -> None:
    alone = [specialise_group(128, 128, 8, 64, Dtype.BF16, rows, copies=False).alone for rows in (0, 1, 32, 33, 4096)]
    assert alone == [True, True, True, False, False]
    assert not specialise_group(128, 128, 8, 64, Dtype.BF16, 1).alone


def test_an_id_that_is_no_expert_is_told_of_in_one_launch_too() -> None:
    ctx = context(placement=linear(8, 1))
    ids_Rk = torch.tensor([[0, 7], [3, 8], [-2, 1]])
    found = sort_pairs(ctx, torch.zeros(3, 4), ids_Rk, table="routed", copies=False)
    assert found.places.tolist() == [[0, 3], [2, -1], [-1, 1]]
    with pytest.raises(MoecError, match="expert 8 of `routed`"):
        raise_faults(ctx)


@pytest.mark.parametrize("rows", [0, 40])
def test_room_for_all_pairs_and_no_wait(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a captured graph gets: as many rows as there can be, the first of them written, and the places to sum by."""
    ctx = context(placement=linear(8, 2), rank=1)
    ids_Rk = route_to(rows, 8, 3, "repeated", torch.Generator().manual_seed(1))
    x_RD = torch.randn(rows, 20)
    weights_Rk = torch.rand(rows, 3)
    wanted = torch_pairs.group_rows(ctx, x_RD, ids_Rk, table="routed")
    num_served = len(wanted[2])
    gathering = sort_pairs(ctx, x_RD, ids_Rk, table="routed", copies=False)
    assert gathering.rows is None
    monkeypatch.setattr(triton_rows, "is_deferred", lambda _: True)
    rows_XD, ends_M, pairs_X = group_rows(ctx, x_RD, ids_Rk, table="routed")
    assert rows_XD.shape == (rows * 3, 20) and pairs_X.shape == (rows * 3,)
    assert torch.equal(rows_XD[:num_served], wanted[0]) and torch.equal(ends_M, wanted[1])
    assert torch.equal(gathering.offsets, wanted[1]) and torch.equal(gathering.pairs[:num_served], wanted[2])
    assert torch.equal(gathering.places, invert_pairs(wanted[2], (rows, 3)))
    rows_XD[num_served:] = torch.nan
    assert_close(
        reduce_rows(ctx, rows_XD, pairs_X, weights_Rk, table="routed"), exact_sums(wanted[0], wanted[2], weights_Rk)
    )
    assert not ctx.step_memo


def test_rows_may_be_views_into_messages() -> None:
    """Rows and weights as `open_rows` gives them, with the rest of the message between them, and one row for all."""
    ctx = context(placement=linear(8, 1))
    ids_Rk = route_to(9, 8, 2, "spread", torch.Generator().manual_seed(2))
    message = torch.randn(9, 60)
    x_RD, weights_Rk = message[:, :50], message[:, 58:]
    found = sort_pairs(ctx, x_RD, ids_Rk, table="routed")
    wanted = torch_pairs.group_rows(ctx, x_RD, ids_Rk, table="routed")
    assert found.rows is not None and torch.equal(found.rows, wanted[0])
    assert_close(sum_rows(found.rows, found.places, weights_Rk), exact_sums(wanted[0], wanted[2], weights_Rk))
    for same in (x_RD[:1].expand(9, 50), x_RD.T.contiguous().T):
        rows_XD, _, pairs_X = group_rows(ctx, same, ids_Rk, table="routed")
        assert torch.equal(rows_XD, same[pairs_X // 2])


def test_b07_experts_of_other_ranks_are_passed_over() -> None:
    """Global ids on 4 ranks of 2 experts: every rank finds its own rows, 6 in all."""
    ids_Rk = torch.tensor([[2], [3], [0], [5], [2], [7]])
    x_RD = torch.arange(6.0)[:, None]
    total, counts = torch.zeros(6, 1), []
    for rank in range(4):
        ctx = context(placement=linear(8, 4), rank=rank)
        rows_XD, ends_M, pairs_X = group_rows(ctx, x_RD, ids_Rk, table="routed")
        assert torch.equal(rows_XD[:, 0].long(), pairs_X)
        expert_X = 2 * rank + torch.arange(2).repeat_interleave(torch.diff(ends_M, prepend=ends_M.new_zeros(1)))
        outs_XD = (expert_X + 1.0)[:, None]
        total += reduce_rows(ctx, outs_XD, pairs_X, torch.ones(6, 1), table="routed")
        counts.append(len(pairs_X))
    assert counts == [1, 3, 1, 1]
    assert total.flatten().tolist() == [3, 4, 1, 6, 3, 8]


def test_experts_lie_as_the_placement_says() -> None:
    """Slots in another order than the ids."""
    ctx = context(placement=Placement(((4, 0), (2, 3, 1))), rank=1)
    ids_Rk = torch.tensor([[1, 2], [0, 3], [4, 1], [3, 2]])
    _, ends_M, pairs_X = group_rows(ctx, torch.zeros(4, 8), ids_Rk, table="routed")
    assert ends_M.tolist() == [2, 4, 6]
    assert pairs_X.tolist() == [1, 7, 3, 6, 0, 5]


@pytest.mark.parametrize("experts", [5, 7, 60, 160, 257, 384, 512])
def test_b24_rows_of_the_last_expert_are_found(experts: int) -> None:
    """More than 256 experts, no power of two; all rows to the last one, then one row to each."""
    ctx = context(placement=linear(experts, 1))
    last = torch.full((70, 1), experts - 1)
    rows_XD, ends_M, pairs_X = group_rows(ctx, torch.arange(70.0)[:, None], last, table="routed")
    assert rows_XD.flatten().tolist() == pairs_X.tolist() == list(range(70))
    assert ends_M.tolist() == [0] * (experts - 1) + [70]
    backwards = torch.arange(experts - 1, -1, -1)[:, None]
    _, ends_M, pairs_X = group_rows(ctx, torch.zeros(experts, 4), backwards, table="routed")
    assert ends_M.tolist() == list(range(1, experts + 1)) and torch.equal(pairs_X[:, None], backwards)


def test_b25_counts_with_an_empty_expert() -> None:
    """Tokens per expert 2, 3, 0, 6, 8: five ends, no pair more than there are, none of an expert that has none."""
    ids_Rk = torch.repeat_interleave(torch.arange(5), torch.tensor([2, 3, 0, 6, 8]))[torch.randperm(19)][:, None]
    _, ends_M, pairs_X = group_rows(context(placement=linear(5, 1)), torch.zeros(19, 4), ids_Rk, table="routed")
    assert ends_M.tolist() == [2, 5, 5, 11, 19]
    assert ids_Rk[pairs_X].flatten().tolist() == [0] * 2 + [1] * 3 + [3] * 6 + [4] * 8


def test_b29_a_repeated_expert_counts_twice() -> None:
    """Row [2, 2] with weights 0.5 and 0.25 gives 0.75 of what expert 2 gives."""
    ctx = context(placement=linear(4, 1))
    ids_Rk = torch.tensor([[2, 2], [2, 2], [0, 2]])
    rows_XD, ends_M, pairs_X = group_rows(ctx, torch.tensor([[4.0], [8.0], [16.0]]), ids_Rk, table="routed")
    assert ends_M.tolist() == [1, 1, 6, 6] and pairs_X.tolist() == [4, 0, 1, 2, 3, 5]
    weights_Rk = torch.tensor([[0.5, 0.25]]).expand(3, 2)
    sums = reduce_rows(ctx, rows_XD * 10, pairs_X, weights_Rk, table="routed")
    assert sums.flatten().tolist() == [30.0, 60.0, 120.0]


def test_b36_no_rows_and_no_experts_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_rows, "_launcher", lambda *_: pytest.fail("launched"))
    ctx = context(placement=Placement(((0, 1), ())), rank=1)
    for ids_Rk in (torch.empty(0, 2, dtype=torch.int64), torch.tensor([[0, 1]])):
        rows_XD, ends_M, pairs_X = group_rows(ctx, torch.ones(len(ids_Rk), 16), ids_Rk, table="routed")
        assert rows_XD.shape == (0, 16) and ends_M.shape == (0,) and pairs_X.shape == (0,)
    empty = torch.empty(0, dtype=torch.int64)
    assert reduce_rows(ctx, torch.empty(0, 16), empty, torch.empty(0, 2), table="routed").shape == (0, 16)
