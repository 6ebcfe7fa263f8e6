"""The lane of experts in host memory: what it copies, in which order, at what pace, and how it is stopped.

Order is told by `times`, which follow the pace and not when threads ran. Where a scene needs its requests to be made in
time, it is played again on a machine that was too slow for that.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from gc import collect

import psutil
import pytest
import torch

from moec.diagnostics import MoecError
from moec.runtime.cpp_build import find_compiler
from moec.runtime.experts.copier import Copier
from moec.runtime.experts.file import Key
from moec.runtime.experts.memory_lane import MemoryLane, MemoryTransfer, memory_library
from moec.runtime.experts.pace import Link, Load, Rate, SystemClock
from moec.runtime.experts.thread_lane import ThreadLane
from moec.runtime.experts.tiers import HostTier
from moec.runtime.experts.transfer import State, Transfer
from tests.expert_blobs import CONTENTS, Checkpoint, begin, blob

#: Experts of three pieces, the last one shorter, and of 300.
A, B, C, LARGE = (0, 0), (0, 1), (0, 5), (1, 1)
PIECE_BYTES = 64
#: The first piece has the link for so long: enough to ask for more meanwhile.
SLOW = Rate(bandwidth=1e7, latency=0.05)
#: Nothing is there before the test is over.
NEVER = Rate(bandwidth=1e7, latency=3600.0)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    try:
        find_compiler()
    except MoecError as error:
        pytest.skip(str(error))
    set_piece(monkeypatch, PIECE_BYTES)
    found = memory_library()
    assert found is not None
    return found


def set_piece(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("moec.runtime.experts.memory_lane.LINK_PIECE_BYTES", size)


def host(rate: Rate | None = None) -> HostTier:
    return HostTier(CONTENTS, CONTENTS.keys, Checkpoint(), rate=rate)


def ask(copier: Copier, key: Key, is_demand: bool) -> MemoryTransfer:
    """Into a slot of its own."""
    into = torch.zeros(CONTENTS.blob_bytes(key[0]), dtype=torch.uint8)
    transfer = begin(copier, key, into, is_demand)
    assert isinstance(transfer, MemoryTransfer)
    return transfer


def is_whole(transfer: Transfer) -> bool:
    return torch.equal(transfer.into, blob(transfer.key))


def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        time.sleep(0.001)


def arrive(transfers: Sequence[Transfer]) -> None:
    """Return once all of them are there, without making them demands."""
    for transfer in transfers:
        while not transfer.is_done:
            time.sleep(0.001)


def has_begun(transfer: Transfer) -> bool:
    """Whether the first piece is there: no expert here begins with zeros alone."""
    return bool(transfer.into[:PIECE_BYTES].any())


def asked_at(transfer: MemoryTransfer) -> float:
    return float(transfer.record.asked_at)


def times(transfer: Transfer) -> tuple[float, float]:
    found = transfer.times
    assert found is not None
    return found


def by_due(transfers: Sequence[Transfer]) -> list[int]:
    """Numbers of the transfers, the one that was there first at the beginning."""
    return sorted(range(len(transfers)), key=lambda number: times(transfers[number])[1])


def by_link(rate: Rate, transfers: Sequence[MemoryTransfer], are_demands: Sequence[bool]) -> list[tuple[float, float]]:
    """When a link brings the same, asked for at the same moments."""
    link, loads = Link(rate, PIECE_BYTES), list[Load]()
    for transfer, is_demand in zip(transfers, are_demands, strict=True):
        loads.append(Load(transfer.into.numel(), asked_at(transfer), is_demand))
        link.ask(loads[-1])
    link.run_until(float("inf"))
    return [(load.began_at or 0.0, load.due or 0.0) for load in loads]


def play(scene: Callable[[Copier], list[MemoryTransfer]]) -> list[MemoryTransfer]:
    """The transfers of a scene once they are there, all of them asked for while the first piece had the link."""
    while True:
        with Copier([host(SLOW)]) as copier:
            transfers = scene(copier)
            arrive(transfers)
        assert all(map(is_whole, transfers))
        if asked_at(transfers[-1]) < asked_at(transfers[0]) + SLOW.latency:
            return transfers


def threads() -> set[int]:
    return {thread.id for thread in psutil.Process().threads()}


def opened(library: ctypes.CDLL, rate: Rate | None) -> tuple[MemoryLane, set[int]]:
    """A lane, and its thread."""
    before = threads()
    lane = MemoryLane(host(rate), library)
    return lane, threads() - before


def is_over(thread: set[int]) -> None:
    """Return once a thread that was joined is gone from the system's list too."""
    until(lambda: not thread & threads())


