"""Traces through the cache: sums that hold for any of them, and figures of real ones."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moec.cache.policies import POLICIES
from moec.cache.predictors import History, NextRouter, most_rows_first
from moec.cache.simulate import Outcome, Prefetch, look_ups, policy_for, popularity_of, simulate
from moec.cache.trace import Array, Trace, read_trace
from tests.traces import random_ids, trace_of

BOUNDS = {"layer": "belady", "rank": "belady_rank"}


def in_steps(trace: Trace, size: int) -> Trace:
    """The same tokens, `size` of them at once."""
    starts = np.append(np.arange(0, trace.num_tokens, size), trace.num_tokens)
    return replace(trace, step_starts=starts)


def run(trace: Trace, name: str, slots: int) -> Outcome:
    return simulate(trace, policy_for(name, trace), slots)


# Any trace


@pytest.mark.parametrize("size", [1, 4, 30])
@pytest.mark.parametrize("name", [*POLICIES, *BOUNDS.values()])
def test_look_ups_are_hits_or_misses_and_bytes_are_of_what_moved(name: str, size: int) -> None:
    trace = in_steps(trace_of(random_ids(3, 60, 2, 9), 9), size)
    outcome = run(trace, name, 4)
    assert outcome.lookups == sum(len(experts) for step in look_ups(trace) for experts in step) == outcome.active.sum()
    assert outcome.hits + outcome.misses == outcome.lookups
    assert outcome.demanded.sum(axis=0).tolist() == [c.misses for c in outcome.counters]
    assert outcome.transfers == outcome.misses and not outcome.fetched.any()
    assert outcome.moved_bytes([1, 10, 100]) == sum(c.misses * 10**i for i, c in enumerate(outcome.counters))
    assert outcome.misses >= run(trace, BOUNDS[policy_for(name, trace).scope], 4).misses


def test_with_a_slot_for_everyone_each_expert_comes_once() -> None:
    trace = trace_of(random_ids(2, 200, 2, 7), 7)
    for name in (*POLICIES, *BOUNDS.values()):
        assert run(trace, name, 7).transfers == 14


def test_every_rank_sees_its_own_experts_and_together_they_see_all() -> None:
    trace = in_steps(trace_of(random_ids(2, 40, 3, 8), 8), 5)
    ranks = [[range(5)] * 2, [range(5, 8)] * 2]
    outcomes = [simulate(trace, policy_for("belady", trace, held), 2, held) for held in ranks]
    assert sum(o.active for o in outcomes).tolist() == run(trace, "belady", 2).active.tolist()
    assert all(sum(o.demanded).sum() == o.misses > 0 for o in outcomes)


def test_what_was_there_before_is_not_copied() -> None:
    trace = trace_of([[[0], [1], [2]]], 4)
    for name in ("layer_lru", "belady"):
        assert run(trace, name, 2).misses == 3
        assert simulate(trace, policy_for(name, trace), 2, initial=[(0, 1), (0, 2)]).misses == 2
        assert simulate(trace, policy_for(name, trace), 2, pinned=[(0, 1)]).misses == 2


# Prefetch


def guessed(right: Array, num_experts: int) -> Trace:
    """A trace whose next router knows: `predicted_ids` are the choices."""
    return replace(trace_of(right, num_experts), predicted_ids=right)


def test_a_router_that_is_always_right_leaves_only_the_first_layers_to_miss() -> None:
    trace = guessed(random_ids(4, 50, 2, 16), 16)
    assert trace.predicted_ids is not None
    ahead = 2
    outcome = simulate(
        trace,
        policy_for("layer_lru", trace),
        4,
        prefetch=Prefetch(NextRouter(trace.predicted_ids, trace.step_starts, 16), ahead, 2),
    )
    assert [c.misses == 0 for c in outcome.counters] == [False, False, True, True]
    plain = run(trace, "layer_lru", 4)
    for layer in (2, 3):
        assert outcome.fetched[:, layer].tolist() == plain.demanded[:, layer].tolist(), "the same copies, earlier"
        assert outcome.counters[layer].prefetch_hits == outcome.counters[layer].prefetches


def test_guesses_that_are_always_wrong_cost_copies_and_change_no_sum() -> None:
    right = random_ids(3, 60, 2, 8)
    wrong = (right + 4) % 8
    is_wrong = [not set(r) & set(w) for r, w in zip(right.reshape(-1, 2), wrong.reshape(-1, 2), strict=True)]
    trace = replace(trace_of(right, 8), predicted_ids=np.where(np.reshape(is_wrong, (3, 60, 1)), wrong, -1))
    assert trace.predicted_ids is not None
    prefetch = Prefetch(NextRouter(trace.predicted_ids, trace.step_starts, 8), 1, 2)
    for name in POLICIES:
        outcome = simulate(trace, policy_for(name, trace), 3, prefetch=prefetch)
        assert outcome.hits + outcome.misses == outcome.lookups == 360
        assert outcome.transfers == (outcome.demanded + outcome.fetched).sum() > run(trace, name, 3).transfers


@pytest.mark.parametrize("is_early", [False, True])
def test_only_layers_that_prefetch_do_and_only_so_much(is_early: bool) -> None:
    trace = guessed(random_ids(4, 30, 3, 16), 16)
    assert trace.predicted_ids is not None
    router = NextRouter(trace.predicted_ids, trace.step_starts, 16)
    prefetch = Prefetch(router, 1, 2, targets=[2], is_early=is_early)
    outcome = simulate(trace, policy_for("lfu", trace), 6, prefetch=prefetch)
    assert (outcome.fetched.sum(axis=0) > 0).tolist() == [False, False, True, False]
    assert outcome.fetched.max() == 2


def test_guesses_go_by_rows_then_by_number() -> None:
    assert most_rows_first([0, 2, 0, 3, 2]) == [3, 1, 4]
    router = NextRouter(np.array([[[-1, -1]] * 3, [[4, 2], [0, 4], [-1, 2]]]), np.array([0, 3]), 5)
    assert router.guess(0, 0, np.zeros(5), 1) == [2, 4, 0]


def test_history_guesses_what_used_to_follow() -> None:
    first = np.array([[0], [0], [0], [1], [2]])
    second = np.array([[3], [3], [4], [4], [1]])
    history = History(np.stack([first, second]), 5)
    assert history.guess(0, 0, np.array([1, 0, 0, 0, 0]), 1) == [3]
    assert history.guess(0, 0, np.array([1, 1, 1, 0, 0]), 1) == [4, 1, 3], "shares 4/3, 1 and 2/3"
    assert history.guess(0, 0, np.zeros(5, int), 1) == []
    assert history.guess(0, 1, np.ones(5, int), 1) == [], "there is no later layer"
    with pytest.raises(ValueError, match="learned for 1 layers ahead, not 2"):
        history.guess(0, 0, np.ones(5, int), 2)
    with pytest.raises(ValueError, match="2 layers ahead in a trace of 2 layers"):
        History(np.stack([first, second]), 5, ahead=2)


def test_popularity_counts_tokens() -> None:
    assert popularity_of(trace_of([[[0, 1], [1, 2]], [[2, 0], [2, 1]]], 3)).tolist() == [[1, 2, 1], [1, 1, 2]]


# Real traces: DeepSeek-V2-Lite, 26 layers of 64 experts, top 6


@pytest.fixture(scope="module")
def real(shared: Path) -> dict[str, Trace]:
    folder = shared / "data" / "traces" / "deepseek-v2-lite"
    if not folder.is_dir():
        pytest.skip(f"no traces at {folder}")
    return {name: read_trace(folder / f"{name}.npz") for name in ("law", "summary")}


def first_tokens(trace: Trace, count: int, every: int = 1) -> Trace:
    """The first `count` tokens of every so many-th layer, one a step."""
    return trace_of(trace.expert_ids[::every, :count], trace.num_experts)


def test_figures_of_an_independent_count(real: dict[str, Trace]) -> None:
    """3,000 tokens of `law`, 16 of 64 slots a layer; a token's look-ups are simultaneous."""
    law = first_tokens(real["law"], 3000)
    assert run(law, "layer_lru", 16).hit_rate == pytest.approx(0.499, abs=5e-4)
    assert run(law, "belady", 16).hit_rate == pytest.approx(0.679, abs=6e-4)


