"""Eviction policies: which resident expert gives up its slot.

A policy sees every look-up (`use`), and the keys that may leave (`admit`, `drop`). It never sees a pinned key, nor a
prefetched one before its layer has been looked up: those cannot leave, and `Residency` sees to that. Its `scope` says
what it chooses among: the slots of one layer, or all slots of the rank.

Every choice is deterministic: equal keys leave in the order of their layer and expert numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Literal, Protocol

import numpy as np

#: (layer, expert); layers are numbered from 0 among the sparse layers of the model.
Key = tuple[int, int]
Scope = Literal["layer", "rank"]


class Policy(Protocol):
    """What `Residency` asks. A look-up calls `use` once, then `victims`, then `drop` and `admit`."""

    @property
    def scope(self) -> Scope:
        """`layer`: a pool of slots for each layer. `rank`: one pool for all layers of the rank."""
        ...

    def use(self, layer: int, experts: Sequence[int]) -> None:
        """One step looks up these distinct experts of a layer, resident or not, all at once."""
        ...

    def admit(self, key: Key) -> None:
        """`key` has a slot, and may be told to leave it from now on."""
        ...

    def drop(self, key: Key) -> None:
        """An admitted key has left."""
        ...

    def victims(self, layer: int, count: int, kept: Collection[Key]) -> list[Key]:
        """At most `count` admitted keys of the pool of `layer` that are not in `kept`, the first to leave first."""
        ...

    def order(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Experts that have just been looked up, resident or not, by their worth: the first to leave first."""
        ...


class Lru:
    """The least recently used of all layers. A step visits the layers in a circle, so what it takes next is always
    the oldest: known to be bad, and kept to show it."""

    scope: Scope = "rank"

    def __init__(self) -> None:
        self._pools: defaultdict[int, OrderedDict[Key, None]] = defaultdict(OrderedDict)
        self._latest: list[Key] = []

    def use(self, layer: int, experts: Sequence[int]) -> None:
        self._latest = [(layer, expert) for expert in experts]
        self._renew(self._latest)

    def admit(self, key: Key) -> None:
        """What comes without having been used (a wrong guess, the initial content) is the next to leave."""
        pool = self._pools[self._number(key[0])]
        pool[key] = None
        if key in self._latest:
            self._renew(self._latest[self._latest.index(key) + 1 :])  # in their order, whichever was resident
        else:
            pool.move_to_end(key, last=False)

    def drop(self, key: Key) -> None:
        del self._pools[self._number(key[0])][key]

    def victims(self, layer: int, count: int, kept: Collection[Key]) -> list[Key]:
        return list(islice((key for key in self._pools[self._number(layer)] if key not in kept), count))

    def order(self, layer: int, experts: Sequence[int]) -> list[int]:
        return sorted(experts)  # used in the same step

    def _renew(self, keys: Sequence[Key]) -> None:
        for key in keys:
            if key in (pool := self._pools[self._number(key[0])]):
                pool.move_to_end(key)

    def _number(self, layer: int) -> int:
        return layer if self.scope == "layer" else 0


class LayerLru(Lru):
    """The least recently used of the layer."""

    scope: Scope = "layer"


class LeastStale:
    """What the sweep through the layers has passed: of all layers, the key whose layer came by most often without it;
    among equals the one whose layer was visited last, since that is the furthest from its next visit.

    After SpecMD's Least-Stale (arXiv 2602.03921). With time counted in layer visits, keys last used within the same
    L visits (L layers) have been passed equally often. So the victim is the newest of the oldest such window, where
    the least recently used one would be needed first of all.
    """

    scope: Scope = "rank"

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._now = 0
        self._last: dict[Key, int] = {}  # visit of the last use, of keys that may leave
        self._by_visit: dict[int, dict[Key, None]] = {}  # the same the other way round, oldest visit first
        self._never: dict[Key, None] = {}
        self._latest: set[Key] = set()

    def use(self, layer: int, experts: Sequence[int]) -> None:
        # The clock follows the layers, not the calls, so that a layer nobody looked up does not shift the windows.
        self._now += (layer - self._now % self._num_layers) % self._num_layers or self._num_layers
        self._latest = {(layer, expert) for expert in experts}
        for key in sorted(self._latest):
            if key in self._last or key in self._never:
                self.drop(key)
                self.admit(key)

    def admit(self, key: Key) -> None:
        if key in self._latest:
            self._last[key] = self._now
            self._by_visit.setdefault(self._now, {})[key] = None
        else:
            self._never[key] = None

    def drop(self, key: Key) -> None:
        if key in self._never:
            del self._never[key]
            return
        visit = self._last.pop(key)
        del self._by_visit[visit][key]
        if not self._by_visit[visit]:
            del self._by_visit[visit]

    def victims(self, layer: int, count: int, kept: Collection[Key]) -> list[Key]:
        found = list(islice((key for key in reversed(self._never) if key not in kept), count))
        window: list[int] = []
        for visit in self._by_visit:
            if window and self._window(visit) != self._window(window[0]):
                found += self._newest_first(window, kept)
                window = []
                if len(found) >= count:
                    break
            window.append(visit)
        return (found + self._newest_first(window, kept))[:count]

    def order(self, layer: int, experts: Sequence[int]) -> list[int]:
        return sorted(experts)

    def _window(self, visit: int) -> int:
        return (self._now - visit) // self._num_layers

    def _newest_first(self, visits: list[int], kept: Collection[Key]) -> list[Key]:
        return [key for visit in reversed(visits) for key in sorted(self._by_visit[visit]) if key not in kept]