# --- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_demand", [True, False], ids=["demands", "prefetches"])
@pytest.mark.parametrize("piece", [1, 143, 144, 1000, 4800, 19200, 19201, 1 << 20])
@pytest.mark.parametrize("rate", [None, Rate(1e9, 1e-6)], ids=["unpaced", "paced"])
def test_every_byte_comes_and_none_beside_them(
    monkeypatch: pytest.MonkeyPatch, rate: Rate | None, piece: int, is_demand: bool
) -> None:
    """Experts of 144 and 19200 bytes: smaller than a piece, as large, of several, of several and a shorter one."""
    set_piece(monkeypatch, piece)
    keys = CONTENTS.keys
    around = [torch.full((CONTENTS.blob_bytes(key[0]) + 2,), 255, dtype=torch.uint8) for key in keys]
    with Copier([host(rate)]) as copier:
        transfers = [begin(copier, key, into[1:-1], is_demand) for key, into in zip(keys, around, strict=True)]
        assert isinstance(copier.lanes[0], MemoryLane)
        arrive(transfers)
        assert {(transfer.state, transfer.is_demand) for transfer in transfers} == {(State.WHOLE, is_demand)}
        assert copier.lanes[0].num_bytes == sum(CONTENTS.blob_bytes(key[0]) for key in keys)
    assert all(map(is_whole, transfers))
    assert {int(byte) for into in around for byte in (into[0], into[-1])} == {255}


@pytest.mark.parametrize("rate", [None, Rate(1e9, 1e-5)], ids=["unpaced", "paced"])
@pytest.mark.parametrize("seed", range(4))
def test_no_slot_ever_holds_wrong_bytes(monkeypatch: pytest.MonkeyPatch, rate: Rate | None, seed: int) -> None:
    """Slots are filled, given up and filled anew in an order drawn by lot."""
    set_piece(monkeypatch, 1024)
    drawn = random.Random(seed)
    with torch.inference_mode():  # as the rank's own tensors may be
        arena = torch.zeros(4, CONTENTS.blob_bytes(1), dtype=torch.uint8)
    held: dict[int, Transfer] = {}
    with Copier([host(rate)]) as copier:
        for _ in range(500):
            place, key = drawn.randrange(4), drawn.choice(CONTENTS.keys)
            if (before := held.pop(place, None)) is not None:
                what = drawn.choice(["cancel", "wait", "promote", "look"])
                if what == "promote":
                    before.promote()
                if what == "look":
                    arrive([before])
                if what == "cancel" and before.cancel():
                    left = before.into.clone()
                    ask(copier, LARGE, is_demand=True).wait()  # the thread goes on
                    assert torch.equal(before.into, left)
                else:
                    before.wait()
                    assert is_whole(before)
            held[place] = begin(copier, key, arena[place, : CONTENTS.blob_bytes(key[0])], drawn.random() < 0.5)
        for transfer in held.values():
            transfer.wait()
            assert is_whole(transfer)


# --- order ------------------------------------------------------------------------------------------------------------


def test_a_demand_is_there_before_a_prefetch_that_was_asked_for_earlier() -> None:
    """It overtakes between two pieces."""
    ahead, needed = play(lambda copier: [ask(copier, LARGE, False), ask(copier, A, True)])
    assert times(ahead)[0] == asked_at(ahead)
    assert times(ahead)[0] < times(needed)[0] < times(needed)[1] < times(ahead)[1]
    assert (ahead.is_demand, needed.is_demand) == (False, True)


def test_equals_come_in_the_order_they_were_asked_for() -> None:
    asked = [(A, True), (B, False), (LARGE, True), (C, False), (A, True)]
    transfers = play(lambda copier: [ask(copier, key, is_demand) for key, is_demand in asked])
    assert by_due(transfers) == [0, 2, 4, 1, 3]


def test_what_is_promoted_comes_behind_the_demands_and_before_the_prefetches() -> None:
    def scene(copier: Copier) -> list[MemoryTransfer]:
        first, left, promoted = ask(copier, A, False), ask(copier, B, False), ask(copier, C, False)
        demand = ask(copier, A, True)
        promoted.promote()
        promoted.promote()
        assert promoted.is_demand
        return [first, left, promoted, demand, ask(copier, B, True)]

    assert by_due(play(scene)) == [3, 2, 4, 0, 1]


def test_what_is_waited_for_is_a_demand() -> None:
    def scene(copier: Copier) -> list[MemoryTransfer]:
        first, left, wanted = ask(copier, A, True), ask(copier, B, False), ask(copier, C, False)
        waiting = threading.Thread(target=wanted.wait)
        waiting.start()
        until(lambda: wanted.is_demand)
        last = ask(copier, A, False)
        waiting.join()
        return [first, left, wanted, last]

    assert by_due(play(scene)) == [0, 2, 1, 3]


