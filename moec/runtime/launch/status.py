"""What a rank is doing now, in memory that its launcher can still read when the rank is stopped or gone.

Two writers share a slot. The rank's main thread writes its place (operation, layer, step, and whether it may be waiting
for a peer) before each operation, and every eight steps how long the parts of a step took. A second thread writes a
beat (a counter) and the main thread's processor time. So a stopped process shows as a beat that stands still, a stuck
one as a place that stands still under a beat that goes on, and a busy one by its processor time.
"""

from __future__ import annotations

import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from moec.runtime.launch.fault import Fault

#: How often a rank beats. Several beats fit into the shortest limit (`watch.SILENT_SECONDS`).
BEAT_SECONDS = 0.25
#: The parts of a run, each with a limit of its own (`watch.SECTION_SECONDS`).
SECTIONS = ("setup", "load", "compile", "step", "output", "shutdown")
#: The parts of a step whose times are compared among ranks.
PARTS = ("attention", "dense", "experts")
#: Steps to a window, of which medians are taken: short enough that two windows are full within 20 steps.
WINDOW_STEPS = 8
_WORKING, _WAITING, _DONE = range(3)

#: The beat thread's: beats, processor time of the main thread in nanoseconds.
_BEAT = struct.Struct("<QQ")
#: Full windows of this phase, its name, then for each part and for the last two windows: nanoseconds and rows a step.
_TIMES = struct.Struct(f"<Q8s{4 * len(PARTS)}Q")
#: Progress (a counter), layer and step (-1: none), mode, section, then the operation's name in UTF-8, cut to fit.
_PLACE = struct.Struct("<QqqBB110s")
_TIMES_AT = _BEAT.size
_PLACE_AT = _TIMES_AT + _TIMES.size
_MODE_AT = _PLACE_AT + 24
SLOT_BYTES = _PLACE_AT + _PLACE.size


@dataclass(frozen=True)
class Place:
    """An operation, and the layer and step it belongs to (None: none). `is_over`: what follows it is under way."""

    op: str = ""
    layer: int | None = None
    step: int | None = None
    is_over: bool = False

    def __str__(self) -> str:
        """` during all_to_all of layer 3, step 5`, or nothing when the operation is not known."""
        if not self.op:
            return ""
        parts = [f"{name} {value}" for name, value in (("layer", self.layer), ("step", self.step)) if value is not None]
        return f" {'after' if self.is_over else 'during'} {self.op}" + (f" of {', '.join(parts)}" if parts else "")


@dataclass(frozen=True)
class Reading:
    """A slot as it was at one moment.

    `cpu_ns`: processor time of the main thread. `times`: part -> (nanoseconds, rows) a step, medians of the last two
    full windows, latest last; of `phase` (prefill or decode), of which `windows` are full.
    """

    place: Place = Place()
    section: str = SECTIONS[0]
    is_waiting: bool = False
    progress: int = 0
    beats: int = 0
    cpu_ns: int = 0
    phase: str = ""
    windows: int = 0
    times: tuple[tuple[tuple[int, int], ...], ...] = ()


