"""One tier's copier: a thread that brings experts into slots piece by piece, what compute waits for first.

1. `start` queues a transfer, behind the other demands or behind the other prefetches.
2. The thread takes the first demand, else the first prefetch, and copies one piece of it with the lock released. Then
   it chooses anew: a demand overtakes a prefetch between two of its pieces, and the prefetch goes on afterwards.
3. An emulated tier's link (`moec.runtime.expert_pace`) says when each piece is due. The thread takes up the next one no
   sooner, and whoever waits for a transfer waits until it is due.

A slot is written only by the piece that is under way, and `Transfer.cancel` returns after it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from enum import Enum, auto

import torch
from torch import Tensor

from moec.runtime.expert_file import Key
from moec.runtime.expert_pace import Clock, Link
from moec.runtime.expert_tiers import Tier


class State(Enum):
    """PENDING until its last piece is there (WHOLE), an error ends it (FAILED), or nobody wants it (DROPPED)."""

    PENDING = auto()
    WHOLE = auto()
    FAILED = auto()
    DROPPED = auto()


class Transfer:
    """One expert on its way into a slot."""

    def __init__(self, lane: Lane, key: Key, into: Tensor, is_demand: bool, asked_at: float) -> None:
        self.key, self.into, self.is_demand, self.asked_at = key, into, is_demand, asked_at
        self.state = State.PENDING
        self.error: BaseException | None = None
        self.copied, self.due = 0, 0.0
        self.pieces: Iterator[int] = lane.tier.pieces(key, into)
        #: What the device has been given to do so far may still read the expert that the slot holds now.
        self.after = torch.cuda.current_stream(into.device).record_event() if into.is_cuda else None
        self._lane = lane

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self.state is not State.PENDING and (self.due == 0.0 or self.due <= self._lane.clock.now())

    def wait(self) -> None:
        """Return once the slot holds the expert. Raises what went wrong. What is waited for is a demand."""
        if self.state is State.PENDING:
            self._lane.wait(self)
        if self.error is not None:
            raise self.error
        if self.state is State.DROPPED:
            raise AssertionError(f"the transfer of {self.key} was cancelled")
        if self.due:
            self._lane.clock.wait_until(self.due)

    def promote(self) -> None:
        """Make a prefetch a demand, behind those there are."""
        self._lane.promote(self)

    def cancel(self) -> bool:
        """Stop it, after the piece that is under way. Whether it was stopped: False when the slot holds it whole.

        Either way nothing of it is written once this has returned.
        """
        return self._lane.cancel(self)


class Lane:
    """The thread of one tier, and the two queues it serves.

    `num_transfers` and `num_bytes` count what was brought whole; `num_overtaken`: how often a demand was taken up
    before a prefetch that had begun; `dropped_bytes`: pieces of transfers that did not come to their end.
    """

    def __init__(self, tier: Tier, clock: Clock) -> None:
        self.tier, self.clock = tier, clock
        self.num_transfers = self.num_bytes = self.num_overtaken = self.dropped_bytes = 0
        self._link = Link(tier.rate)
        self._demands: deque[Transfer] = deque()
        self._prefetches: deque[Transfer] = deque()
        self._under_way: Transfer | None = None
        self._is_closed = False
        lock = threading.Lock()
        self._work, self._ended = threading.Condition(lock), threading.Condition(lock)
        self._stream: torch.cuda.Stream | None = None
        self._thread = threading.Thread(target=self._run, name=f"experts-{tier.name}", daemon=True)
        self._thread.start()

    def start(self, transfer: Transfer) -> Transfer:
        """Queue a transfer."""
        with self._work:
            if self._is_closed:
                raise AssertionError("the copier is closed")
            (self._demands if transfer.is_demand else self._prefetches).append(transfer)
            self._work.notify()
        return transfer

    def wait(self, transfer: Transfer) -> None:
        """Return once `transfer` has ended, in whatever way."""
        with self._ended:
            self._promote(transfer)
            while transfer.state is State.PENDING:
                self._ended.wait()

    def promote(self, transfer: Transfer) -> None:
        with self._ended:
            self._promote(transfer)

    def _promote(self, transfer: Transfer) -> None:
        if not transfer.is_demand and transfer.state is State.PENDING:
            self._prefetches.remove(transfer)
            self._demands.append(transfer)
            transfer.is_demand = True

    def cancel(self, transfer: Transfer) -> bool:
        with self._ended:
            if transfer.state is State.PENDING:
                self._end(transfer, State.DROPPED)
            while self._under_way is transfer:
                self._ended.wait()
        return transfer.state is not State.WHOLE

    def close(self) -> None:
        """Drop what is pending and end the thread, after the piece that is under way."""
        with self._work:
            self._is_closed = True
            for transfer in [*self._demands, *self._prefetches]:
                self._end(transfer, State.DROPPED)
            self._work.notify()
        self._thread.join()

    def _end(self, transfer: Transfer, state: State) -> None:
        """Take it off its queue. With the lock held."""
        (self._demands if transfer.is_demand else self._prefetches).remove(transfer)
        transfer.state = state
        if state is State.WHOLE:
            self.num_transfers, self.num_bytes = self.num_transfers + 1, self.num_bytes + transfer.copied
        else:
            self.dropped_bytes += transfer.copied
        self._ended.notify_all()

    # --- the thread ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()  # or tensors made in that mode could not be written by this thread
    def _run(self) -> None:
        while (transfer := self._next()) is not None:
            reached, error = 0, None
            try:
                reached = self._copy_piece(transfer)
            except BaseException as caught:  # raised again by who waits for it; the thread serves the others
                error = caught
            self._account(transfer, reached, error)
            del transfer
            if self._link.rate is not None:
                self.clock.sleep_until(self._link.free_at)

    def _next(self) -> Transfer | None:
        with self._work:
            while not (self._is_closed or self._demands or self._prefetches):
                self._work.wait()
            if self._is_closed:
                return None
            waiting = self._prefetches[0] if self._prefetches else None
            transfer = self._demands[0] if self._demands else self._prefetches[0]
            if waiting is not None and waiting is not transfer and waiting.copied and not transfer.copied:
                self.num_overtaken += 1
            self._under_way = transfer
            return transfer

    def _copy_piece(self, transfer: Transfer) -> int:
        """Copy one piece; how many bytes are there now. The device has finished with the piece as well."""
        if transfer.after is None:
            return next(transfer.pieces, transfer.into.numel())
        if self._stream is None:
            self._stream = torch.cuda.Stream(transfer.into.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(transfer.after)
            reached = next(transfer.pieces, transfer.into.numel())
        self._stream.synchronize()
        return reached

    def _account(self, transfer: Transfer, reached: int, error: BaseException | None) -> None:
        with self._ended:
            self._under_way = None
            if error is None:
                is_first, moved = transfer.copied == 0, reached - transfer.copied
                transfer.due = self._link.carry(moved, transfer.asked_at, is_first)
                transfer.copied = reached
            if transfer.state is State.DROPPED:  # while the piece was under way: who cancelled it waits
                self._ended.notify_all()
            elif error is not None:
                transfer.error = error
                self._end(transfer, State.FAILED)
            elif reached == transfer.into.numel():
                self._end(transfer, State.WHOLE)
