"""Who has stopped answering, who is stuck and who is slow, from what ranks say of themselves (`launch.status`).

Liveness and progress have limits of their own:

1. Silent: the beats stand still. A process that is seen to be stopped is silent after `SILENT_SECONDS`; any other,
   whose beat may wait for Python's lock while a library works, after `FROZEN_SECONDS` without processor time.
2. Stuck: the beats go on, but the rank neither waits for a peer, nor gets on, nor uses the processor. How long that may
   last depends on the section it is in (`SECTION_SECONDS`). A rank that computes is not stuck, however slow it is.
3. Slow: a part of the step takes a rank `SLOW_RATIO` times as long as the others, in all and for each row, over two
   windows of steps. That is worth a note, not the end of the run.

No clocks are compared: a beat is a counter, and time counts only while the watcher itself runs (`MAX_GAP_SECONDS`), so
neither a machine that slept nor Ctrl-Z raises an alarm.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moec.diagnostics import fail
from moec.runtime.launch.report import Report
from moec.runtime.launch.status import PARTS, WINDOW_STEPS, Reading

LIMITS_VARIABLE = "MOEC_LIMITS"
#: Twelve beats. With the time between two looks, a stopped rank is named within 4 s.
SILENT_SECONDS = 3.0
#: A beat can be late on a machine with far more to do than it has processors; 10 s is what users are promised.
FROZEN_SECONDS = 8.0
#: How long a rank may stand still without using the processor.
SECTION_SECONDS = {
    "setup": 60.0,  # a driver that starts, a name server that does not answer
    "load": 120.0,  # counted anew with each block read: a network file system that hiccups
    "compile": 600.0,  # a compiler in another process
    "step": 7.0,  # nothing but computing, and waiting for peers, which is not counted; told within 10 s
    "output": math.inf,  # the reader decides
    "shutdown": 30.0,
}
#: How long an operation of a step may compute while peers wait: just less than a collective's timeout, to say more.
BUSY_SECONDS = 540.0
#: A longer time between two looks counts as this: the watcher was stopped itself.
MAX_GAP_SECONDS = 1.0
#: Less processor time than this share of the time passed is none.
IDLE_SHARE = 0.02
#: Of uneven loads that are no fault, few are this uneven; a device that throttles or shares its time is.
SLOW_RATIO = 2.5
#: Below this much a step a difference is not worth a note.
SLOW_NS = 300_000
STATES = {"R": "running", "S": "sleeping", "D": "waiting for a device", "T": "stopped", "Z": "dead", "t": "traced"}


@dataclass(frozen=True)
class Process:
    """A process of this or another host. `state`: as in /proc, empty when unknown; `cpu`: its processor time in s."""

    pid: int
    state: str = ""
    cpu: float = 0.0
    host: str = ""

    def __str__(self) -> str:
        state = f", state {self.state}: {STATES.get(self.state, 'unknown')}" if self.state else ""
        return f"pid {self.pid}{f' on {self.host}' if self.host else ''}{state}"


@dataclass(frozen=True)
class Limits:
    """The limits in seconds. Fractions are allowed."""

    silent: float = SILENT_SECONDS
    frozen: float = FROZEN_SECONDS
    busy: float = BUSY_SECONDS
    sections: Mapping[str, float] = field(default_factory=lambda: SECTION_SECONDS)


@dataclass(frozen=True)
class Finding:
    """What is wrong with a rank."""

    rank: int
    report: Report


@dataclass
class _Trace:
    """What was last seen of a rank, and for how many seconds it has stood still.

    `cpu`: processor time of the whole process when its beats were first missed.
    """

    seen: Reading
    cpu: float | None = None
    silent: float = 0.0
    idle: float = 0.0
    stalled: float = 0.0


class Watch:
    """Looks at the ranks again and again."""

    def __init__(self, limits: Limits | None = None) -> None:
        """Raises E0608 where MOEC_LIMITS is not understood."""
        self.limits = limits or read_limits()
        self._before: float | None = None
        self._traces: dict[int, _Trace] = {}
        self._told: set[int] = set()

    def look(self, now: float, ranks: Mapping[int, Reading], process: Callable[[int], Process]) -> Finding | None:
        """What is wrong with a rank, if anything. `now`: monotonic seconds; `process(rank)` is asked of a suspect."""
        passed = min(now - self._before, MAX_GAP_SECONDS) if self._before is not None else 0.0
        self._before = now
        for rank, reading in ranks.items():
            self._follow(self._traces.setdefault(rank, _Trace(reading)), reading, passed)
        for rank in ranks:
            if report := self._silent(rank, process):
                return Finding(rank, report)
        are_waiting = any(reading.is_waiting for reading in ranks.values())
        found = ((rank, self._stuck(rank, process, are_waiting)) for rank in ranks)
        return next((Finding(rank, report) for rank, report in found if report), None)

    def slow(self, ranks: Mapping[int, Reading], process: Callable[[int], Process]) -> list[str]:
        """A note for each rank that has not been noted yet and is slow in the two latest windows of this phase."""
        notes = []
        if ranks and all(reading.windows >= 2 for reading in ranks.values()):
            for rank in ranks.keys() - self._told:
                if found := _slow_part(rank, ranks):
                    self._told.add(rank)
                    notes.append(f"rank {rank} ({process(rank)}) is slow: {found}")
        return notes

    @staticmethod
    def _follow(trace: _Trace, reading: Reading, passed: float) -> None:
        seen, trace.seen = trace.seen, reading
        since_beat = trace.silent + passed
        trace.silent = 0.0 if reading.beats != seen.beats else since_beat
        is_same = (reading.progress, reading.is_waiting) == (seen.progress, seen.is_waiting)
        trace.stalled = trace.stalled + passed if is_same and not reading.is_waiting else 0.0
        if reading.beats != seen.beats:  # only then is the processor time known
            is_idle = reading.cpu_ns - seen.cpu_ns < IDLE_SHARE * since_beat * 1e9
            trace.idle = trace.idle + since_beat if is_idle and trace.stalled else 0.0
            trace.cpu = None

    def _silent(self, rank: int, process: Callable[[int], Process]) -> Report | None:
        trace = self._traces[rank]
        if trace.silent < self.limits.silent:
            return None
        found = process(rank)
        if found.state == "t":  # somebody debugs it
            return None
        if found.state != "T":
            trace.cpu = found.cpu if trace.cpu is None else trace.cpu
            if found.cpu - trace.cpu > IDLE_SHARE * self.limits.frozen:  # a library holds Python's lock and works
                trace.cpu, trace.silent = None, 0.0
            if trace.silent < self.limits.frozen:
                return None
        why = "it was stopped by SIGSTOP, a debugger or a batch system" if found.state == "T" else "look at its host"
        message = f"rank {rank} ({found}) stopped answering {trace.silent:.1f} s ago{trace.seen.place}"
        return Report("E0620", message, why)

    def _stuck(self, rank: int, process: Callable[[int], Process], are_waiting: bool) -> Report | None:
        trace = self._traces[rank]
        section = trace.seen.section
        limit = self.limits.sections[section]
        if trace.idle >= limit:
            how = f"has not moved for {trace.idle:.1f} s"
        elif section == "step" and are_waiting and trace.stalled >= self.limits.busy:
            how = f"computes for {trace.stalled:.0f} s while others wait"
        else:
            return None
        message = f"rank {rank} ({process(rank)}) {how}{trace.seen.place}"
        return Report("E0621", message, f"the limit of the section `{section}` is {limit:g} s ({LIMITS_VARIABLE})")


def read_limits() -> Limits:
    """The limits, with those that MOEC_LIMITS changes: `step=2,compile=5`. Raises E0608."""
    text = os.environ.get(LIMITS_VARIABLE, "")
    values = {"silent": SILENT_SECONDS, "frozen": FROZEN_SECONDS, "busy": BUSY_SECONDS, **SECTION_SECONDS}
    for option in filter(None, text.split(",")):
        name, _, number = option.partition("=")
        if name not in values or not number.replace(".", "", 1).isdecimal():
            help = f"write NAME=SECONDS,... with NAME one of {', '.join(values)}"
            raise fail("E0608", f"{LIMITS_VARIABLE}={text} is not understood: `{option}`", help)
        values[name] = float(number)
    sections = {name: values[name] for name in SECTION_SECONDS}
    return Limits(values["silent"], values["frozen"], values["busy"], sections)


def look_at(pid: int, host: str = "") -> Process:
    """A process of this host as /proc has it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return Process(pid, host=host)
    return Process(pid, fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), host)


