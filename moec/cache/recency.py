"""Policies by the time of the last use: `lru`, `layer_lru` and `least_stale`."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Sequence
from itertools import islice

from moec.cache.policy import Key, Scope


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

    def admit(self, layer: int, experts: Sequence[int]) -> None:
        """What comes without having been used (a wrong guess, the initial content) is the next to leave."""
        pool = self._pools[self._number(layer)]
        for expert in experts:
            key = layer, expert
            pool[key] = None
            if key in self._latest:
                self._renew(self._latest[self._latest.index(key) + 1 :])  # in their order, whichever was resident
            else:
                pool.move_to_end(key, last=False)

    def evict(self, layer: int, count: int, kept: Collection[Key]) -> list[Key]:
        pool = self._pools[self._number(layer)]
        leaving = list(islice((key for key in pool if key not in kept), count))
        for key in leaving:
            del pool[key]
        return leaving

    def worth(self, key: Key) -> float:
        return float(key in self._latest)

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
        known = [key for key in self._latest if key in self._last or key in self._never]
        for key in known:
            self._forget(key)
        self.admit(layer, [expert for _, expert in known])

    def admit(self, layer: int, experts: Sequence[int]) -> None:
        for expert in experts:
            key = layer, expert
            if key in self._latest:
                self._last[key] = self._now
                self._by_visit.setdefault(self._now, {})[key] = None
            else:
                self._never[key] = None

    def evict(self, layer: int, count: int, kept: Collection[Key]) -> list[Key]:
        leaving = self._stalest(count, kept)
        for key in leaving:
            self._forget(key)
        return leaving

    def worth(self, key: Key) -> float:
        return float(key in self._latest)

    def _forget(self, key: Key) -> None:
        if key in self._never:
            del self._never[key]
            return
        visit = self._last.pop(key)
        del self._by_visit[visit][key]
        if not self._by_visit[visit]:
            del self._by_visit[visit]

    def _stalest(self, count: int, kept: Collection[Key]) -> list[Key]:
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

    def _window(self, visit: int) -> int:
        return (self._now - visit) // self._num_layers

    def _newest_first(self, visits: list[int], kept: Collection[Key]) -> list[Key]:
        return [key for visit in reversed(visits) for key in sorted(self._by_visit[visit]) if key not in kept]