# --- pace -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [Rate(1e6), Rate(1e7, 1e-3), Rate(2e9, 5e-6)], ids=str)
@pytest.mark.parametrize("is_demand", [True, False], ids=["demands", "prefetches"])
def test_the_lane_keeps_the_latency_and_bandwidth_of_a_link(rate: Rate, is_demand: bool) -> None:
    drawn, transfers = random.Random(3), list[MemoryTransfer]()
    with Copier([host(rate)]) as copier:
        for key in drawn.choices(CONTENTS.keys, k=20):
            time.sleep(drawn.choice([0.0, 0.0, 0.004]))
            transfers.append(ask(copier, key, is_demand))
        arrive(transfers)
    assert [times(transfer) for transfer in transfers] == by_link(rate, transfers, [is_demand] * len(transfers))


def test_the_lane_takes_turns_as_a_link_does() -> None:
    asked = [(LARGE, False), (A, True), (B, False), (LARGE, True), (C, True), (A, False)]
    transfers = play(lambda copier: [ask(copier, key, is_demand) for key, is_demand in asked])
    expected = by_link(SLOW, transfers, [is_demand for _, is_demand in asked])
    assert [times(transfer) for transfer in transfers] == expected


@pytest.mark.parametrize("rate", [None, Rate(1e9, 1e-5), Rate(1e9, 0.15)], ids=str)
def test_nobody_who_waited_goes_on_too_early(
    monkeypatch: pytest.MonkeyPatch, library: ctypes.CDLL, rate: Rate | None
) -> None:
    """Not even when it was copied long before it is due, and Python has looked for signals meanwhile."""
    set_piece(monkeypatch, 1024)
    with Copier([host(rate)]) as copier:
        for key in (A, LARGE, B):
            transfer = ask(copier, key, is_demand=True)
            transfer.wait()
            assert library.lane_is_there(transfer.address)  # which looks at the clock
            assert (is_whole(transfer), transfer.is_done) == (True, True)


def test_without_a_pace_times_are_those_of_copying() -> None:
    with Copier([host()]) as copier:
        transfers = [ask(copier, key, is_demand=True) for key in (A, LARGE, B)]
        transfers[-1].wait()
        assert all(transfer.is_done for transfer in transfers)
    moments = [moment for transfer in transfers for moment in times(transfer)]
    assert asked_at(transfers[0]) <= moments[0]
    assert moments == sorted(moments)


# --- stopping ---------------------------------------------------------------------------------------------------------


def test_what_is_cancelled_in_the_queue_never_begins() -> None:
    with Copier([host(NEVER)]) as copier:
        ask(copier, A, is_demand=True)
        unwanted = ask(copier, B, is_demand=False)
        assert [unwanted.cancel(), unwanted.cancel()] == [True, True]
        assert (unwanted.state, unwanted.times) == (State.DROPPED, None)
        with pytest.raises(AssertionError, match=r"the transfer of \(0, 1\) was cancelled"):
            unwanted.wait()
    assert not unwanted.into.any()
    assert copier.lanes[0].num_bytes == 0


def test_what_is_cancelled_under_way_gets_no_further_piece() -> None:
    with Copier([host(NEVER)]) as copier:
        unwanted = ask(copier, LARGE, is_demand=False)
        until(lambda: has_begun(unwanted))
        assert unwanted.cancel()
    assert torch.equal(unwanted.into[:PIECE_BYTES], blob(LARGE)[:PIECE_BYTES])
    assert not unwanted.into[PIECE_BYTES:].any()
    assert copier.lanes[0].num_bytes == 0


def test_what_is_cancelled_before_it_is_due_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    set_piece(monkeypatch, 1024)
    with Copier([host(NEVER)]) as copier:
        unwanted = ask(copier, A, is_demand=True)
        until(lambda: unwanted.state is State.WHOLE)
        assert not unwanted.is_done
        assert [unwanted.cancel(), unwanted.cancel()] == [True, True]
        assert (unwanted.is_done, unwanted.times) == (False, None)
        with pytest.raises(AssertionError, match="was cancelled"):
            unwanted.wait()


@pytest.mark.parametrize("rate", [None, Rate(1e9, 1e-5)], ids=["unpaced", "paced"])
def test_what_is_there_cannot_be_cancelled(rate: Rate | None) -> None:
    with Copier([host(rate)]) as copier:
        unseen, waited = ask(copier, A, is_demand=True), ask(copier, B, is_demand=True)
        waited.wait()
        assert [unseen.cancel(), waited.cancel()] == [False, False]  # nobody has looked after the first one
        unseen.promote()
        unseen.wait()
        assert (unseen.state, is_whole(unseen)) == (State.WHOLE, True)


