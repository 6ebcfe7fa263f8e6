"""Who is in which slot: nothing is lost, doubled or taken from under a computation, whatever is asked for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moec.cache.policies import COUNTING, policy_named
from moec.cache.residency import PASSING, Counters, Load, Residency, Use, least_slots
from tests.cache_drivers import ALL_POLICIES, Checked, policy_of


def residency_of(policy: str, num_experts: int, slots: int, num_layers: int = 1, **parts: Any) -> Residency:
    return Residency([range(num_experts)] * num_layers, slots, policy_named(policy, num_layers, num_experts), **parts)


def test_a_wrong_guess_or_a_wrap_leaves_no_stale_expert() -> None:
    """B21: 4 experts, 2 slots, 7 steps, then all four at once."""
    residency = residency_of("layer_lru", 4, 2)
    told = [use for expert in (0, 1, 2, 0, 3, 1, 0) for use in residency.demand(0, [expert])]
    assert told == [
        Use(0, 0, True, None),
        Use(1, 1, True, None),
        Use(2, 0, True, (0, 0)),
        Use(0, 1, True, (0, 1)),
        Use(3, 0, True, (0, 2)),
        Use(1, 1, True, (0, 0)),
        Use(0, 0, True, (0, 3)),
    ]
    assert residency.demand(0, [0, 1, 2, 3]) == [
        Use(0, 0, False, None),
        Use(1, 1, False, None),
        Use(2, 0, True, (0, 0)),
        Use(3, 1, True, (0, 1)),
    ]
    assert residency.counters == [Counters(lookups=11, hits=2, misses=9, evictions=7)]


@pytest.mark.parametrize("name", ALL_POLICIES)
def test_the_faulty_sequence_with_guesses_that_are_always_wrong(name: str) -> None:
    """B21 with two layers in one pool or in two, every guess wrong: nobody gets another's slot, and the sums hold."""
    look_ups = [(layer, [expert]) for expert in (0, 1, 2, 0, 3, 1, 0) for layer in (0, 1)]
    look_ups += [(layer, [0, 1, 2, 3]) for layer in (0, 1)]
    residency = Residency([range(4)] * 2, 2, policy_of(name, 2, 4, look_ups))
    checked = Checked(residency, 2, 2, ())
    for layer, experts in look_ups:
        checked.demand(layer, experts)
        following = [expert for expert in range(4) if expert not in experts]
        checked.prefetch(1 - layer, following[:1])
        checked.agrees()
    assert sum(c.lookups for c in residency.counters) == 22
    assert sum(c.prefetches for c in residency.counters) > 0


operations = st.lists(
    st.tuples(
        st.sampled_from(("demand", "prompts", "served", "prefetch")),
        st.integers(0, 2),
        st.lists(st.integers(0, 6), max_size=7),
    ),
    min_size=1,
    max_size=40,
)


@pytest.mark.parametrize("name", ALL_POLICIES)
@settings(max_examples=60, deadline=None)
@given(operations, st.integers(1, 4), st.sets(st.tuples(st.integers(0, 2), st.integers(0, 6)), max_size=3), st.data())
def test_whatever_is_asked_no_slot_is_lost_or_shared(
    name: str, steps: list[tuple[str, int, list[int]]], slots: int, pinned: set[tuple[int, int]], data: Any
) -> None:
    look_ups = [(layer, experts) for what, layer, experts in steps if what in ("demand", "prompts")]
    held = [range(7)] * 3
    policy = policy_of(name, 3, 7, look_ups)
    slots = max(slots, least_slots(held, policy.scope, pinned))
    checked = Checked(Residency(held, slots, policy, pinned), 3, slots, pinned)
    checked.fill(data.draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), max_size=8)))
    for what, layer, experts in steps:
        if what in ("demand", "prompts"):
            checked.demand(layer, experts, of_prompts=what == "prompts")
        elif what == "served":
            checked.served()
        else:
            checked.prefetch(layer, experts)
        checked.agrees()
        assert pinned <= set(checked.content.values())


