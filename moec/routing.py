"""What part of the tokens needs which ranks: exact expectations for random routing, or counts over a routing trace.

A `Routing` answers for any division of the experts into parts (the experts of a rank, of a node, of the ranks at one
place of every node). E experts, k chosen per token; `part_of[e]` is expert e's part, numbered from 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property, lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Parts = Sequence[int] | NDArray[np.int64]


class Routing(Protocol):
    """What one kind of layer does with its tokens."""

    def touched(self, part_of: Parts, num_parts: int) -> Floats:
        """Probability that a token has an expert in each part."""
        ...

    def pairs(self, part_of: Parts, num_parts: int) -> Floats:
        """Expected number of a token's experts in each part."""
        ...

    def active(self, part_of: Parts, num_parts: int, tokens: float) -> Floats:
        """Expected number of each part's experts that at least one of `tokens` tokens chose."""
        ...


@dataclass(frozen=True)
class RandomRouting:
    """Every token chooses `keep` of `groups` equal groups, then `top` of their experts, all choices equally likely.

    With all groups kept this is a plain uniform choice of `top` out of `num_experts`.
    """

    num_experts: int
    top: int
    groups: int = 1
    keep: int = 1

    def touched(self, part_of: Parts, num_parts: int) -> Floats:
        """1 - C(E - m, k) / C(E, k) for a part of m experts, averaged over the groups that may be kept."""
        in_group = self._profiles(part_of, num_parts)
        return np.array([_touched(profile, self) for profile in in_group])

    def pairs(self, part_of: Parts, num_parts: int) -> Floats:
        return _sizes(part_of, num_parts) * (self.top / self.num_experts)

    def active(self, part_of: Parts, num_parts: int, tokens: float) -> Floats:
        return _sizes(part_of, num_parts) * (1.0 - math.pow(1.0 - self.top / self.num_experts, tokens))

    def _profiles(self, part_of: Parts, num_parts: int) -> list[tuple[int, ...]]:
        """Of each part: how many of its experts are in each group, largest first (which group it is plays no role)."""
        groups = self.groups if self.keep < self.groups else 1
        cells = np.asarray(part_of) * groups + np.arange(self.num_experts) // (self.num_experts // groups)
        counted = np.sort(np.bincount(cells, minlength=num_parts * groups).reshape(num_parts, groups))[:, ::-1]
        return [tuple(row) for row in counted.tolist()]


def _sizes(part_of: Parts, num_parts: int) -> Floats:
    """Experts of each part."""
    return np.bincount(part_of, minlength=num_parts).astype(np.float64)


@cache
def _touched(profile: tuple[int, ...], routing: RandomRouting) -> float:
    """Probability that an expert is chosen of a part that has profile[g] experts in group g."""
    keep = routing.keep if len(profile) > 1 else 1
    eligible = routing.num_experts * keep // len(profile)
    ways = math.comb(len(profile), keep) * math.comb(eligible, routing.top)
    found = _kept_experts(profile, keep)
    return float(1 - Fraction(sum(n * math.comb(eligible - m, routing.top) for m, n in found.items()), ways))


def _kept_experts(profile: tuple[int, ...], keep: int) -> dict[int, int]:
    """Of all choices of `keep` groups: how many keep m of a part's experts, for each m."""
    ways: Counter[tuple[int, int]] = Counter({(0, 0): 1})  # (groups kept so far, experts in them)
    for size in profile:
        taken = Counter({(kept + 1, m + size): n for (kept, m), n in ways.items() if kept < keep})
        ways += taken
    return {m: n for (kept, m), n in ways.items() if kept == keep}


