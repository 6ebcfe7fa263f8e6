"""The cache lab: one trace through every policy and prefetcher at several sizes, beside what nothing can beat.

The policies and the state machine are those that the run time uses. Each case starts with empty slots. Cases are
independent, so several run at once where the trace is long.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moec.cache.policies import POLICIES
from moec.cache.policy import Key, Scope
from moec.cache.predictors import History, NextRouter, Predictor
from moec.cache.residency import least_slots
from moec.cache.simulate import Outcome, Prefetch, policy_for, simulate
from moec.cache.stream import Stream, as_prompts
from moec.cache.timing import Counts, Floats, Machine, least_seconds, step_seconds
from moec.cache.trace import DECODE, PREFILL, Trace

PREFETCHERS = ("none", "history", "next_router")
#: What knows the future: of each layer's slots, and of all slots of a rank as one pool.
BOUNDS = ("belady", "belady_rank")
#: Below this number of look-ups over all cases, starting processes costs more than they save.
MANY_LOOK_UPS = 2_000_000
#: (TTFT, time per token) in seconds; None where there is nothing to predict them from.
Times = tuple[float | None, float | None]


@dataclass(frozen=True)
class Case:
    """`slots` for each layer on a rank, and who decides."""

    slots: int
    policy: str
    prefetch: str = "none"


@dataclass(frozen=True, eq=False)
class Lab:
    """What is measured. `held[rank][layer]`: experts of each rank of an expert group; a step's tokens are the group's.

    `popularity` and `history` are what the policy `trace` and the prefetcher `history` learned from; where None, from
    the trace itself, in hindsight. Without `expert_bytes` sizes are left out, without `machine` times.
    """

    trace: Trace
    held: Sequence[Sequence[Sequence[int]]]
    pinned: Sequence[int] = ()
    ahead: int = 1
    popularity: Trace | None = None
    history: Trace | None = None
    expert_bytes: Sequence[int] | None = None
    machine: Machine | None = None

    @cached_property
    def ranks(self) -> list[Stream]:
        return [Stream(self.trace, held) for held in self.held]

    @cached_property
    def prompts(self) -> list[Stream]:
        """What times to the first token are of: the trace's prefill steps, or else each sequence as one."""
        if (self.trace.phase == PREFILL).any():
            return self.ranks
        return [Stream(as_prompts(self.trace), held) for held in self.held]

    def cases(self, sizes: Sequence[int]) -> list[Case]:
        """Every policy with every prefetcher that the trace allows, then the bounds, size by size."""
        usable = [p for p in PREFETCHERS if p != "next_router" or self.trace.predicted_ids is not None]
        usable = usable if self.ahead < self.trace.num_layers else ["none"]
        online = [(policy, prefetch) for policy in POLICIES for prefetch in usable]
        return [Case(slots, *who) for slots in sizes for who in [*online, *((bound, "none") for bound in BOUNDS)]]

    def bytes_of(self, transfers: Counts) -> int | None:
        """Bytes of so many experts of each layer, [L]."""
        if self.expert_bytes is None:
            return None
        return sum(int(count) * size for count, size in zip(transfers, self.expert_bytes, strict=True))


@dataclass(frozen=True)
class Row:
    """One case, summed over ranks. `hit_rates` by layer. `transfers` = `demanded` + `fetched`; `useless` of the latter
    left without having been used."""

    case: Case
    lookups: int
    hits: int
    prefetch_hits: int
    demanded: int
    fetched: int
    useless: int
    skipped: int
    evictions: int
    hit_rates: tuple[float, ...]
    moved_bytes: int | None
    times: Times

    @property
    def hit_rate(self) -> float:
        return self.hits / self.lookups if self.lookups else 1.0

    @property
    def transfers(self) -> int:
        return self.demanded + self.fetched


@dataclass(frozen=True)
class Floor:
    """What nothing can beat at a size: experts that must be copied whatever is known, and the times with no more."""

    slots: int
    transfers: int
    moved_bytes: int | None
    times: Times


def measure(lab: Lab, sizes: Sequence[int], show: Callable[[int, int], None] = lambda done, total: None) -> list[Row]:
    """A row for each case, in order. `show(done, total)` is called as they end. Raises ValueError for too few slots."""
    cases, rows = lab.cases(sizes), []
    for row in _run(lab, cases):
        rows.append(row)
        show(len(rows), len(cases))
    return rows


