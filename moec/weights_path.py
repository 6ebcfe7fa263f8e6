"""Where the weights named in a `.moe` file lie on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from moec.diagnostics import fail


def find_weights(
    written: str | None, bases: Path | Sequence[Path], given: Path | None = None, must_exist: bool = True
) -> Path | None:
    """The model folder: `given` (`--weights`) if there is one, else the path as written, else the hub's local cache.

    A relative path is looked up in the folder of the `.moe` file; for an artifact first in the folder that holds it,
    where it may have been moved to with its weights. Never in the current folder as such. Nothing
    is ever downloaded. None: the file names no weights, or they are not here and need not be. Raises E0760, E0761.
    """
    if given is not None:
        if not given.is_dir():
            raise fail("E0761", f"there is no model folder at `{given}`", "give --weights a folder with config.json")
        return given
    if written is None:
        if must_exist:
            raise fail("E0760", "the program names no weights", "pass --weights DIR, or compile from a model folder")
        return None
    starts = list(dict.fromkeys([bases] if isinstance(bases, Path) else bases))
    places = [*(base / written for base in starts), *_cached(written)]
    here = [folder for folder in places if folder.is_dir()]
    models = [folder for folder in here if (folder / "config.json").is_file()]  # `.` is always some folder
    if models or (here and len(starts) == 1):
        return (models or here)[0]
    if must_exist:
        looked = ", ".join(f"`{folder}`" for folder in places)
        raise fail(
            "E0761", f"the weights `{written}` are not on this machine (looked in {looked})", "pass --weights DIR"
        )
    return None


def _cached(written: str) -> list[Path]:
    """Snapshots of `owner/name` in the local Hugging Face cache, the newest first."""
    parts = written.split("/")
    if len(parts) != 2 or not all(parts) or ".." in parts:
        return []
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    snapshots = home / "hub" / f"models--{parts[0]}--{parts[1]}" / "snapshots"
    found = list(snapshots.iterdir()) if snapshots.is_dir() else []
    return sorted(found, key=lambda folder: folder.stat().st_mtime, reverse=True)
