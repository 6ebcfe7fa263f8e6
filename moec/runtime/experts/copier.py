"""Brings experts into slots while the rank computes: one thread for each tier in use, demands before prefetches.

    with Copier([host, nvme]) as copier:
        (ahead,) = copier.start([((3, 17), Room.of(arena[slot]))], is_demand=False)
        ...
        ahead.wait()

It is made inside the rank: a process must not fork while threads live.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from moec.runtime.experts.file import Key
from moec.runtime.experts.memory_lane import MemoryLane, memory_library
from moec.runtime.experts.pace import Clock, SystemClock
from moec.runtime.experts.thread_lane import ThreadLane
from moec.runtime.experts.tiers import HostTier, Tier
from moec.runtime.experts.transfer import Lane, Room, Transfer


class Copier:
    """Takes each expert from the first of its tiers that has it. Called from one thread."""

    def __init__(self, tiers: Sequence[Tier], clock: Clock | None = None) -> None:
        """`tiers`: fastest first. `clock`: another one than the machine's."""
        self.lanes: list[Lane] = []
        self._found: dict[Key, tuple[Lane, int]] = {}  # an expert's lane and bytes
        try:
            for tier in tiers:
                self.lanes.append(_open_lane(tier, clock))
        except BaseException:  # no more threads, say
            self.close()
            raise

    def __enter__(self) -> Copier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, copies: Sequence[tuple[Key, Room]], is_demand: bool) -> Sequence[Transfer]:
        """Begin to copy experts, in this order, each into its slot.

        On a CUDA device a slot is written after what its current stream has been given so far, which may still read the
        expert that was there.
        """
        parts: dict[Lane, list[tuple[Key, Room]]] = {}
        for copy in copies:
            key, room = copy
            lane, size = self._found.get(key) or self._find(key)
            if size != room.num_bytes:
                raise AssertionError(f"the slot for {key} has {room.num_bytes} bytes, the expert {size}")
            parts.setdefault(lane, []).append(copy)
        begun = {lane: lane.start(part, is_demand) for lane, part in parts.items()}
        if len(begun) == 1:
            return begun.popitem()[1]
        left = {lane: iter(transfers) for lane, transfers in begun.items()}
        return [next(left[self._found[key][0]]) for key, _ in copies]

    def _find(self, key: Key) -> tuple[Lane, int]:
        for lane in self.lanes:
            if (size := lane.tier.bytes_of(key)) is not None:
                found = self._found[key] = lane, size
                return found
        raise AssertionError(f"no tier has the expert {key}")

    def close(self) -> None:
        """Stop what is under way, after the piece being copied, and end the threads."""
        for lane in self.lanes:
            lane.close()


def _open_lane(tier: Tier, clock: Clock | None) -> Lane:
    if isinstance(tier, HostTier) and not tier.is_pinned and clock is None:
        library = memory_library()
        if library is not None:
            return MemoryLane(tier, library)
    return ThreadLane(tier, clock or SystemClock())
