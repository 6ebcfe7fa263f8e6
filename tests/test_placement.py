"""Which rank holds which expert, and that it changes no result: B05, B07, B10, B18, B36, B43 of the fault list."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from moec.ir.evaluator import local, program
from moec.ir.program import op_of
from moec.placement import STRATEGIES, Placement, balanced, linear, round_robin
from tests.known_experts import sparse_sums
from tests.programs import compiled, evaluate, moe, plan, program_of, random_steps, weights_of


@pytest.mark.parametrize(
    ("total", "parts", "sizes"),
    [
        (8, 3, (3, 3, 2)),
        (30, 8, (4, 4, 4, 4, 4, 4, 3, 3)),
        (5, 8, (1, 1, 1, 1, 1, 0, 0, 0)),
        (32, 3, (11, 11, 10)),
        (0, 2, (0, 0)),
    ],
)
def test_the_remainder_is_spread_over_the_first_ranks(total: int, parts: int, sizes: tuple[int, ...]) -> None:
    assert balanced(total, parts) == sizes
    assert linear(total, parts).counts == round_robin(total, parts).counts == sizes


def test_linear_keeps_neighbours_together_and_round_robin_deals_them() -> None:
    assert linear(8, 3).slots == ((0, 1, 2), (3, 4, 5), (6, 7))
    assert round_robin(8, 3).slots == ((0, 3, 6), (1, 4, 7), (2, 5))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("num_experts", "num_ranks"), [*itertools.product((1, 5, 8, 13, 256), (1, 2, 3, 8, 32))])
def test_every_expert_has_one_slot_and_the_tables_agree(strategy: str, num_experts: int, num_ranks: int) -> None:
    table = STRATEGIES[strategy](num_experts, num_ranks)
    assert table.fault(num_experts, num_ranks) == ""
    assert table.num_experts == num_experts
    for expert in range(num_experts):
        assert table.flat[table.slot_of[expert]] == expert
    ends = list(itertools.accumulate(table.counts))
    owners = [next(rank for rank, end in enumerate(ends) if slot < end) for slot in table.slot_of]
    assert all(expert in table.slots[rank] for expert, rank in enumerate(owners))


@pytest.mark.parametrize(
    ("slots", "fault"),
    [
        (((0, 1), (2,)), "experts without a slot: [3]"),
        (((0, 1), (1, 2, 3)), "an expert has two slots or does not exist"),
        (((0, 1), (2, 3, 4)), "an expert has two slots or does not exist"),
        (((0, 1, 2, 3),), "the table has 1 ranks, the ep group 2"),
    ],
)
def test_a_wrong_table_is_named(slots: tuple[tuple[int, ...], ...], fault: str) -> None:
    assert Placement(slots).fault(4, 2) == fault


# --- what experts give does not depend on where they are ------------------------------------------------------------

EP = ({}, {"dp": 2, "ep": 2}, {"dp": 4, "ep": 4})
TP = ({"tp": 2, "ep": 2}, {"tp": 4, "ep": 4}, {"tp": 2, "etp": 2}, {"dp": 2, "tp": 2, "ep": 2, "etp": 2})


def count_rows(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Rows that each rank's experts process from now on."""
    seen: Counter[int] = Counter()
    plain = program.LOCAL["grouped_gate_up"]

    def counting(ctx: local.Context, rows: Tensor, *rest: Any) -> Tensor:
        seen[ctx.rank] += len(rows)
        result: Tensor = plain(ctx, rows, *rest)
        return result

    monkeypatch.setitem(program.LOCAL, "grouped_gate_up", counting)
    return seen


