"""What a rank is doing now, where its launcher can read it after the rank is gone; and planted faults for tests.

A rank writes operation, layer and step into a slot of memory shared with its launcher before each operation that can
wait for a peer, so the line about a killed rank says where it died.

`MOEC_FAULT=kill@all_to_all:step=2,rank=1` makes rank 1 kill itself (SIGKILL) when it enters `all_to_all` in step 2;
`raise@load` makes every rank raise on entering `load`. It is a hook for tests and drills; unset, nothing happens.
"""

from __future__ import annotations

import os
import signal
import struct
from dataclasses import dataclass

from moec.diagnostics import fail

#: layer and step (-1: none), then the operation's name in UTF-8, cut to fit.
_SLOT = struct.Struct("<qq112s")
SLOT_BYTES = _SLOT.size
FAULT_VARIABLE = "MOEC_FAULT"
_FAULT_FORM = "ACTION@OPERATION[:step=N][,rank=N] with ACTION kill or raise"


@dataclass(frozen=True)
class Place:
    """An operation, and the layer and step it belongs to (None: none)."""

    op: str = ""
    layer: int | None = None
    step: int | None = None

    def __str__(self) -> str:
        """` during all_to_all of layer 3, step 5`, or nothing when the operation is not known."""
        if not self.op:
            return ""
        parts = [f"{name} {value}" for name, value in (("layer", self.layer), ("step", self.step)) if value is not None]
        return f" during {self.op}" + (f" of {', '.join(parts)}" if parts else "")


@dataclass(frozen=True)
class Fault:
    """A planted fault: what happens on entering `op` (in `step` and on `rank` only, where given)."""

    action: str
    op: str
    step: int | None = None
    rank: int | None = None

    def strike(self, place: Place, rank: int) -> None:
        """Kill or raise when `place` on `rank` is where the fault is planted.

        Raises:
            RuntimeError: `raise` was planted here.
        """
        if self.op != place.op or self.rank not in (None, rank) or self.step not in (None, place.step):
            return
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError(f"fault planted by {FAULT_VARIABLE}")


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
    op, _, options = rest.partition(":")
    values: dict[str, int] = {}
    for option in filter(None, options.split(",")):
        name, _, number = option.partition("=")
        if name not in ("step", "rank") or not number.isdecimal():
            raise fail("E0608", f"{FAULT_VARIABLE}={text} is not understood: `{option}`", f"write {_FAULT_FORM}")
        values[name] = int(number)
    if action not in ("kill", "raise") or not at or not op:
        raise fail("E0608", f"{FAULT_VARIABLE}={text} is not understood", f"write {_FAULT_FORM}")
    return Fault(action, op, values.get("step"), values.get("rank"))


class Status:
    """The place of one rank: set `layer` and `step` as they change, call `enter` before an operation."""

    def __init__(self, rank: int = 0, slot: memoryview | None = None, fault: Fault | None = None) -> None:
        """`slot`: `SLOT_BYTES` of memory shared with the launcher; without one the status is this process's own."""
        self.rank = rank
        self.layer: int | None = None
        self.step: int | None = None
        self._slot = slot if slot is not None else memoryview(bytearray(SLOT_BYTES))
        self._fault = fault

    def enter(self, op: str) -> None:
        """Say that `op` begins. A planted fault strikes here."""
        layer, step = (-1 if value is None else value for value in (self.layer, self.step))
        _SLOT.pack_into(self._slot, 0, layer, step, op.encode()[:112])
        if self._fault is not None:
            self._fault.strike(self.place, self.rank)

    @property
    def place(self) -> Place:
        return read_place(self._slot)


def read_place(slot: memoryview) -> Place:
    """What a rank wrote into its slot last."""
    layer, step, op = _SLOT.unpack_from(slot, 0)
    name = op.rstrip(b"\0").decode(errors="ignore")
    return Place(name, layer if layer >= 0 else None, step if step >= 0 else None) if name else Place()
