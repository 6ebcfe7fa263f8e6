"""Which expert is in which slot: the one state machine that the run time and the simulator drive.

Slots are numbered; what is in them changes, they do not, so a captured graph that reads through the table stays valid.
`demand` is a step's look-up of a layer, `prefetch` a guess about a later one. Both only decide: whoever drives this
moves the bytes, in the order of what is returned, and hands compute a slot when its expert has arrived.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moec.cache.policy import Key, Policy, Scope


class Use(NamedTuple):
    """One expert that a step needs, and where it is. `is_loaded`: it must first be copied there, on demand."""

    expert: int
    slot: int
    is_loaded: bool
    evicted: Key | None


class Load(NamedTuple):
    """One expert that is copied into `slot` on a guess."""

    expert: int
    slot: int
    evicted: Key | None


@dataclass(slots=True)
class Counters:
    """What happened to one layer. lookups = hits + misses; transfers = misses + prefetches."""

    lookups: int = 0
    hits: int = 0  # resident when looked up, thanks to a prefetch or not
    prefetch_hits: int = 0  # the part of `hits` that a prefetch brought and that nobody had used before
    misses: int = 0
    evictions: int = 0  # of experts of this layer, by whichever layer
    prefetches: int = 0
    skipped: int = 0  # guesses for which no slot was to be had
    useless: int = 0  # prefetched and evicted before any use


def least_slots(held: Sequence[Collection[int]], scope: Scope, pinned: Collection[Key] = ()) -> int:
    """The fewest slots per layer that work: those of the pinned experts, and one through which the others pass."""
    need = [sum(key[0] == layer for key in pinned) for layer in range(len(held))]
    passing = [int(len(experts) > kept) for experts, kept in zip(held, need, strict=True)]
    if scope == "layer":
        return max(map(sum, zip(need, passing, strict=True)), default=0)
    return -(-(sum(need) + max(passing, default=0)) // max(len(held), 1))


def check_slots(held: Sequence[Collection[int]], slots: int, scope: Scope, pinned: Collection[Key]) -> None:
    """Raises ValueError, with the number that would do, where there are fewer than `least_slots`."""
    if slots < (least := least_slots(held, scope, pinned)):
        raise ValueError(f"{slots} slots per layer: at least {least} are needed")


#: Slots that a step passes through at least, which streams its experts: one is computed, the next one comes.
PASSING = 2
#: A step of prompts that looks up a larger share of a layer's experts needs most of those of the layers to come too.
STREAMED = 0.6


class Residency:
    """The slots of one rank: a pool of `slots` for each layer, or one pool of slots x layers (`policy.scope`).

    `held[layer]` are the experts that this rank holds; `pinned` ones are there from the beginning and stay. Slots are
    numbered layer by layer. Raises ValueError where the slots are fewer than `least_slots`, or a pinned expert or one
    looked up is not held.
    """

    def __init__(
        self, held: Sequence[Collection[int]], slots: int, policy: Policy, pinned: Collection[Key] = ()
    ) -> None:
        check_slots(held, slots, policy.scope, pinned)
        self.policy = policy
        self.num_slots = slots * len(held)
        self.counters = [Counters() for _ in held]
        self._held = [frozenset(experts) for experts in held]
        self._tables: list[dict[int, Use]] = [{} for _ in held]  # the look-up of each resident, as a hit
        pools = [list(range((layer + 1) * slots - 1, layer * slots - 1, -1)) for layer in range(len(held))]
        shared = [slot for pool in reversed(pools) for slot in pool]
        self._free = [shared] * len(held) if policy.scope == "rank" else pools  # the lowest at the end
        self._guessed: dict[Key, None] = {}  # prefetched since the last look-up of their layer: nobody evicts them
        self._unused: list[set[int]] = [set() for _ in held]  # prefetched and not used since
        self._wanted: set[Key] = set()  # by a look-up that is not served yet
        self._to_come: range = range(0)  # layers that the rest of a prompts' step will look up, in a pool of all layers
        self._pinned = frozenset(pinned)
        for layer, expert in sorted(pinned):
            self._check(layer, [expert])
            self._place(layer, expert, self._free[layer].pop())
        self._room = [len(free) for free in self._free]  # what is not pinned

    def slot_of(self, layer: int, expert: int) -> int | None:
        found = self._tables[layer].get(expert)
        return None if found is None else found.slot

    def resident(self, layer: int) -> tuple[int, ...]:
        """Experts that have a slot, in ascending order."""
        return tuple(sorted(self._tables[layer]))

    def fill(self, order: Iterable[Key]) -> list[Key]:
        """Give the free slots to the first keys of `order`, uncounted. Returns those that got one, the best first."""
        placed = []
        for layer, expert in order:
            if self._free[layer] and expert not in self._tables[layer]:
                self._check(layer, [expert])
                self._place(layer, expert, self._free[layer].pop())
                self.policy.admit(layer, [expert])
                placed.append((layer, expert))
        return placed

    def demand(self, layer: int, experts: Collection[int], of_prompts: bool = False) -> list[Use]:
        """Serve the look-ups of one step in one layer. In this order: residents, then misses, each loaded once.

        A miss takes a free slot, else the policy's victim among what this step does not look up. Where the step wants
        more than there are slots, some take the slot of an expert further up the same list, which must have been
        computed by then: the step streams. What is worth most is not passed over: it stays where it is, or comes last.

        `of_prompts`: a step that may look up most experts of every layer. If it does so here, in a pool of all layers,
        it streams, and residents of layers to come stay, since most would have to be loaded again.
        """
        wanted = sorted(set(experts))
        self._check(layer, wanted)
        if self._guessed:
            self._settle(layer)
        self.policy.use(layer, wanted)
        self._wanted = {(layer, expert) for expert in wanted}
        is_broad = of_prompts and len(wanted) > STREAMED * len(self._held[layer])
        self._to_come = range(layer + 1, len(self._held) if is_broad and self.policy.scope == "rank" else 0)
        table, uses, misses = self._tables[layer], list[Use](), list[int]()
        for expert in wanted:
            if (hit := table.get(expert)) is not None:
                uses.append(hit)
            else:
                misses.append(expert)
        self._count(layer, uses, len(misses))
        if misses:
            self._load(layer, misses, uses)
        return uses

    def served(self) -> None:
        """What the latest look-up wanted has been computed: its slots may be given to guesses."""
        self._wanted = set()

    def most_used(self, layer: int) -> list[int]:
        """Experts of a layer that have been used, by their worth to the policy, the greatest first."""
        worth = {expert: self.policy.worth((layer, expert)) for expert in self._held[layer]}
        return sorted((expert for expert in worth if worth[expert] > 0), key=lambda expert: (-worth[expert], expert))

    def prefetch(self, layer: int, experts: Sequence[int], most: int | None = None) -> list[Load]:
        """Load the guesses that are not resident, the best guess first, and at most `most` of them.

        Nothing gives way that is pinned, wanted by a look-up that is not `served`, guessed for a look-up to come, among
        these guesses, or kept by a step of prompts. Where no slot is left the rest is skipped.
        """
        self._check(layer, experts)
        table = self._tables[layer]
        missing = [expert for expert in dict.fromkeys(experts) if expert not in table][:most]
        if not missing:
            return []
        kept = self._wanted.union([(layer, expert) for expert in experts if expert in table])
        if self._to_come:
            kept |= self._resident(self._to_come)
        places = self._places(layer, len(missing), kept)
        loads = [Load(expert, slot, gone) for expert, (slot, gone) in zip(missing, places, strict=False)]
        for expert, slot, _ in loads:
            self._place(layer, expert, slot)
            self._guessed[layer, expert] = None
            self._unused[layer].add(expert)
        self.counters[layer].prefetches += len(loads)
        self.counters[layer].skipped += len(missing) - len(loads)
        return loads

    def _load(self, layer: int, misses: list[int], uses: list[Use]) -> None:
        """Append a use for each miss to `uses`, which has the residents."""
        staying: Collection[Key] = ()
        wanted, room = self._wanted, self._room[layer]
        if self._to_come or (len(wanted) > room and len(wanted - self._pinned) > room):
            staying = self._staying(layer)
            misses.sort(key=lambda expert: (self.policy.worth((layer, expert)), expert))
        places = self._places(layer, len(misses), wanted.union(staying) if staying else wanted)
        least = min(PASSING, len(misses)) if self._to_come else len(misses)
        if len(places) < least:
            places += self._retract(least - len(places))
        while True:
            for (slot, gone), expert in zip(places, misses, strict=False):
                self._place(layer, expert, slot)
                uses.append(Use(expert, slot, True, gone))
            self.policy.admit(layer, misses[: len(places)])
            misses = misses[len(places) :]
            if (num_left := len(wanted) - len(uses)) == 0:
                return
            served = {use.slot: number for number, use in enumerate(uses)}
            places = self._places(layer, num_left, staying)
            places.sort(key=lambda place: served[place[0]])  # the longer ago, the sooner it is free

    def _staying(self, layer: int) -> list[Key]:
        """Residents that keep their slots while a step streams: those that it still needs, then those worth most."""
        layers, room = [layer], self._room[layer]
        if self.policy.scope == "rank":
            layers, room = list(range(len(self._tables))), room - len(self._guessed)
        resident = self._resident(layers) - self._guessed.keys()

        def worth(key: Key) -> tuple[bool, float, Key]:
            return key[0] in self._to_come, self.policy.worth(key), key

        ranked = sorted((resident | self._wanted) - self._pinned, key=worth)
        best = ranked[len(ranked) - max(room - PASSING, 0) :]
        return [key for key in best if key in resident]

    def _resident(self, layers: Iterable[int]) -> set[Key]:
        return {(layer, expert) for layer in layers for expert in self._tables[layer]}

    def _places(self, layer: int, count: int, kept: Collection[Key]) -> list[tuple[int, Key | None]]:
        """At most `count` slots and who has just left each: free ones, then those of the policy's victims."""
        free = self._free[layer]
        places: list[tuple[int, Key | None]] = [(free.pop(), None) for _ in range(min(count, len(free)))]
        if len(places) < count:
            leaving = self.policy.evict(layer, count - len(places), kept)
            places += [(self._evict(key), key) for key in leaving]
        return places

    def _retract(self, count: int) -> list[tuple[int, Key | None]]:
        """Slots of guesses for later layers, the latest first: a guess does not split a step into waves."""
        newest = list(reversed(self._guessed))[:count] if self.policy.scope == "rank" else []
        for key in newest:
            del self._guessed[key]
        return [(self._evict(key), key) for key in newest]

    def _place(self, layer: int, expert: int, slot: int) -> None:
        self._tables[layer][expert] = Use(expert, slot, False, None)

    def _evict(self, key: Key) -> int:
        layer, expert = key
        counters = self.counters[layer]
        counters.evictions += 1
        if expert in self._unused[layer]:
            self._unused[layer].remove(expert)
            counters.useless += 1
        return self._tables[layer].pop(expert).slot

    def _settle(self, layer: int) -> None:
        """The guesses for this look-up have been right or wrong: from now on they may leave like all others."""
        settled = [key for key in self._guessed if key[0] == layer]
        for key in settled:
            del self._guessed[key]
        self.policy.admit(layer, [expert for _, expert in settled])

    def _count(self, layer: int, hits: Sequence[Use], misses: int) -> None:
        counters = self.counters[layer]
        counters.lookups += len(hits) + misses
        counters.hits += len(hits)
        counters.misses += misses
        if unused := self._unused[layer]:
            brought = unused.intersection([use.expert for use in hits])
            counters.prefetch_hits += len(brought)
            unused -= brought

    def _check(self, layer: int, experts: Collection[int]) -> None:
        if not self._held[layer].issuperset(experts):
            wrong = sorted(set(experts) - self._held[layer])
            raise ValueError(f"layer {layer}: this rank does not hold experts {wrong}")
