"""`moec run` starts its own ranks: fork them from this process, watch them, and say in one line what went wrong.

1. torch is imported here, once; ranks are forked before any thread starts, which takes hundredths of a second where
   fresh processes take seconds.
2. Ranks meet over a TCP store on a loopback port that this process binds, so no two runs fight for a port.
3. Each rank has a pipe to the launcher for its result or its error report. End of file on it means the rank is gone.
4. A rank that is there but does not answer, or is stuck, is found by what it writes of itself (`watch`).
5. The first root cause wins: a killed rank or a rank's own error, over a peer's "connection closed".
6. Whatever happens, every rank started here is killed and reaped. Ranks also die with the launcher (`die_with`).
"""

from __future__ import annotations

import json
import mmap
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from moec.diagnostics import MoecError
from moec.runtime.launch.fault import planted_fault
from moec.runtime.launch.rank import Rank, die_with, join_timeout, start_rank
from moec.runtime.launch.report import Report, died, encode_event, note_slow, report_of
from moec.runtime.launch.signals import signals_raise
from moec.runtime.launch.status import SLOT_BYTES, Status, keep_beating, read_slot
from moec.runtime.watch import Process, Watch, look_at

#: How long reports of lost peers may wait for the report of the rank that was lost.
_ROOT_CAUSE_SECONDS = 2.0
#: How often the launcher looks after its ranks. It wakes up at once for a rank that ends.
_LOOK_SECONDS = 0.25
_POLL_SECONDS = 0.1

Main = Callable[[Rank], object]


def run_ranks(main: Main, world: int, *, kind: str = "cpu", threads: int | None = None) -> list[object]:
    """Run `main(rank)` in `world` forked ranks and give their results, which must be JSON values, in rank order.

    Call it from the main thread of a process that has started no torch threads. `kind`: cpu or cuda.

    Raises:
        MoecError: what a rank raised, E0601 when a rank was killed, E0620 or E0621 when it is silent or stuck, E0699
            for a bug in a rank, E0606 after a signal.
        BrokenPipeError: nobody reads the standard output any more.
    """
    with signals_raise(), _Crew(main, world, kind, threads) as crew:
        for rank in range(world):
            crew.start(rank)
        crew.close_listener()
        return crew.wait()


@dataclass
class _Member:
    """A rank as the launcher sees it. `pid` is 0 once the rank is reaped."""

    pid: int
    pipe: int
    pending: bytes = b""
    result: list[object] = field(default_factory=list)
    report: Report | None = None


