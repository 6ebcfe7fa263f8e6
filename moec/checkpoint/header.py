"""The header of one safetensors file: names, dtypes, shapes and where the bytes lie, checked before anything is read.

Format (huggingface/safetensors): 8 bytes little-endian header length N, N bytes of JSON padded with spaces, then the
data; the tensors' byte ranges neither overlap nor leave gaps and end at the end of the file.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moec.checkpoint.json import DuplicateKey, is_lfs_pointer, parse_json, regular_size
from moec.diagnostics import MoecError, fail

MAX_HEADER = 100_000_000  # safetensors' own limit
MAX_TENSORS = 200_000
MAX_DIMS = 8
NAME = re.compile(r"[A-Za-z0-9._/-]{1,256}")

#: Bytes of one element.
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip

_AGAIN = "fetch the file again"


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies: `offset` counts bytes from the start of `file`, a plain name in the model folder."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """What one shard holds, its size in bytes and the digest of its header."""

    tensors: dict[str, Tensor]
    size: int
    sha256: str


def read_header(path: Path) -> Header:
    """Header of the shard at `path`. Raises E0704 to E0709, each naming the file."""
    size = regular_size(path, "weights file")
    raw = _header_bytes(path, size)
    try:
        entries = parse_json(raw)
    except DuplicateKey as error:
        raise fail("E0707", f"the header of `{path}` names `{error.args[0]}` twice", _AGAIN) from None
    except ValueError as error:
        raise fail("E0707", f"the header of `{path}` is not JSON: {error}", _AGAIN) from None
    if not isinstance(entries, dict):
        raise fail("E0707", f"the header of `{path}` is not an object", _AGAIN)
    entries.pop("__metadata__", None)
    if len(entries) > MAX_TENSORS:
        raise fail("E0709", f"`{path}` holds {len(entries)} tensors; the limit is {MAX_TENSORS}")
    data = 8 + len(raw)
    tensors = {name: _tensor(path, name, entry, data) for name, entry in entries.items()}
    _check_cover(path, tensors, data, size)
    return Header(tensors, size, hashlib.sha256(raw).hexdigest())


def _header_bytes(path: Path, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            head = file.read(64)
            if is_lfs_pointer(head):
                help = "run `git lfs pull` in that folder to fetch the real file"
                raise fail("E0704", f"`{path}` ({size} bytes) is a Git LFS pointer, not the weights", help)
            if size < 8:
                what = "is empty" if size == 0 else f"has {size} bytes, too few for a header"
                raise fail("E0705", f"`{path}` {what}", _AGAIN)
            length = int.from_bytes(head[:8], "little")
            if length > MAX_HEADER:
                message = f"`{path}` does not begin with a safetensors header (its length would be {length} bytes)"
                raise fail("E0707", message, "check that this is a safetensors file, and fetch it again")
            if 8 + length > size:
                message = f"`{path}` has {size} bytes, but its header alone needs {8 + length}: it is cut short"
                raise fail("E0705", message, _AGAIN)
            file.seek(8)
            raw = file.read(length)
    except OSError as error:
        raise fail("E0706", f"weights file `{path}` cannot be read: {error.strerror or error}") from None
    if len(raw) != length or not raw.startswith(b"{"):
        raise fail("E0707", f"the header of `{path}` is damaged", _AGAIN)
    return raw


def _tensor(path: Path, name: str, entry: Any, data: int) -> Tensor:
    """One entry, its sizes agreeing with each other."""
    if not NAME.fullmatch(name):
        shown = name if len(name) <= 80 else name[:80] + "..."
        raise fail(
            "E0709",
            f"`{path}` holds a tensor with a name moec does not accept: {shown!r}",
            f"names match {NAME.pattern}",
        )
    keys = {"dtype", "shape", "data_offsets"}
    if not isinstance(entry, dict) or set(entry) != keys or not _are_sizes(entry["shape"]):
        raise _bad(path, name, "its entry is not {dtype, shape, data_offsets}")
    shape, offsets, dtype = tuple(entry["shape"]), entry["data_offsets"], entry["dtype"]
    if len(shape) > MAX_DIMS:
        raise fail("E0709", f"tensor `{name}` of `{path}` has {len(shape)} dims; the limit is {MAX_DIMS}")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _bad(path, name, f"dtype {dtype!r} is not known")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[1] < offsets[0]:
        raise _bad(path, name, f"data_offsets are {offsets!r}")
    nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
    if nbytes != offsets[1] - offsets[0]:
        message = f"{dtype} {list(shape)} needs {nbytes} bytes, its range has {offsets[1] - offsets[0]}"
        raise _bad(path, name, message)
    return Tensor(path.name, dtype, shape, data + offsets[0], nbytes)


def _check_cover(path: Path, tensors: dict[str, Tensor], data: int, size: int) -> None:
    """The ranges follow each other without gap or overlap and end where the file ends."""
    end = data
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != end:
            what = "overlaps the tensor before it" if tensor.offset < end else "leaves a gap before it"
            raise _bad(path, name, what)
        end += tensor.nbytes
    if end != size:
        what = "is cut short" if size < end else "has bytes after the last tensor"
        raise fail("E0705", f"`{path}` {what}: its header describes {end} bytes, the file has {size}", _AGAIN)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _bad(path: Path, name: str, what: str) -> MoecError:
    return fail("E0708", f"tensor `{name}` of `{path}`: {what}", _AGAIN)
