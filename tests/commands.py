"""Runs the `moec` command in a child forked from the test process, which has torch imported already: no start cost.

The child is a session of its own, so a test can count what a command leaves behind.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moec.cli.app import main

#: After this a command counts as hung. Generous: what a test asserts is never a time near it.
PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class Done:
    """Exit status (minus the signal's number where one killed it) and output of a command."""

    code: int
    out: str
    err: str

    @property
    def error_lines(self) -> list[str]:
        return [line for line in [*self.out.splitlines(), *self.err.splitlines()] if "moec: error[" in line]


class Command:
    """A running command. `pid` is also its session."""

    def __init__(
        self, run: Callable[[], object], env: dict[str, str] | None = None, pipe: tuple[int, int] | None = None
    ) -> None:
        """Start `run()` with `env` added to the environment; `pipe`: standard output is its write end."""
        self._folder = tempfile.TemporaryDirectory()
        self._out, self._err = (Path(self._folder.name) / name for name in ("out", "err"))
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._become(run, env or {}, pipe)

    def _become(self, run: Callable[[], object], env: dict[str, str], pipe: tuple[int, int] | None) -> None:
        code = 99
        try:
            os.setsid()
            signal.alarm(0)
            for signum in (signal.SIGINT, signal.SIGTERM):
                signal.signal(signum, signal.SIG_DFL if signum == signal.SIGTERM else signal.default_int_handler)
            os.environ.update(env)
            if pipe is not None:
                os.close(pipe[0])
            os.dup2(pipe[1] if pipe is not None else os.open(self._out, os.O_CREAT | os.O_WRONLY), 1)
            os.dup2(os.open(self._err, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
            try:
                run()
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 0 if end.code is None else 98
            sys.stdout.flush()
        finally:
            os._exit(code)

    def wait(self) -> Done:
        """The finished command. Fails the test when it hangs, after killing its whole session."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                out = self._out.read_text() if self._out.exists() else ""
                return Done(os.waitstatus_to_exitcode(status), out, self._err.read_text())
            if time.monotonic() > deadline:
                os.killpg(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise AssertionError(f"hung; standard error: {self._err.read_text()}")
            time.sleep(0.01)

    def wait_for(self, word: str) -> None:
        """Until `word` is on its standard output."""
        self._until(lambda: self._out.exists() and word in self._out.read_text(), f"`{word}` never appeared")

    def wait_until_alone(self) -> None:
        """Until no process of its session is left."""
        self._until(lambda: not session_members(self.pid), f"left behind: {session_members(self.pid)}")

    @staticmethod
    def _until(condition: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, otherwise
            time.sleep(0.01)


def moec(*args: str | Path, env: dict[str, str] | None = None, pipe: tuple[int, int] | None = None) -> Command:
    """Start `moec ARGS`."""

    def run() -> None:
        sys.argv = ["moec", *map(str, args)]
        main()

    return Command(run, env, pipe)


def session_members(session: int) -> Sequence[int]:
    """Pids of the processes of a session that are not zombies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # gone meanwhile
        if fields[0] != "Z" and int(fields[3]) == session:
            found.append(int(stat.parts[2]))
    return found
