"""An artifact on disk: a folder of text files, and machine code, under a manifest of their digests. No torch.

Written whole or not at all: into a folder beside its place, which then takes its name, by one process at a time. Read
back only as written: a file that is missing, changed or extra is named, and nothing of it is used.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from moec.diagnostics import fail

MANIFEST = "MANIFEST.json"
FORMAT = 1
MAX_FILE = 64 << 20
#: Files that are no text: machine code of kernels, kept for tools to read. Nothing of it is ever run.
BINARY = (".cubin", ".hsaco")
#: What every plan.json has (`moec.plan.document` writes it).
_PLAN_PARTS: dict[str, type] = {
    "plan": str, "source": str, "model": dict, "weights": dict, "compute": str, "context": int, "target": str,
    "parameters": dict, "mesh": dict, "cluster": dict, "placement": dict, "memory": list, "kernels": list,
    "phases": dict,
}  # fmt: skip


def canonical_json(value: Any) -> str:
    """One text per value: sorted keys, two spaces, a newline at the end."""
    return json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False) + "\n"


def write_artifact(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Publish `files` (name -> content) with their manifest as `folder`, in place of an older artifact there.

    Raises E0770 where the folder is something else, E0681 where it cannot be written.
    """
    folder = Path(os.path.normpath(folder))
    manifest = {"format": FORMAT, "moec": version("moec"), "files": {name: _entry(files[name]) for name in files}}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _only_writer(folder) as parts:
            _check_place(folder)  # not before: another writer may be between its two renames
            made = Path(tempfile.mkdtemp(prefix=f"{parts}new.", dir=folder.parent))
            for name, content in {**files, MANIFEST: canonical_json(manifest)}.items():
                _write(made / name, _bytes(content))
            made.chmod(0o755)
            _publish(made, folder, Path(tempfile.mkdtemp(prefix=f"{parts}old.", dir=folder.parent)))
    except OSError as error:
        raise fail(
            "E0681", f"cannot write the artifact `{folder}`: {error.strerror}", "free space or choose -o"
        ) from None


def _check_place(folder: Path) -> None:
    if folder.exists() and not (folder / MANIFEST).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise fail("E0770", f"`{folder}` exists and is no artifact of moec", "choose another folder with -o")


def _bytes(content: str | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.encode()


def _entry(content: str | bytes) -> dict[str, Any]:
    data = _bytes(content)
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _only_writer(folder: Path) -> Iterator[str]:
    """Hold the lock of a place, and give the prefix of the folders beside it that its holder alone makes and removes.

    What a process left that died while it wrote is removed too. The lock lies in the folder for temporary files, and
    goes with its holder: nothing is left there or beside the artifact.
    """
    place = str(folder.absolute().parent.resolve() / folder.name)
    key = hashlib.sha256(place.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    parts = f".{folder.name[:64]}.{key[:8]}."
    name = Path(tempfile.gettempdir()) / f"moec-{os.getuid()}-{key}.lock"
    while (lock := _lock(name)) is None:
        pass
    try:
        _sweep(folder, parts)
        try:
            yield parts
        finally:
            _sweep(folder, parts)
    finally:
        name.unlink(missing_ok=True)
        os.close(lock)


def _lock(name: Path) -> int | None:
    """The descriptor of a lock file once it is locked; None where its last holder has removed it in between."""
    lock = os.open(name, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.samestat(os.fstat(lock), name.lstat()):
            return lock
    except FileNotFoundError:
        pass
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    return None


def _sweep(folder: Path, parts: str) -> None:
    """Remove what a writer left. An artifact that one had moved aside, with none in its place, is put back."""
    for left in sorted(path for path in folder.parent.iterdir() if path.name.startswith(parts)):  # `new.` before `old.`
        if left.name.startswith(f"{parts}old.") and (left / MANIFEST).is_file() and not folder.exists():
            os.replace(left, folder)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _publish(made: Path, folder: Path, aside: Path) -> None:
    """Rename into place; an older artifact is moved to the empty folder `aside` first, and comes back on failure."""
    if not folder.exists():
        os.replace(made, folder)
        return
    os.replace(folder, aside)
    try:
        os.replace(made, folder)
    except OSError:
        os.replace(aside, folder)
        raise


def read_artifact(folder: Path) -> dict[str, str]:
    """Every text of an artifact, whose files are all checked. Raises E0771 (damaged), E0772 (another version)."""
    files = _read_all(folder)
    return {name: data.decode(errors="replace") for name, data in files.items() if not name.endswith(BINARY)}


def read_binaries(folder: Path) -> dict[str, bytes]:
    """Every file of an artifact that is no text. Raises E0771, E0772."""
    return {name: data for name, data in _read_all(folder).items() if name.endswith(BINARY)}


def _read_all(folder: Path) -> dict[str, bytes]:
    manifest = _manifest(folder)
    if (made_by := manifest.get("moec")) != version("moec") or manifest.get("format") != FORMAT:
        message = f"`{folder}` was compiled by moec {made_by}, this is {version('moec')}"
        raise fail("E0772", message, "compile the `.moe` file again")
    listed = manifest["files"]
    found = {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir() or p.is_symlink()} - {MANIFEST}
    for name in sorted(found ^ set(listed)):
        raise _damaged(folder, f"`{name}` is {'not in the manifest' if name in found else 'missing'}")
    return {name: _read(folder, name, listed[name]) for name in sorted(listed)}


def read_plan(text: str) -> dict[str, Any]:
    """plan.json as an object that has every part its readers ask for. Raises ValueError."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("its plan.json is not JSON") from None
    if not isinstance(document, dict):
        raise ValueError("its plan.json is no object")
    for key, kind in _PLAN_PARTS.items():
        if not isinstance(document.get(key), kind):
            raise ValueError(f"its plan.json has no `{key}` of the kind that belongs there")
    if not isinstance(document["weights"].get("path"), str | None) or type(document["mesh"].get("pp", 1)) is not int:
        raise ValueError("its plan.json names no weights and mesh")
    return document


def _manifest(folder: Path) -> dict[str, Any]:
    if not (folder / MANIFEST).is_file():
        raise _damaged(folder, f"it has no {MANIFEST}, so it is no artifact of moec")
    manifest: Any = None
    try:
        manifest = json.loads(_content(folder / MANIFEST).decode(errors="replace"))
        entries = manifest["files"].items()
        is_sound = all(_is_plain(name) and {"size", "sha256"} <= set(entry) for name, entry in entries)
    except (ValueError, KeyError, TypeError, AttributeError):
        is_sound = False
    if not is_sound:
        raise _damaged(folder, f"its {MANIFEST} cannot be read")
    return dict(manifest)


def _is_plain(name: str) -> bool:
    parts = name.split("/")
    return len(parts) <= 2 and all(part and not part.startswith(".") and "\\" not in part for part in parts)


def _read(folder: Path, name: str, entry: Mapping[str, Any]) -> bytes:
    path = folder / name
    if path.is_symlink() or path.parent.is_symlink() or not path.is_file():
        raise _damaged(folder, f"`{name}` is no plain file")
    data = _content(path)
    if _entry(data) != {"size": entry["size"], "sha256": entry["sha256"]}:
        raise _damaged(folder, f"`{name}` was changed after it was compiled")
    return data


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_FILE)


def _damaged(folder: Path, what: str) -> Exception:
    return fail("E0771", f"the artifact `{folder}` cannot be used: {what}", "compile the `.moe` file again")
