"""Who leaves first, policy by policy, against the plainest way to say it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moec.cache.policies import POLICIES, policy_named, scope_of
from moec.cache.policy import Key
from moec.cache.residency import Residency
from moec.cache.scored import FORGETTING, Lfu

LAYERS, EXPERTS = 3, 6
sweeps = st.lists(
    st.tuples(*[st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=2)] * LAYERS), min_size=4, max_size=25
)


def evictions(name: str, steps: list[tuple[set[int], ...]], slots: int) -> list[Key]:
    """Who left, in order, over these steps of all layers."""
    residency = Residency([range(EXPERTS)] * LAYERS, slots, policy_named(name, LAYERS, EXPERTS))
    uses = [use for step in steps for layer, experts in enumerate(step) for use in residency.demand(layer, experts)]
    return [use.evicted for use in uses if use.evicted is not None]


def expected(name: str, steps: list[tuple[set[int], ...]], slots: int) -> list[Key]:
    """The same by sorting everything at each miss. Times are visits of layers, from 1."""
    last: dict[Key, int] = {}
    present, gone = set[Key](), list[Key]()
    for now, (layer, experts) in enumerate([(at, e) for step in steps for at, e in enumerate(step)], start=1):
        wanted = {(layer, expert) for expert in experts}
        pool = {key for key in present if name != "layer_lru" or key[0] == layer}
        room = slots * (1 if name == "layer_lru" else LAYERS)

        def passed(key: Key, now: int = now) -> tuple[int, int, Key]:
            """Most visits of its layer without it first, then the latest visit of its layer."""
            return -((now - last[key]) // LAYERS), -last[key], key

        def age(key: Key) -> tuple[int, Key]:
            return last[key], key

        surplus = len(pool | wanted) - room
        leaving = sorted(pool - wanted, key=passed if name == "least_stale" else age)[: max(0, surplus)]
        gone += leaving
        present = (present | wanted) - set(leaving)
        last.update(dict.fromkeys(wanted, now))
    return gone


@pytest.mark.parametrize("name", ["lru", "layer_lru", "least_stale"])
@settings(max_examples=100, deadline=None)
@given(sweeps, st.integers(2, 4))
def test_recency_is_what_sorting_by_it_gives(name: str, steps: list[tuple[set[int], ...]], slots: int) -> None:
    assert evictions(name, steps, slots) == expected(name, steps, slots)


def test_one_list_for_all_layers_loses_what_comes_next_and_the_sweep_does_not() -> None:
    """Three layers use their two experts in every step, and half of the six have a slot."""
    hits = {}
    for name in ("lru", "least_stale"):
        residency = Residency([range(2)] * LAYERS, 1, policy_named(name, LAYERS, 2))
        for layer in [*range(LAYERS)] * 10:
            residency.demand(layer, [0, 1])
        hits[name] = sum(counters.hits for counters in residency.counters)
    assert hits["lru"] == 0
    assert hits["least_stale"] == 14


def test_uses_are_forgotten_by_a_power_law() -> None:
    """One use, by its age: age ** -0.75 from one step to a few thousand, to within a quarter."""
    policy = Lfu(1, 2)
    policy.use(0, [0])
    weights = []
    for _ in range(3000):
        policy.use(0, [1])
        weights.append(policy.scores(0)[0])
    assert weights == pytest.approx([age**-FORGETTING for age in range(1, 3001)], rel=0.25)


def test_a_few_recent_uses_outweigh_many_old_ones_and_not_for_long() -> None:
    residency = Residency([range(5)], 2, policy_named("lfu", 1, 5))
    for _ in range(100):
        residency.demand(0, [0])
    for _ in range(3):
        residency.demand(0, [1])
    residency.demand(0, [2])
    assert residency.resident(0) == (0, 2), "a hundred uses, three steps ago"
    for expert in (3, 4, 3, 4, 3, 4, 3, 4) * 8:
        residency.demand(0, [expert])
    assert residency.resident(0) == (3, 4)


def worths(steps: list[tuple[set[int], ...]], at: int) -> dict[Key, float]:
    """What every expert is worth to `sweep_lfu` after the look-up number `at`, from the first one on."""
    visits = [(layer, experts) for step in steps for layer, experts in enumerate(step)][: at + 1]
    now, found = visits[-1][0], {}
    for layer in range(LAYERS):
        own = [experts for of_layer, experts in visits if of_layer == layer]
        distance = (layer - now - 1) % LAYERS + 1
        for expert in range(EXPERTS):
            uses = sum(0.9**age for age, experts in enumerate(reversed(own)) if expert in experts)
            found[layer, expert] = uses / distance**0.5
    return found


@settings(max_examples=100, deadline=None)
@given(sweeps, st.integers(2, 4))
def test_who_leaves_a_sweep_is_worth_least(steps: list[tuple[set[int], ...]], slots: int) -> None:
    """No one who stays is worth less than one who leaves, but for those that the step itself uses."""
    residency = Residency([range(EXPERTS)] * LAYERS, slots, policy_named("sweep_lfu", LAYERS, EXPERTS))
    for at, (layer, experts) in enumerate([(at, e) for step in steps for at, e in enumerate(step)]):
        gone = {use.evicted for use in residency.demand(layer, experts)} - {None}
        worth, wanted = worths(steps, at), {(layer, expert) for expert in experts}
        stayed = {(of, e) for of in range(LAYERS) for e in residency.resident(of)} - wanted
        assert not gone & wanted
        least = min((worth[key] for key in stayed), default=np.inf)
        assert all(worth[key] <= least * (1 + 1e-9) for key in gone if key is not None)


def test_a_sweep_forgets_at_the_same_pace_for_thousands_of_steps() -> None:
    residency = Residency([range(4)], 2, policy_named("sweep_lfu", 1, 4))
    for _ in range(3000):
        residency.demand(0, [0])
    residency.demand(0, [1])
    for _ in range(30):  # 0.9 ** 30 of ten: less than one use
        residency.demand(0, [1])
    residency.demand(0, [2])
    assert residency.resident(0) == (1, 2)


def test_popularity_goes_by_the_trace_alone() -> None:
    residency = Residency([range(4)], 2, policy_named("trace", 1, 4, [[5, 1, 5, 9]]))
    told = [use for step in ([0], [1], [2], [3], [1], [1]) for use in residency.demand(0, step)]
    assert [use.evicted for use in told] == [None, None, (0, 1), (0, 0), (0, 2), None]


def test_scores_stay_finite() -> None:
    policy = Lfu(1, 1)
    for _ in range(20_000):
        policy.use(0, [0])
    assert np.isfinite(policy.scores(0)[0])


def test_names() -> None:
    assert POLICIES == ("lru", "layer_lru", "lfu", "sweep_lfu", "least_stale", "trace")
    for name in POLICIES:
        policy = policy_named(name, 2, 4, [[1] * 4] * 2)
        assert policy.scope == ("rank" if name in ("lru", "sweep_lfu", "least_stale") else "layer")
        assert scope_of(name) == policy.scope
    with pytest.raises(
        ValueError, match="policy `belady` is none of lru, layer_lru, lfu, sweep_lfu, least_stale, trace"
    ):
        policy_named("belady", 2, 4)
    with pytest.raises(ValueError, match="policy `trace` needs the counts of a recorded trace"):
        policy_named("trace", 2, 4)
