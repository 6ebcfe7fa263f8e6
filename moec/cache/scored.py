"""Policies that let the lowest score leave: `lfu` and `trace` of a layer, `sweep_lfu` of all layers."""

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

    def admit(self, key: Key) -> None:
        self._pools[key[0]].add(key)

    def drop(self, key: Key) -> None:
        self._pools[key[0]].remove(key)

    def victims(self, layer: int, count: int, kept: Collection[Key]) -> list[Key]:
        scores = self.scores(layer)
        free = [(scores[key[1]], key) for key in self._pools[layer] if key not in kept]
        return [key for _, key in sorted(free)[:count]]

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


#: How an expert's worth falls with the layers until its next use.
SWEEP_POWER = 0.5
#: No layer fetches ahead for the first one, so what it misses is waited for. Of 1, 1.5, 2, 3 the best in that model.
FIRST_WORTH = 1.5


class SweepLfu(Lfu):
    """The least frequently used of all layers, where those count for less whose layer comes later.

    Until a layer comes again, the slot of one of its experts can serve others that are fetched ahead. So the experts
    that most steps use stay, and the others pass through the slots that are left. A frequency is divided by the square
    root of the layers until the next use: of the powers 1/2, 1 and 2 the one that exposed least in a model of four
    recorded traces, in which they differ by 2 %.
    """

    scope: Scope = "rank"

    def __init__(self, num_layers: int, num_experts: int) -> None:
        super().__init__(num_layers, num_experts)
        self._may_leave = np.zeros((num_layers, num_experts), bool)
        self._frequency = np.zeros((num_layers, num_experts))
        worths = np.arange(1, num_layers + 1) ** -SWEEP_POWER
        weights = np.ones((num_layers, 1))
        weights[0] = FIRST_WORTH
        #: Of each layer [L, 1], where layer n has been looked up last.
        self._weights = [np.roll(worths, n + 1)[:, None] * weights for n in range(num_layers)]
        self._worths = self._frequency

    def use(self, layer: int, experts: Sequence[int]) -> None:
        super().use(layer, experts)
        self._frequency[layer] = self.scores(layer)
        self._worths = self._frequency * self._weights[layer]

    def admit(self, key: Key) -> None:
        self._may_leave[key] = True

    def drop(self, key: Key) -> None:
        self._may_leave[key] = False

    def victims(self, layer: int, count: int, kept: Collection[Key]) -> list[Key]:
        worths = np.where(self._may_leave, self._worths, np.inf)
        for key in kept:
            worths[key] = np.inf
        flat = worths.ravel()
        most = np.partition(flat, count - 1)[count - 1] if count < flat.size else np.inf
        (found,) = np.nonzero((flat <= most) & (flat < np.inf))  # more than `count` where some are equal
        first = found[np.argsort(flat[found], kind="stable")][:count].tolist()
        return [divmod(place, worths.shape[1]) for place in first]

    def worth(self, key: Key) -> float:
        return float(self._worths[key])


class Popularity(Scored):
    """The least popular of a recorded trace: `counts[layer][expert]`, whatever happens now."""

    def __init__(self, counts: Sequence[Sequence[float]]) -> None:
        super().__init__()
        self._counts = counts

    def scores(self, layer: int) -> Sequence[float]:
        return self._counts[layer]
