"""The other ranks of a torchrun run, as one rank sees them through the store: who is there, who died, who reports."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Mapping
from datetime import timedelta

from torch._C._distributed_c10d import Store

from moec.diagnostics import MoecError, fail
from moec.runtime.launch.process import Identity, is_alive, start_time
from moec.runtime.launch.rank import COLLECTIVE_TIMEOUT, join_timeout
from moec.runtime.launch.report import PeerLost
from moec.runtime.launch.seat import Seat, serves_store
from moec.runtime.launch.status import BEAT_SECONDS, Reading, read_slot
from moec.runtime.watch import Process, look_at

#: How long a rank on another host may not beat before its death explains a lost connection.
_QUIET_SECONDS = 8 * BEAT_SECONDS


class Peers:
    """What this rank knows of the others, through the store."""

    def __init__(self, seat: Seat, store: Store | None, who: str = "main") -> None:
        """`who`: the thread of this rank that asks, so that two of them do not both report."""
        self.seat, self.store, self.who = seat, store, who
        self._expected = set(range(seat.world))
        self._processes: dict[int, Identity] = {}  # of the ranks seen so far
        self._beating: list[int] = []
        if store is not None:
            store.set(f"pid/{seat.rank}", str(Identity.own()))

    def wait_for_all(self, plan: str, digests: Mapping[str, str]) -> None:
        """Return once every rank is there, and all have the same `digests` by what they are of.

        Raises:
            MoecError: E0607, naming the ranks that are not there; E0622, naming two that do not run the same.
        """
        if self.store is None:
            return
        self.store.set(f"digests/{self.seat.rank}", json.dumps(digests))
        if self.seat.rank != 0:
            self._wait_for_first(plan)
            return
        missing = self._wait_for("pid", join_timeout())
        if missing:
            self._expected.difference_update(missing)
            there, names = self.seat.world - len(missing), ", ".join(map(str, missing))
            raise fail("E0607", f"plan wants {plan}, got {there}: rank {names} missing")
        if late := self._wait_for("digests", COLLECTIVE_TIMEOUT):
            raise fail("E0607", f"rank {', '.join(map(str, late))} did not come as far as the plan's check")
        for rank in range(1, self.seat.world):
            theirs = json.loads(self.store.get(f"digests/{rank}"))
            for what, mine in digests.items():
                if theirs.get(what) != mine:
                    raise self._mismatch(rank, what, mine, str(theirs.get(what)))
        self.store.set("all here", "")

    def _wait_for(self, key: str, timeout: timedelta) -> list[int]:
        """The ranks whose `key` does not come in time, or, where one has failed, is not there then."""
        assert self.store is not None
        keys = [f"{key}/{rank}" for rank in range(self.seat.world)]
        deadline = time.monotonic() + timeout.total_seconds()
        while time.monotonic() < deadline and not self.store.check(keys):
            if self.claimed():
                raise PeerLost("a peer failed")
            time.sleep(0.05)
        return [rank for rank, name in enumerate(keys) if not self.store.check([name])]

    def _mismatch(self, rank: int, what: str, mine: str, theirs: str) -> MoecError:
        hosts = [self._process(r).host for r in (0, rank)]
        places = f" on {hosts[0]} and {hosts[1]}" if hosts[0] != hosts[1] else ""
        message = f"ranks 0 and {rank}{places} do not have the same {what}: {mine[:12]} and {theirs[:12]}"
        return fail("E0622", message, "start every rank with the same command, files and version of moec")

    def _wait_for_first(self, plan: str) -> None:
        """Wait for rank 0's word that all are here, or that it gives up."""
        assert self.store is not None
        began = time.monotonic()
        patience = join_timeout().total_seconds() + 5
        while not self.store.check(["all here"]):
            waited = time.monotonic() - began
            if self.claimed() or waited > COLLECTIVE_TIMEOUT.total_seconds() + patience:
                raise PeerLost("rank 0 did not find all ranks")
            if waited > patience and not self.store.check(["pid/0"]):
                raise fail("E0607", f"plan wants {plan}: rank 0 missing")
            time.sleep(0.02)

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

    def quiet(self) -> tuple[int, Process] | None:
        """A rank on another host that shows nothing new for two seconds, and has not ended in order."""
        assert self.store is not None
        here = socket.gethostname()
        far = [rank for rank in range(self.seat.world) if self._process(rank).host not in ("", here)]
        keys = [f"status/{rank}" for rank in far if self.store.check([f"status/{rank}"])]
        before = self.store.multi_get(keys) if keys else []
        deadline = time.monotonic() + _QUIET_SECONDS
        while keys and time.monotonic() < deadline and not self.claimed():
            time.sleep(0.05)
        after = self.store.multi_get(keys) if keys and not self.claimed() else []
        for key, old, new in zip(keys, before, after, strict=False):
            rank = int(key.partition("/")[2])
            if old == new and not self._has_left(rank):
                return rank, self.process(rank)
        return None

    def publish(self, slot: memoryview) -> None:
        """Show this rank's status to its peers."""
        if self.store is not None:
            self.store.set(f"status/{self.seat.rank}", bytes(slot).hex())

    def read(self) -> dict[int, Reading]:
        """The status of the peers that this rank watches: rank 0 watches all others, and they watch rank 0."""
        if self.store is None:
            return {}
        for rank in range(1, self.seat.world) if self.seat.rank == 0 else (0,):
            if rank not in self._beating and self.store.check([f"status/{rank}"]):
                self._beating.append(rank)
        if not self._beating:
            return {}
        slots = self.store.multi_get([f"status/{rank}" for rank in self._beating])
        return {rank: _reading(slot) for rank, slot in zip(self._beating, slots, strict=True)}

    def forget(self, rank: int) -> bool:
        """Stop watching a rank that has ended in order. Whether it has."""
        is_gone = self._has_left(rank)
        if is_gone:
            self._beating.remove(rank)
        return is_gone

    def process(self, rank: int) -> Process:
        """The process of a rank, with its state where it runs on this host."""
        self._process(rank)
        return self.known_process(rank)

    def known_process(self, rank: int) -> Process:
        """The same from what is known here, without asking the store."""
        found = self._processes.get(rank, Identity())
        return look_at(found.pid) if found.host == socket.gethostname() else Process(found.pid, host=found.host)

    def accuse(self, rank: int) -> None:
        """Name the rank that does not answer, for the peers on its host: it cannot end itself."""
        if self.store is not None:
            self.store.set("silent", str(rank))

    def end_accused(self) -> None:
        """Kill the rank that does not answer where it runs on this host and is the process that joined this run."""
        if self.store is None or not self.store.check(["silent"]):
            return
        found = self._process(int(self.store.get("silent")))
        if found.host == socket.gethostname() and found.started and found.started == start_time(found.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(found.pid, signal.SIGKILL)

    def _is_needed(self) -> bool:
        """Whether a peer may still use the store."""
        return any(not self._has_left(rank) and not self._gone(rank) for rank in self._expected)

    def _has_left(self, rank: int) -> bool:
        assert self.store is not None
        return self.store.check([f"left/{rank}"])

    def _gone(self, rank: int) -> int:
        """The pid of a rank that ran on this host and does no more, else 0."""
        found = self._process(rank)
        return found.pid if found.host == socket.gethostname() and not is_alive(found.pid) else 0

    def _process(self, rank: int) -> Identity:
        """What a rank has said of its process; an empty host while it has said nothing."""
        assert self.store is not None
        if rank not in self._processes:
            if not self.store.check([f"pid/{rank}"]):
                return Identity()
            self._processes[rank] = Identity.parse(self.store.get(f"pid/{rank}").decode())
        return self._processes[rank]


def _reading(text: bytes) -> Reading:
    return read_slot(bytes.fromhex(text.decode()))
