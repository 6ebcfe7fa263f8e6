"""Strict reading of the small JSON files beside a model's weights. Standard library only.

Python's own parser keeps the last of two equal keys and takes NaN; a checkpoint that depends on either is damaged.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from moec.diagnostics import fail

MIB = 1024 * 1024


class DuplicateKey(ValueError):
    """An object names a key twice; `args[0]` is the key."""


def regular_size(path: Path, what: str) -> int:
    """Bytes of a regular file (links followed). Raises E0706 for anything else, before it is opened."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        raise fail(
            "E0706", f"{what} `{path}` cannot be read: {_reason(error)}", "check the path and its rights"
        ) from None
    if not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "a device, pipe or socket"
        raise fail("E0706", f"{what} `{path}` is {kind}, not a file", "give the folder that holds config.json")
    return status.st_size


def parse_json(text: bytes) -> Any:
    """The value, with duplicate keys and NaN refused. Raises ValueError (`DuplicateKey` among them)."""
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json_object(path: Path, code: str, what: str, limit: int) -> tuple[dict[str, Any], bytes]:
    """The object in the file at `path` and the file's bytes. Raises E0706, or `code` naming the file."""
    size = regular_size(path, what)
    if size > limit:
        raise fail(code, f"{what} `{path}` has {size} bytes; the limit is {limit}", "this is not a file moec can use")
    data = b""
    try:
        data = path.read_bytes()
        value = parse_json(data)
    except OSError as error:
        raise fail("E0706", f"{what} `{path}` cannot be read: {_reason(error)}") from None
    except DuplicateKey as error:
        raise fail(code, f"{what} `{path}` names `{error.args[0]}` twice", "fetch the file again") from None
    except ValueError as error:
        hint = "run `git lfs pull` in that folder" if is_lfs_pointer(data) else "fetch the file again"
        raise fail(code, f"{what} `{path}` is not JSON: {error}", hint) from None
    if not isinstance(value, dict):
        raise fail(code, f"{what} `{path}` holds {type(value).__name__}, not an object", "fetch the file again")
    return value, data


def is_lfs_pointer(head: bytes) -> bool:
    """Whether a file that begins with `head` is the placeholder that Git LFS leaves for the real one."""
    return head.startswith(b"version https://git-lfs")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise DuplicateKey(next(name for name in names if names.count(name) > 1))
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
