"""From tokens to experts and back by every exchange, and the experts' grouped products. All ranks in one process."""

from __future__ import annotations

import pytest
import torch

from moec.diagnostics import MoecError
from moec.placement import Placement, linear, round_robin
from moec.runtime.kernels import torch_moe as k
from tests.contexts import context, poisoned_memory
from tests.exchanges import EXCHANGES, Batch, Exchange, constants, exact, gated, random_batches

each_exchange = pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES)


@each_exchange
@pytest.mark.parametrize(
    "placement", [linear(11, 1), linear(11, 3), round_robin(11, 4), Placement(((5, 0, 7), (2, 4, 1, 6, 3), (10, 9, 8)))]
)
def test_experts_are_found_wherever_they_are_placed(exchange: Exchange, placement: Placement) -> None:
    """B10 and B43: unequal counts, any order. Batches differ in size, one is empty."""
    sizes = [5, 0, 9, 2][: len(placement.slots)]
    batches = random_batches(sizes, num_experts=11, top=3, hidden=6)
    experts, gate_up, down = gated(11, hidden=6, inner=10)
    results, served = exchange(batches, placement, experts)
    assert sum(served) == 3 * sum(sizes)
    for batch, found in zip(batches, results, strict=True):
        torch.testing.assert_close(found.double(), exact(batch, gate_up, down), rtol=0, atol=1e-5)


def ones(ids: list[list[int]]) -> Batch:
    """Tokens whose choices all count fully."""
    tokens = torch.tensor(ids).view(len(ids), -1)
    return torch.full((len(ids), 4), 7.0), tokens, torch.ones(tokens.shape)


@each_exchange
def test_b07_ranks_other_than_0_find_their_experts(exchange: Exchange) -> None:
    batches = [ones([[2], [3]]), ones([[0], [5]]), ones([[2]]), ones([[7]])]
    results, served = exchange(batches, linear(8, 4), constants([e + 1.0 for e in range(8)]))
    assert torch.cat(results)[:, 0].tolist() == [3, 4, 1, 6, 3, 8]
    assert served == [1, 3, 1, 1]


@each_exchange
def test_b08_nothing_falls_to_expert_0(exchange: Exchange) -> None:
    results, served = exchange([ones([[2, 3]]), ones([[3, 2]])], linear(4, 2), constants([100, 1, 0.5, 0.5]))
    assert torch.cat(results).unique().tolist() == [1.0]
    assert served == [0, 4]


@each_exchange
@pytest.mark.parametrize("chosen", [[0, 1, 2, 3, 4, 6, 7], [7], [4, 5, 6, 7], []])
def test_b19_rows_nobody_writes_are_not_read(exchange: Exchange, chosen: list[int]) -> None:
    """Memory starts as NaN; experts, ranks, or everything may have no token. The second call gives the same bits."""
    ids = [[a, b] for a in chosen for b in chosen]
    tokens = torch.tensor(ids, dtype=torch.int64).view(-1, 2)
    batch = (
        torch.randn(len(ids), 6, generator=torch.Generator().manual_seed(1)),
        tokens,
        torch.full(tokens.shape, 0.5),
    )
    experts, gate_up, down = gated(8, hidden=6, inner=10)
    with poisoned_memory():
        first, _ = exchange([batch, batch], linear(8, 2), experts)
        again, _ = exchange([batch, batch], linear(8, 2), experts)
    assert first[0].shape == (len(ids), 6)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    torch.testing.assert_close(first[1].double(), exact(batch, gate_up, down), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "counts", [[2, 3, 0, 6, 8], [19, 0, 0, 0, 0], [0, 0, 0, 0, 19], [0, 0, 0, 0, 0], [4, 5, 6, 4, 0]]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_b25_grouped_products_of_uneven_experts(counts: list[int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(sum(counts), 7, generator=generator).to(dtype)
    w = torch.randn(5, 9, 7, generator=generator).to(dtype)
    with poisoned_memory():
        found = k.grouped_linear(context(), rows, torch.tensor(counts).cumsum(0).int(), w)
    owner = torch.arange(5).repeat_interleave(torch.tensor(counts))
    wanted = torch.einsum("rk,rnk->rn", rows.double(), w.double()[owner])
    torch.testing.assert_close(found, wanted.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


def test_experts_given_fewer_rows_than_there_are_is_refused() -> None:
    with pytest.raises(MoecError, match="experts were given 3 of 4 rows") as error:
        k.grouped_linear(context(), torch.zeros(4, 2), torch.tensor([1, 3], dtype=torch.int32), torch.zeros(2, 5, 2))
    assert error.value.diagnostics[0].code == "E0508"


def test_a_rank_without_experts() -> None:
    assert k.grouped_linear(
        context(), torch.zeros(0, 2), torch.empty(0, dtype=torch.int32), torch.zeros(0, 5, 2)
    ).shape == (0, 5)


@each_exchange
def test_b36_one_token_on_eight_ranks(exchange: Exchange) -> None:
    empty = (torch.empty(0, 4), torch.empty(0, 1, dtype=torch.int64), torch.empty(0, 1))
    results, served = exchange(
        [empty] * 5 + [ones([[3]])] + [empty] * 2, linear(8, 8), constants([float(e) for e in range(8)])
    )
    assert served == [0, 0, 0, 1, 0, 0, 0, 0]
    assert [r.shape[0] for r in results] == [0, 0, 0, 0, 0, 1, 0, 0] and results[5].unique().tolist() == [3.0]


@each_exchange
def test_b29_an_expert_named_twice_counts_twice(exchange: Exchange) -> None:
    batch = (torch.randn(3, 6), torch.tensor([[2, 2], [2, 2], [1, 1]]), torch.tensor([[0.5, 0.25]] * 3))
    experts, gate_up, down = gated(4, hidden=6, inner=5)
    whole = (batch[0], batch[1][:, :1], torch.full((3, 1), 0.75))
    (found, _), served = exchange([batch, (batch[0][:0], batch[1][:0], batch[2][:0])], linear(4, 2), experts)
    assert sum(served) == 6
    torch.testing.assert_close(found.double(), exact(whole, gate_up, down), rtol=0, atol=1e-5)


@each_exchange
def test_b41_results_of_a_row_depend_on_nothing_else(exchange: Exchange) -> None:
    """Which experts other tokens chose, and how many there are, changes nothing beyond rounding."""
    experts, _, _ = gated(8, hidden=6, inner=10)
    many, other = random_batches([30, 7], num_experts=8, top=2, hidden=6)
    whole, _ = exchange([many, other], linear(8, 2), experts)
    for row in (0, 7, 29):
        one = (many[0][row : row + 1], many[1][row : row + 1], many[2][row : row + 1])
        alone, _ = exchange([one, one], linear(8, 2), experts)
        torch.testing.assert_close(alone[0][0], whole[0][row], rtol=0, atol=1e-5)


@each_exchange
def test_b19_a_row_that_is_not_a_number_stays_alone(exchange: Exchange) -> None:
    experts, gate_up, down = gated(8, hidden=6, inner=10)
    batches = random_batches([6, 6, 6, 6], num_experts=8, top=3, hidden=6)
    batches[0][0][0] = float("nan")
    batches[2][0][5] = float("inf")
    results, _ = exchange(batches, linear(8, 4), experts)
    assert results[0][0].isnan().all() and not results[2][5].isfinite().any()
    for rank, batch in enumerate(batches):
        kept = [row for row in range(6) if (rank, row) not in ((0, 0), (2, 5))]
        torch.testing.assert_close(results[rank][kept].double(), exact(batch, gate_up, down)[kept], rtol=0, atol=1e-5)