@dataclass(frozen=True, eq=False)
class TracedRouting:
    """The choices of real tokens, `expert_ids` [tokens, k], counted as they are."""

    expert_ids: NDArray[np.int64]
    num_experts: int

    def touched(self, part_of: Parts, num_parts: int) -> Floats:
        parts = np.sort(np.asarray(part_of)[self.expert_ids], axis=1)
        is_first = np.ones(parts.shape, dtype=bool)
        is_first[:, 1:] = parts[:, 1:] != parts[:, :-1]
        return _sizes(parts[is_first], num_parts) / len(self.expert_ids)

    def pairs(self, part_of: Parts, num_parts: int) -> Floats:
        parts = np.asarray(part_of)[self.expert_ids]
        return _sizes(parts.ravel(), num_parts) / len(self.expert_ids)

    def active(self, part_of: Parts, num_parts: int, tokens: float) -> Floats:
        used: Floats = 1.0 - (1.0 - self._share) ** tokens
        return np.bincount(part_of, weights=used, minlength=num_parts).astype(np.float64)

    @cached_property
    def _share(self) -> Floats:
        """Part of the tokens that chose each expert."""
        return _sizes(self.expert_ids.ravel(), self.num_experts) / len(self.expert_ids)


@dataclass(frozen=True)
class WithShared:
    """`routed`, where each token has the `count` experts behind the routed ones too."""

    routed: RandomRouting | TracedRouting
    count: int

    def touched(self, part_of: Parts, num_parts: int) -> Floats:
        routed, shared = self._split(part_of, num_parts)
        return np.where(shared > 0, 1.0, self.routed.touched(routed, num_parts))

    def pairs(self, part_of: Parts, num_parts: int) -> Floats:
        routed, shared = self._split(part_of, num_parts)
        return self.routed.pairs(routed, num_parts) + shared

    def active(self, part_of: Parts, num_parts: int, tokens: float) -> Floats:
        routed, shared = self._split(part_of, num_parts)
        return self.routed.active(routed, num_parts, tokens) + shared * min(1.0, tokens)

    def _split(self, part_of: Parts, num_parts: int) -> tuple[Parts, Floats]:
        """Parts of the routed experts, and the number of shared ones in each part."""
        return part_of[: -self.count], _sizes(part_of[-self.count :], num_parts)


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """Expert choices of real tokens: `expert_ids` [sparse layers, tokens, k], layers in the order of the model.

    `learned`: the same of the trace that a cache's eviction goes by, where it is another one. `recall`: the share of
    what the routers were guessed to choose that they chose, where guesses were recorded. Whether they fit a model is
    for who reads them to say (`moec.plan.trace`).
    """

    expert_ids: NDArray[np.integer]
    learned: NDArray[np.integer] | None = None
    recall: float | None = None

    def part(self, layers: Sequence[int]) -> RoutingTrace:
        """The trace of some of the sparse layers, numbered from 0."""
        chosen = list(layers)
        learned = None if self.learned is None else self.learned[chosen]
        return replace(self, expert_ids=self.expert_ids[chosen], learned=learned)

    def popularity(self, num_experts: int) -> NDArray[np.integer]:
        """How often each expert was chosen in what eviction goes by: [sparse layers, experts]."""
        ids = self.expert_ids if self.learned is None else self.learned
        return np.stack([np.bincount(layer.ravel(), minlength=num_experts) for layer in ids])

    def of_layers(self, layers: Sequence[int], num_experts: int) -> TracedRouting:
        """The choices of some of the sparse layers, numbered from 0, taken as one layer's."""
        return _as_one(self, tuple(layers), num_experts)


@lru_cache(maxsize=32)  # what is counted over a routing is kept by its identity: see `moec.cost.flow`
def _as_one(trace: RoutingTrace, layers: tuple[int, ...], num_experts: int) -> TracedRouting:
    ids = trace.expert_ids[list(layers)]
    return TracedRouting(ids.reshape(-1, ids.shape[-1]).astype(np.int64), num_experts)


def expected_destinations(routing: Routing, part_of: Parts, num_parts: int) -> float:
    """E[D]: parts that a token goes to, G (1 - C(E - E/G, k) / C(E, k)) for G equal parts of a uniform choice."""
    return float(routing.touched(part_of, num_parts).sum())