def test_figures_of_an_independent_count_one_after_another(real: dict[str, Trace]) -> None:
    """The same look-ups as 18,000 of one expert each, for one layer in four, held against the plainest counts too."""
    ids = real["law"].expert_ids[:, :3000].reshape(26, -1, 1)
    sequential = trace_of(ids[::4], 64)
    outcomes = {name: run(sequential, name, 16) for name in ("layer_lru", "belady")}
    assert outcomes["layer_lru"].hits == sum(plain_lru_hits(layer.ravel().tolist(), 16) for layer in ids[::4])
    assert outcomes["belady"].hits == sum(plain_belady_hits(layer.ravel().tolist(), 16) for layer in ids[::4])
    all_layers = [plain_lru_hits(layer.ravel().tolist(), 16) for layer in ids]
    assert sum(all_layers) / ids.size == pytest.approx(0.476, abs=5e-4)


def plain_lru_hits(look_ups: list[int], slots: int) -> int:
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for expert in look_ups:
        hits += expert in held
        held[expert] = None
        held.move_to_end(expert)
        if len(held) > slots:
            held.popitem(last=False)
    return hits


def plain_belady_hits(look_ups: list[int], slots: int) -> int:
    later = [len(look_ups)] * len(look_ups)
    seen: dict[int, int] = {}
    for i in range(len(look_ups) - 1, -1, -1):
        later[i] = seen.get(look_ups[i], len(look_ups))
        seen[look_ups[i]] = i
    held: dict[int, int] = {}
    hits = 0
    for expert, following in zip(look_ups, later, strict=True):
        hits += expert in held
        if expert not in held and len(held) == slots:
            del held[max(held, key=held.__getitem__)]
        held[expert] = following
    return hits


