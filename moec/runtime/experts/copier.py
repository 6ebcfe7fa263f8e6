"""Brings experts into slots while the rank computes: one thread for each tier in use, demands before prefetches.

    with Copier([host, nvme]) as copier:
        ahead = copier.start((3, 17), arena[slot], is_demand=False)
        ...
        ahead.wait()

It is made inside the rank: a process must not fork while threads live.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from torch import Tensor

from moec.runtime.experts.file import Key
from moec.runtime.experts.lane import Lane, State, Transfer
from moec.runtime.experts.pace import Clock, SystemClock
from moec.runtime.experts.tiers import Tier


class Copier:
    """Takes each expert from the first of its tiers that has it. Called from one thread."""

    def __init__(self, tiers: Sequence[Tier], clock: Clock | None = None) -> None:
        """`tiers`: fastest first."""
        self.lanes: list[Lane] = []
        self._clock = clock or SystemClock()
        self._last: dict[int, Transfer] = {}
        try:
            for tier in tiers:
                self.lanes.append(Lane(tier, self._clock))
        except BaseException:  # no more threads, say
            self.close()
            raise

    def __enter__(self) -> Copier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, key: Key, into: Tensor, is_demand: bool) -> Transfer:
        """Begin to copy the expert `key` into `into` (uint8 [blob bytes], contiguous).

        On a CUDA device the slot is written after what its current stream has been given so far, which may still read
        the expert that was there.
        """
        asked_at, slot = self._clock.now(), into.data_ptr()
        before = self._last.get(slot)
        if before is not None and before.state is State.PENDING:
            raise AssertionError(f"the slot for {key} is still being filled with {before.key}")
        for lane in self.lanes:
            if (size := lane.tier.bytes_of(key)) is not None:
                if size != into.numel():
                    raise AssertionError(f"the slot for {key} has {into.numel()} bytes, the expert {size}")
                transfer = self._last[slot] = lane.start(Transfer(lane, key, into, is_demand, asked_at))
                return transfer
        raise AssertionError(f"no tier has the expert {key}")

    def close(self) -> None:
        """Stop what is under way, after the piece being copied, and end the threads."""
        for lane in self.lanes:
            lane.close()