class Status:
    """The status of one rank. Set `layer`, `step` and `phase` as they change, and say what begins:

    `begin` a section (or be `within` one), `enter` an operation that may wait for a peer and `leave` it, `work` on one
    that does not.
    A planted fault strikes where something begins.
    """

    def __init__(self, rank: int = 0, slot: memoryview | None = None, fault: Fault | None = None) -> None:
        """`slot`: `SLOT_BYTES` of memory shared with the launcher; without one the status is this process's own."""
        self.rank = rank
        self.layer: int | None = None
        self.step: int | None = None
        self.phase = ""
        self.slot = slot if slot is not None else memoryview(bytearray(SLOT_BYTES))
        self._fault = fault
        self._section, self._progress, self._beats = 0, 0, 0
        self._times = _StepTimes()

    @property
    def section(self) -> str:
        return SECTIONS[self._section]

    def begin(self, section: str, op: str = "") -> None:
        """Say that a section begins, with the operation `op`."""
        self._section = SECTIONS.index(section)
        if section == "step" and self._times.close_step(self.phase):
            _TIMES.pack_into(self.slot, _TIMES_AT, *self._times.fields())
        self._write(op or section, _WORKING)
        self._strike(section)

    @contextmanager
    def within(self, section: str, op: str) -> Iterator[None]:
        """A section inside another one, which then goes on."""
        before, self._section = self._section, SECTIONS.index(section)
        self._write(op, _WORKING)
        self._strike(section)
        yield
        self._section = before
        self.slot[_MODE_AT : _MODE_AT + 2] = bytes((_DONE, before))

    def enter(self, op: str) -> None:
        """Say that `op` begins, which may wait for a peer: standing still is not this rank's fault until `leave`."""
        self._write(op, _WAITING)

    def leave(self) -> None:
        """Say that the wait is over and this rank computes again."""
        self.slot[_MODE_AT] = _DONE

    def work(self, op: str) -> None:
        """Say that `op` begins, which waits for nobody."""
        self._write(op, _WORKING)

    def worked(self, part: str, since_ns: int, rows: int) -> None:
        """Count the time since `since_ns` (of `time.perf_counter_ns`) and `rows` towards a part of this step."""
        if self._fault is not None:
            taken = time.perf_counter_ns() - since_ns
            self._fault.stretch((self.place.op, part), self.step, self.rank, taken)
        self._times.add(PARTS.index(part), time.perf_counter_ns() - since_ns, rows)

    def progressed(self) -> None:
        """Say that a long operation gets on."""
        self._progress += 1
        struct.pack_into("<Q", self.slot, _PLACE_AT, self._progress)

    def beat(self, cpu_ns: int) -> None:
        """Say that the process runs. From the beat thread only."""
        self._beats += 1
        _BEAT.pack_into(self.slot, 0, self._beats, cpu_ns)

    @property
    def place(self) -> Place:
        return read_slot(self.slot).place

    def _write(self, op: str, mode: int) -> None:
        self._progress += 1
        layer, step = (-1 if value is None else value for value in (self.layer, self.step))
        _PLACE.pack_into(
            self.slot, _PLACE_AT, self._progress, layer, step, mode, self._section, op.encode()[: _PLACE.size - 26]
        )
        self._strike(op)

    def _strike(self, place: str) -> None:
        if self._fault is not None and self._fault.strike(place, self.step, self.rank):
            self._fault = None


class _StepTimes:
    """Times and rows of the parts of each step of a window, and the medians of the last two windows."""

    def __init__(self) -> None:
        self._phase, self._windows = "", 0
        self._step = [(0, 0)] * len(PARTS)
        self._steps: list[list[tuple[int, int]]] = []
        self._medians = [[(0, 0)] * len(PARTS)] * 2

    def add(self, part: int, nanoseconds: int, rows: int) -> None:
        before = self._step[part]
        self._step[part] = before[0] + nanoseconds, before[1] + rows

    def close_step(self, phase: str) -> bool:
        """End the step before, which was of `phase`. Whether the fields have changed."""
        step, self._step = self._step, [(0, 0)] * len(PARTS)
        if phase != self._phase:
            self._phase, self._windows, self._steps = phase, 0, [step]
            return True
        self._steps.append(step)
        if len(self._steps) < WINDOW_STEPS:
            return False
        by_part = zip(*self._steps, strict=True)
        medians = [tuple(int(statistics.median(values)) for values in zip(*steps, strict=True)) for steps in by_part]
        self._medians = [self._medians[1], [(nanoseconds, rows) for nanoseconds, rows in medians]]
        self._windows, self._steps = self._windows + 1, []
        return True

    def fields(self) -> tuple[int | bytes, ...]:
        """As `_TIMES` lays them out."""
        flat = [number for window in self._medians for part in window for number in part]
        return self._windows, self._phase.encode(), *flat


def read_slot(slot: memoryview | bytes) -> Reading:
    """What a rank wrote into its slot last."""
    beats, cpu_ns = _BEAT.unpack_from(slot, 0)
    windows, phase, *flat = _TIMES.unpack_from(slot, _TIMES_AT)
    progress, layer, step, mode, section, op = _PLACE.unpack_from(slot, _PLACE_AT)
    name = _text(op)
    place = Place(name, layer if layer >= 0 else None, step if step >= 0 else None, mode == _DONE) if name else Place()
    pairs = list(zip(flat[::2], flat[1::2], strict=True))
    times = tuple(pairs[: len(PARTS)]), tuple(pairs[len(PARTS) :])
    return Reading(place, SECTIONS[section], mode == _WAITING, progress, beats, cpu_ns, _text(phase), windows, times)


def keep_beating(status: Status, also: Callable[[], None] | None = None) -> None:
    """Start the thread that beats for this process, from its main thread and after the fork; it calls `also` too."""
    clock = time.pthread_getcpuclockid(threading.get_ident()) if hasattr(time, "pthread_getcpuclockid") else None

    def beat() -> None:
        while True:
            status.beat(time.process_time_ns() if clock is None else time.clock_gettime_ns(clock))
            if also is not None:
                also()
            time.sleep(BEAT_SECONDS)

    threading.Thread(target=beat, daemon=True, name="beat").start()


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="ignore")