@pytest.mark.parametrize("exchange", ["flat", "gather"])
def test_b07_every_rank_serves_its_own_experts(exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = count_rows(monkeypatch)
    routing = [(2,), (3,), (0,), (5,), (2,), (7,)]
    assert sparse_sums(routing, lambda e: e + 1.0, 8, exchange=exchange, dp=4, ep=4) == [3, 4, 1, 6, 3, 8]
    assert [seen[rank] for rank in range(4)] == [1, 3, 1, 1]


@pytest.mark.parametrize("exchange", ["flat", "gather"])
def test_b07_on_ranks_that_hold_different_numbers_of_experts(exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = count_rows(monkeypatch)
    routing = [(2,), (3,), (0,), (5,), (2,), (7,)]
    assert sparse_sums(routing, lambda e: e + 1.0, 8, exchange=exchange, dp=3, ep=3) == [3, 4, 1, 6, 3, 8]
    assert [seen[rank] for rank in range(3)] == [3, 2, 1]  # experts 0-2, 3-5, 6-7


@pytest.mark.parametrize("exchange", ["flat", "gather"])
@pytest.mark.parametrize("degrees", (*EP, *TP), ids=str)
@pytest.mark.parametrize("inner", [4, 3])
def test_b05_a_shared_expert_is_counted_once(inner: int, degrees: dict[str, int], exchange: str) -> None:
    """Of inner width 4 it is cut over tp where tp > 1; of width 3 it is whole on every rank."""
    routing = [(e, 7 - e) for e in range(6)]
    assert sparse_sums(routing, lambda e: 0.0, 8, 1.0, inner, exchange, **degrees) == [1.0] * 6


@pytest.mark.parametrize("exchange", ["flat", "gather"])
@pytest.mark.parametrize("degrees", (*EP, {"dp": 2, "tp": 2, "ep": 2, "etp": 2}), ids=str)
def test_b10_the_declared_placement_moves_experts_and_results_stay(degrees: dict[str, int], exchange: str) -> None:
    """Expert e gives e, and the table is the permutation [5,0,7,2,4,1,6,3]: a loader in identity order would show."""
    parts = degrees.get("ep", 1)
    permutation = (5, 0, 7, 2, 4, 1, 6, 3) if parts > 1 else tuple(range(8))
    table = Placement(tuple(permutation[i : i + 8 // parts] for i in range(0, 8, 8 // parts)))
    routing = [(e,) for e in range(8)]
    assert sparse_sums(routing, float, 8, placement=table, exchange=exchange, **degrees) == list(range(8))


@pytest.mark.parametrize("exchange", ["flat", "gather"])
def test_b10_random_placements_change_no_bit(exchange: str) -> None:
    """Each token's experts are summed by slot (flat); by rank (gather) the order of a sum may change."""
    rng = random.Random(5)
    spec = plan([moe(7, top=3, shared=3)], exchange=exchange, dp=3, ep=3)
    lowered, steps = program_of(spec), random_steps(3)
    weights = weights_of(lowered)
    identity = evaluate(compiled(spec), weights, steps)
    for _ in range(6):
        experts = rng.sample(range(7), 7)
        program = compiled(spec)
        program.placements["routed"] = Placement((tuple(experts[:3]), tuple(experts[3:5]), tuple(experts[5:])))
        permuted = evaluate(program, weights, steps)
        if exchange == "flat":
            assert torch.equal(permuted, identity)
        else:
            assert torch.allclose(permuted, identity, rtol=0, atol=1e-12)


@pytest.mark.parametrize("exchange", ["flat", "gather"])
def test_b18_copies_of_all_experts_exchange_nothing(exchange: str) -> None:
    program = compiled(plan([moe()], exchange=exchange, dp=2, edp=2))
    assert [op_of(node).name for _, node in program.nodes() if "comm" in op_of(node).effects] == []
    both = compiled(plan([moe()], exchange=exchange, dp=4, edp=2, ep=2))
    assert both.mesh.groups()["experts.ep"] == ((0, 1), (2, 3))
    moving = [node for _, node in both.nodes() if "group" in node.kwargs and node.kwargs.get("how") != "keep"]
    assert {node.kwargs["group"] for node in moving} == {"experts.ep"}


@pytest.mark.parametrize("exchange", ["flat", "gather"])
@pytest.mark.parametrize(
    ("tokens", "degrees"),
    [(1, {"dp": 8, "ep": 8}), (3, {"dp": 4, "ep": 4}), (1, {"tp": 2, "ep": 2}), (1, {"dp": 2, "tp": 4, "ep": 8})],
    ids=str,
)
def test_b36_ranks_without_rows_take_part(tokens: int, degrees: dict[str, int], exchange: str) -> None:
    routing = [(e,) for e in range(tokens)]
    assert sparse_sums(routing, lambda e: e + 1.0, 8, exchange=exchange, **degrees) == [e + 1.0 for e in range(tokens)]


@pytest.mark.parametrize("exchange", ["flat", "gather"])
def test_b36_a_step_without_any_row(exchange: str) -> None:
    spec = plan([moe()], exchange=exchange, dp=2, tp=2, ep=2, etp=2)
    logits = evaluate(compiled(spec), weights_of(program_of(spec)), [[]])
    assert logits.shape == (0, 11)


@pytest.mark.parametrize("exchange", ["flat", "gather"])
def test_b43_more_ranks_than_experts(exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = count_rows(monkeypatch)
    routing = [(e % 5, (e + 1) % 5) for e in range(9)]
    sums = sparse_sums(routing, lambda e: e + 1.0, 5, exchange=exchange, dp=8, ep=8)
    assert sums == [sum(e + 1.0 for e in experts) / 2 for experts in routing]
    assert sum(seen.values()) == 18 and not any(seen[rank] for rank in (5, 6, 7))
