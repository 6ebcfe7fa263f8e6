"""How a rank says what went wrong: one report, sent as JSON (never pickle) or printed as the one line of a failed run.

A report is `derived` when it only says that a peer is gone: the peer's own report, or its death, is the cause and wins.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import traceback
from dataclasses import asdict, dataclass

from moec.diagnostics import Diagnostic, MoecError
from moec.runtime.launch.status import Place, Status

DEBUG_VARIABLE = "MOEC_DEBUG"
#: How torch.distributed words the loss of a peer; its exceptions are plain RuntimeErrors on gloo.
_LOST = re.compile(
    r"connection (was )?(closed|reset|refused)|closed by peer|broken pipe|timed out|gloo/transport|socket timeout"
    r"|recvvalue failed|nccl|remote process exited|failed to (recv|send)",
    re.IGNORECASE,
)
#: How libraries word EMFILE: gloo in a RuntimeError, libuv (the store) without the reason.
_NO_FILES = re.compile(r"too many open files|failed to init uv loop", re.IGNORECASE)

#: Errors every rank would report alike: naming one of them would mislead.
_ABOUT_ALL = ("E0603", "E0605", "E0607", "E0622")
_COMPILER = ("E01", "E02", "E03", "E04", "E05")


class PeerLost(MoecError):
    """A collective failed because a peer is gone or silent (E0602)."""

    def __init__(self, message: str) -> None:
        super().__init__(Diagnostic("E0602", message, help="the line of the rank that failed first says why"))


@dataclass(frozen=True)
class Report:
    """An error of one rank as plain text fields."""

    code: str
    message: str
    help: str = ""
    derived: bool = False

    @property
    def diagnostic(self) -> Diagnostic:
        return Diagnostic(self.code, self.message, help=self.help)

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, object]) -> Report:
        return Report(str(value["code"]), str(value["message"]), str(value["help"]), bool(value["derived"]))


def is_peer_loss(error: BaseException) -> bool:
    """Whether `error` only tells that some peer is gone. Looks at the words of RuntimeErrors of torch.distributed."""
    if isinstance(error, PeerLost):
        return True
    if is_out_of_files(error):
        return False
    came_from_torch = type(error).__module__.startswith("torch") or type(error) is RuntimeError
    return came_from_torch and bool(_LOST.search(str(error)))


def is_out_of_files(error: BaseException) -> bool:
    """Whether this process may not open another file or socket, whichever library met the limit."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return True
    return not isinstance(error, MoecError) and bool(_NO_FILES.search(str(error)))


def report_of(error: BaseException, status: Status, world: int) -> Report:
    """The report of an exception that ended a rank. With MOEC_DEBUG set, the traceback goes to standard error first."""
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exception(error, file=sys.stderr)
    code = error.diagnostics[0].code if isinstance(error, MoecError) else ""
    is_own = world > 1 and code not in _ABOUT_ALL and not code.startswith(_COMPILER)
    whom = f" ({describe_rank(status.rank, os.getpid(), status.place)})" if is_own else ""
    if is_peer_loss(error):
        message = f"rank {status.rank} lost its peers{status.place}: {first_line(error)}"
        return Report("E0602", message, derived=True)
    if isinstance(error, MoecError):
        first = error.diagnostics[0]
        where = f" ({first.primary.span.where})" if first.primary else ""
        return Report(first.code, f"{first.message}{where}{whom}", first.help)
    return internal_report(error, whom)


def internal_report(error: BaseException, whom: str = "") -> Report:
    """The report of an exception nobody expected: a bug in moec, but for a limit that any line may meet."""
    if is_out_of_files(error):
        return Report("E0623", "this process may not open more files", "raise the limit: ulimit -n 1024")
    help = "" if os.environ.get(DEBUG_VARIABLE) else f"set {DEBUG_VARIABLE}=1 for the traceback, and report it"
    return Report("E0699", f"internal error: {type(error).__name__}: {first_line(error)}{whom}", help)


def describe_rank(rank: int, pid: int, place: Place) -> str:
    return f"rank {rank}, pid {pid}" + (f",{place}" if place.op else "")


def died(rank: int, pid: int, how: str, place: Place) -> Report:
    """The report about a rank that could not report itself."""
    help = "the kernel kills a process this way when memory runs out" if "SIGKILL" in how else ""
    return Report("E0601", f"rank {rank} (pid {pid}) {how}{place}", help)


def note_slow(note: str) -> None:
    """Print a note on standard error, on a line of its own where the text of the run goes to the same terminal."""
    sys.stdout.flush()
    sys.stderr.write(f"{chr(10) if sys.stderr.isatty() else ''}moec: note: {note}\n")
    sys.stderr.flush()


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without gloo's source position and advice."""
    line = (str(error).strip() or "no message").splitlines()[0]
    return re.sub(r"^\[/\S+\] ", "", line).partition(". This is typically")[0][:300]


def encode_event(event: dict[str, object]) -> bytes:
    """One line of JSON for the pipe to the launcher."""
    return json.dumps(event).encode() + b"\n"