def test_the_order_of_the_question_does_not_matter() -> None:
    one, other = residency_of("lfu", 8, 3), residency_of("lfu", 8, 3)
    for experts in ([3, 1], [7, 2, 3], [5, 0, 4, 6, 1], [1, 2]):
        assert one.demand(0, experts) == other.demand(0, [*reversed(experts), experts[0]])


def test_what_is_worth_most_is_what_a_step_in_waves_leaves_behind() -> None:
    residency = residency_of("lfu", 6, 2)
    for _ in range(5):
        residency.demand(0, [1, 4])
    residency.demand(0, [0, 2])
    assert [use.expert for use in residency.demand(0, range(6))] == [0, 2, 3, 5, 1, 4]
    assert residency.resident(0) == (1, 4)


def test_a_guess_that_is_used_counts_once_and_one_that_is_not_is_useless() -> None:
    residency = residency_of("layer_lru", 6, 3)
    residency.demand(0, [0])
    assert residency.prefetch(0, [1, 0, 2]) == [Load(1, 1, None), Load(2, 2, None)]
    assert [use.is_loaded for use in residency.demand(0, [1])] == [False]
    residency.demand(0, [1])
    assert residency.demand(0, [3]) == [Use(3, 2, True, (0, 2))], "never used: it leaves before what was"
    assert residency.counters == [
        Counters(lookups=4, hits=2, prefetch_hits=1, misses=2, evictions=1, prefetches=2, useless=1)
    ]


def test_a_guess_takes_no_slot_from_the_step_or_from_better_guesses() -> None:
    residency = residency_of("layer_lru", 8, 4)
    residency.demand(0, [0, 1])
    residency.demand(0, [2, 3])
    assert residency.prefetch(0, [4, 0, 5, 6]) == [Load(4, 1, (0, 1))]
    assert residency.counters[0].skipped == 2
    assert residency.prefetch(0, [7]) == [Load(7, 0, (0, 0))]


def test_a_guess_takes_the_slots_of_a_step_once_it_is_served() -> None:
    residency = residency_of("layer_lru", 8, 2)
    residency.demand(0, [0, 1])
    assert residency.prefetch(0, [4]) == []
    residency.served()
    assert residency.prefetch(0, [4, 5]) == [Load(4, 0, (0, 0)), Load(5, 1, (0, 1))]


def test_no_more_guesses_are_fetched_than_allowed() -> None:
    residency = residency_of("lfu", 8, 6)
    residency.demand(0, [0])
    assert [load.expert for load in residency.prefetch(0, [5, 0, 3, 4], most=2)] == [5, 3]
    assert residency.counters[0].skipped == 0


def test_a_guess_for_a_later_layer_does_not_split_a_step() -> None:
    """All slots of the rank in one pool: rather than in waves, a step goes at the cost of the latest guesses."""
    residency = residency_of("lru", 4, 2, num_layers=2)
    residency.prefetch(1, [0, 1, 2, 3])
    uses = residency.demand(0, [0, 1])
    assert [use.evicted for use in uses] == [(1, 3), (1, 2)]
    assert residency.counters[1].useless == 2


