"""Predicted seconds of steps whose experts come through a cache, on one rank.

L sparse layers, S steps. A layer that has all its experts takes `dense` (attention, router, shared experts) and then
`work` (routed experts), each the larger of reading its weights once and its arithmetic. Copies of one layer's experts
follow one another, and demands go before prefetches. With d experts demanded and g fetched ahead for a layer:

    exposed = max(0, copy(d) - work on the experts that are there)       those are computed while the others come
    late    = max(0, copy(g) - ahead * (dense + work))                   the time since they were asked for
    step    = max(sum over layers of dense + work + exposed + late,  all copies of the step)

That is what a cache with look-ahead exposes, layer by layer, from counts instead of rates. Activations, KV memory,
exchanges between ranks and launches are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.integer]


@dataclass(frozen=True, eq=False)
class Machine:
    """One rank and what it holds of a model.

    `expert_bytes`, `dense_bytes`, `copy_s`: [L], bytes of one routed expert and of a layer's other weights, seconds
    until one expert has come. `other_bytes`: layers without routed experts, and the head. `width`: bytes of a weight.
    `memory_rate` bytes/s; `flop_rate` FLOP/s, None: arithmetic takes no time. `dp`: ranks that share a step's tokens.
    """

    expert_bytes: Floats
    dense_bytes: Floats
    other_bytes: float
    copy_s: Floats
    memory_rate: float
    flop_rate: float | None
    width: int
    dp: int = 1


@dataclass(frozen=True, eq=False)
class Steps:
    """What steps did on one rank. `tokens` [S], of all ranks together; the others [S, L].

    `active`: experts used; `pairs`: rows they served; `demanded` and `fetched`: experts copied on demand and ahead.
    """

    tokens: Counts
    active: Counts
    pairs: Counts
    demanded: Counts
    fetched: Counts


def step_seconds(machine: Machine, steps: Steps, ahead: int = 1) -> Floats:
    """[S]: predicted seconds of each step."""
    dense, work = layer_seconds(machine, steps)
    demanded, fetched = (machine.copy_s * count for count in (steps.demanded, steps.fetched))
    there = 1.0 - steps.demanded / np.maximum(steps.active, 1)
    exposed = np.maximum(0.0, demanded - work * there)
    late = np.maximum(0.0, fetched - ahead * (dense + work))
    computed = (dense + work + exposed + late).sum(axis=1) + _other(machine, steps)
    found: Floats = np.maximum(computed, (demanded + fetched).sum(axis=1))
    return found


def least_seconds(machine: Machine, steps: Steps, slots: int) -> Floats:
    """[S]: what no policy and no prefetch can beat: a step's compute, or copying what finds no place in all slots."""
    dense, work = layer_seconds(machine, steps)
    crossing = np.maximum(0, steps.active.sum(axis=1) - slots * steps.active.shape[1]) * machine.copy_s.min()
    found: Floats = np.maximum((dense + work).sum(axis=1) + _other(machine, steps), crossing)
    return found


def layer_seconds(machine: Machine, steps: Steps) -> tuple[Floats, Floats]:
    """(dense, work), each [S, L]: seconds of layers that have all their experts."""
    own = np.ceil(steps.tokens / machine.dp)[:, None]
    dense = _seconds(machine, machine.dense_bytes[None, :], machine.dense_bytes * own)
    work = _seconds(machine, machine.expert_bytes * steps.active, machine.expert_bytes * steps.pairs)
    return dense, work


def _other(machine: Machine, steps: Steps) -> Floats:
    own = np.ceil(steps.tokens / machine.dp)
    return _seconds(machine, np.full(len(own), machine.other_bytes), machine.other_bytes * own)


def _seconds(machine: Machine, read: Floats, used: Floats) -> Floats:
    """The larger of reading `read` bytes and two operations per weight of `used` bytes, counted once for each row."""
    found: Floats = read / machine.memory_rate
    if machine.flop_rate is not None:
        found = np.maximum(found, 2.0 * used / machine.width / machine.flop_rate)
    return found
