"""One tier's copier: a thread that brings experts into slots piece by piece, what compute waits for first.

1. `start` queues a transfer, behind the other demands or behind the other prefetches.
2. The thread takes the first demand, else the first prefetch, and copies one piece of it with the lock released. Then
   it chooses anew: a demand overtakes a prefetch between two of its pieces, and the prefetch goes on afterwards.
3. To wake the thread, and to take turns with it at Python's lock, costs who computes as much as copying the tier's
   `wake_bytes`. So less than that is left in the queue, and whoever waits for a transfer that nobody copies copies it.
4. Where the tier is emulated, its link (`moec.runtime.experts.pace`) is told the same, and says when a transfer that is
   there may be used.

One piece is under way at a time, so one thread writes. `Transfer.cancel` returns after it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moec.runtime.experts.file import Key
from moec.runtime.experts.pace import LINK_PIECE_BYTES, Clock, Link, Load
from moec.runtime.experts.tiers import Tier
from moec.runtime.experts.transfer import Room, State


class ThreadTransfer:
    """A `Transfer`."""

    def __init__(self, lane: ThreadLane, key: Key, into: Tensor, is_demand: bool, asked_at: float) -> None:
        self.key, self.into, self.is_demand = key, into, is_demand
        self.state = State.PENDING
        self.error: BaseException | None = None
        self.began_at: float | None = None
        self.ended_at: float | None = None
        self.pieces: Iterator[int] = lane.tier.pieces(key, into)
        #: What the device has been given to do so far may still read the expert that the slot holds now.
        self.after = torch.cuda.current_stream(into.device).record_event() if into.is_cuda else None
        self.load = Load(into.numel(), asked_at, is_demand)
        self._lane, self._link, self._clock = lane, lane.link, lane.clock

    @property
    def is_done(self) -> bool:
        if self.state is State.PENDING and self._lane.is_awake:
            return False
        if self._link is None or self.state in (State.FAILED, State.DROPPED):
            return True
        return self._link.is_there(self.load, self._clock.now())

    @property
    def times(self) -> tuple[float, float] | None:
        began, ended = (self.load.began_at, self.load.due) if self._link is not None else (self.began_at, self.ended_at)
        return None if self.state is not State.WHOLE or began is None or ended is None else (began, ended)

    def wait(self) -> None:
        self.promote()
        self._lane.wait(self)
        if self.error is not None:
            raise self.error
        if self.state is State.DROPPED:
            raise AssertionError(f"the transfer of {self.key} was cancelled")
        if self._link is not None:
            self._clock.wait_until(self._link.due(self.load))

    def promote(self) -> None:
        if self.is_demand or self.state is State.DROPPED:
            return
        self._lane.promote(self)
        if self._link is not None:
            self._link.promote(self.load, self._clock.now())

    def cancel(self) -> bool:
        if self._link is not None and self.state is not State.DROPPED:
            now = self._clock.now()
            if not self._link.is_there(self.load, now):
                self._link.drop(self.load, now)
                return self._lane.cancel(self, is_due=False)
        return self._lane.cancel(self, is_due=True)


class ThreadLane:
    """A `Lane` of any tier. `is_awake`: the thread is going through the queues."""

    def __init__(self, tier: Tier, clock: Clock) -> None:
        self.tier, self.clock = tier, clock
        self.link = None if tier.rate is None else Link(tier.rate, LINK_PIECE_BYTES)
        self.num_transfers = self.num_bytes = 0
        self._demands: deque[ThreadTransfer] = deque()
        self._prefetches: deque[ThreadTransfer] = deque()
        self._under_way: ThreadTransfer | None = None
        self._backlog = 0
        self.is_awake = self._is_closed = False
        lock = threading.Lock()
        self._work, self._ended = threading.Condition(lock), threading.Condition(lock)
        self._stream: torch.cuda.Stream | None = None
        self._thread = threading.Thread(target=self._run, name=f"experts-{tier.name}", daemon=True)
        self._thread.start()

    def start(self, copies: Sequence[tuple[Key, Room]], is_demand: bool) -> list[ThreadTransfer]:
        now = self.clock.now()
        transfers = [ThreadTransfer(self, key, room.memory, is_demand, now) for key, room in copies]
        with self._work:
            if self._is_closed:
                raise AssertionError("the copier is closed")
            for transfer in transfers:
                self._put(transfer)
            if not self.is_awake and (self._backlog >= self.tier.wake_bytes or copies[0][1].memory.is_cuda):
                self.is_awake = True
                self._work.notify()
        if self.link is not None:
            for transfer in transfers:
                self.link.ask(transfer.load)
        return transfers

    def _put(self, transfer: ThreadTransfer) -> None:
        """Put it on its queue. With the lock held."""
        slot = transfer.into.data_ptr()
        for before in (*self._demands, *self._prefetches):
            if before.into.data_ptr() == slot:
                raise AssertionError(f"the slot for {transfer.key} is still being filled with {before.key}")
        self._queue(transfer).append(transfer)
        self._backlog += transfer.into.numel()

    def wait(self, transfer: ThreadTransfer) -> None:
        """Return once `transfer` has ended, in whatever way."""
        while self._is_left(transfer):
            self._advance(transfer)

    def _is_left(self, transfer: ThreadTransfer) -> bool:
        """Wait until `transfer` has ended (False), or its next piece is the caller's to copy."""
        with self._ended:
            while transfer.state is State.PENDING and self._under_way is not None:
                self._ended.wait()
            if transfer.state is State.PENDING:
                self._under_way = transfer
            return transfer.state is State.PENDING

    def promote(self, transfer: ThreadTransfer) -> None:
        with self._ended:
            if transfer.state is State.PENDING:
                self._prefetches.remove(transfer)
                self._demands.append(transfer)
            transfer.is_demand = True

    def cancel(self, transfer: ThreadTransfer, is_due: bool) -> bool:
        """Whether `transfer` is stopped. `is_due`: its link has brought it."""
        with self._ended:
            if transfer.state is State.PENDING:
                self._end(transfer, State.DROPPED)
            elif transfer.state is State.WHOLE and not is_due:
                transfer.state = State.DROPPED
            while self._under_way is transfer:
                self._ended.wait()
        return transfer.state is not State.WHOLE

    def close(self) -> None:
        with self._work:
            self._is_closed = True
            for transfer in [*self._demands, *self._prefetches]:
                self._end(transfer, State.DROPPED)
            self._work.notify()
        self._thread.join()

    def _queue(self, transfer: ThreadTransfer) -> deque[ThreadTransfer]:
        return self._demands if transfer.is_demand else self._prefetches

    def _end(self, transfer: ThreadTransfer, state: State) -> None:
        """Take it off its queue. With the lock held."""
        self._queue(transfer).remove(transfer)
        self._backlog -= transfer.into.numel()
        transfer.state = state
        self._ended.notify_all()

    def _run(self) -> None:
        while (transfer := self._next()) is not None:
            self._advance(transfer)
            del transfer

    def _next(self) -> ThreadTransfer | None:
        """The transfer that is the thread's to go on with; None once the lane is closed."""
        with self._work:
            while not (self._is_closed or self._has_turn()):
                self._work.wait()
            if self._is_closed:
                return None
            self._under_way = (self._demands or self._prefetches)[0]
            return self._under_way

    def _has_turn(self) -> bool:
        if not (self._demands or self._prefetches):
            self.is_awake = False
        return self.is_awake and self._under_way is None

    def _advance(self, transfer: ThreadTransfer) -> None:
        """Copy the piece that is under way."""
        if transfer.began_at is None:
            transfer.began_at = self.clock.now()
        is_over, error = False, None
        try:
            is_over = self._copy_piece(transfer)
        except BaseException as caught:  # raised again by who waits for it; the thread serves the others
            error = caught
        with self._ended:
            self._under_way = None
            if transfer.state is State.DROPPED:  # while the piece was under way: who cancelled it waits
                self._ended.notify_all()
            elif error is not None:
                transfer.error = error
                self._end(transfer, State.FAILED)
            elif is_over:
                transfer.ended_at = self.clock.now()
                self.num_transfers, self.num_bytes = self.num_transfers + 1, self.num_bytes + transfer.into.numel()
                self._end(transfer, State.WHOLE)
            if self.is_awake:
                self._work.notify()  # it may have waited for another thread's piece

    @torch.inference_mode()  # or tensors made in that mode could not be written by this thread
    def _copy_piece(self, transfer: ThreadTransfer) -> bool:
        """Copy one piece; whether it was the last one. The device has finished with the piece as well."""
        if transfer.after is None:
            return next(transfer.pieces, None) is None
        if self._stream is None:
            self._stream = torch.cuda.Stream(transfer.into.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(transfer.after)
            is_over = next(transfer.pieces, None) is None
        self._stream.synchronize()
        return is_over
