"""One rank of a run that torchrun (or Slurm) started. It finds its peers by the environment; of all ranks one reports.

1. Every rank publishes its pid in the store at MASTER_ADDR:MASTER_PORT, which torchrun serves, or else rank 0.
2. The world is held against the plan, and rank 0 waits for all ranks, so that a missing one is named, and for the
   digests of what they are to run, so that they cannot talk past each other.
3. A rank that fails claims the right to print in the store; the first claim wins, the others are silent. A rank that
   only lost its peers first looks whether a peer's process is gone, and then speaks for it.
4. A thread follows the peers' fate and the signals (torchrun stops the other ranks by SIGTERM as soon as one is dead),
   since the main thread may sit in a collective that never ends. It also shows this rank's status to the peers:
   rank 0 watches all of them, and they watch rank 0.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NoReturn, Protocol

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from moec.diagnostics import EXIT_PEER, MoecError, fail
from moec.runtime.launch.fault import planted_fault
from moec.runtime.launch.peers import Peers
from moec.runtime.launch.rank import Rank, die_with, start_rank
from moec.runtime.launch.report import Report, died, note_slow, report_of
from moec.runtime.launch.seat import connect, read_seat, torchrun_serves_store
from moec.runtime.launch.signals import Stopped
from moec.runtime.launch.status import BEAT_SECONDS, Status, keep_beating, read_slot
from moec.runtime.watch import Watch

#: How long a rank that lost its peers waits for the rank that knows why.
_CLAIM_SECONDS = 1.0
#: How long a rank that failed and serves the store waits for the others to see why.
_FAREWELL_SECONDS = 5.0
#: How often a rank looks whether its peers are alive and silent.
_WATCH_SECONDS = 0.25
#: How long a rank that is done and serves the store waits for slower ranks to be done.
_LINGER_SECONDS = 30.0

#: Beats without a word of the store after which rank 0, which serves it, is silent.
_STORE_BEATS = int(5 / BEAT_SECONDS)


class Start(Protocol):
    """Gives a process its `Rank`, once all ranks are there and agree on the `digests`, by what they are of."""

    def __call__(self, world: int, mesh: str, kind: str, digests: Mapping[str, str] | None = None) -> Rank: ...


def is_started_by_torchrun() -> bool:
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def run_as_rank(work: Callable[[Start], object]) -> NoReturn:
    """Run `work(start)` as one rank, report what goes wrong, and end the process.

    `work` prepares, then calls `start(world, mesh, kind)` with the plan's number of ranks, its mesh in words and the
    kind of device, and digests of what must be the same on all ranks, to get its `Rank`.
    """
    status, peers = Status(), None
    try:
        seat = read_seat(os.environ)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            die_with(os.getppid())  # torchrun killed by SIGKILL leaves its ranks alive
        store = connect(seat)
        peers = Peers(seat, store)
        status = Status(seat.rank, fault=planted_fault())
        status.begin("setup", "init")
        _watch(Peers(seat, connect(seat, may_serve=False), "watch"), status)
        base = PrefixStore("torch", store) if store is not None else None

        def start(world: int, mesh: str, kind: str, digests: Mapping[str, str] | None = None) -> Rank:
            status.enter("handshake")
            plan = f"{world} rank{'s' * (world != 1)} ({mesh})"
            if seat.world != world:
                again = f"start it with torchrun --nproc-per-node {world}"
                raise fail("E0603", f"plan wants {plan}, got {seat.world}", again)
            assert peers is not None
            peers.wait_for_all(plan, digests or {})
            return start_rank(seat.rank, world, (seat.local_rank, seat.local_world), kind, base, status)

        work(start)
        sys.stdout.flush()
        if dist.is_initialized():
            dist.destroy_process_group()
        peers.leave(_LINGER_SECONDS)
        _end(0)
    except BrokenPipeError:
        if peers is not None:
            peers.claim("closed")
        _end(0)
    except BaseException as error:
        _end(_report(error, status, peers))


def _report(error: BaseException, status: Status, peers: Peers | None) -> int:
    """Print the line of the run if it is this rank's to print. Gives the exit code."""
    report = report_of(error, status, peers.seat.world if peers else 1)
    code = error.exit_code if isinstance(error, MoecError) else report.diagnostic.exit_code
    if peers is None:
        _print(report)
        return code
    try:
        return _report_lost(report, status, peers) if report.derived else _report_own(report, code, peers)
    except RuntimeError:  # the store is gone, and with it rank 0, which served it: the next rank says so
        if peers.seat.rank == 1:
            _print(Report("E0601", f"rank 0 died{status.place}"))
        return EXIT_PEER


