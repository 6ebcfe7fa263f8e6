"""A Chrome/Perfetto trace of a run: a process per rank, a track per stream, arrows from dispatch to combine.

1. `Recorder.watch` wraps a rank's kernels: each call becomes an event on the stream of its operation. A started
   transfer lasts from its start to the end of its wait, on its link's track; the copy of a cached expert from its
   first byte to its last, on the track of copies.
2. Ranks count microseconds from one barrier, so their clocks agree to about one message.
3. Rank 0 gathers all events and writes one JSON file; what the cost model predicts are processes of their own in it.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch.distributed as dist

from moec.files import write_whole
from moec.ir.ops.exchange import LEAVES, Hops
from moec.ir.program import Program
from moec.runtime.experts.cache import Copy, ExpertCache
from moec.runtime.generate import Place, gather_bytes

STREAMS = ("compute", "intra", "inter", "copy")


@dataclass(frozen=True)
class Event:
    """One operation of one rank, in microseconds from the common zero."""

    name: str
    stream: str
    start: float
    end: float
    phase: str
    layer: int | None
    hop: int | None = None  # that it begins or ends
    by: str | None = None  # demand or prefetch, of a copy


@dataclass
class Recorder:
    """Collects the events of one rank."""

    zero: float
    events: list[Event] = field(default_factory=list)
    started: dict[int, tuple[float, str]] = field(default_factory=dict, repr=False)
    hops: Hops = field(default_factory=Hops, repr=False)
    copies: list[Copy] = field(default_factory=list, repr=False)

    def now(self) -> float:
        return self._at(time.perf_counter())

    def _at(self, seconds: float) -> float:
        return (seconds - self.zero) * 1e6

    def copied(self) -> list[Event]:
        """The copies of experts that were brought whole."""
        found = list[Event]()
        for copy in self.copies:
            if (times := copy.transfer.times) is not None:
                start, end = map(self._at, times)
                by = "demand" if copy.is_demand else "prefetch"
                found.append(Event(f"expert {copy.expert}", "copy", start, end, copy.phase, copy.layer, by=by))
        return found

    def watch(self, kernels: SimpleNamespace, program: Program) -> SimpleNamespace:
        """The same kernels, each call recorded."""
        streams = _streams(program)
        wrapped = {
            name: self.watch(kernel, program)
            if isinstance(kernel, SimpleNamespace)
            else self._watched(name, kernel, program.phase, streams)
            for name, kernel in vars(kernels).items()
        }
        return SimpleNamespace(**wrapped)

    def _watched(
        self, name: str, kernel: Callable[..., Any], phase: str, streams: Mapping[str, str]
    ) -> Callable[..., Any]:
        @functools.wraps(kernel)
        def run(ctx: Any, *args: Any, **attrs: Any) -> Any:
            start = self.now()
            result = kernel(ctx, *args, **attrs)
            end = self.now()
            if name == "all_to_all_start":
                self.started[id(result)] = (start, streams[attrs["group"]])
            elif name == "all_to_all_wait":
                began, stream = self.started.pop(id(args[0]))
                self.events.append(Event("all_to_all", stream, began, end, phase, ctx.layer))
                self.events.append(Event("wait", "compute", start, end, phase, ctx.layer))
            else:
                stream = streams.get(str(attrs.get("group", "")), "compute") if _moves(name, attrs) else "compute"
                hop = self.hops.number(name, args, result if isinstance(result, tuple) else (result,))
                self.events.append(Event(name, stream, start, end, phase, ctx.layer, hop))
            return result

        return run


def _streams(program: Program) -> dict[str, str]:
    """Group -> the class of links it crosses."""
    groups = program.mesh.groups()
    crossing = {
        name: any(program.cluster.link_class(ranks) == "inter" for ranks in lists) for name, lists in groups.items()
    }
    return {name: "inter" if crosses else "intra" for name, crosses in crossing.items()}


def _moves(name: str, attrs: Mapping[str, Any]) -> bool:
    return "group" in attrs and name not in ("fan_out", "pair_order") and attrs.get("how", "gather") == "gather"


def start_recorder(place: Place, cache: ExpertCache | None = None) -> Recorder:
    """A recorder whose zero all ranks share; from now on it has the copies of `cache` too."""
    if place.mesh.world > 1:
        place.status.enter("barrier")
        dist.barrier()
        place.status.leave()
    recorder = Recorder(time.perf_counter())
    if cache is not None:
        cache.copies = recorder.copies
    return recorder


def gather_events(recorder: Recorder, place: Place) -> list[list[Event]]:
    """On rank 0: the events of each rank, in rank order; an empty list on the others."""
    text = json.dumps([asdict(event) for event in [*recorder.events, *recorder.copied()]]).encode()
    parts = gather_bytes(place, text, "timeline")
    return [[Event(**event) for event in json.loads(part)] for part in parts] if place.rank == 0 else []


def trace(
    ranks: Sequence[Sequence[Event]], predicted: Mapping[str, Sequence[Event]] = MappingProxyType({})
) -> dict[str, Any]:
    """The trace as Chrome's JSON object. Process ids are ranks; predictions by name are the processes behind them."""
    events: list[dict[str, Any]] = []
    named = [*((f"rank {rank}", recorded) for rank, recorded in enumerate(ranks)), *predicted.items()]
    for pid, (name, recorded) in enumerate(named):
        if recorded:
            events += _process(pid, name, recorded)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _process(pid: int, name: str, events: Sequence[Event]) -> list[dict[str, Any]]:
    names, tids = _tracks(events)
    tracks = [_meta(pid, tid, "thread_name", track) for tid, track in enumerate(names)]
    slices = [_slice(pid, tid, event) for tid, event in zip(tids, events, strict=True)]
    return [_meta(pid, 0, "process_name", name), *tracks, *slices, *_arrows(pid, tids, events)]


