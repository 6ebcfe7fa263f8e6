"""Files that commands write: whole or not at all, so that a full disk never costs the user an older file. No torch."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from moec.diagnostics import MoecError, fail


def cache_folder() -> Path:
    """Where moec keeps what it can make again: compiled programs, libraries, kernels."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moec"


def check_place(path: Path) -> None:
    """Raises E0618 where `path` can be no file, to be asked before the work whose result it is to hold."""
    if path.is_dir():
        raise fail("E0618", f"cannot write `{path}`: it is a folder", "name a file")
    if not path.parent.is_dir():
        raise fail("E0618", f"cannot write `{path}`: its folder does not exist", "create it first")


def write_whole(path: Path, data: str | bytes) -> None:
    """Write `data` as `path`, through a file beside it that then takes its name. Raises E0618; `path` stays as it was.

    A link stays one, with its target written; rights stay as they were. What is no plain file (a pipe, /dev/stdout)
    cannot be replaced and holds nothing to lose, so it is written to directly.
    """
    check_place(path)
    content = data.encode() if isinstance(data, str) else data
    try:
        mode = path.stat().st_mode if path.exists() else None
        if mode is not None and not stat.S_ISREG(mode):
            path.write_bytes(content)
        else:
            _replace(path.resolve(), content, _default_mode() if mode is None else stat.S_IMODE(mode))
    except OSError as error:
        raise _cannot(path, error) from error


def _replace(place: Path, content: bytes, mode: int) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{place.name[:64]}.", dir=place.parent)
    made = Path(name)
    try:
        with open(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        made.chmod(mode)
        os.replace(made, place)
    finally:
        made.unlink(missing_ok=True)


def _default_mode() -> int:
    """What open() would give a new file; the umask can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return 0o666 & ~mask


def _cannot(path: Path, error: OSError) -> MoecError:
    return fail("E0618", f"cannot write `{path}`: {error.strerror or error}", "free space or choose another file")