def _report_own(report: Report, code: int, peers: Peers) -> int:
    if peers.claim():
        _print(report)
    peers.leave(_FAREWELL_SECONDS)
    return code


def _report_lost(report: Report, status: Status, peers: Peers) -> int:
    """Speak for a peer that cannot; for the loss itself only when nobody knows why."""
    deadline = time.monotonic() + _CLAIM_SECONDS
    found = None
    while not peers.claimed() and found is None and time.monotonic() < deadline:
        found = peers.dead()
        time.sleep(0.01)
    if found is not None:
        report = died(*found, "died", status.place)
    elif not peers.claimed() and (far := peers.quiet()) is not None:
        rank, process = far
        report = Report("E0601", f"rank {rank} ({process}) died, or its host is gone,{status.place}")
    if not peers.claimed() and peers.claim():
        _print(report)
    code = 0 if peers.claimed() == "closed" else EXIT_PEER
    peers.leave(_FAREWELL_SECONDS)  # the store may be gone from here on
    return code


def _print(report: Report) -> None:
    sys.stdout.flush()
    print(report.diagnostic.one_line(), file=sys.stderr, flush=True)  # noqa: T201


def _end(code: int) -> NoReturn:
    """Leave without the exit handlers: a process group with a dead peer may wait in them."""
    sys.stderr.flush()
    os._exit(code)


def _watch(peers: Peers, status: Status) -> None:
    """Follow signals and the fate of the peers in a thread of its own: the main thread may sit in a collective."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: None)  # the wakeup descriptor wants a handler
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    watch_ranks, guard = Watch(), _StoreGuard(peers)

    def watch() -> None:
        lost = Report("E0602", f"rank {status.rank} lost its peers", derived=True)
        with contextlib.suppress(RuntimeError):  # without a store, only signals are left to follow
            while not select.select([read_end], [], [], _WATCH_SECONDS)[0]:
                guard.beats = 0
                peers.publish(status.slot)
                if peers.is_claimed_elsewhere() or (not peers.claimed() and peers.dead() is not None):
                    peers.end_accused()
                    _end(_report_lost(lost, status, peers))
                _look(watch_ranks, peers, status)
        guard.is_on = False
        stopped = Stopped(os.read(read_end, 1)[0])
        lost = Report("E0606", stopped.diagnostics[0].message, derived=True)
        with contextlib.suppress(RuntimeError):
            if peers.claimed() and not peers.is_claimed_elsewhere():
                return  # the main thread is reporting, and then ends the process
            _report_lost(lost, status, peers)
        _end(stopped.exit_code)

    keep_beating(status, guard.beat)
    threading.Thread(target=watch, daemon=True).start()


def _look(watch: Watch, peers: Peers, status: Status) -> None:
    """End this process, and with it the run, when a peer (or rank 0 itself) is silent or stuck."""
    ranks = peers.read()
    if peers.seat.rank == 0 and peers.store is not None:
        ranks[0] = read_slot(status.slot)
    found = watch.look(time.monotonic(), ranks, peers.process)
    if found is not None and not peers.forget(found.rank):
        peers.accuse(found.rank)
        here = f" when it last showed; rank {status.rank} waits{status.place}" if found.rank != status.rank else ""
        if peers.claim():
            _print(replace(found.report, message=found.report.message + here))
        peers.end_accused()
        peers.leave(_FAREWELL_SECONDS)
        _end(EXIT_PEER)
    if peers.seat.rank == 0:
        for note in watch.slow(ranks, peers.process):
            note_slow(note)


class _StoreGuard:
    """Finds a rank 0 that serves the store and does not answer: whoever asks the store then waits for ever.

    A store that torchrun serves is not guarded: torchrun may be suspended, its ranks go on.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.beats = 0
        self.is_on = peers.store is not None and peers.seat.rank != 0 and not torchrun_serves_store()

    def beat(self) -> None:
        """Called at each beat; the thread that talks to the store sets `beats` to 0 whenever it was answered."""
        self.beats += 1
        if not self.is_on or self.beats < _STORE_BEATS:
            return
        if self.peers.seat.rank == 1:  # the store cannot say who reports
            process = self.peers.known_process(0)
            _print(Report("E0620", f"rank 0 ({process}) stopped answering; it serves the store where the ranks meet"))
        _end(EXIT_PEER)