@pytest.mark.parametrize("name", [name for name in ALL_POLICIES if policy_of(name, 1, 1, []).scope == "rank"])
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.booleans(), st.data())
def test_a_step_of_prompts_loads_in_a_pool_what_is_in_no_slot_and_little_twice(
    name: str, slots: int, is_guessed: bool, data: Any
) -> None:
    """Residents of layers to come stay, but for those whose slots the step passes through."""
    few, most = (st.sets(st.integers(0, 6), min_size=least, max_size=7) for least in (0, 5))
    before, step = (data.draw(st.lists(experts, min_size=4, max_size=4)) for experts in (few, most))
    look_ups = [*enumerate(before), *enumerate(step)]
    checked = Checked(Residency([range(7)] * 4, slots, policy_of(name, 4, 7, look_ups)), 4, slots, ())
    checked.fill(data.draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), max_size=4 * slots)))
    for layer, wanted in enumerate(before):
        checked.demand(layer, wanted)
        checked.served()
    missing = {(layer, expert) for layer, wanted in enumerate(step) for expert in wanted} - set(
        checked.content.values()
    )
    loads = sum(checked.loads)
    for layer, wanted in enumerate(step):
        checked.demand(layer, wanted, of_prompts=True)
        checked.served()
        if is_guessed and layer < 3:
            checked.prefetch(layer + 1, sorted(step[layer + 1]))
    assert sum(checked.loads) - loads <= len(missing) + PASSING


def test_a_step_of_prompts_that_uses_few_experts_goes_by_the_policy() -> None:
    told = []
    for of_prompts in (False, True):
        residency = residency_of("sweep_lfu", 10, 2, num_layers=3)
        residency.fill([(layer, expert) for layer in range(3) for expert in range(2)])
        told.append([residency.demand(layer, [3, 4, 5, 6, 7, 8], of_prompts) for layer in range(3)])
    assert told[0] == told[1]


def test_what_a_layer_has_used_most() -> None:
    """Resident or not, by what the policy counts; what was never used is not among them."""
    for policy in COUNTING[:2]:
        residency = residency_of(policy, 6, 1, num_layers=2)
        for experts in ([4], [1, 4], [4, 1, 3], [1, 4]):
            residency.demand(1, experts)
        assert residency.most_used(1) == [4, 1, 3]
        assert residency.most_used(0) == []
    assert residency_of("lru", 6, 1).most_used(0) == []


def test_the_first_keys_are_the_last_to_leave() -> None:
    residency = residency_of("layer_lru", 8, 3, pinned=[(0, 7)])
    assert residency.fill([(0, 5), (0, 7), (0, 1), (0, 2)]) == [(0, 5), (0, 1)]
    assert [use.evicted for use in residency.demand(0, [3, 4])] == [(0, 1), (0, 5)]
    assert residency.counters[0].misses == 2 and residency.slot_of(0, 7) == 0


@pytest.mark.parametrize(
    ("scope", "pinned", "least"),
    [
        ("layer", [], 1),
        ("rank", [], 1),
        ("layer", [(1, 0), (1, 2)], 3),
        ("layer", [(0, e) for e in range(4)], 4),
        ("rank", [(1, 0), (1, 2)], 2),
        ("rank", [(layer, e) for layer in range(2) for e in range(4)], 4),
    ],
)
def test_the_least_slots_are_what_is_pinned_and_one_to_pass_through(
    scope: Any, pinned: list[tuple[int, int]], least: int
) -> None:
    policy = "lru" if scope == "rank" else "layer_lru"
    assert least_slots([range(4)] * 2, scope, pinned) == least
    residency = residency_of(policy, 4, least, num_layers=2, pinned=pinned)
    for layer in (0, 1):
        assert {use.expert for use in residency.demand(layer, range(4))} == set(range(4))
    with pytest.raises(ValueError, match=f"{least - 1} slots per layer: at least {least} are needed"):
        residency_of(policy, 4, least - 1, num_layers=2, pinned=pinned)


def test_experts_of_other_ranks_are_refused() -> None:
    residency = Residency([[0, 2]], 1, policy_named("lfu", 1, 4))
    with pytest.raises(ValueError, match=r"layer 0: this rank does not hold experts \[1, 3\]"):
        residency.demand(0, [0, 1, 3])
    with pytest.raises(ValueError, match=r"does not hold experts \[1\]"):
        residency.prefetch(0, [1])
    with pytest.raises(ValueError, match=r"does not hold experts \[3\]"):
        Residency([[0, 2]], 2, policy_named("lfu", 1, 4), [(0, 3)])