@pytest.mark.parametrize("share", [12, 25, 50])
@pytest.mark.parametrize(("name", "least"), [("law", 0.08), ("summary", 0.25)])
def test_lfu_closes_enough_of_the_gap_to_belady(real: dict[str, Trace], name: str, least: float, share: int) -> None:
    """On a part of each trace: 800 tokens, every other layer. The cache lab shows it for all."""
    trace, slots = first_tokens(real[name], 800, every=2), round(64 * share / 100)
    rates = {policy: run(trace, policy, slots).hit_rate for policy in ("layer_lru", "lfu", "belady")}
    assert (rates["lfu"] - rates["layer_lru"]) / (rates["belady"] - rates["layer_lru"]) >= least


def test_no_policy_beats_its_bound_on_a_real_trace_in_any_layer(real: dict[str, Trace]) -> None:
    trace = first_tokens(real["summary"], 200, every=2)
    bounds = {scope: run(trace, name, 8) for scope, name in BOUNDS.items()}
    for name in POLICIES:
        scope, outcome = policy_for(name, trace).scope, run(trace, name, 8)
        assert outcome.transfers >= bounds[scope].transfers
        if scope == "layer":
            layers = zip(outcome.counters, bounds[scope].counters, strict=True)
            assert all(mine.misses >= least.misses for mine, least in layers)


def test_history_of_one_half_helps_on_the_other(real: dict[str, Trace]) -> None:
    trace = first_tokens(real["law"], 400)
    history = History(real["law"].expert_ids[:, 4000:], 64)
    plain = run(trace, "lfu", 16)
    outcome = simulate(trace, policy_for("lfu", trace), 16, prefetch=Prefetch(history, 1, 2))
    assert outcome.hit_rate > plain.hit_rate + 0.05
    assert outcome.misses < 0.8 * plain.misses
