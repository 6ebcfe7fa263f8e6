"""How a command ends: its errors in words, its exit code, and never a traceback for bad input.

No torch here, because every command goes through this module.
"""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Callable
from typing import NoReturn, ParamSpec

import typer

from moec.diagnostics import Diagnostic, MoecError, fail
from moec.runtime.launch.report import DEBUG_VARIABLE, internal_report

P = ParamSpec("P")

EXIT_CODES = """\b
Exit codes: 0 done; 1 the program is wrong; 2 wrong usage; 3 an input is damaged, stale or does not match;
4 the environment says no; 5 a rank failed or the world size does not fit; 6 a numeric check failed;
70 a bug in moec; 130 and 143 stopped by SIGINT and SIGTERM."""


def epilog(example: str) -> str:
    """What stands below the help of a command: an example and the exit codes."""
    return f"Example: {example}\n\n{EXIT_CODES}"


def guarded(command: Callable[P, object], in_one_line: bool = False) -> Callable[P, None]:
    """`command` with every exception turned into text on standard error and an exit code.

    `in_one_line`: print one line even where the error has source lines to show, as `moec run` promises.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            _open_missing()
            command(*args, **kwargs)
            sys.stdout.flush()
        except MoecError as error:
            _clear_bar()
            _show(error, in_one_line)
            raise typer.Exit(error.exit_code) from None
        except BrokenPipeError:
            _close_stdout()
            raise typer.Exit(0) from None
        except OSError as error:
            if not _is_about_output(error):
                _bug(error)
            _close_stdout()
            _show(cannot_print(error), in_one_line)
            raise typer.Exit(4) from None
        except KeyboardInterrupt:
            _say(Diagnostic("E0606", "stopped by SIGINT").one_line())
            raise typer.Exit(130) from None
        except (typer.Exit, typer.BadParameter):
            raise
        except Exception as error:
            _bug(error)

    return run


def say(line: str) -> None:
    """One line on standard error."""
    _say(line)


def debug(is_on: bool) -> None:
    """Show tracebacks from here on, in ranks too."""
    if is_on:
        os.environ[DEBUG_VARIABLE] = "1"


def _show(error: MoecError, in_one_line: bool) -> None:
    first, others = error.diagnostics[0], len(error.diagnostics) - 1
    if in_one_line:
        _say(first.one_line() + (f" (and {others} more: see `moec check`)" if others else ""))
    elif others or first.primary is not None:
        _say(error.render())
    else:
        _say(first.one_line())


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _clear_bar() -> None:
    """On a terminal, remove the progress bar of a rank that was ended while it showed one, and show the cursor."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[2K\x1b[?25h")


def _bug(error: Exception) -> NoReturn:
    report = internal_report(error)
    _say(report.diagnostic.one_line())
    raise typer.Exit(report.diagnostic.exit_code) from None


def _open_missing() -> None:
    """Where the caller closed standard output or error, what is printed there goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def cannot_print(error: OSError) -> MoecError:
    """The error of an output that takes no more, such as a full disk."""
    return fail("E0618", f"cannot write standard output: {error.strerror}", "free space or send it elsewhere")


def _is_about_output(error: OSError) -> bool:
    """Whether standard output cannot take more: only writes to it name no file and fail in this way."""
    return error.filename is None and error.errno in (errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EDQUOT)


def _close_stdout() -> None:
    """Point standard output at nothing, so that the flush at exit does not meet the closed pipe again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
