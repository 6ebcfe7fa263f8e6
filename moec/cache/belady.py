"""The best that any policy can do: who is needed again last of all, leaves (Belady 1966).

A step's look-ups of a layer are simultaneous, so a victim is never one of them. Experts of a layer are equally large,
and a miss must be loaded, so this makes the fewest misses; a test holds it against trying out every choice.

Only where a step wants more than there are slots, a policy that has to use real slots can do worse, by having to end
with what passed through them last. The bound does not: what it has no use for leaves at once.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from moec.cache.policy import Key, Scope
from moec.cache.residency import Counters, check_slots

#: Later than everything.
NEVER = 1 << 62
#: Heaps are cleared of outdated entries when they have grown to this many times what is in them.
SLACK = 4


class Belady:
    """Knows all look-ups beforehand: `steps[i][layer]` are the distinct experts that step i looks up.

    It must be driven with exactly these, in this order; ValueError says that it is not.
    """

    def __init__(self, steps: Sequence[Sequence[Sequence[int]]], scope: Scope = "layer") -> None:
        self.scope: Scope = scope
        self._coming: defaultdict[Key, list[int]] = defaultdict(list)  # times of look-ups to come, the next one last
        times = range(sum(map(len, steps)) - 1, -1, -1)
        backwards = ((layer, experts) for step in reversed(steps) for layer, experts in reversed(list(enumerate(step))))
        for time, (layer, experts) in zip(times, backwards, strict=True):
            for expert in experts:
                self._coming[layer, expert].append(time)
        self._next: dict[Key, int] = {}  # of keys that may leave
        self._heaps: defaultdict[int, list[tuple[int, Key]]] = defaultdict(list)  # (-time, key), some outdated

    def use(self, layer: int, experts: Sequence[int]) -> None:
        for expert in experts:
            key = layer, expert
            if not self._coming[key]:
                raise ValueError(f"layer {layer}, expert {expert}: one look-up more than was foreseen")
            self._coming[key].pop()
            if key in self._next:
                self.admit(layer, [expert])

    def admit(self, layer: int, experts: Sequence[int]) -> None:
        heap = self._heaps[self.pool_of(layer)]
        for expert in experts:
            key = layer, expert
            self._next[key] = time = self._time(key)
            heapq.heappush(heap, (-time, key))
        if len(heap) > SLACK * len(self._next) + 64:
            heap[:] = sorted({entry for entry in heap if self._is_current(entry)})

    def evict(self, layer: int, count: int, kept: Collection[Key]) -> list[Key]:
        heap = self._heaps[self.pool_of(layer)]
        staying: list[tuple[int, Key]] = []
        leaving: list[Key] = []
        while heap and len(leaving) < count:
            entry = heapq.heappop(heap)
            if not self._is_current(entry):
                continue
            if entry[1] not in kept:
                leaving.append(entry[1])
                del self._next[entry[1]]  # which outdates any second entry of it
            elif entry not in staying[-1:]:
                staying.append(entry)
        for entry in staying:
            heapq.heappush(heap, entry)
        return leaving

    def worth(self, key: Key) -> float:
        return -self._time(key)

    def _time(self, key: Key) -> int:
        coming = self._coming[key]
        return coming[-1] if coming else NEVER

    def _is_current(self, entry: tuple[int, Key]) -> bool:
        return self._next.get(entry[1]) == -entry[0]

    def pool_of(self, layer: int) -> int:
        """The number of the pool that a layer's experts share."""
        return layer if self.scope == "layer" else 0


class Bound:
    """The fewest misses with `slots` per layer. It is driven like a `Residency`, but has counts instead of slots.

    Raises ValueError for fewer than `least_slots`.
    """

    def __init__(
        self, held: Sequence[Collection[int]], slots: int, policy: Belady, pinned: Collection[Key] = ()
    ) -> None:
        check_slots(held, slots, policy.scope, pinned)
        self.counters = [Counters() for _ in held]
        self._policy, self._pinned, self._present = policy, frozenset(pinned), set[Key]()
        self._free: defaultdict[int, int] = defaultdict(int)  # of a pool; less than none within a look-up
        for layer in range(len(held)):
            self._free[policy.pool_of(layer)] += slots - sum(key[0] == layer for key in self._pinned)
        self._room = dict(self._free)

    def fill(self, order: Iterable[Key]) -> None:
        """Begin with the first keys of `order` for which there is room."""
        for key in order:
            if self._free[self._policy.pool_of(key[0])] and key not in self._present | self._pinned:
                self._enter(key)

    def demand(self, layer: int, experts: Collection[int], of_prompts: bool = False) -> None:
        """One step looks up these experts of a layer at once, of whichever phase it is."""
        wanted = {(layer, expert) for expert in experts}
        missing = wanted - self._present - self._pinned
        self._policy.use(layer, sorted(expert for _, expert in wanted))
        for key in missing:
            self._enter(key)
        pool = self._policy.pool_of(layer)
        too_many = len(wanted - self._pinned) > self._room[pool]  # this step alone is more than there is room for
        for key in self._policy.evict(layer, -self._free[pool], () if too_many else wanted):
            self._leave(key)
        counters = self.counters[layer]
        counters.lookups += len(wanted)
        counters.misses += len(missing)
        counters.hits += len(wanted) - len(missing)

    def _enter(self, key: Key) -> None:
        self._present.add(key)
        self._free[self._policy.pool_of(key[0])] -= 1
        self._policy.admit(key[0], [key[1]])

    def _leave(self, key: Key) -> None:
        self._present.remove(key)
        self._free[self._policy.pool_of(key[0])] += 1
        self.counters[key[0]].evictions += 1
