"""The pace of a tier that is emulated: when its link would have brought what this machine has copied already.

The copies themselves are made as fast as they can be. A `Link` works out, from the times of asking alone, when each of
them is due; whoever waits for one waits until then. So the pace does not hang on when threads run, and no thread sleeps
for it but the one that waits.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

#: How late a sharp sleep ends, but for one in ten.
_MARGIN_SECONDS = 40e-6
#: What a link brings before it turns to a demand: 33 us at 2 GB/s, less than a small expert has.
LINK_PIECE_BYTES = 64 << 10
_PR_SET_TIMERSLACK = 29


@dataclass(frozen=True)
class Rate:
    """What the link of a tier does: `bandwidth` in bytes/s, `latency` in s before the first byte of a transfer."""

    bandwidth: float
    latency: float = 0.0


@dataclass(eq=False)
class Load:
    """One transfer as its link sees it. `left`: bytes not taken up yet; `due`: when the last one is there.

    `began_at`: when the first one was taken up.
    """

    left: int
    asked_at: float
    is_demand: bool
    began_at: float | None = None
    due: float | None = None


class Link:
    """A link that brings one piece after another: of the first demand, else of the first prefetch.

    It takes up a piece when it is free and the piece was asked for. The times given to it never go back.
    """

    def __init__(self, rate: Rate, piece_bytes: int) -> None:
        self.rate, self.piece_bytes = rate, piece_bytes
        self._free_at = 0.0
        self._demands: deque[Load] = deque()
        self._prefetches: deque[Load] = deque()

    def ask(self, load: Load) -> None:
        """A load that is asked for now."""
        self.run_until(load.asked_at)
        self._queue(load).append(load)

    def promote(self, load: Load, now: float) -> None:
        """Make a prefetch a demand, behind those there are."""
        self.run_until(now)
        if load.due is None:
            self._prefetches.remove(load)
            self._demands.append(load)
        load.is_demand = True

    def drop(self, load: Load, now: float) -> None:
        """Bring no further piece of it."""
        self.run_until(now)
        if load.due is None:
            self._queue(load).remove(load)

    def is_there(self, load: Load, now: float) -> bool:
        self.run_until(now)
        return load.due is not None and load.due <= now

    def due(self, load: Load) -> float:
        """When a demand is there, given that nothing more is asked for until then."""
        while load.due is None:
            self._carry(self._demands[0])
        return load.due

    def run_until(self, now: float) -> None:
        """Take up every piece whose turn comes up to `now`."""
        while (queue := self._demands or self._prefetches) and max(self._free_at, queue[0].asked_at) <= now:
            self._carry(queue[0])

    def _carry(self, load: Load) -> None:
        taken_up = min(load.left, self.piece_bytes)
        begin, seconds = max(self._free_at, load.asked_at), taken_up / self.rate.bandwidth
        if load.began_at is None:
            load.began_at, seconds = begin, seconds + self.rate.latency
        self._free_at, load.left = begin + seconds, load.left - taken_up
        if load.left == 0:
            load.due = self._free_at
            self._queue(load).popleft()

    def _queue(self, load: Load) -> deque[Load]:
        return self._demands if load.is_demand else self._prefetches


class Clock(Protocol):
    """Seconds, and waiting for them."""

    def now(self) -> float: ...

    def wait_until(self, deadline: float) -> None: ...


class SystemClock:
    """The machine's monotonic clock."""

    def __init__(self) -> None:
        self._thread = threading.local()

    def now(self) -> float:
        return time.perf_counter()

    def wait_until(self, deadline: float) -> None:
        """Spends the last microseconds looking at the clock: a sleep is late by a fifth of a short transfer."""
        if not hasattr(self._thread, "is_sharp"):
            self._thread.is_sharp = True
            _sharpen_sleeps()
        left = deadline - time.perf_counter()
        if left > _MARGIN_SECONDS:
            time.sleep(left - _MARGIN_SECONDS)
        while time.perf_counter() < deadline:
            pass


def _sharpen_sleeps() -> None:
    """Have the kernel end this thread's sleeps on time, not up to 50 us later to save power. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
