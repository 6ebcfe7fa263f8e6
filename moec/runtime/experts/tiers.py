"""The tiers that experts come from: host memory, and the nvme file, behind which stands the checkpoint.

A tier hands out an expert in pieces, so that its copier (`moec.runtime.experts.copier`) can turn to another one between
two. What it has handed out counts only once it ends without an error.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moec.cache_sizes import DEVICE_PIECE_BYTES
from moec.diagnostics import Diagnostic, MoecError, fail, printable
from moec.runtime.experts.file import PIECE_BYTES, Contents, ExpertFile, FileFault, Key
from moec.runtime.experts.fill import Progress, ReadExpert, Warn, open_expert_file
from moec.runtime.experts.pace import Rate

#: Blobs in host memory start at multiples of this, as torch's own tensors do.
_ALIGNMENT = 64
#: Copied in 300 us. A thread that wakes up and takes turns costs the one that computes 60 us for each expert, and many
#: times as much where cores are busy; copying a small expert (200 KB) itself costs it 45.
WAKE_BYTES = 2 << 20
Bytes = npt.NDArray[np.uint8]


class Tier(Protocol):
    """Where experts lie.

    `rate`: what its copier keeps to, where the tier is emulated. `wake_bytes`: so many are worth a thread's waking up.
    """

    name: str
    rate: Rate | None
    wake_bytes: int

    def bytes_of(self, key: Key) -> int | None:
        """Bytes of the blob of an expert; None where this tier does not have it."""

    def pieces(self, key: Key, into: Tensor) -> Iterator[int]:
        """Copy a blob into `into` (uint8 [blob bytes]); before each piece but the first, yields the bytes there so far.

        Called from the copier's thread, for one expert after another or for several by turns.

        Raises:
            MoecError: the expert cannot be had. What `into` holds then is not to be used.
        """
        ...


class HostTier:
    """Experts in memory that this process owns, page-locked for a CUDA device."""

    name = "host"
    wake_bytes = WAKE_BYTES

    def __init__(
        self,
        contents: Contents,
        keys: Collection[Key],
        read: ReadExpert,
        *,
        rate: Rate | None = None,
        is_pinned: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Take the experts `keys` of `contents` from the checkpoint.

        Raises:
            MoecError: E0644, there is not so much memory; what `read` raises.
        """
        self.rate, self.is_pinned = rate, is_pinned
        sizes = {key: contents.blob_bytes(key[0]) for key in keys}
        total = sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes.values())
        try:
            memory = torch.empty(total, dtype=torch.uint8, pin_memory=is_pinned)
        except RuntimeError as error:  # the allocator's own
            message = f"the host tier needs {total} bytes of memory for {len(sizes)} experts, which are not to be had"
            raise fail("E0644", message, "give `host` fewer bytes, or run fewer ranks on a node") from error
        self._blobs: dict[Key, Tensor] = {}
        start = 0
        for key, size in sizes.items():
            blob = self._blobs[key] = memory[start : start + size]
            read(key, blob)
            start += -(-size // _ALIGNMENT) * _ALIGNMENT
            if progress is not None:
                progress(start, total)

    def bytes_of(self, key: Key) -> int | None:
        blob = self._blobs.get(key)
        return None if blob is None else blob.numel()

    @property
    def blobs(self) -> Mapping[Key, Tensor]:
        """Experts, uint8 [blob bytes]."""
        return self._blobs

    def pieces(self, key: Key, into: Tensor) -> Iterator[int]:
        blob = self._blobs[key]
        return _device_pieces(blob, into) if into.is_cuda else _memory_pieces(blob, into)


def _memory_pieces(source: Tensor, target: Tensor) -> Iterator[int]:
    """By numpy, on this thread alone: torch would start threads that compete with those that compute."""
    there, here = source.numpy(), target.numpy()
    for first in range(0, len(there), PIECE_BYTES):
        if first:
            yield first
        np.copyto(here[first : first + PIECE_BYTES], there[first : first + PIECE_BYTES])


def _device_pieces(source: Tensor, target: Tensor) -> Iterator[int]:
    for first in range(0, len(source), DEVICE_PIECE_BYTES):
        if first:
            yield first
        last = first + DEVICE_PIECE_BYTES
        target[first:last].copy_(source[first:last], non_blocking=True)


class NvmeTier:
    """Experts in an expert file, and where that fails, in the checkpoint.

    `num_rereads`: experts that were taken from the checkpoint because the file failed. The first failure is told
    (E0642); an expert that failed once is not looked for in the file again.
    """

    name = "nvme"

    def __init__(
        self, contents: Contents, file: ExpertFile | None, read: ReadExpert, warn: Warn, rate: Rate | None = None
    ) -> None:
        """`file`: None where it could not be written, which the caller has told."""
        self.rate, self.num_rereads = rate, 0
        self.wake_bytes = 0 if rate is None else WAKE_BYTES  # a real disk may take its time
        self._contents, self._file, self._read, self._warn = contents, file, read, warn
        self._failed: dict[Key, str] = {}

    def bytes_of(self, key: Key) -> int | None:
        place = self._contents.places.get(key)
        return None if place is None else len(place)

    def pieces(self, key: Key, into: Tensor) -> Iterator[int]:
        if self._file is not None and key not in self._failed:
            try:
                yield from self._file.pieces(key, into)
                return
            except FileFault as fault:
                self._note(key, str(fault))
        self.num_rereads += 1
        blob = torch.empty(into.numel(), dtype=torch.uint8) if into.is_cuda else into
        try:
            self._read(key, blob)
        except MoecError as error:
            raise self._lost(key, error) from error
        if into.is_cuda:
            into.copy_(blob)

    def close(self) -> None:
        """Close the file. Its copier must be closed before."""
        if self._file is not None:
            self._file.close()

    def _note(self, key: Key, fault: str) -> None:
        if not self._failed:
            path = self._file.path if self._file else ""
            message = (
                f"the expert file `{path}` {fault} ({self._contents.describe(key)}): the checkpoint is read instead"
            )
            self._warn(Diagnostic("E0642", message, help="delete the file to have it written again"))
        self._failed[key] = fault

    def _lost(self, key: Key, error: MoecError) -> MoecError:
        found = error.diagnostics[0]
        if self._file is None:
            return error
        file = f"its expert file `{self._file.path}` {self._failed[key]}"
        message = f"{self._contents.describe(key)} cannot be read: {file}, and in the checkpoint {found.message}"
        return fail("E0643", message, found.help)


def open_nvme(
    folder: Path,
    contents: Contents,
    read: ReadExpert,
    *,
    rate: Rate | None = None,
    warn: Warn | None = None,
    progress: Progress | None = None,
) -> NvmeTier:
    """The nvme tier over the expert file in `folder`, which is written unless it is there.

    Where it cannot be written (a full disk), experts are read from the checkpoint each time, with a warning (E0641).

    Raises:
        MoecError: E0640, there is no such folder; what `read` raises while the file is written.
    """
    tell = warn or print_note
    try:
        return NvmeTier(contents, open_expert_file(folder, contents, read, tell, progress), read, tell, rate)
    except MoecError as error:
        found = error.diagnostics[0]
        if found.code != "E0641":
            raise
    tell(Diagnostic(found.code, f"{found.message}; experts are read from the checkpoint instead", help=found.help))
    return NvmeTier(contents, None, read, tell, rate)


def print_note(note: Diagnostic) -> None:
    """`moec: note[CODE]: message; help` on standard error, in one write."""
    tail = f"; {note.help}" if note.help else ""
    sys.stderr.write(printable(f"moec: note[{note.code}]: {note.message}{tail}".replace("\n", " ")) + "\n")
    sys.stderr.flush()
