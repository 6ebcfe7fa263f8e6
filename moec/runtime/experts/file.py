"""The nvme tier's file: the experts of one rank, each a blob of bytes with a checksum that every read is held to.

Layout: a head (`MAGIC`, the length of a JSON text, the text, a digest for each blob, the digest of all that), then
the blobs, each from a multiple of `PAGE` bytes. A blob is one expert of one layer: its parameters as this rank computes
with them, one after another, each C-contiguous.

The head's text says everything that the bytes depend on, and the file's name is made from it. So a file is the wanted
one exactly when its head begins with the text wanted: nothing of a file is parsed.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from xxhash import xxh3_128, xxh3_128_digest

from moec.cache_sizes import DEVICE_PIECE_BYTES
from moec.runtime.weights_reader import TORCH_DTYPES

#: Layer (counted among the sparse layers, from 0) and expert.
Key = tuple[int, int]

MAGIC = b"MOECEXP1"
PAGE = 4096
DIGEST_BYTES = 16
#: Of a transfer into host memory. Between two pieces a demand may overtake: 26 us at 10 GB/s.
PIECE_BYTES = 256 << 10


class FileFault(Exception):
    """Why a file, or one blob of it, cannot be used: ` has ..`, to follow the file's name."""


@dataclass(frozen=True)
class LayerBlobs:
    """The experts of one sparse layer on this rank.

    `name`: as errors name it; `parameters`: name, dtype (of `TORCH_DTYPES`) and shape of those of one expert, in the
    order they have in its blob.
    """

    name: str
    experts: tuple[int, ...]
    parameters: tuple[tuple[str, str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Contents:
    """What a file is to hold. `fingerprint`: of the checkpoint, and of this rank's cut of its experts."""

    fingerprint: str
    layers: tuple[LayerBlobs, ...]

    def blob_bytes(self, layer: int) -> int:
        """Bytes of each blob of a layer."""
        return sum(math.prod(shape) * TORCH_DTYPES[dtype].itemsize for _, dtype, shape in self.layers[layer].parameters)

    @cached_property
    def text(self) -> bytes:
        """The head of the file up to its digests."""
        described = json.dumps(asdict(self), sort_keys=True).encode()
        return MAGIC + len(described).to_bytes(8, "little") + described

    @property
    def file_name(self) -> str:
        return f"experts-{xxh3_128_digest(self.text).hex()}.moec"

    @cached_property
    def keys(self) -> tuple[Key, ...]:
        """Every expert, in the order of the blobs and of their digests."""
        return tuple((layer, expert) for layer, blobs in enumerate(self.layers) for expert in blobs.experts)

    @property
    def head_bytes(self) -> int:
        return len(self.text) + DIGEST_BYTES * (len(self.keys) + 1)

    @cached_property
    def places(self) -> dict[Key, range]:
        """The bytes of the file that each blob takes up."""
        places, start = {}, _to_page(self.head_bytes)
        for key in self.keys:
            places[key] = range(start, start + self.blob_bytes(key[0]))
            start = _to_page(places[key].stop)
        return places

    @property
    def file_bytes(self) -> int:
        return max((place.stop for place in self.places.values()), default=self.head_bytes)

    def describe(self, key: Key) -> str:
        """`expert 5 of layers.3`."""
        return f"expert {key[1]} of {self.layers[key[0]].name}"


def _to_page(offset: int) -> int:
    return -(-offset // PAGE) * PAGE


def seal(contents: Contents, digests: list[bytes]) -> bytes:
    """The head of a file whose blobs have these digests."""
    head = contents.text + b"".join(digests)
    return head + xxh3_128_digest(head)


class ExpertFile:
    """An open file that has the contents wanted. It stays readable when it is unlinked or replaced meanwhile."""

    def __init__(self, path: Path, contents: Contents) -> None:
        """Open the file at `path`.

        Raises:
            FileNotFoundError: there is none.
            FileFault: it cannot be used: unreadable, cut short, damaged, or no plain file.
        """
        self.path, self.contents = path, contents
        self._places = contents.places
        self._staging = torch.empty(0, dtype=torch.uint8)
        try:  # not to block, should this be the name of a pipe
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise FileFault(f"cannot be opened: {error.strerror}") from None
        try:
            self._check_place()
            self._digests = self._read_head()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._descriptor)

    def _check_place(self) -> None:
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise FileFault("is no plain file")
        if found.st_size != self.contents.file_bytes:
            raise FileFault(f"has {found.st_size} bytes, not {self.contents.file_bytes}")

    def _read_head(self) -> dict[Key, bytes]:
        wanted = self.contents
        head = bytearray(wanted.head_bytes)
        self._fill(memoryview(head), 0)
        body, digest = head[:-DIGEST_BYTES], head[-DIGEST_BYTES:]
        if not head.startswith(wanted.text) or xxh3_128_digest(body) != digest:
            raise FileFault("has a damaged head")
        start = len(wanted.text)
        cut = (bytes(body[at : at + DIGEST_BYTES]) for at in range(start, len(body), DIGEST_BYTES))
        return dict(zip(wanted.keys, cut, strict=True))

    def pieces(self, key: Key, into: Tensor) -> Iterator[int]:
        """Read a blob into `into` (uint8 [blob bytes]); before each piece but the first, yields the bytes read so far.

        Only once it ends without an error are the bytes those that were written.

        Raises:
            FileFault: they are not, or cannot be read.
        """
        place, checksum = self._places[key], xxh3_128()
        step = DEVICE_PIECE_BYTES if into.is_cuda else PIECE_BYTES
        for first in range(0, len(place), step):
            if first:
                yield first
            target = into[first : first + step]
            read = self._stage(len(target)) if into.is_cuda else target
            view = read.numpy().data
            self._fill(view, place.start + first)
            checksum.update(view)
            if into.is_cuda:
                target.copy_(read, non_blocking=True)  # done before the next piece is asked for
        if checksum.digest() != self._digests[key]:
            raise FileFault("does not have the bytes that were written")

    def _stage(self, count: int) -> Tensor:
        if self._staging.numel() < count:
            self._staging = torch.empty(count, dtype=torch.uint8, pin_memory=True)
        return self._staging[:count]

    def _fill(self, view: memoryview, offset: int) -> None:
        while view:
            try:
                got = os.preadv(self._descriptor, [view], offset)
            except OSError as error:
                raise FileFault(f"cannot be read: {error.strerror}") from None
            if got == 0:
                raise FileFault("was cut short")
            view, offset = view[got:], offset + got
