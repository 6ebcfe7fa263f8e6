"""The lab: every case is a run of the simulator, ranks add up, and learned figures come from where they say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moec.cache import lab as labs
from moec.cache.lab import BOUNDS, Case, Lab, floor, least_size, measure, resident_times
from moec.cache.policies import POLICIES
from moec.cache.simulate import policy_for, simulate
from moec.cache.timing import Machine
from tests.traces import random_ids, trace_of

WHOLE = [[range(12)] * 3]
HALVES = [[range(6)] * 3, [range(6, 12)] * 3]
IDS = random_ids(3, 60, 3, 12)
TRACE = trace_of(IDS, 12, seq_lengths=np.array([20, 30, 10]))
#: A guess of every layer that is right three times of four.
GUESSED = replace(TRACE, predicted_ids=np.where(np.arange(60)[None, :, None] % 4 == 0, -1, IDS))
MACHINE = Machine(*(np.full(3, 100.0) for _ in range(2)), 300.0, np.full(3, 2.0), 100.0, 1e4, 2)


def test_every_policy_meets_every_prefetcher_that_the_trace_allows() -> None:
    plain, guessed = (Lab(trace, WHOLE).cases([3, 6]) for trace in (TRACE, GUESSED))
    assert len(set(plain)) == len(plain) == 2 * (2 * len(POLICIES) + len(BOUNDS))
    assert {case.prefetch for case in plain} == {"none", "history"}
    assert {case for case in guessed if case.prefetch != "next_router"} == set(plain)
    assert {case.policy for case in guessed if case.prefetch == "next_router"} == set(POLICIES)
    assert {case.prefetch for case in Lab(GUESSED, WHOLE, ahead=3).cases([3])} == {"none"}  # past the last layer


def test_a_row_is_a_run_of_the_simulator() -> None:
    rows = measure(Lab(TRACE, WHOLE), [4])
    for row in rows:
        if row.case.prefetch == "none":
            outcome = simulate(TRACE, policy_for(row.case.policy, TRACE), 4)
            assert (row.hits, row.demanded, row.transfers) == (outcome.hits, outcome.misses, outcome.transfers)
            assert row.hit_rates == tuple(c.hits / c.lookups for c in outcome.counters)
        assert row.lookups == row.hits + row.demanded == 3 * 60 * 3
        assert row.times == (None, None) and row.moved_bytes is None
    assert min(row.demanded for row in rows if row.case.prefetch == "none") in {
        row.demanded for row in rows if row.case.policy in BOUNDS
    }


def test_right_guesses_save_misses_and_fetch_what_they_save() -> None:
    rows = {row.case: row for row in measure(Lab(GUESSED, WHOLE), [6])}
    plain, ahead = (rows[Case(6, "layer_lru", prefetch)] for prefetch in ("none", "next_router"))
    assert ahead.demanded < 0.6 * plain.demanded
    assert 0 < ahead.prefetch_hits <= ahead.fetched


def test_ranks_add_up() -> None:
    one, two = (measure(Lab(TRACE, held, expert_bytes=[7] * 3), [12 // len(held)]) for held in (WHOLE, HALVES))
    for whole, halves in zip(one, two, strict=True):
        assert whole.lookups == halves.lookups
        assert halves.moved_bytes == 7 * halves.transfers
        if whole.case.prefetch == "none":  # a slot for each expert: all are copied once
            assert whole.demanded == halves.demanded == 36


def test_pinned_experts_are_there_and_stay() -> None:
    lab = Lab(TRACE, WHOLE, pinned=(0, 5))
    assert (least_size(Lab(TRACE, WHOLE)), least_size(lab)) == (1, 3)
    rows = measure(lab, [3])
    uses = int(np.isin(IDS, (0, 5)).sum())
    assert all(row.hits >= uses for row in rows)
    with pytest.raises(ValueError, match="at least 3"):
        measure(lab, [2])


def test_learning_from_another_trace_changes_what_was_learned_alone() -> None:
    """A trace of four experts only: their popularity keeps them, and history names no others."""
    other = trace_of(random_ids(3, 50, 3, 4), 12)
    hindsight, learned = (
        measure(Lab(TRACE, WHOLE), [4]),
        measure(Lab(TRACE, WHOLE, popularity=other, history=other), [4]),
    )
    for mine, theirs in zip(hindsight, learned, strict=True):
        is_taught = mine.case.policy == "trace" or mine.case.prefetch == "history"
        assert (mine == theirs) != is_taught, mine.case


def test_times_are_of_prefill_steps_or_of_sequences() -> None:
    """Without prefill tokens each sequence stands for a prompt; with them only those steps count."""
    lab = Lab(TRACE, WHOLE, machine=MACHINE)
    ttft, token = resident_times(lab)
    assert token == 3.0 + 3 * (1.0 + 3.0)  # all weights read once for each token, three experts of each layer
    assert ttft == pytest.approx(np.mean([3 + 3 + 3 * 12] * 3), rel=0.02)  # prompts use nearly all experts
    phase = np.repeat(np.array([0, 1], np.uint8), [20, 40])
    starts = np.concatenate([[0], np.arange(20, 61)])
    mixed = replace(TRACE, phase=phase, step_starts=starts)
    assert resident_times(replace(lab, trace=mixed)) == (3.0 + 3.0 + 3 * 12, token)
    only = replace(TRACE, phase=np.zeros(60, np.uint8), step_starts=np.array([0, 60]))
    assert resident_times(replace(lab, trace=only))[1] is None


def test_the_floor_is_below_every_row() -> None:
    lab = Lab(GUESSED, HALVES, expert_bytes=[5, 6, 7], machine=MACHINE)
    for slots in (2, 4, 6):
        least, rows = floor(lab, slots), measure(lab, [slots])
        for row in rows:
            assert least.transfers <= row.transfers and (least.moved_bytes or 0) <= (row.moved_bytes or 0)
            assert all((a or 0) <= (b or 0) + 1e-9 for a, b in zip(least.times, row.times, strict=True))


def test_several_processes_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(GUESSED, WHOLE, machine=MACHINE)
    alone = measure(lab, [3, 6])
    monkeypatch.setattr(labs, "MANY_LOOK_UPS", 0)
    monkeypatch.setattr(labs.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    seen: list[tuple[int, int]] = []
    assert measure(lab, [3, 6], lambda done, total: seen.append((done, total))) == alone
    assert seen == [(i, len(alone)) for i in range(1, len(alone) + 1)]
