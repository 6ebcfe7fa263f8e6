"""The copier: what overtakes what, what is stopped, what is told; without clocks, by tiers that wait for the test."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moec.diagnostics import MoecError, fail
from moec.runtime.experts.copier import Copier
from moec.runtime.experts.file import Key
from moec.runtime.experts.pace import Link, Load, Rate, SystemClock
from moec.runtime.experts.tiers import HostTier, open_nvme
from moec.runtime.experts.transfer import Transfer
from tests.expert_blobs import CONTENTS, Checkpoint, Notes, begin, blob, flip

SECONDS = 60
A, B, C, D = (0, 1), (0, 2), (0, 3), (1, 1)
PIECES, PIECE_BYTES = 3, 4


class Gated:
    """A tier of experts of three pieces, each of which waits until the test lets it on. Expert e is made of bytes e."""

    name = "gated"

    def __init__(self, rate: Rate | None = None, layers: tuple[int, ...] = (0, 1), wake_bytes: int = 0) -> None:
        self.rate, self.layers, self.wake_bytes = rate, layers, wake_bytes
        self.begun: queue.SimpleQueue[tuple[Key, int]] = queue.SimpleQueue()
        self.copied_by: list[str] = []
        self.allowed = threading.Semaphore(0)
        self.failing: dict[Key, BaseException] = {}

    def bytes_of(self, key: Key) -> int | None:
        return PIECES * PIECE_BYTES if key[0] in self.layers else None

    def pieces(self, key: Key, into: Tensor) -> Iterator[int]:
        for piece in range(PIECES):
            if piece:
                yield piece * PIECE_BYTES
            self.begun.put((key, piece))
            self.copied_by.append(threading.current_thread().name)
            assert self.allowed.acquire(timeout=SECONDS)
            if key in self.failing:
                raise self.failing[key]
            into[piece * PIECE_BYTES : (piece + 1) * PIECE_BYTES] = key[1]

    def next(self) -> tuple[Key, int]:
        """The piece that begins next."""
        return self.begun.get(timeout=SECONDS)

    def let(self, pieces: int = 1) -> None:
        self.allowed.release(pieces)

    def let_all(self) -> None:
        self.allowed.release(1000)


def slot() -> Tensor:
    return torch.zeros(PIECES * PIECE_BYTES, dtype=torch.uint8)


def is_whole(into: Tensor, key: Key) -> bool:
    return into.tolist() == [key[1]] * PIECES * PIECE_BYTES


def fall_asleep(copier: Copier) -> None:
    """Return once the first tier's thread has found nothing more to copy."""
    while copier.lanes[0].is_awake:
        threading.Event().wait(0.001)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("experts-")]


@pytest.fixture
def gated() -> Iterator[Gated]:
    tier = Gated()
    yield tier
    tier.let_all()
    assert threads() == []


# --- order ------------------------------------------------------------------------------------------------------------


def test_a_demand_overtakes_a_prefetch_between_two_pieces(gated: Gated) -> None:
    ahead, needed = slot(), slot()
    with Copier([gated]) as copier:
        prefetch = begin(copier, A, ahead, is_demand=False)
        assert gated.next() == (A, 0)
        demand = begin(copier, B, needed, is_demand=True)
        gated.let_all()
        assert [gated.next() for _ in range(5)] == [(B, 0), (B, 1), (B, 2), (A, 1), (A, 2)]
        demand.wait()
        prefetch.wait()
        assert (copier.lanes[0].num_transfers, copier.lanes[0].num_bytes) == (2, 24)
    assert is_whole(ahead, A)
    assert is_whole(needed, B)


def test_a_demand_is_there_before_the_prefetch_it_overtook(gated: Gated) -> None:
    with Copier([gated]) as copier:
        prefetch = begin(copier, A, slot(), is_demand=False)
        gated.next()
        demand = begin(copier, B, slot(), is_demand=True)
        gated.let(4)
        demand.wait()
        assert (demand.is_done, prefetch.is_done) == (True, False)
        gated.let_all()
        prefetch.wait()
        assert prefetch.is_done


def test_equals_are_served_in_the_order_they_were_asked_for(gated: Gated) -> None:
    with Copier([gated]) as copier:
        begin(copier, A, slot(), is_demand=True)
        assert gated.next() == (A, 0)
        last = begin(copier, D, slot(), is_demand=False)
        for key in (B, C):
            begin(copier, key, slot(), is_demand=True)
        gated.let_all()
        assert [gated.next()[0] for _ in range(11)] == [A, A, B, B, B, C, C, C, D, D, D]
        last.wait()


