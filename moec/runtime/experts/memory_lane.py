"""The lane of experts in host memory: its thread (`memory_lane.cpp`) copies without Python's lock.

A thread of Python's takes turns with who computes at that lock: for a small expert (200 KB) this cost as much as the
copy itself. Where there is no compiler, `moec.runtime.experts.thread_lane` copies instead.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from array import array
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from torch import Tensor

from moec.diagnostics import MoecError
from moec.runtime.cpp_build import load
from moec.runtime.experts.file import Key
from moec.runtime.experts.pace import LINK_PIECE_BYTES
from moec.runtime.experts.tiers import HostTier
from moec.runtime.experts.transfer import Room, State

#: How long a wait goes on before Python may look for signals.
_PATIENCE_SECONDS = 0.1
_STATES = (State.PENDING, State.WHOLE, State.DROPPED)


_P, _N, _F, _B = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_bool
_SIGNATURES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "lane_open": ((_F, _F, _N), _P),
    "lane_close": ((_P,), None),
    "lane_free": ((_P,), None),
    "lane_start": ((_P, _P, _P, _N, _B), _N),
    "lane_is_there": ((_P,), _B),
    "lane_wait": ((_P, _P, _F), _B),
    "lane_promote": ((_P, _P), None),
    "lane_cancel": ((_P, _P), _B),
    "lane_bytes": ((_P,), _N),
}


class _Record(ctypes.Structure):
    """`Transfer` of memory_lane.cpp."""

    _fields_ = (
        ("source", ctypes.c_void_p),
        ("into", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("left", ctypes.c_int64),
        ("asked_at", ctypes.c_double),
        ("needed_at", ctypes.c_double),
        ("began_at", ctypes.c_double),
        ("due", ctypes.c_double),
        ("is_demand", ctypes.c_int32),
        ("state", ctypes.c_int32),
    )


_RECORD_BYTES = ctypes.sizeof(_Record)


class MemoryTransfer:
    """A `Transfer`, the `number`-th of those in `records`. Its lane keeps it while its thread writes there."""

    __slots__ = ("_is_there", "_lane", "_number", "_records", "address", "into", "key")

    def __init__(
        self, lane: MemoryLane, key: Key, into: Tensor, records: ctypes.Array[_Record], number: int, address: int
    ) -> None:
        self.key, self.into, self._lane, self._is_there = key, into, lane, False
        self._records, self._number, self.address = records, number, address

    @property
    def record(self) -> _Record:
        return self._records[self._number]

    @property
    def is_demand(self) -> bool:
        return bool(self.record.is_demand)

    @property
    def state(self) -> State:
        return _STATES[self.record.state]

    @property
    def is_done(self) -> bool:
        if not self._is_there:
            self._is_there = self._lane.library.lane_is_there(self.address)
        return self._is_there

    @property
    def times(self) -> tuple[float, float] | None:
        record = self.record
        return (record.began_at, record.due) if self.state is State.WHOLE else None

    def wait(self) -> None:
        if self.is_done:
            return
        self.promote()
        while not self._lane.library.lane_wait(self._lane.handle, self.address, _PATIENCE_SECONDS):
            if self.state is State.DROPPED:
                raise AssertionError(f"the transfer of {self.key} was cancelled")
        self._is_there = True

    def promote(self) -> None:
        if not self.is_demand:
            self._lane.library.lane_promote(self._lane.handle, self.address)

    def cancel(self) -> bool:
        return not self._is_there and bool(self._lane.library.lane_cancel(self._lane.handle, self.address))


class MemoryLane:
    """A `Lane` over experts in host memory, for slots in host memory."""

    def __init__(self, tier: HostTier, library: ctypes.CDLL) -> None:
        """Raises RuntimeError where no thread can be started."""
        self.tier, self.library = tier, library
        rate = (tier.rate.bandwidth, tier.rate.latency) if tier.rate is not None else (0.0, 0.0)
        self.handle = library.lane_open(*rate, LINK_PIECE_BYTES)
        if not self.handle:
            raise RuntimeError("can't start new thread")
        #: The last transfer into each slot: its memory must live while the thread may write there.
        self._latest: dict[int, MemoryTransfer] = {}
        self._sources = {key: blob.data_ptr() for key, blob in tier.blobs.items()}
        self._end = weakref.finalize(self, _free, library, self.handle, os.getpid())
        self._is_closed = False

    @property
    def num_bytes(self) -> int:
        return int(self.library.lane_bytes(self.handle))

    def start(self, copies: Sequence[tuple[Key, Room]], is_demand: bool) -> list[MemoryTransfer]:
        if self._is_closed:
            raise AssertionError("the copier is closed")
        slots, sources, count = [room.address for _, room in copies], self._sources, len(copies)
        asked = array("q", [sources[key] for key, _ in copies] + slots + [room.num_bytes for _, room in copies])
        records = (_Record * count)()
        first, queued = ctypes.addressof(records), count
        transfers = [
            MemoryTransfer(self, key, room.memory, records, number, first + number * _RECORD_BYTES)
            for number, (key, room) in enumerate(copies)
        ]
        try:
            queued = self.library.lane_start(self.handle, first, asked.buffer_info()[0], count, is_demand)
        finally:  # of an interrupt too, behind which the thread still writes in `records`
            if queued == count:
                self._latest.update(zip(slots, transfers, strict=True))
        if queued < count:
            raise AssertionError(f"the slot for {copies[queued][0]} is still being filled")
        return transfers

    def close(self) -> None:
        self._is_closed = True
        if self._end.alive:
            self.library.lane_close(self.handle)


def _free(library: ctypes.CDLL, handle: int, process: int) -> None:
    """A process that was forked meanwhile has the lane without its thread, and would wait for that forever."""
    if os.getpid() == process:
        library.lane_free(handle)


@functools.cache
def memory_library() -> ctypes.CDLL | None:
    """The lane's code, built once; None where there is no compiler. It starts no thread, so ranks may be forked."""
    try:
        library = load(files("moec.runtime.experts").joinpath("memory_lane.cpp").read_text())
    except MoecError:
        return None
    for name, (arguments, result) in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library
