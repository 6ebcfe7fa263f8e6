"""A model folder as Hugging Face lays it out: config.json, safetensors shards, and their index where there are several.

Only headers are read here, no data. Every fault is an E07 error that names the file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moec.checkpoint.header import Header, Tensor, read_header
from moec.checkpoint.json import MIB, read_json_object, regular_size
from moec.diagnostics import MoecError, fail

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
MAX_INDEX = 64 * MIB
MAX_CONFIG = MIB
MAX_SHARDS = 10_000


@dataclass(frozen=True)
class Fingerprint:
    """What a compiled artifact remembers of its weights: digests of config and index, size and header of each shard."""

    config: str
    index: str
    shards: dict[str, tuple[int, str]]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> Fingerprint:
        """Inverse of `to_json`. Raises KeyError, TypeError or ValueError on anything else."""
        shards = {str(name): (int(size), str(digest)) for name, (size, digest) in value["shards"].items()}
        return Fingerprint(str(value["config"]), str(value["index"]), shards)

    def changes(self, now: Fingerprint) -> list[str]:
        """File names whose digest or size is another one in `now`."""
        found = ["config.json"] if self.config != now.config else []
        found += [INDEX] if self.index != now.index else []
        both = {**self.shards, **now.shards}
        return found + [name for name in sorted(both) if self.shards.get(name) != now.shards.get(name)]


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a model folder by name, with its config."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    fingerprint: Fingerprint


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read config, index and all shard headers of `folder`. Raises MoecError (E0701 to E0714)."""
    config, raw_config = read_config(folder)
    if os.path.lexists(folder / INDEX):
        headers, digest = _read_indexed(folder)
    elif os.path.lexists(folder / SINGLE):
        headers, digest = {SINGLE: read_header(_inside(folder, SINGLE))}, ""
    else:
        raise _no_weights(folder)
    tensors = {name: tensor for header in headers.values() for name, tensor in header.tensors.items()}
    shards = {name: (header.size, header.sha256) for name, header in sorted(headers.items())}
    fingerprint = Fingerprint(hashlib.sha256(raw_config).hexdigest(), digest, shards)
    return Checkpoint(folder, config, tensors, fingerprint)


def has_weights(folder: Path) -> bool:
    """Whether `folder` holds weights. Raises E0703 where it holds pickles only."""
    if any(os.path.lexists(folder / name) for name in (INDEX, SINGLE)):
        return True
    error = _no_weights(folder)
    if error.diagnostics[0].code == "E0703":
        raise error
    return False


def read_config(path: Path) -> tuple[dict[str, Any], bytes]:
    """The config at `path` (a model folder or a config.json) and its bytes. Raises E0701, E0706 or E0714."""
    if not path.exists():
        raise fail("E0701", f"there is no model at `{path}`", "give a folder that holds config.json, or that file")
    if not path.is_dir():
        return read_json_object(path, "E0714", "config", MAX_CONFIG)
    if not os.path.lexists(path / "config.json"):
        raise fail("E0701", f"`{path}` holds no config.json", "give the folder of a Hugging Face model")
    return read_json_object(_inside(path, "config.json"), "E0714", "config", MAX_CONFIG)


def check_unchanged(compiled: Fingerprint, now: Checkpoint) -> None:
    """Raise E0744 where the weights are not those that were compiled."""
    if changed := compiled.changes(now.fingerprint):
        message = f"the weights in `{now.folder}` changed since the program was compiled: {_some(changed)}"
        raise fail("E0744", message, "compile again")


def _read_indexed(folder: Path) -> tuple[dict[str, Header], str]:
    """Headers of all shards the index names, in agreement with it; digest of the index."""
    index, raw = read_json_object(_inside(folder, INDEX), "E0710", "index", MAX_INDEX)
    where = index.get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(file, str) for file in where.values()):
        raise fail(
            "E0710", f"index `{folder / INDEX}` has no `weight_map` from tensor names to files", "fetch it again"
        )
    files = sorted(set(where.values()))
    if len(files) > MAX_SHARDS:
        raise fail("E0709", f"index `{folder / INDEX}` names {len(files)} files; the limit is {MAX_SHARDS}")
    if SINGLE not in files and os.path.lexists(folder / SINGLE):
        message = f"`{folder}` holds both `{SINGLE}` and an index that does not name it"
        raise fail("E0713", message, "keep the one that is meant")
    for file in files:
        _check_name(folder, file)
    if missing := [file for file in files if not os.path.lexists(folder / file)]:
        message = (
            f"{len(missing)} of the {len(files)} files that `{folder / INDEX}` names are missing: {_some(missing)}"
        )
        raise fail("E0712", message, "fetch the missing files")
    headers = {file: read_header(_inside(folder, file)) for file in files}
    _check_agreement(folder, where, headers)
    return headers, hashlib.sha256(raw).hexdigest()


def _check_agreement(folder: Path, where: dict[str, str], headers: dict[str, Header]) -> None:
    """Every tensor of the index is in exactly the shard it names, and the shards hold no other."""
    lost = [f"{name} ({file})" for name, file in where.items() if name not in headers[file].tensors]
    extra = [
        f"{name} ({file})" for file, header in headers.items() for name in header.tensors if where.get(name) != file
    ]
    notes = [f"{len(lost)} missing from the file that the index names: {_some(lost)}"] if lost else []
    notes += [f"{len(extra)} in a file that the index does not name: {_some(extra)}"] if extra else []
    if notes:
        raise fail(
            "E0713", f"`{folder / INDEX}` and its files disagree: {'; '.join(notes)}", "fetch index and files again"
        )


def _check_name(folder: Path, file: str) -> None:
    """A plain name of a safetensors file: nothing that leaves the folder."""
    plain = Path(file).name == file and "\\" not in file and "\0" not in file and file.isprintable()
    if not plain or not file.endswith(".safetensors") or len(file) > 255:
        message = f"index `{folder / INDEX}` names {file!r}, which is not the plain name of a .safetensors file"
        raise fail("E0711", message, "an index may name only files of its own folder; do not use this model")


def _inside(folder: Path, file: str) -> Path:
    """`folder / file`, whose target after links lies in the folder or in the blobs of its Hugging Face cache entry."""
    path, home = folder / file, Path(os.path.realpath(folder))
    target = Path(os.path.realpath(path))
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if not (target.is_relative_to(home) or target.is_relative_to(blobs)):
        raise fail("E0711", f"`{path}` is a link that leaves the model folder", "copy the file into the folder")
    regular_size(path, "file")
    return path


def _no_weights(folder: Path) -> MoecError:
    pickles = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(PICKLES))
    if pickles:
        message = f"`{folder}` holds weights as {_some(pickles)}, a format that can run code when it is read"
        return fail("E0703", message, "fetch the model's safetensors files, or convert it")
    return fail(
        "E0702", f"`{folder}` holds no weights: neither `{SINGLE}` nor `{INDEX}`", "fetch the safetensors files"
    )


def _some(names: Iterable[str]) -> str:
    """Up to five names, and that there are more."""
    listed = list(names)
    return ", ".join(f"`{name}`" for name in listed[:5]) + (", ..." if len(listed) > 5 else "")