def test_a_promoted_prefetch_goes_behind_the_demands_and_before_the_prefetches(gated: Gated) -> None:
    with Copier([gated]) as copier:
        begin(copier, A, slot(), is_demand=False)
        assert gated.next() == (A, 0)
        begin(copier, B, slot(), is_demand=False)
        promoted = begin(copier, C, slot(), is_demand=False)
        begin(copier, D, slot(), is_demand=True)
        promoted.promote()
        promoted.promote()
        gated.let_all()
        assert [gated.next()[0] for _ in range(11)] == [D, D, D, C, C, C, A, A, B, B, B]
        assert promoted.is_demand
        promoted.wait()
        promoted.promote()


def test_a_prefetch_goes_on_where_it_is_when_it_is_promoted_meanwhile(gated: Gated) -> None:
    into = slot()
    with Copier([gated]) as copier:
        promoted = begin(copier, A, into, is_demand=False)
        assert gated.next() == (A, 0)
        promoted.promote()
        begin(copier, B, slot(), is_demand=True)
        gated.let_all()
        assert [gated.next() for _ in range(3)] == [(A, 1), (A, 2), (B, 0)]
        promoted.wait()
    assert is_whole(into, A)


def test_what_is_waited_for_is_a_demand(gated: Gated) -> None:
    with Copier([gated]) as copier:
        begin(copier, A, slot(), is_demand=False)
        assert gated.next() == (A, 0)
        wanted = begin(copier, B, slot(), is_demand=False)
        waiting = threading.Thread(target=wanted.wait)
        waiting.start()
        while not wanted.is_demand:  # set by the other thread, once it waits
            threading.Event().wait(0.001)
        gated.let_all()
        assert gated.next() == (B, 0)
        waiting.join(SECONDS)
        assert wanted.is_done


def test_tiers_do_not_wait_for_each_other() -> None:
    slow, quick = Gated(layers=(0,)), Gated(layers=(0, 1))
    quick.let_all()
    with Copier([slow, quick]) as copier:
        blocked = begin(copier, A, slot(), is_demand=True)
        assert slow.next() == (A, 0)
        begin(copier, D, slot(), is_demand=False).wait()
        assert not blocked.is_done
        assert len(threads()) == 2
        slow.let_all()
        blocked.wait()
    assert threads() == []


# --- stopping ---------------------------------------------------------------------------------------------------------


def test_what_is_cancelled_in_the_queue_never_begins(gated: Gated) -> None:
    into = slot()
    with Copier([gated]) as copier:
        first = begin(copier, A, slot(), is_demand=True)
        gated.next()
        unwanted = begin(copier, B, into, is_demand=False)
        assert unwanted.cancel()
        assert unwanted.cancel()
        gated.let_all()
        first.wait()
        begin(copier, C, slot(), is_demand=False).wait()
        assert [gated.next()[0] for _ in range(5)] == [A, A, C, C, C]
        with pytest.raises(AssertionError, match=r"\(0, 2\) was cancelled"):
            unwanted.wait()
    assert not into.any()


def test_what_is_cancelled_between_two_pieces_writes_no_other(gated: Gated) -> None:
    into = slot()
    with Copier([gated]) as copier:
        unwanted = begin(copier, A, into, is_demand=False)
        gated.next()
        demand = begin(copier, B, slot(), is_demand=True)
        gated.let()
        assert gated.next() == (B, 0)
        assert unwanted.cancel()
        refilled = begin(copier, C, into, is_demand=True)
        gated.let_all()
        demand.wait()
        refilled.wait()
        assert copier.lanes[0].num_transfers == 2
    assert is_whole(into, C)


def test_cancelling_waits_for_the_piece_that_is_under_way(gated: Gated) -> None:
    into, seen, asked = slot(), list[tuple[bool, list[int]]](), threading.Event()

    def cancel(transfer: Transfer) -> None:
        asked.set()
        seen.append((transfer.cancel(), into.tolist()))

    with Copier([gated]) as copier:
        unwanted = begin(copier, A, into, is_demand=False)
        gated.next()
        thread = threading.Thread(target=cancel, args=[unwanted])
        thread.start()
        asked.wait(SECONDS)
        while not unwanted.is_done:  # cancelled, with its piece still under way
            threading.Event().wait(0.001)
        assert (seen, into.any().item()) == ([], False)
        gated.let()
        thread.join(SECONDS)
        begin(copier, B, slot(), is_demand=True)
        gated.let_all()
        assert gated.next() == (B, 0)
    assert seen == [(True, [1] * PIECE_BYTES + [0] * 2 * PIECE_BYTES)]
    assert into.tolist() == seen[0][1]


