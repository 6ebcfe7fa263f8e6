"""A cache driven by hand in tests: every policy by name, and a model of the slots that checks each answer."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from moec.cache.belady import Belady
from moec.cache.policies import POLICIES, policy_named
from moec.cache.policy import Key, Policy
from moec.cache.residency import Load, Residency, Use

ALL_POLICIES = (*POLICIES, "belady", "belady_rank")
#: (layer, experts) looked up.
LookUp = tuple[int, Collection[int]]


def policy_of(name: str, num_layers: int, num_experts: int, look_ups: Sequence[LookUp]) -> Policy:
    """A policy for a run of just these look-ups; `trace` goes by their counts, `belady` knows them."""
    if name.startswith("belady"):
        steps = [[sorted(set(e)) if at == layer else [] for at in range(num_layers)] for layer, e in look_ups]
        return Belady(steps, "rank" if name == "belady_rank" else "layer")
    counts = [
        [sum(at == layer and expert in e for at, e in look_ups) for expert in range(num_experts)]
        for layer in range(num_layers)
    ]
    return policy_named(name, num_layers, num_experts, counts)


class Checked:
    """A `Residency`, and what every slot holds by its answers alone. Each call asserts what must hold after it."""

    def __init__(self, residency: Residency, num_layers: int, slots: int, pinned: Collection[Key]) -> None:
        self.residency, self.num_layers, self.slots = residency, num_layers, slots
        self.is_rank = residency.policy.scope == "rank"
        self.pinned = frozenset(pinned)
        self.content: dict[int, Key] = {}
        self.guessed: set[Key] = set()
        self.wanted: set[Key] = set()
        self.loads = [0] * num_layers
        self._read()

    def fill(self, keys: Sequence[Key]) -> None:
        before = set(self.content.values())
        placed = self.residency.fill(keys)
        self._read()
        assert set(self.content.values()) == before | set(placed)

    def demand(self, layer: int, experts: Collection[int], of_prompts: bool = False) -> list[Use]:
        wanted = {(layer, expert) for expert in experts}
        before = set(self.content.values())
        self.guessed -= {key for key in self.guessed if key[0] == layer}
        uses = self.residency.demand(layer, experts, of_prompts)
        assert sorted(use.expert for use in uses) == sorted(set(experts)), "each expert is served once"
        assert {(layer, use.expert) for use in uses if not use.is_loaded} == wanted & before
        assert uses == sorted(uses, key=lambda use: use.is_loaded), "residents first"
        served: set[Key] = set()
        for use in uses:
            if use.is_loaded:
                self._replace(layer, use, unserved=wanted - served)
            else:
                assert self.content[use.slot] == (layer, use.expert) and use.evicted is None
            served.add((layer, use.expert))
        self.wanted = wanted
        is_passing = (of_prompts and self.is_rank) or len(wanted - self.pinned) > self._room(layer)
        assert is_passing or len({use.slot for use in uses}) == len(uses), "no slot twice where there are enough"
        slots = [use.slot for use in uses]
        assert self._room(layer) < 2 or all(slots[i] != slots[i + 1] for i in range(len(slots) - 2)), "one at a time"
        return uses

    def prefetch(self, layer: int, experts: Sequence[int]) -> list[Load]:
        before = set(self.content.values())
        kept = self.wanted | self.guessed | {(layer, expert) for expert in experts}
        loads = self.residency.prefetch(layer, experts)
        missing = [expert for expert in dict.fromkeys(experts) if (layer, expert) not in before]
        assert [load.expert for load in loads] == missing[: len(loads)], "the best guesses, each once"
        for load in loads:
            assert load.evicted not in kept
            self._replace(layer, load, unserved=set())
            self.guessed.add((layer, load.expert))
        return loads

    def served(self) -> None:
        self.residency.served()
        self.wanted = set()

    def agrees(self) -> None:
        """The table is the model's, and the counters add up."""
        for layer, counters in enumerate(self.residency.counters):
            assert counters.lookups == counters.hits + counters.misses
            assert counters.misses + counters.prefetches == self.loads[layer]
            assert counters.prefetch_hits + counters.useless <= counters.prefetches
            held = {key[1]: slot for slot, key in self.content.items() if key[0] == layer}
            assert self.residency.resident(layer) == tuple(sorted(held))
            assert all(self.residency.slot_of(layer, expert) == slot for expert, slot in held.items())

    def _replace(self, layer: int, load: Use | Load, unserved: set[Key]) -> None:
        assert self.content.get(load.slot) == load.evicted
        assert load.evicted not in self.pinned and load.evicted not in unserved
        assert (layer, load.expert) not in self.content.values(), "one expert in two slots"
        assert load.slot in range(self.num_layers * self.slots)
        assert self.is_rank or load.slot // self.slots == layer
        if load.evicted is not None:
            self.guessed.discard(load.evicted)
        self.content[load.slot] = layer, load.expert
        self.loads[layer] += 1

    def _room(self, layer: int) -> int:
        """Slots of the layer's pool that are not pinned."""
        pool = self.slots * (self.num_layers if self.is_rank else 1)
        return pool - sum(self.is_rank or key[0] == layer for key in self.pinned)

    def _read(self) -> None:
        for layer in range(self.num_layers):
            for expert in self.residency.resident(layer):
                slot = self.residency.slot_of(layer, expert)
                assert slot is not None
                self.content[slot] = layer, expert
