"""How copies meet the layers that need them: which come first, and what is counted of those that come late."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moec.cache.residency import Residency
from moec.cache.scored import Lfu
from moec.runtime.experts.cache import ExpertCache
from moec.runtime.experts.copier import Copier
from moec.runtime.experts.file import Key
from moec.runtime.experts.transfer import Room, State
from tests.expert_blobs import CONTENTS


class Coming:
    """A transfer that arrives when a test says so, or is waited for."""

    times = None

    def __init__(self, key: Key, into: torch.Tensor, is_demand: bool) -> None:
        self.key, self.into, self.is_demand = key, into, is_demand
        self.state = State.PENDING

    @property
    def is_done(self) -> bool:
        return self.state is State.WHOLE

    def wait(self) -> None:
        self.state = State.WHOLE

    def promote(self) -> None:
        self.is_demand = True

    def cancel(self) -> bool:
        self.state = State.DROPPED
        return True


class Begun(Copier):
    """Copies nothing. `transfers`: the last one of each expert."""

    def __init__(self) -> None:
        super().__init__([])
        self.transfers: dict[Key, Coming] = {}

    def start(self, copies: Sequence[tuple[Key, Room]], is_demand: bool) -> Sequence[Coming]:
        begun = [Coming(key, room.memory, is_demand) for key, room in copies]
        self.transfers.update({transfer.key: transfer for transfer in begun})
        return begun


def cache_over(copier: Copier) -> ExpertCache:
    held = [blobs.experts for blobs in CONTENTS.layers]
    policy = Lfu(len(held), max(map(max, held)) + 1)
    return ExpertCache(range(len(held)), CONTENTS, Residency(held, 3, policy), copier, torch.device("cpu"))


def test_a_prefetch_still_under_way_is_late_and_becomes_a_demand() -> None:
    copier = Begun()
    cache = cache_over(copier)
    there, late, missed = CONTENTS.layers[0].experts[:3]
    counts = [0] * (max(CONTENTS.layers[0].experts) + 1)
    counts[there], counts[late] = 5, 3
    cache.prefetch(1, 0, counts, 2, "next_router")
    copier.transfers[0, there].state = State.WHOLE

    cache.demand(0, [there, late, missed])
    assert cache.arrivals.late == 1
    assert {key[1]: transfer.is_demand for key, transfer in copier.transfers.items()} == {
        there: False,
        late: True,
        missed: True,
    }
    assert [[use.expert for use in uses] for uses in cache.serve(0)] == [[there], [late], [missed]]
    counters = cache.residency.counters[0]
    assert (counters.hits, counters.prefetch_hits, counters.misses, cache.arrivals.waited) == (2, 2, 1, 2)

    cache.demand(0, [there, late, missed])
    assert [len(uses) for uses in cache.serve(0)] == [3]
    assert (cache.arrivals.late, cache.arrivals.waited) == (1, 2)


def test_a_guess_that_nobody_needs_is_not_late() -> None:
    copier = Begun()
    cache = cache_over(copier)
    guessed, needed = CONTENTS.layers[0].experts[:2]
    counts = [0] * (max(CONTENTS.layers[0].experts) + 1)
    counts[guessed] = 1
    cache.prefetch(1, 0, counts, 1, "next_router")
    cache.demand(0, [needed])
    assert [[use.expert for use in uses] for uses in cache.serve(0)] == [[needed]]
    assert (cache.arrivals.late, copier.transfers[0, guessed].is_demand) == (0, False)