def test_what_is_whole_is_not_stopped(gated: Gated) -> None:
    into = slot()
    gated.let_all()
    with Copier([gated]) as copier:
        done = begin(copier, A, into, is_demand=True)
        done.wait()
        assert not done.cancel()
        done.wait()
    assert is_whole(into, A)


def test_closing_drops_what_is_pending_and_ends_the_threads(gated: Gated) -> None:
    copier = Copier([gated])
    under_way = begin(copier, A, slot(), is_demand=True)
    assert gated.next() == (A, 0)
    others = [begin(copier, key, slot(), is_demand=key == B) for key in (B, C)]
    closing = threading.Thread(target=copier.close)
    closing.start()
    for transfer in [*others, under_way]:
        with pytest.raises(AssertionError, match="was cancelled"):
            transfer.wait()
    gated.let()
    closing.join(SECONDS)
    assert threads() == []
    assert gated.begun.empty()
    with pytest.raises(AssertionError, match="the copier is closed"):
        begin(copier, D, slot(), is_demand=True)
    copier.close()


def test_an_error_of_the_caller_ends_the_threads_too(gated: Gated) -> None:
    gated.let_all()
    with pytest.raises(ZeroDivisionError), Copier([gated]) as copier:
        begin(copier, A, slot(), is_demand=False)
        assert threads() == ["experts-gated"]
        raise ZeroDivisionError
    assert threads() == []


