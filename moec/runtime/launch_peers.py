"""The other ranks of a torchrun run, as one rank sees them through the store: who is there, who died, who reports."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from moec.diagnostics import fail
from moec.runtime.launch_rank import join_timeout
from moec.runtime.launch_report import PeerLost

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Seat:
    """The numbers torchrun gave this process."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int


def read_seat(env: Mapping[str, str]) -> Seat:
    """The seat an environment describes. LOCAL_WORLD_SIZE may be missing (Slurm): then all ranks are on this host.

    Raises:
        MoecError: E0609, a variable is missing or is no number.
    """
    world = env.get("WORLD_SIZE", "")
    wanted = _NUMBERS if world == "1" else _NUMBERS + _ADDRESS
    missing = [name for name in wanted if name not in env]
    wrong = [name for name in (*_NUMBERS, "MASTER_PORT") if not env.get(name, "0").isdecimal()]
    if missing or wrong:
        what = f"{', '.join(missing)} missing" if missing else f"{', '.join(wrong)} is not a number"
        raise fail("E0609", f"this process looks like a rank of torchrun, but of its variables {what}",
                   "start it with torchrun, or unset RANK and WORLD_SIZE")  # fmt: skip
    rank, local = int(env["RANK"]), int(env["LOCAL_RANK"])
    local_world = int(env.get("LOCAL_WORLD_SIZE", world))
    return Seat(rank, int(world), local, local_world, env.get("MASTER_ADDR", ""), int(env.get("MASTER_PORT", "0")))


class Peers:
    """What this rank knows of the others, through the store."""

    def __init__(self, seat: Seat, store: Store | None, who: str = "main") -> None:
        """`who`: the thread of this rank that asks, so that two of them do not both report."""
        self.seat, self.store, self.who = seat, store, who
        self._expected = set(range(seat.world))
        self._where: dict[int, str] = {}  # host and pid of the ranks seen so far
        if store is not None:
            store.set(f"pid/{seat.rank}", f"{socket.gethostname()} {os.getpid()}")

    def wait_for_all(self, plan: str) -> None:
        """Return once every rank is there.

        Raises:
            MoecError: E0607, on rank 0, naming the ranks that are not.
        """
        if self.store is None:
            return
        keys = [f"pid/{rank}" for rank in range(self.seat.world)]
        if self.seat.rank != 0:
            self._wait_for_first()
            return
        try:
            self.store.wait(keys, join_timeout())
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            self._expected.difference_update(missing)
            there, names = self.seat.world - len(missing), ", ".join(map(str, missing))
            raise fail("E0607", f"plan wants {plan}, got {there}: rank {names} missing") from error
        self.store.set("all here", "")

    def _wait_for_first(self) -> None:
        """Wait for rank 0's word that all are here, or that it gives up."""
        assert self.store is not None
        deadline = time.monotonic() + join_timeout().total_seconds() + 5
        while not self.store.check(["all here"]):
            if self.claimed() or time.monotonic() > deadline:
                raise PeerLost("rank 0 did not find all ranks")
            time.sleep(0.05)

    def claim(self, word: str = "error") -> bool:
        """Whether this thread of this rank is the one to report. The first to ask is."""
        if self.store is None:
            return True
        mine = f"{word} {self.seat.rank} {self.who}"
        return bool(self.store.compare_set("claim", "", mine).decode() == mine)

    def claimed(self) -> str:
        """The word of the rank that reports, or the empty string while none does."""
        return self._claim().partition(" ")[0]

    def is_claimed_elsewhere(self) -> bool:
        """Whether another rank than this one reports."""
        claim = self._claim().split()
        return bool(claim) and claim[1] != str(self.seat.rank)

    def _claim(self) -> str:
        if self.store is None or not self.store.check(["claim"]):
            return ""
        return self.store.get("claim").decode()

    def leave(self, seconds: float) -> None:
        """Say that this rank's end is orderly. Where it serves the store, stay `seconds` at most for the others."""
        if self.store is None:
            return
        with contextlib.suppress(RuntimeError):  # the store went first
            self.store.set(f"left/{self.seat.rank}", "")
            deadline = time.monotonic() + seconds
            while serves_store(self.seat) and time.monotonic() < deadline and self._is_needed():
                time.sleep(0.02)

    def dead(self) -> tuple[int, int] | None:
        """Rank and pid of a peer on this host whose process is gone without a word."""
        for rank in range(self.seat.world if self.store is not None else 0):
            if (pid := self._gone(rank)) and not self._has_left(rank):
                return rank, pid
        return None

    def _is_needed(self) -> bool:
        """Whether a peer may still use the store."""
        return any(not self._has_left(rank) and not self._gone(rank) for rank in self._expected)

    def _has_left(self, rank: int) -> bool:
        assert self.store is not None
        return self.store.check([f"left/{rank}"])

    def _gone(self, rank: int) -> int:
        """The pid of a rank that ran on this host and does no more, else 0."""
        assert self.store is not None
        if rank not in self._where and self.store.check([f"pid/{rank}"]):
            self._where[rank] = self.store.get(f"pid/{rank}").decode()
        host, _, pid = self._where.get(rank, "").rpartition(" ")
        return int(pid) if host == socket.gethostname() and not is_alive(int(pid)) else 0


def serves_store(seat: Seat) -> bool:
    """Whether this rank serves the store: rank 0 does where torchrun does not."""
    return seat.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def connect(seat: Seat, may_serve: bool = True) -> Store | None:
    """The store of the run, under a prefix of this attempt; none for a world of one rank.

    Raises:
        MoecError: E0604, rank 0 cannot serve it because the port is taken; E0607, nobody serves it.
    """
    if seat.world == 1:
        return None
    attempt = f"moec/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    try:
        store = TCPStore(
            seat.address,
            seat.port,
            None,
            may_serve and serves_store(seat),
            join_timeout(),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        where = f"{seat.address}:{seat.port}"
        if "EADDRINUSE" in str(error):
            raise fail("E0604", f"{where} is in use{port_holder(seat.port)}", "choose another MASTER_PORT") from error
        raise fail("E0607", f"rank {seat.rank} finds nobody at {where}", "is rank 0 running there?") from error
    return PrefixStore(attempt, store)


def port_holder(port: int) -> str:
    """` by pid N` for the process of this user that listens on a TCP port, or the empty string."""
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    rows = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    inodes = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(descriptor) in inodes:
                return f" by pid {descriptor.parts[2]}"
        except OSError:
            continue  # the process is gone, or not ours to look at
    return ""


def is_alive(pid: int) -> bool:
    """False for a process that is gone or a zombie."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:
        return True  # not ours, or no /proc