class _Crew:
    """The ranks of one run."""

    def __init__(self, main: Main, world: int, kind: str, threads: int | None) -> None:
        self.main, self.world, self.kind, self.threads = main, world, kind, threads
        self.fault = planted_fault()
        self.watch = Watch()
        self.members: dict[int, _Member] = {}
        self.slots = mmap.mmap(-1, SLOT_BYTES * world)
        self.selector = selectors.DefaultSelector()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=world)
        self.port = self.listener.getsockname()[1]
        self.waiting_since: float | None = None
        self.looked_at = time.monotonic()

    def __enter__(self) -> _Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members.values():
            if member.pid:
                os.kill(member.pid, signal.SIGKILL)
                os.waitpid(member.pid, 0)
            os.close(member.pipe)
        self.selector.close()
        self.close_listener()

    def close_listener(self) -> None:
        self.listener.close()

    def slot(self, rank: int) -> memoryview:
        return memoryview(self.slots)[SLOT_BYTES * rank : SLOT_BYTES * (rank + 1)]

    def start(self, rank: int) -> None:
        """Fork one rank."""
        launcher = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._be_rank(rank, launcher, write_end)
        os.close(write_end)
        self.members[rank] = _Member(pid, read_end)
        self.selector.register(read_end, selectors.EVENT_READ, rank)

    def wait(self) -> list[object]:
        """Read reports until every rank is done, or one has failed and the cause is known."""
        while self.selector.get_map():
            for key, _ in self.selector.select(timeout=_POLL_SECONDS):
                self._read(key.data)
            self._raise_cause()
            if time.monotonic() - self.looked_at >= _LOOK_SECONDS:
                self._look()
        self._raise_cause()
        return [self.members[rank].result[0] for rank in range(self.world)]

    def _look(self) -> None:
        """Raise what is wrong with a rank that is still there, and note which one is slow."""
        self.looked_at = time.monotonic()
        there = [rank for rank, member in self.members.items() if member.pid and not member.result]
        running = {rank: read_slot(self.slot(rank)) for rank in there}
        if found := self.watch.look(self.looked_at, running, self._process):
            raise MoecError(found.report.diagnostic)
        for note in self.watch.slow(running, self._process):
            note_slow(note)

    def _process(self, rank: int) -> Process:
        return look_at(self.members[rank].pid)

    def _read(self, rank: int) -> None:
        member = self.members[rank]
        data = os.read(member.pipe, 1 << 20)
        *lines, member.pending = (member.pending + data).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if "closed" in event:
                raise BrokenPipeError
            if "report" in event:
                member.report = Report.from_json(event["report"])
            else:
                member.result = [event["result"]]
        if not data:
            self.selector.unregister(member.pipe)
            self._reap(rank, member)

    def _reap(self, rank: int, member: _Member) -> None:
        """Take the exit status of a rank whose pipe is closed; without result or report, that is its death."""
        pid, member.pid = member.pid, 0
        _, status = os.waitpid(pid, 0)
        if member.report is not None or member.result:
            return
        if os.WIFSIGNALED(status):
            if os.WTERMSIG(status) in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                time.sleep(0.2)  # sent to the whole process group: our own handler is about to say so
            how = f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
        else:
            how = f"ended with status {os.WEXITSTATUS(status)} and no result"
        member.report = died(rank, pid, how, read_slot(self.slot(rank)).place)

    def _raise_cause(self) -> None:
        """Raise the first root cause there is; reports of lost peers only when no cause turns up."""
        reports = [member.report for member in self.members.values() if member.report is not None]
        causes = [report for report in reports if not report.derived]
        if causes:
            raise MoecError(causes[0].diagnostic)
        if reports:
            self.waiting_since = self.waiting_since or time.monotonic()
            if not self.selector.get_map() or time.monotonic() - self.waiting_since > _ROOT_CAUSE_SECONDS:
                raise MoecError(reports[0].diagnostic)

    def _be_rank(self, rank: int, launcher: int, pipe: int) -> NoReturn:
        """The life of a forked rank. Never returns into the launcher's stack."""
        code = 1
        try:
            die_with(launcher)
            for signum in (signal.SIGINT, signal.SIGHUP):  # the terminal sends these to all; the launcher acts
                signal.signal(signum, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for member in self.members.values():
                os.close(member.pipe)
            os.write(pipe, self._work(rank))
            code = 0
        finally:
            os._exit(code)

    def _work(self, rank: int) -> bytes:
        """Run `main` in this rank; the event that tells the launcher how it went."""
        status = Status(rank, self.slot(rank), self.fault)
        keep_beating(status)
        try:
            store = self._join(rank) if self.world > 1 else None
            seat = start_rank(rank, self.world, (rank, self.world), self.kind, store, status, self.threads)
            result = self.main(seat)
            sys.stdout.flush()
            status.begin("shutdown")
            if self.world > 1:
                dist.destroy_process_group()
            return encode_event({"result": result})
        except BrokenPipeError:
            return encode_event({"closed": True})
        except BaseException as error:
            return encode_event({"report": report_of(error, status, self.world).to_json()})

    def _join(self, rank: int) -> Store:
        """The store ranks meet at. Rank 0 serves it on the socket the launcher bound."""
        # Ranks of one host need no other network.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        if rank == 0:
            return TCPStore(
                "127.0.0.1",
                self.port,
                None,
                True,
                join_timeout(),
                wait_for_workers=False,
                master_listen_fd=self.listener.detach(),
            )
        return TCPStore("127.0.0.1", self.port, None, False, join_timeout(), wait_for_workers=False)


def prepare_fork() -> None:
    """Keep torch from starting threads in this process, so that it may fork ranks. Call it right after the import."""
    torch.set_num_threads(1)