def test_a_thread_that_cannot_start_ends_those_that_did(gated: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, list[str]()

    def start_one(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Copier([gated, gated])
    assert (started, threads()) == (["experts-gated"], [])


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [fail("E0643", "gone"), ValueError("no such luck")], ids=["told", "unforeseen"])
def test_an_error_reaches_who_waits_and_nobody_else(gated: Gated, error: Exception) -> None:
    gated.failing[A] = error
    gated.let_all()
    with Copier([gated]) as copier:
        failed, other = (begin(copier, key, slot(), is_demand=False) for key in (A, B))
        other.wait()
        for _ in range(2):
            with pytest.raises(type(error)) as caught:
                failed.wait()
            assert caught.value is error
        assert failed.is_done
        assert failed.cancel()
        assert copier.lanes[0].num_transfers == 1


def test_a_slot_must_fit_and_be_free(gated: Gated) -> None:
    into = slot()
    with Copier([gated]) as copier:
        with pytest.raises(AssertionError, match="no tier has the expert"):
            begin(copier, (7, 0), into, is_demand=True)
        with pytest.raises(AssertionError, match="has 11 bytes, the expert 12"):
            begin(copier, A, into[:-1], is_demand=True)
        first = begin(copier, A, into, is_demand=False)
        with pytest.raises(AssertionError, match=r"is still being filled with \(0, 1\)"):
            begin(copier, B, into, is_demand=True)
        gated.let_all()
        first.wait()
        begin(copier, B, into, is_demand=True).wait()
    assert is_whole(into, B)


# --- real tiers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_no_slot_ever_holds_wrong_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Slots are filled, given up and filled anew in an order drawn by lot, from two tiers, of which one is damaged."""
    for module in ("experts.file", "experts.tiers"):
        monkeypatch.setattr(f"moec.runtime.{module}.PIECE_BYTES", 1024)
    drawn, checkpoint = random.Random(seed), Checkpoint()
    host, nvme = HostTier(CONTENTS, [(1, 1)], checkpoint), open_nvme(tmp_path, CONTENTS, checkpoint, warn=Notes())
    flip(tmp_path / CONTENTS.file_name, CONTENTS.places[0, 5].start)
    with torch.inference_mode():  # as the rank's own tensors may be
        arena = torch.zeros(4, CONTENTS.blob_bytes(1), dtype=torch.uint8)
    held: dict[int, Transfer] = {}
    with Copier([host, nvme]) as copier:
        for _ in range(300):
            place, key = drawn.randrange(4), drawn.choice(CONTENTS.keys)
            if (before := held.pop(place, None)) is not None:
                what = drawn.choice(["cancel", "wait", "promote"])
                if what == "promote":
                    before.promote()
                if what == "cancel" and before.cancel():
                    left = before.into.clone()
                    for other in [(1, 1), (1, 2)]:  # both threads go on
                        begin(copier, other, torch.zeros_like(arena[0]), is_demand=True).wait()
                    assert torch.equal(before.into, left)
                else:
                    before.wait()
                    assert torch.equal(before.into, blob(before.key))
            into = arena[place, : CONTENTS.blob_bytes(key[0])]
            held[place] = begin(copier, key, into, is_demand=drawn.random() < 0.5)
        for transfer in held.values():
            transfer.wait()
            assert torch.equal(transfer.into, blob(transfer.key))
    nvme.close()
    assert nvme.num_rereads > 0


def test_an_expert_that_is_nowhere_ends_the_wait_for_it(tmp_path: Path) -> None:
    checkpoint = Checkpoint()
    nvme = open_nvme(tmp_path, CONTENTS, checkpoint, warn=Notes())
    flip(tmp_path / CONTENTS.file_name, CONTENTS.places[0, 5].start)
    checkpoint.is_lost = True
    with Copier([nvme]) as copier:
        transfer = begin(copier, (0, 5), torch.zeros(CONTENTS.blob_bytes(0), dtype=torch.uint8), is_demand=True)
        with pytest.raises(MoecError, match=r"expert 5 of layers\.1 cannot be read: its expert file") as caught:
            transfer.wait()
    assert caught.value.diagnostics[0].code == "E0643"
    nvme.close()


# --- few bytes --------------------------------------------------------------------------------------------------------


def test_few_bytes_are_copied_by_who_waits_for_them() -> None:
    tier, into, me = Gated(wake_bytes=25), slot(), threading.current_thread().name
    tier.let_all()
    with Copier([tier]) as copier:
        few = [begin(copier, A, into, is_demand=False), begin(copier, B, slot(), is_demand=False)]
        assert ([transfer.is_done for transfer in few], tier.copied_by) == ([True, True], [])
        few[0].wait()
        assert (is_whole(into, A), tier.copied_by) == (True, [me] * PIECES)
        few[0].wait()
        assert few[1].cancel()
        with pytest.raises(AssertionError, match="was cancelled"):
            few[1].wait()
        assert (tier.copied_by, copier.lanes[0].num_transfers) == ([me] * PIECES, 1)


def test_more_bytes_wake_the_thread_and_it_falls_asleep_again() -> None:
    tier, me = Gated(wake_bytes=25), threading.current_thread().name
    with Copier([tier]) as copier:
        many = [begin(copier, key, slot(), is_demand=False) for key in (A, B, C)]
        assert tier.next() == (A, 0)
        assert [transfer.is_done for transfer in many] == [False] * 3
        tier.let_all()
        for transfer in many:
            transfer.wait()
        assert tier.copied_by[0] == "experts-gated"
        fall_asleep(copier)
        del tier.copied_by[:]
        few = begin(copier, D, slot(), is_demand=True)
        assert not copier.lanes[0].is_awake
        few.wait()
        assert tier.copied_by == [me] * PIECES


def test_the_thread_goes_on_behind_a_piece_that_was_copied_for_it() -> None:
    """Its waking up falls into a piece that another thread copies, and it must not miss its turn after that."""
    tier = Gated(wake_bytes=20)
    with Copier([tier]) as copier:
        first = begin(copier, A, slot(), is_demand=True)
        waiting = threading.Thread(target=first.wait, name="waiting")
        waiting.start()
        assert tier.next() == (A, 0)
        second = begin(copier, B, slot(), is_demand=False)
        assert copier.lanes[0].is_awake
        tier.let_all()
        waiting.join(SECONDS)
        assert [tier.next() for _ in range(5)] == [(A, 1), (A, 2), (B, 0), (B, 1), (B, 2)]
        second.wait()
        assert tier.copied_by[0] == "waiting"
        assert tier.copied_by[-1] in ("experts-gated", threading.current_thread().name)


def test_an_error_in_few_bytes_is_raised_where_they_are_waited_for() -> None:
    tier = Gated(wake_bytes=100)
    tier.let_all()
    tier.failing[A] = KeyboardInterrupt()
    with Copier([tier]) as copier:
        failed, other = begin(copier, A, slot(), is_demand=True), begin(copier, B, slot(), is_demand=True)
        with pytest.raises(KeyboardInterrupt):
            failed.wait()
        other.wait()
        assert failed.is_done


# --- pace -------------------------------------------------------------------------------------------------------------

#: Four bytes, which are a piece, take one second; the first of a transfer, three.
SLOW = Rate(bandwidth=4.0, latency=2.0)
LOAD_BYTES = 12


def asked(link: Link, at: float, is_demand: bool = True) -> Load:
    load = Load(LOAD_BYTES, at, is_demand)
    link.ask(load)
    return load


def test_a_link_keeps_its_latency_and_bandwidth() -> None:
    link = Link(SLOW, 4)
    first, second = asked(link, 100.0), asked(link, 101.0)
    assert (link.due(second), link.due(first)) == (110.0, 105.0)
    assert link.due(asked(link, 120.0)) == 125.0


def test_a_demand_waits_for_the_piece_on_the_link_and_no_other() -> None:
    link = Link(SLOW, 4)
    ahead, needed = asked(link, 0.0, is_demand=False), asked(link, 1.0)
    assert link.due(needed) == 3 + 5
    assert not link.is_there(ahead, 9.9)
    assert link.is_there(ahead, 10.0)
    assert ahead.due == 10.0


def test_a_promoted_load_overtakes_prefetches_and_no_demand() -> None:
    link = Link(SLOW, 4)
    loads = [asked(link, 0.0, is_demand=False) for _ in range(3)]
    needed = asked(link, 1.0)
    link.promote(loads[2], 2.0)
    assert [link.due(needed), link.due(loads[2])] == [8.0, 13.0]
    link.run_until(100.0)
    assert [load.due for load in loads] == [15.0, 20.0, 13.0]
    link.promote(loads[0], 101.0)
    assert link.due(loads[0]) == 15.0


def test_a_load_is_promoted_from_where_it_is_by_then() -> None:
    link = Link(SLOW, 4)
    first, second = asked(link, 0.0, is_demand=False), asked(link, 0.0, is_demand=False)
    link.promote(second, 6.0)
    assert (first.due, link.due(second)) == (5.0, 10.0)


def test_a_dropped_load_leaves_the_link_after_its_piece() -> None:
    link = Link(SLOW, 4)
    unwanted, other = asked(link, 0.0, is_demand=False), asked(link, 0.0, is_demand=False)
    link.drop(unwanted, 3.5)
    assert link.due(asked(link, 3.5)) == 4 + 5
    assert link.is_there(other, 14.0)
    assert not link.is_there(unwanted, 1000.0)
    link.drop(other, 1000.0)
    assert link.is_there(other, 1000.0)


class SetClock:
    """A clock that stands where the test sets it. Waits are over at once, and noted."""

    def __init__(self) -> None:
        self.time = 0.0
        self.waited: list[float] = []

    def now(self) -> float:
        return self.time

    def wait_until(self, deadline: float) -> None:
        self.waited.append(deadline)


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Copier, SetClock]]:
    """A copier of one tier whose copies are over at once, and whose link is slow."""
    monkeypatch.setattr("moec.runtime.experts.thread_lane.LINK_PIECE_BYTES", PIECE_BYTES)
    tier, clock = Gated(SLOW), SetClock()
    tier.let_all()
    with Copier([tier], clock) as copier:
        yield copier, clock


