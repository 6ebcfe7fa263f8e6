"""What the copies of experts are to those who start and await them, whichever lane makes them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple, Protocol

from torch import Tensor

from moec.runtime.experts.file import Key
from moec.runtime.experts.tiers import Tier


class Room(NamedTuple):
    """Where an expert goes: `memory` is uint8 [blob bytes], contiguous, `num_bytes` long and at `address`.

    Those of slots are made once: to ask a tensor each time takes a third of what the beginning of a copy does.
    """

    memory: Tensor
    address: int
    num_bytes: int

    @classmethod
    def of(cls, memory: Tensor) -> Room:
        return cls(memory, memory.data_ptr(), memory.numel())


class State(Enum):
    """PENDING until its last piece is there (WHOLE), an error ends it (FAILED), or nobody wants it (DROPPED)."""

    PENDING = auto()
    WHOLE = auto()
    FAILED = auto()
    DROPPED = auto()


class Transfer(Protocol):
    """One expert on its way into a slot. For the thread that started it."""

    @property
    def key(self) -> Key: ...

    @property
    def into(self) -> Tensor: ...

    @property
    def is_demand(self) -> bool: ...

    @property
    def state(self) -> State: ...

    @property
    def is_done(self) -> bool:
        """Whether `wait` has nothing to wait for: all is there, or so little is missing that it is left to `wait`."""
        ...

    @property
    def times(self) -> tuple[float, float] | None:
        """From when to when it was brought, in seconds of its lane's clock; None where it is not whole."""
        ...

    def wait(self) -> None:
        """Return once the slot holds the expert. Raises what went wrong. What is waited for is a demand."""

    def promote(self) -> None:
        """Make a prefetch a demand, behind those there are."""

    def cancel(self) -> bool:
        """Stop it, after the piece that is under way. Whether it was stopped: False when the slot holds it whole.

        Either way nothing of it is written once this has returned.
        """
        ...


class Lane(Protocol):
    """One tier's copier: demands first, then prefetches, each in the order of `start`, piece by piece.

    `num_bytes` counts what was brought whole.
    """

    @property
    def tier(self) -> Tier: ...

    @property
    def num_bytes(self) -> int: ...

    def start(self, copies: Sequence[tuple[Key, Room]], is_demand: bool) -> Sequence[Transfer]:
        """Queue copies of experts, in this order, each into its slot.

        Raises AssertionError where the lane still fills one of those slots.
        """
        ...

    def close(self) -> None:
        """Drop what is pending and end the thread, after the piece that is under way."""
