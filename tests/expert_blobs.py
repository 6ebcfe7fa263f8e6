"""A small set of experts with bytes that tell them apart, and what may go wrong where they lie."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import pytest
import torch
from torch import Tensor

from moec.diagnostics import Diagnostic, fail
from moec.runtime.experts.file import Contents, Key, LayerBlobs
from moec.runtime.experts.transfer import Room

T_co = TypeVar("T_co", covariant=True)

#: Two layers with experts of different sizes; a blob of the second is several pages long.
CONTENTS = Contents(
    "3f2a",
    (
        LayerBlobs("layers.1", (0, 1, 5), (("experts.gate_up", "bf16", (6, 8)), ("experts.down", "bf16", (8, 3)))),
        LayerBlobs("layers.2", (1, 2), (("experts.gate_up", "bf16", (100, 64)), ("experts.down", "bf16", (64, 50)))),
    ),
)


def blob(key: Key, contents: Contents = CONTENTS) -> Tensor:
    """The bytes of an expert, uint8 [blob bytes]: no two alike, nor any two places of one."""
    count = contents.blob_bytes(key[0])
    return ((torch.arange(count) * (2 * key[1] + 3) + 101 * key[0] + torch.arange(count) // 256) % 251).to(torch.uint8)


class Starts(Protocol[T_co]):
    """A copier, or one of its lanes."""

    def start(self, copies: Sequence[tuple[Key, Room]], is_demand: bool) -> Sequence[T_co]: ...


def begin(copier: Starts[T_co], key: Key, into: Tensor, is_demand: bool) -> T_co:
    """The copy of one expert, begun."""
    (transfer,) = copier.start([(key, Room.of(into))], is_demand)
    return transfer


class Checkpoint:
    """Stands in for the weights' files. `asked`: the experts that were read, in order; `is_lost`: it cannot be read."""

    def __init__(self, contents: Contents = CONTENTS) -> None:
        self.contents, self.asked, self.is_lost = contents, list[Key](), False

    def __call__(self, key: Key, into: Tensor) -> None:
        self.asked.append(key)
        if self.is_lost:
            message = "`model/model.safetensors` cannot be opened: No such file or directory"
            raise fail("E0745", message, "put it back")
        into.copy_(blob(key, self.contents))


class Notes:
    """What was told to the user."""

    def __init__(self) -> None:
        self.told: list[Diagnostic] = []

    def __call__(self, note: Diagnostic) -> None:
        self.told.append(note)

    @property
    def codes(self) -> list[str]:
        return [note.code for note in self.told]


def failing(monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    """From now on, `os.CALL` fails with this error number."""

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(f"os.{call}", refuse)


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


FULL = [errno.ENOSPC, errno.EDQUOT]
