"""Predicted times of steps by hand, and that nothing is predicted to be faster than the floor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moec.cache.simulate import policy_for, simulate
from moec.cache.stream import Stream, as_prompts
from moec.cache.timing import Machine, Steps, layer_seconds, least_seconds, step_seconds
from moec.cache.trace import PREFILL
from tests.traces import random_ids, trace_of

#: Two layers whose dense part takes 3 s and each expert 1 s to read; 2 s to copy one; 5 s for the rest of a step.
MACHINE = Machine(
    expert_bytes=np.array([10.0, 10.0]),
    dense_bytes=np.array([30.0, 30.0]),
    other_bytes=50.0,
    copy_s=np.array([2.0, 2.0]),
    memory_rate=10.0,
    flop_rate=None,
    width=2,
)


def steps(**changes: Any) -> Steps:
    """One step of one token that uses 4 experts in the first layer and 2 in the second."""
    found = {"active": [[4, 2]], "pairs": [[4, 2]], "demanded": [[0, 0]], "fetched": [[0, 0]]} | changes
    return Steps(np.array([1]), *(np.array(found[name]) for name in ("active", "pairs", "demanded", "fetched")))


RESIDENT = 5 + (3 + 4) + (3 + 2)


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({}, RESIDENT),
        ({"demanded": [[1, 0]]}, RESIDENT),  # 2 s of copies under the 3 s of the experts that are there
        ({"demanded": [[3, 0]]}, RESIDENT + 6 - 1),
        ({"demanded": [[4, 2]]}, RESIDENT + 8 + 4),  # nothing is there to hide under
        ({"fetched": [[0, 2]]}, RESIDENT),  # 4 s asked for one layer of 5 s before
        ({"fetched": [[0, 4]]}, RESIDENT + 8 - 5),
    ],
)
def test_a_step_by_hand(changes: dict[str, Any], seconds: float) -> None:
    assert step_seconds(MACHINE, steps(**changes)).tolist() == [seconds]


def test_a_longer_look_ahead_hides_more() -> None:
    asked = steps(fetched=[[0, 4]])
    assert step_seconds(MACHINE, asked, ahead=2).tolist() == [RESIDENT]


def test_no_step_is_shorter_than_its_copies() -> None:
    """Each layer's 40 s fit what ten layers take, but they all follow one another."""
    assert step_seconds(MACHINE, steps(fetched=[[20, 20]]), ahead=10).tolist() == [80]


def test_arithmetic_counts_where_it_takes_longer_than_reading() -> None:
    """100 tokens of which each dp rank has 50: dense 30 bytes are 15 weights, 2 x 15 x 50 FLOP at 100 FLOP/s."""
    machine = replace(MACHINE, flop_rate=100.0, dp=2)
    many = Steps(np.array([100]), np.array([[4, 2]]), np.array([[300, 2]]), *([np.zeros((1, 2))] * 2))
    dense, work = layer_seconds(machine, many)
    assert dense.tolist() == [[15.0, 15.0]]
    assert work.tolist() == [[2 * 5 * 300 / 100, 2.0]]


def test_an_empty_step_takes_what_reading_the_rest_takes() -> None:
    none = Steps(np.array([0]), *([np.zeros((1, 2), np.int64)] * 4))
    assert step_seconds(MACHINE, none).tolist() == [5 + 3 + 3]


# --- what a rank sees of a trace ------------------------------------------------------------------------------------

HALVES = [[range(8)] * 3, [range(8, 16)] * 3]


def batched() -> Stream:
    """3 layers of 16 experts, 40 tokens in steps of 0 to 7 tokens, the first two of a prompt."""
    starts = np.array([0, 5, 5, 12, 13, 20, 27, 33, 40])
    phase = np.repeat(np.array([0, 1], np.uint8), [5, 35])
    trace = trace_of(random_ids(3, 40, 4, 16), 16, step_starts=starts, phase=phase, seq_lengths=np.array([25, 15]))
    return Stream(trace, [range(16)] * 3)


def test_what_steps_use_is_counted_rank_by_rank() -> None:
    trace = batched().trace
    for held in HALVES:
        found = Stream(trace, held).steps
        for step, (start, end) in enumerate(zip(trace.step_starts[:-1], trace.step_starts[1:], strict=True)):
            for layer in range(3):
                chosen = [e for e in trace.expert_ids[layer, start:end].ravel().tolist() if e in held[layer]]
                assert (found.pairs[step, layer], found.active[step, layer]) == (len(chosen), len(set(chosen)))
    whole, halves = batched().steps, [Stream(trace, held).steps for held in HALVES]
    assert np.array_equal(whole.active, halves[0].active + halves[1].active)
    assert whole.tokens.tolist() == [5, 0, 7, 1, 7, 7, 6, 7]


def test_steps_are_of_a_phase_or_of_none() -> None:
    assert batched().trace.step_phases.tolist() == [0, -1, 1, 1, 1, 1, 1, 1]


def test_sequences_as_prompts_keep_their_tokens() -> None:
    found = as_prompts(batched().trace)
    assert found.step_starts.tolist() == [0, 25, 40]
    assert (found.phase == PREFILL).all()


@pytest.mark.parametrize("slots", [1, 3, 5, 8, 16])
@pytest.mark.parametrize("policy", ["lru", "lfu", "belady", "belady_rank"])
def test_no_policy_is_below_the_floor(policy: str, slots: int) -> None:
    machine = replace(MACHINE, **{name: np.full(3, 2.0) for name in ("expert_bytes", "dense_bytes", "copy_s")})
    for stream in (batched(), Stream(as_prompts(batched().trace), [range(16)] * 3), Stream(batched().trace, HALVES[1])):
        if slots > len(stream.held[0]):
            continue
        outcome = simulate(stream.trace, policy_for(policy, stream.trace, stream.held), slots, stream.held)
        assert outcome.transfers >= stream.least_transfers(slots).sum() > 0
        least = least_seconds(machine, stream.steps, slots)
        assert (step_seconds(machine, stream.served(outcome)) >= least - 1e-9)[1:].all()


def test_with_a_slot_for_each_expert_the_floor_is_reached() -> None:
    stream = batched()
    outcome = simulate(stream.trace, policy_for("layer_lru", stream.trace), 16)
    assert outcome.transfers == stream.least_transfers(16).sum() == 48
