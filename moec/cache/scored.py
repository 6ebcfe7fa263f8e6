"""Policies that let the lowest score of a layer leave: `lfu` and `trace`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Sequence

import numpy as np

from moec.cache.policy import Key, Scope


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

    def admit(self, layer: int, experts: Sequence[int]) -> None:
        self._pools[layer].update([(layer, expert) for expert in experts])

    def evict(self, layer: int, count: int, kept: Collection[Key]) -> list[Key]:
        scores, pool = self.scores(layer), self._pools[layer]
        free = [(scores[key[1]], key) for key in pool if key not in kept]
        leaving = [key for _, key in sorted(free)[:count]]
        pool.difference_update(leaving)
        return leaving

    def worth(self, key: Key) -> float:
        return self.scores(key[0])[key[1]]


#: A use that is n steps old weighs n ** -FORGETTING.
FORGETTING = 0.75
#: Half-lives, in steps, of the exponentials that add up to this weight.
HALF_LIVES = tuple(4.0**n for n in range(7))
#: Steps after which sums are made small again. A use of the shortest half-life weighs 2 ** steps until then.
ERA_STEPS = 256


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
        half_lives = np.array(HALF_LIVES)
        #: What a use in step n of an era adds: later ones more, where earlier ones ought to lose.
        self._added = half_lives**-FORGETTING * 2.0 ** (np.arange(ERA_STEPS)[:, None] / half_lives)
        self._left, self._fade = 2.0 ** (-np.arange(ERA_STEPS)[:, None] / half_lives), 0.5 ** (ERA_STEPS / half_lives)
        self._sums = np.zeros((num_layers, num_experts, len(half_lives)))
        self._rows = [list(sums) for sums in self._sums]  # views: to index an array takes as long as to add
        self._steps = [0] * num_layers
        self._scores: dict[int, Sequence[float]] = {}  # of layers, until the next use

    def use(self, layer: int, experts: Sequence[int]) -> None:
        rows, step = self._rows[layer], self._steps[layer] + 1
        if step == ERA_STEPS:
            self._sums[layer] *= self._fade
            step = 0
        self._steps[layer], added = step, self._added[step]
        self._scores.pop(layer, None)
        for expert in experts:
            row = rows[expert]
            row += added

    def scores(self, layer: int) -> Sequence[float]:
        if layer not in self._scores:
            self._scores[layer] = (self._sums[layer] * self._left[self._steps[layer]]).sum(axis=1).tolist()
        return self._scores[layer]


class Popularity(Scored):
    """The least popular of a recorded trace: `counts[layer][expert]`, whatever happens now."""

    def __init__(self, counts: Sequence[Sequence[float]]) -> None:
        super().__init__()
        self._counts = counts

    def scores(self, layer: int) -> Sequence[float]:
        return self._counts[layer]