def _tracks(events: Sequence[Event]) -> tuple[list[str], list[int]]:
    """Names of the tracks, and each event's: events of one track follow one another, as Chrome wants it of a thread.

    A stream has as many as are busy at once, each event on the first that is free: `intra`, `intra 2`, ...
    """
    names, tids = list[str](), [0] * len(events)
    for stream in STREAMS:
        free_at: list[float] = []
        mine = [i for i, event in enumerate(events) if event.stream == stream]
        for i in sorted(mine, key=lambda i: (events[i].start, events[i].end)):
            track = next((t for t, at in enumerate(free_at) if at <= events[i].start), len(free_at))
            free_at[track : track + 1] = [events[i].end]
            tids[i] = len(names) + track
        names += [stream, *(f"{stream} {number}" for number in range(2, len(free_at) + 1))]
    return names, tids


def _meta(pid: int, tid: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}}


def _slice(pid: int, tid: int, event: Event) -> dict[str, Any]:
    start, end = round(event.start, 3), round(event.end, 3)  # each alone, so that neighbours still do not overlap
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": event.name,
        "cat": event.phase,
        "ts": start,
        "dur": round(end - start, 3),
        "args": {"phase": event.phase, "layer": event.layer, **({"by": event.by} if event.by else {})},
    }


def _arrows(pid: int, tids: Sequence[int], events: Sequence[Event]) -> list[dict[str, Any]]:
    """From what sends a layer's rows out to what sums them."""
    arrows: list[dict[str, Any]] = []
    begun: dict[int, tuple[int, Event]] = {}
    for tid, event in zip(tids, events, strict=True):
        if event.hop is not None and event.name in LEAVES:
            begun[event.hop] = (tid, event)
        elif event.hop in begun:
            number = f"{pid}.{len(arrows) // 2}"
            arrows += [_arrow(pid, "s", *begun[event.hop], number), _arrow(pid, "f", tid, event, number)]
    return arrows


def _arrow(pid: int, kind: str, tid: int, event: Event, number: str) -> dict[str, Any]:
    """One end of an arrow. It belongs to the slice of its track at that time, which a slice's end is not part of."""
    at = max(event.start, event.end - 0.001) if kind == "s" else event.start
    ends = {"bp": "e"} if kind == "f" else {}
    place = {"pid": pid, "tid": tid, "ts": round(at, 3)}
    return {"ph": kind, **place, "name": "exchange", "cat": "exchange", "id": number, **ends}


def write_trace(path: Path, content: Mapping[str, Any]) -> None:
    """Write the trace, whole or not at all. Raises E0618 where the file cannot be written."""
    write_whole(path, json.dumps(content))