def test_who_waits_waits_until_the_link_has_brought_it(paced: tuple[Copier, SetClock]) -> None:
    copier, clock = paced
    clock.time = 100.0
    first, second = begin(copier, A, slot(), is_demand=True), begin(copier, B, slot(), is_demand=True)
    first.wait()
    second.wait()
    assert clock.waited == [105, 110]
    clock.time = 109.9
    assert (first.is_done, second.is_done) == (True, False)
    clock.time = 110.0
    assert second.is_done
    clock.time = 120.0
    begin(copier, C, slot(), is_demand=False).wait()
    assert clock.waited == [105, 110, 125]


def test_what_is_promoted_or_waited_for_goes_first_on_the_link_too(paced: tuple[Copier, SetClock]) -> None:
    copier, clock = paced
    ahead = [begin(copier, key, slot(), is_demand=False) for key in (A, B, C)]
    clock.time = 1.0
    ahead[2].promote()
    ahead[2].wait()
    ahead[1].wait()
    ahead[0].wait()
    assert clock.waited == [8, 13, 15]


def test_what_is_cancelled_before_it_is_due_was_stopped(paced: tuple[Copier, SetClock]) -> None:
    copier, clock = paced
    unwanted, kept = begin(copier, A, slot(), is_demand=False), begin(copier, B, slot(), is_demand=False)
    clock.time = 3.5
    assert unwanted.cancel()
    assert unwanted.cancel()
    with pytest.raises(AssertionError, match="was cancelled"):
        unwanted.wait()
    fall_asleep(copier)
    clock.time = 8.9
    assert not kept.is_done
    clock.time = 9.0
    assert kept.is_done
    assert not kept.cancel()
    kept.wait()


def test_without_a_rate_nobody_waits_for_a_link(gated: Gated) -> None:
    clock = SetClock()
    gated.let_all()
    with Copier([gated], clock) as copier:
        begin(copier, A, slot(), is_demand=False).wait()
    assert clock.waited == []


def test_the_machines_clock_is_never_early() -> None:
    clock = SystemClock()
    for seconds in (0.0, 1e-5, 1e-4, 1e-3):
        deadline = clock.now() + seconds
        clock.wait_until(deadline)
        assert clock.now() >= deadline
