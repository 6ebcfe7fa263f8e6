"""Signals that end a run, as an exception in the launcher."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from moec.diagnostics import Diagnostic, MoecError


class Stopped(MoecError):
    """A signal ended the run (E0606). The exit code is 128 plus the signal's number."""

    def __init__(self, signum: int) -> None:
        super().__init__(Diagnostic("E0606", f"stopped by {signal.Signals(signum).name}"))
        self.signum = signum

    @property
    def exit_code(self) -> int:
        return 128 + self.signum


@contextmanager
def signals_raise() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into `Stopped`; a second one while cleaning up is ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, _: FrameType | None) -> None:
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        raise Stopped(signum)

    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for signum in before:
        signal.signal(signum, stop)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
