"""Faults planted for tests and drills, by the environment variable MOEC_FAULT.

`kill@all_to_all:step=2,rank=1` has rank 1 kill itself when it enters `all_to_all` in step 2. ACTION is one of

- `kill` (SIGKILL), `stop` (SIGSTOP) and `raise` (an exception);
- `hang` (wait for ever) and `pause` (wait `seconds`, 60 unless given) without using the processor;
- `slow` (from here on the operation takes five times as long).

The place is an operation (`all_to_all`, `join experts.ep`), a section of the run (`load`, `compile`, `step`) or a part
of a step (`experts`). Unset, nothing happens. With MOEC_FAULT_MARK=FILE, that file is touched when the fault strikes
(but for `slow`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from moec.diagnostics import fail

FAULT_VARIABLE = "MOEC_FAULT"
MARK_VARIABLE = "MOEC_FAULT_MARK"
ACTIONS = ("kill", "stop", "raise", "hang", "pause", "slow")
SLOWNESS = 5
_OPTIONS = ("step", "rank", "seconds")
_FORM = f"ACTION@PLACE[:step=N][,rank=N][,seconds=N] with ACTION one of {', '.join(ACTIONS)}"


@dataclass(frozen=True)
class Fault:
    """What happens at a place (in `step` and on `rank` only, where given)."""

    action: str
    place: str
    step: int | None = None
    rank: int | None = None
    seconds: int = 60

    def strike(self, place: str, step: int | None, rank: int) -> bool:
        """Do it where `place`, which a rank enters, is the fault's. Whether it was (and the rank goes on).

        Raises:
            RuntimeError: `raise` was planted here.
        """
        if self.action == "slow" or not self._is_here((place,), step, rank):
            return False
        _mark()
        if self.action == "raise":
            raise RuntimeError(f"fault planted by {FAULT_VARIABLE}")
        if self.action == "pause":
            time.sleep(self.seconds)
        elif self.action == "hang":
            signal.pause()
        else:
            os.kill(os.getpid(), signal.SIGKILL if self.action == "kill" else signal.SIGSTOP)
        return True

    def stretch(self, places: Collection[str], step: int | None, rank: int, nanoseconds: int) -> None:
        """After an operation that took `nanoseconds`, wait as long as a slow rank would take longer."""
        if self.action == "slow" and self._is_here(places, step, rank):
            time.sleep(nanoseconds * (SLOWNESS - 1) / 1e9)

    def _is_here(self, places: Collection[str], step: int | None, rank: int) -> bool:
        return self.place in places and self.rank in (None, rank) and self.step in (None, step)


def planted_fault() -> Fault | None:
    """The fault that MOEC_FAULT plants, if it is set. Raises MoecError E0608."""
    text = os.environ.get(FAULT_VARIABLE)
    return parse_fault(text) if text else None


def parse_fault(text: str) -> Fault:
    """The fault a `MOEC_FAULT` value names.

    Raises:
        MoecError: E0608, the text is not of that form.
    """
    action, at, rest = text.partition("@")
    place, _, options = rest.partition(":")
    values: dict[str, int] = {}
    for option in filter(None, options.split(",")):
        name, _, number = option.partition("=")
        if name not in _OPTIONS or not (number.isascii() and number.isdecimal()):
            raise fail("E0608", f"{FAULT_VARIABLE}={text} is not understood: `{option}`", f"write {_FORM}")
        values[name] = int(number)
    if action not in ACTIONS or not at or not place:
        raise fail("E0608", f"{FAULT_VARIABLE}={text} is not understood", f"write {_FORM}")
    return Fault(action, place, **values)


def _mark() -> None:
    if path := os.environ.get(MARK_VARIABLE):
        Path(path).touch()