class Scored(ABC):
    """A policy of one layer that lets the lowest score leave; what a score is, its subclasses say."""

    scope: Scope = "layer"

    def __init__(self) -> None:
        self._pools: defaultdict[int, set[Key]] = defaultdict(set)

    @abstractmethod
    def scores(self, layer: int) -> Sequence[float]:
        """Of each expert of the layer, resident or not."""

    def use(self, layer: int, experts: Sequence[int]) -> None:  # noqa: B027 (a policy need not learn)
        """Scores that do not change."""

    def admit(self, key: Key) -> None:
        self._pools[key[0]].add(key)

    def drop(self, key: Key) -> None:
        self._pools[key[0]].remove(key)

    def victims(self, layer: int, count: int, kept: Collection[Key]) -> list[Key]:
        scores = self.scores(layer)
        free = [(scores[key[1]], key) for key in self._pools[layer] if key not in kept]
        return [key for _, key in sorted(free)[:count]]

    def order(self, layer: int, experts: Sequence[int]) -> list[int]:
        scores = self.scores(layer)
        return sorted(experts, key=lambda expert: (scores[expert], expert))


#: A use that is n steps old weighs n ** -FORGETTING.
FORGETTING = 0.75
#: Half-lives, in steps, of the exponentials that add up to this weight.
HALF_LIVES = 4.0 ** np.arange(7)


class Lfu(Scored):
    """The least frequently used of the layer, where uses are forgotten by a power law.

    How often something was needed n steps after its last need falls like a power of n in most records of use (Anderson
    and Schooler 1991), so the need of an expert is scored as the sum over its uses of age ** -0.75: much for the last
    few steps, as least recently used has it, and a little for all that came before, as counting has it. An exponential
    decay has to choose between the two. The power is the sum of exponentials of widely spaced half-lives, each
    of which needs one number per expert.

    A step counts once, however many of its tokens chose the expert.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        super().__init__()
        self._kept = 0.5 ** (1.0 / HALF_LIVES)[:, None]
        self._added = HALF_LIVES[:, None] ** -FORGETTING
        self._sums = np.zeros((num_layers, len(HALF_LIVES), num_experts))

    def use(self, layer: int, experts: Sequence[int]) -> None:
        sums = self._sums[layer]
        sums *= self._kept
        sums[:, experts] += self._added

    def scores(self, layer: int) -> Sequence[float]:
        found: list[float] = self._sums[layer].sum(axis=0).tolist()
        return found


class Popularity(Scored):
    """The least popular of a recorded trace: `counts[layer][expert]`, whatever happens now."""

    def __init__(self, counts: Sequence[Sequence[float]]) -> None:
        super().__init__()
        self._counts = counts

    def scores(self, layer: int) -> Sequence[float]:
        return self._counts[layer]


#: Names that the language takes, in the order of a report.
POLICIES = ("lru", "layer_lru", "lfu", "least_stale", "trace")


def policy_named(
    name: str, num_layers: int, num_experts: int, popularity: Sequence[Sequence[float]] | None = None
) -> Policy:
    """A new policy for a rank. `popularity[layer][expert]` are the counts that `trace` goes by.

    Raises ValueError for a name that is none, and for `trace` without counts.
    """
    match name:
        case "lru":
            return Lru()
        case "layer_lru":
            return LayerLru()
        case "lfu":
            return Lfu(num_layers, num_experts)
        case "least_stale":
            return LeastStale(num_layers)
        case "trace" if popularity is not None:
            return Popularity(popularity)
        case "trace":
            raise ValueError("policy `trace` needs the counts of a recorded trace")
    raise ValueError(f"policy `{name}` is none of {', '.join(POLICIES)}")