def _slow_part(rank: int, ranks: Mapping[int, Reading]) -> str:
    """`experts take 5.3 ms ...` for the part in which `rank` loses most, or the empty string."""
    found: list[tuple[int, str]] = []
    for part, name in enumerate(PARTS):
        before, now = (_compare(rank, {r: reading.times[w][part] for r, reading in ranks.items()}) for w in (0, 1))
        if before is not None and now is not None:
            mine, others = now
            steps = f"median of {2 * WINDOW_STEPS} steps of {ranks[rank].phase}"
            words = f"its {name} took {mine / 1e6:.1f} ms a step, on the other ranks {others / 1e6:.1f} ms ({steps})"
            found.append((mine - others, words))
    return max(found, default=(0, ""))[1]


def _compare(rank: int, times: Mapping[int, tuple[int, int]]) -> tuple[int, int] | None:
    """This rank's nanoseconds and the others' median, where it is slow."""
    others = [(nanoseconds, rows) for r, (nanoseconds, rows) in times.items() if r != rank and rows]
    mine, my_rows = times[rank]
    if not others or not my_rows:
        return None
    usual = statistics.median(nanoseconds for nanoseconds, _ in others)
    usual_per_row = statistics.median(nanoseconds / rows for nanoseconds, rows in others)
    is_slow = mine > SLOW_RATIO * usual and mine / my_rows > SLOW_RATIO * usual_per_row and mine - usual > SLOW_NS
    return (mine, int(usual)) if is_slow else None
