"""A recorded trace through the cache of one rank: the same state machine and policies as the run time, no bytes moved.

Per step and layer, in this order: the look-up, which is served, then the guess for a later layer, or the other way
round where the Program starts its copies before the layer's own experts are known.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moec.cache.belady import Belady, Bound
from moec.cache.policies import policy_named
from moec.cache.policy import Key, Policy, Scope
from moec.cache.predictors import Predictor
from moec.cache.residency import Counters, Residency
from moec.cache.trace import DECODE, PREFILL, Trace

Array = NDArray[Any]


@dataclass(frozen=True)
class Prefetch:
    """What a layer of the Program does for the one `ahead` layers later: at most `most` loads.

    `targets`: layers for which that is done, all from `ahead` on if None; for those before, the model's dense layers in
    front of its sparse ones do it. `is_early`: before the own look-up of the layer that does it. `coming_back`: at most
    so many of what the first `ahead` layers used most are loaded by the last ones, for the next step.
    """

    predictor: Predictor
    ahead: int
    most: int
    targets: Collection[int] | None = None
    is_early: bool = False
    coming_back: int = 0

    def targets_at(self, layer: int, is_early: bool, num_layers: int) -> list[int]:
        """Layers that are fetched for before (`is_early`) or after the look-up of `layer`, in order."""
        later = layer + self.ahead
        found = [later] if is_early == self.is_early and later < num_layers else []
        if layer == 0 and is_early and self.targets is not None:
            found = [*range(min(self.ahead, num_layers)), *found]
        return [target for target in found if self.targets is None or target in self.targets]


@dataclass(frozen=True, eq=False)
class Outcome:
    """What happened on a rank: counters of each layer; `active`, `demanded` and `fetched` are experts [steps, layers].

    `active` were looked up, `demanded` of them loaded on demand; `fetched` were loaded on a guess for that layer.
    """

    counters: tuple[Counters, ...]
    active: Array
    demanded: Array
    fetched: Array

    @property
    def lookups(self) -> int:
        return sum(c.lookups for c in self.counters)

    @property
    def hits(self) -> int:
        return sum(c.hits for c in self.counters)

    @property
    def misses(self) -> int:
        return sum(c.misses for c in self.counters)

    @property
    def transfers(self) -> int:
        return self.misses + sum(c.prefetches for c in self.counters)

    @property
    def hit_rate(self) -> float:
        """Share of look-ups; 1 where there were none."""
        return self.hits / self.lookups if self.lookups else 1.0

    def moved_bytes(self, expert_bytes: Sequence[int]) -> int:
        """Bytes copied into slots; `expert_bytes[layer]` is the size of one expert."""
        return sum((c.misses + c.prefetches) * size for c, size in zip(self.counters, expert_bytes, strict=True))


def simulate(
    trace: Trace,
    policy: Policy,
    slots: int,
    held: Sequence[Collection[int]] | None = None,
    pinned: Collection[Key] = (),
    initial: Iterable[Key] = (),
    prefetch: Prefetch | Mapping[int, Prefetch] | None = None,
) -> Outcome:
    """Run a trace through a new cache of one rank with `slots` per layer.

    `held[layer]`: the experts of this rank, all of them if None; look-ups of others are other ranks' business.
    `initial`: what is loaded beforehand, uncounted, the best first. `prefetch`: in all steps, or by phase in its own,
    as the trace has them. `Belady` without prefetch gives the bound: at steps
    that want more than there are slots it does better than real slots can. Raises ValueError as `Residency` does.
    """
    held = held if held is not None else [range(trace.num_experts)] * trace.num_layers
    steps = look_ups(trace, held)
    active = np.array([[len(experts) for experts in step] for step in steps], dtype=np.int64)
    demanded, fetched = np.zeros_like(active), np.zeros_like(active)
    phases = trace.step_phases.tolist()
    cache: Bound | Residency
    guess: _Guess = _no_guess
    if isinstance(policy, Belady) and prefetch is None:
        cache = Bound(held, slots, policy, pinned)
    else:
        cache = Residency(held, slots, policy, pinned)
        guess = _guesses(trace, phases, cache, held, prefetch, fetched) if prefetch is not None else _no_guess
    cache.fill(initial)
    for number, step in enumerate(steps):
        for layer, experts in enumerate(step):
            guess(number, layer, True)
            missed = cache.counters[layer].misses
            cache.demand(layer, experts, of_prompts=phases[number] == PREFILL)
            demanded[number, layer] = cache.counters[layer].misses - missed
            guess(number, layer, False)
    return Outcome(tuple(cache.counters), active, demanded, fetched)


def look_ups(trace: Trace, held: Sequence[Collection[int]] | None = None) -> list[list[list[int]]]:
    """Distinct experts of this rank, ascending, that each step looks up in each layer: [step][layer]."""
    starts = trace.step_starts
    if (np.diff(starts) == 1).all():
        found: list[list[list[int]]] = np.sort(trace.expert_ids.swapaxes(0, 1), axis=2).tolist()
    else:
        ranges = zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
        found = [[np.unique(ids[start:end]).tolist() for ids in trace.expert_ids] for start, end in ranges]
    if held is None or all(len(experts) == trace.num_experts for experts in held):
        return found
    mine = [frozenset(experts) for experts in held]
    return [[[e for e in row if e in own] for row, own in zip(step, mine, strict=True)] for step in found]


def policy_for(
    name: str, trace: Trace, held: Sequence[Collection[int]] | None = None, popularity: Trace | None = None
) -> Policy:
    """A policy by its name for a run of `trace`, `belady` (and `belady_rank`, all slots of the rank in one pool) too.

    `popularity` is the trace that `trace` goes by, the one that is run if None: then it is a hindsight figure.
    Raises ValueError for a name that is none.
    """
    if name in ("belady", "belady_rank"):
        scope: Scope = "layer" if name == "belady" else "rank"
        return Belady(look_ups(trace, held), scope)
    return policy_named(name, trace.num_layers, trace.num_experts, popularity_of(popularity or trace).tolist())


def popularity_of(trace: Trace) -> Array:
    """How often each expert was chosen: [layers, experts]."""
    return np.stack([np.bincount(ids.ravel(), minlength=trace.num_experts) for ids in trace.expert_ids])


#: What a layer does in a step, before (True) and after (False) its look-up.
_Guess = Callable[[int, int, bool], None]


def _no_guess(number: int, layer: int, is_early: bool) -> None:
    """The step of a run without prefetch."""


def _guesses(
    trace: Trace,
    phases: Sequence[int],
    residency: Residency,
    held: Sequence[Collection[int]],
    prefetch: Prefetch | Mapping[int, Prefetch],
    fetched: Array,
) -> _Guess:
    """Guess and load; loads are added to `fetched` [steps, layers]."""
    mine = [frozenset(experts) for experts in held]
    by_phase: Mapping[int, Prefetch] = (
        prefetch if isinstance(prefetch, Mapping) else dict.fromkeys((PREFILL, DECODE), prefetch)
    )

    def guess(number: int, layer: int, is_early: bool) -> None:
        if not is_early:
            residency.served()
        now = by_phase.get(phases[number])
        if now is None:
            return
        for later in now.targets_at(layer, is_early, trace.num_layers):
            start, end = trace.step_starts[number : number + 2]
            counts = np.bincount(trace.expert_ids[layer, start:end].ravel(), minlength=trace.num_experts)
            guessed = now.predictor.guess(number, later - now.ahead, counts, now.ahead)
            load(number, later, guessed, now.most)
        first = layer + now.ahead - trace.num_layers
        if first >= 0 and not is_early and now.coming_back:
            load(number, first, residency.most_used(first), now.coming_back)

    def load(number: int, later: int, guessed: Sequence[int], most: int) -> None:
        loads = residency.prefetch(later, [expert for expert in guessed if expert in mine[later]], most)
        fetched[number, later] += len(loads)

    return guess
