"""The bound is one: nothing makes fewer transfers, not even trying out every choice."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moec.cache.belady import Belady, Bound
from moec.cache.policy import Key, Scope
from moec.cache.residency import Counters, Residency
from tests.cache_drivers import ALL_POLICIES, LookUp, policy_of

LAYERS, EXPERTS = 2, 5
look_ups_of = st.lists(
    st.tuples(st.integers(0, LAYERS - 1), st.sets(st.integers(0, EXPERTS - 1), min_size=1)), min_size=1, max_size=9
)
Content = frozenset[Key]


def drive(cache: Residency | Bound, look_ups: Sequence[LookUp]) -> int:
    """Misses of these look-ups."""
    for layer, experts in look_ups:
        cache.demand(layer, experts)
    return sum(counters.misses for counters in cache.counters)


def misses_of(name: str, look_ups: Sequence[LookUp], slots: int) -> int:
    policy = policy_of(name, LAYERS, EXPERTS, look_ups)
    return drive(Residency([range(EXPERTS)] * LAYERS, slots, policy), look_ups)


def bound_of(scope: Scope, look_ups: Sequence[LookUp], slots: int) -> int:
    policy = policy_of("belady" if scope == "layer" else "belady_rank", LAYERS, EXPERTS, look_ups)
    assert isinstance(policy, Belady)
    return drive(Bound([range(EXPERTS)] * LAYERS, slots, policy), look_ups)


def fewest_misses(steps: Sequence[Content], slots: int) -> int:
    """Of one pool, by every content that it can have after each step."""
    costs = {frozenset[Key](): 0}
    for wanted in steps:
        after: dict[Content, int] = {}
        for content, cost in costs.items():
            for left in contents_after(content, wanted, slots):
                after[left] = min(after.get(left, len(steps) * EXPERTS * LAYERS), cost + len(wanted - content))
        costs = after
    return min(costs.values())


def contents_after(content: Content, wanted: Content, slots: int) -> Iterator[Content]:
    """What a pool can hold after a step: all that was wanted, where there are slots for it, and anything else.

    A slot is only emptied to be filled again, since an empty one never saves a miss.
    """
    fits = wanted if len(wanted) <= slots else frozenset[Key]()
    others = (content | wanted) - fits
    for kept in itertools.combinations(others, min(slots - len(fits), len(others))):
        yield fits | set(kept)


@settings(max_examples=300, deadline=None)
@given(look_ups_of, st.integers(1, 3))
def test_belady_equals_trying_out_every_choice(look_ups: list[LookUp], slots: int) -> None:
    steps = [frozenset((layer, expert) for expert in experts) for layer, experts in look_ups]
    by_layer = [[step for step in steps if (layer, 0) <= min(step) < (layer + 1, 0)] for layer in range(LAYERS)]
    assert bound_of("layer", look_ups, slots) == sum(fewest_misses(own, slots) for own in by_layer)


@settings(max_examples=100, deadline=None)
@given(look_ups_of, st.integers(1, 2))
def test_belady_of_a_rank_equals_trying_out_every_choice(look_ups: list[LookUp], slots: int) -> None:
    steps = [frozenset((layer, expert) for expert in experts) for layer, experts in look_ups]
    assert bound_of("rank", look_ups, slots) == fewest_misses(steps, slots * LAYERS)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.sets(st.integers(0, 4))), max_size=30), st.integers(1, 4))
def test_no_policy_makes_fewer_transfers(look_ups: list[LookUp], slots: int) -> None:
    bounds: dict[Scope, int] = {"layer": bound_of("layer", look_ups, slots), "rank": bound_of("rank", look_ups, slots)}
    for name in ALL_POLICIES:
        assert misses_of(name, look_ups, slots) >= bounds[policy_of(name, LAYERS, EXPERTS, look_ups).scope], name


@settings(max_examples=200, deadline=None)
@given(look_ups_of, st.integers(2, 4))
def test_in_slots_belady_makes_as_few_as_the_bound_where_steps_fit(look_ups: list[LookUp], slots: int) -> None:
    fitting = [(layer, set(sorted(experts)[:slots])) for layer, experts in look_ups]
    assert misses_of("belady", fitting, slots) == bound_of("layer", fitting, slots)
    assert misses_of("belady_rank", fitting, slots) == bound_of("rank", fitting, slots)


def test_pinned_experts_and_what_was_there_before_cost_nothing() -> None:
    steps = [[[0, 1, 2]], [[0, 3]], [[1, 2]]]
    bound = Bound([range(4)], 3, Belady(steps), pinned=[(0, 0)])
    bound.fill([(0, 0), (0, 2), (0, 1), (0, 3)])
    assert drive(bound, [(0, step[0]) for step in steps]) == 2  # 3, and one of 1 and 2 again
    assert bound.counters == [Counters(lookups=7, hits=5, misses=2, evictions=2)]


def test_a_step_takes_its_experts_at_once() -> None:
    """One after the other, 0 would leave for 2 and come back free of charge; together, 1 must leave."""
    assert misses_of("belady", [(0, {0, 1}), (0, {0, 2}), (0, {0}), (0, {1})], 2) == 4


def test_too_few_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="1 slots per layer: at least 2 are needed"):
        Bound([range(4)], 1, Belady([[[0]]]), pinned=[(0, 3)])


def test_other_look_ups_than_foreseen_are_refused() -> None:
    residency = Residency([range(3)], 2, Belady([[[0, 1]], [[1]]]))
    residency.demand(0, [0, 1])
    with pytest.raises(ValueError, match="layer 0, expert 0: one look-up more than was foreseen"):
        residency.demand(0, [0])
