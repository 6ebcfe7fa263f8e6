"""A trace as one rank of an expert group sees it: the experts that its steps use, and the copies that nothing saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from moec.cache.simulate import Outcome
from moec.cache.timing import Counts, Steps
from moec.cache.trace import PREFILL, Trace


@dataclass(frozen=True, eq=False)
class Stream:
    """`held[layer]`: the experts of this rank. Tokens of the trace are those of the whole group."""

    trace: Trace
    held: Sequence[Sequence[int]]

    @cached_property
    def steps(self) -> Steps:
        """What each step uses, with no expert copied."""
        trace = self.trace
        step_of_token = np.repeat(np.arange(trace.num_steps), np.diff(trace.step_starts))
        active, pairs = (np.zeros((trace.num_steps, trace.num_layers), np.int64) for _ in range(2))
        for layer, ids in enumerate(trace.expert_ids):
            is_mine = np.isin(ids, np.asarray(self.held[layer]))
            step = np.broadcast_to(step_of_token[:, None], ids.shape)[is_mine]
            used = np.unique(step * trace.num_experts + ids[is_mine])
            active[:, layer] = np.bincount(used // trace.num_experts, minlength=trace.num_steps)
            pairs[:, layer] = np.bincount(step, minlength=trace.num_steps)
        none = np.zeros_like(active)
        return Steps(np.diff(trace.step_starts), active, pairs, none, none)

    def served(self, outcome: Outcome) -> Steps:
        """The steps with the copies of a simulation."""
        return replace(self.steps, demanded=outcome.demanded, fetched=outcome.fetched)

    def least_transfers(self, slots: int) -> Counts:
        """[L]: copies that no policy and no prefetch saves, starting with `slots` x layers empty slots.

        What is used at all is copied once; and each step copies what finds no place in all slots together. The larger
        sum counts, the second one spread over the layers by what they use.
        """
        once = np.array(
            [len(np.intersect1d(ids, own)) for ids, own in zip(self.trace.expert_ids, self.held, strict=True)]
        )
        active = self.steps.active
        total = active.sum(axis=1)
        crossing = np.maximum(0, total - slots * active.shape[1])
        if crossing.sum() <= once.sum():
            return once
        share = active * (crossing / np.maximum(total, 1))[:, None]
        least: Counts = np.rint(share.sum(axis=0)).astype(np.int64)
        return least


def as_prompts(trace: Trace) -> Trace:
    """The same tokens with each sequence as one prefill step."""
    starts = np.concatenate([[0], np.cumsum(trace.seq_lengths, dtype=np.int64)])
    return replace(trace, step_starts=starts, phase=np.full_like(trace.phase, PREFILL))