@pytest.mark.parametrize("piece", [PIECE_BYTES, 8192])
def test_nothing_is_written_once_cancel_has_returned(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    set_piece(monkeypatch, piece)
    drawn = random.Random(7)
    with Copier([host()]) as copier:
        for _ in range(200):
            transfer = ask(copier, LARGE, is_demand=drawn.random() < 0.5)
            for _ in range(drawn.randrange(30)):
                _ = transfer.state
            if transfer.cancel():
                transfer.into.fill_(255)
                ask(copier, A, is_demand=True).wait()
                assert bool((transfer.into == 255).all())
            else:
                assert is_whole(transfer)


def test_closing_drops_what_is_pending_and_ends_the_thread(library: ctypes.CDLL) -> None:
    lane, thread = opened(library, NEVER)
    into = [torch.zeros(CONTENTS.blob_bytes(0), dtype=torch.uint8) for _ in range(3)]
    transfers = [begin(lane, key, into[key[1] % 3], key == A) for key in (A, B, C)]
    until(lambda: has_begun(transfers[0]))
    assert thread
    lane.close()
    is_over(thread)
    lane.close()
    assert [transfer.state for transfer in transfers] == [State.DROPPED] * 3
    assert [bool(transfer.into.any()) for transfer in transfers] == [True, False, False]
    for transfer in transfers:
        assert transfer.cancel()
        with pytest.raises(AssertionError, match="was cancelled"):
            transfer.wait()
    with pytest.raises(AssertionError, match="the copier is closed"):
        begin(lane, A, into[0], is_demand=True)


def test_a_closed_lane_tells_still_what_it_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    set_piece(monkeypatch, 1024)
    with Copier([host(SLOW)]) as copier:
        ask(copier, A, is_demand=True).wait()
        copied = ask(copier, B, is_demand=False)
        until(lambda: copied.state is State.WHOLE)
    copied.wait()  # it may be due only now
    assert is_whole(copied)
    assert not copied.cancel()
    assert copier.lanes[0].num_bytes == 2 * CONTENTS.blob_bytes(0)


class Interrupted(Exception):
    pass


def test_who_waits_can_be_interrupted(library: ctypes.CDLL) -> None:
    def interrupt(*_: object) -> None:
        raise Interrupted

    usual = signal.signal(signal.SIGUSR1, interrupt)
    sender = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
    try:
        lane, thread = opened(library, NEVER)
        transfer = begin(lane, LARGE, torch.zeros(CONTENTS.blob_bytes(1), dtype=torch.uint8), is_demand=False)
        with pytest.raises(Interrupted):
            sender.start()
            transfer.wait()
        sender.join()
    finally:
        signal.signal(signal.SIGUSR1, usual)
    lane.close()
    is_over(thread)
    assert transfer.state is State.DROPPED


def test_a_lane_that_nobody_closed_ends_its_thread(library: ctypes.CDLL) -> None:
    lane, thread = opened(library, NEVER)
    begin(lane, A, torch.zeros(CONTENTS.blob_bytes(0), dtype=torch.uint8), is_demand=True)
    assert thread
    del lane
    collect()
    is_over(thread)


def test_a_forked_process_may_let_go_of_a_lane(library: ctypes.CDLL) -> None:
    """Its thread is not there, and must not be waited for."""
    lane = MemoryLane(host(), library)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            lane._end()  # as the garbage collector does
            code = 0
        finally:
            os._exit(code)
    ended = (0, 0)
    try:
        while ended[0] == 0:
            time.sleep(0.001)
            ended = os.waitpid(child, os.WNOHANG)
    except BaseException:  # the test's time is over
        os.kill(child, signal.SIGKILL)
        raise
    lane.close()
    assert ended == (child, 0)


# --- which lane -------------------------------------------------------------------------------------------------------


def lane_of(copier: Copier) -> type:
    with copier:
        transfer = begin(copier, A, torch.zeros(CONTENTS.blob_bytes(0), dtype=torch.uint8), is_demand=True)
        transfer.wait()
    assert is_whole(transfer)
    return type(copier.lanes[0])


def test_a_thread_of_pythons_copies_where_there_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lane_of(Copier([host()])) is MemoryLane
    assert lane_of(Copier([host()], SystemClock())) is ThreadLane
    monkeypatch.setattr("moec.runtime.experts.copier.memory_library", lambda: None)
    assert lane_of(Copier([host()])) is ThreadLane
