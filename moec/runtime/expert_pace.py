"""The pace of a tier that is emulated: when its link would have brought what this machine has copied already.

A link brings one piece after another. It takes up a piece when it is free and the piece has been asked for, so the
time a piece is due follows from times of asking alone: sleeps that end late never add up.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from dataclasses import dataclass
from typing import Protocol

#: How late a sharp sleep ends, but for one in ten.
_MARGIN_SECONDS = 40e-6
_PR_SET_TIMERSLACK = 29


@dataclass(frozen=True)
class Rate:
    """What the link of a tier does: `bandwidth` in bytes/s, `latency` in s before the first byte of a transfer."""

    bandwidth: float
    latency: float = 0.0


class Clock(Protocol):
    """Seconds, and waiting for them."""

    def now(self) -> float: ...

    def sleep_until(self, deadline: float) -> None:
        """Return at `deadline` or somewhat later."""

    def wait_until(self, deadline: float) -> None:
        """Return at `deadline`."""


class SystemClock:
    """The machine's monotonic clock."""

    def __init__(self) -> None:
        self._thread = threading.local()

    def now(self) -> float:
        return time.perf_counter()

    def sleep_until(self, deadline: float) -> None:
        if not hasattr(self._thread, "is_sharp"):
            self._thread.is_sharp = True
            _sharpen_sleeps()
        left = deadline - time.perf_counter()
        if left > 0:
            time.sleep(left)

    def wait_until(self, deadline: float) -> None:
        """Spends the last microseconds looking at the clock: a sleep is late by a fifth of a short transfer."""
        self.sleep_until(deadline - _MARGIN_SECONDS)
        while time.perf_counter() < deadline:
            pass


def _sharpen_sleeps() -> None:
    """Have the kernel end this thread's sleeps on time, not up to 50 us later to save power. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


class Link:
    """The time line of one link. Without a rate, what is there is never due later."""

    def __init__(self, rate: Rate | None) -> None:
        self.rate = rate
        self.free_at = 0.0

    def carry(self, num_bytes: int, asked_at: float, is_first: bool) -> float:
        """When a piece of `num_bytes`, asked for at `asked_at`, is due; the first of a transfer has the latency."""
        if self.rate is None:
            return 0.0
        taken = num_bytes / self.rate.bandwidth + (self.rate.latency if is_first else 0.0)
        self.free_at = max(self.free_at, asked_at) + taken
        return self.free_at