def least_size(lab: Lab) -> int:
    """The fewest slots per layer with which every policy works on every rank."""
    scopes: tuple[Scope, ...] = ("layer", "rank")
    return max(least_slots(held, scope, _pinned(lab, held)) for held in lab.held for scope in scopes)


def floor(lab: Lab, slots: int) -> Floor:
    """What nothing beats with `slots`, empty at first."""
    transfers: Counts = np.sum([rank.least_transfers(slots) for rank in lab.ranks], axis=0)
    times = _times(lab, lambda machine, rank: least_seconds(machine, rank.steps, slots))
    return Floor(slots, int(transfers.sum()), lab.bytes_of(transfers), times)


def resident_times(lab: Lab) -> Times:
    """Times with every expert in a slot."""
    return _times(lab, lambda machine, rank: step_seconds(machine, rank.steps))


def _run(lab: Lab, cases: Sequence[Case]) -> Iterator[Row]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(len(cases), cores)
    if workers < 2 or lab.trace.expert_ids.size * len(cases) < MANY_LOOK_UPS:
        yield from (_row(lab, case) for case in cases)
        return
    with ProcessPoolExecutor(workers, initializer=_take, initargs=(lab,)) as pool:
        yield from pool.map(_row_of_taken, cases)


_taken: list[Lab] = []


def _take(lab: Lab) -> None:
    """In a process of the pool: what all its cases are of. On Ctrl-C it ends at once and silently."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _taken[:] = [lab]


def _row_of_taken(case: Case) -> Row:
    return _row(_taken[0], case)


def _row(lab: Lab, case: Case) -> Row:
    done = {rank: _simulate(lab, case, rank) for rank in lab.ranks}
    copied: Counts = np.sum([(o.demanded + o.fetched).sum(axis=0) for o in done.values()], axis=0)
    layers = list(zip(*(outcome.counters for outcome in done.values()), strict=True))

    def total(name: str) -> int:
        return sum(getattr(counters, name) for layer in layers for counters in layer)

    def seconds(machine: Machine, rank: Stream) -> Floats:
        outcome = done[rank] if rank in done else _simulate(lab, case, rank)
        return step_seconds(machine, rank.served(outcome), lab.ahead)

    return Row(
        case,
        lookups=total("lookups"),
        hits=total("hits"),
        prefetch_hits=total("prefetch_hits"),
        demanded=total("misses"),
        fetched=total("prefetches"),
        useless=total("useless"),
        skipped=total("skipped"),
        evictions=total("evictions"),
        hit_rates=tuple(sum(c.hits for c in layer) / max(1, sum(c.lookups for c in layer)) for layer in layers),
        moved_bytes=lab.bytes_of(copied),
        times=_times(lab, seconds),
    )


def _simulate(lab: Lab, case: Case, rank: Stream) -> Outcome:
    trace, held = rank.trace, rank.held
    prefetch = None
    if case.prefetch != "none":
        most = min(case.slots, int(np.ceil(rank.steps.active.mean())))
        prefetch = Prefetch(_predictor(lab, case, trace), lab.ahead, most)
    policy = policy_for(case.policy, trace, held, lab.popularity)
    return simulate(trace, policy, case.slots, held, _pinned(lab, held), prefetch=prefetch)


def _pinned(lab: Lab, held: Sequence[Sequence[int]]) -> list[Key]:
    return [(layer, expert) for layer, own in enumerate(held) for expert in lab.pinned if expert in own]


def _predictor(lab: Lab, case: Case, trace: Trace) -> Predictor:
    if case.prefetch == "history":
        return History((lab.history or trace).expert_ids, trace.num_experts, lab.ahead)
    assert trace.predicted_ids is not None
    return NextRouter(trace.predicted_ids, trace.step_starts, trace.num_experts)


def _times(lab: Lab, seconds: Callable[[Machine, Stream], Floats]) -> Times:
    """Means over the steps of a phase, in each of which the slowest rank counts."""
    if (machine := lab.machine) is None:
        return None, None

    def mean(ranks: list[Stream], phase: int) -> float | None:
        steps = ranks[0].trace.step_phases == phase
        if not steps.any():
            return None
        return float(np.max([seconds(machine, rank) for rank in ranks], axis=0)[steps].mean())

    return mean(lab.prompts, PREFILL), mean(lab.ranks, DECODE)
