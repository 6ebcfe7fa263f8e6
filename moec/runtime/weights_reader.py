"""Pieces of tensors from safetensors shards into tensors that this process owns, by `preadv`."""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from moec.blocks import BLOCK
from moec.checkpoint.map import Block
from moec.diagnostics import fail

BOUNCE_BYTES = 8 << 20
#: From this many bytes on, a row's slice of columns is read by itself; shorter ones with the rest of their rows.
MIN_STRIDED_BYTES = 4096
#: Shards held open at once.
MAX_OPEN = 64
FP8 = torch.float8_e4m3fn
#: The torch dtype of each dtype that a parameter may have.
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": FP8}
_FILE_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F8_E4M3": FP8}


class ShardReader:
    """Open shards of one model folder and one bounce buffer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, int] = {}
        self._bounce = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def read(self, block: Block, rows: range, columns: range, target: Tensor) -> None:
        """Read `block[rows, columns]` into the matrix `target`, converted to its dtype, and check it.

        Weights in fp8 are multiplied by the scales of their blocks, but where `target` is in fp8 too.
        """
        if target.numel() == 0:
            return
        stored, width = _FILE_DTYPES[block.dtype], math.prod(block.shape[1:])
        if len(columns) == width and stored == target.dtype and target.is_contiguous() and target.device.type == "cpu":
            self._fill(block, rows.start * width * stored.itemsize, target)
        else:
            self._read_converted(block, rows, columns, target, stored, width)
        if not _is_finite(target):
            self._refuse_values(block, target)

    def _read_converted(
        self, block: Block, rows: range, columns: range, target: Tensor, stored: torch.dtype, width: int
    ) -> None:
        """Some rows at a time through the bounce buffer: whole rows, or their columns alone where that is worth it."""
        strided = len(columns) < width and len(columns) * stored.itemsize >= MIN_STRIDED_BYTES
        across = columns if strided else range(width)
        step = max(1, BOUNCE_BYTES // (len(across) * stored.itemsize))
        scales = self._read_scales(block) if target.dtype != stored else None
        for first in range(0, len(rows), step):
            held = rows[first : first + step]
            buffer = self._buffer(len(held) * len(across), stored).view(len(held), len(across))
            if strided:
                for row, into in zip(held, buffer, strict=True):
                    self._fill(block, (row * width + columns.start) * stored.itemsize, into)
            else:
                self._fill(block, held.start * width * stored.itemsize, buffer)
            cut = buffer if strided else buffer[:, columns.start : columns.stop]
            target[first : first + len(held)].copy_(cut if scales is None else _scaled(cut, scales, held, columns))

    def _read_scales(self, block: Block) -> Tensor | None:
        """fp32, one for each block of an fp8 matrix."""
        if block.scales is None:
            return None
        scales = torch.empty(block.scales.shape, dtype=_FILE_DTYPES[block.scales.dtype])
        self._fill(block.scales, 0, scales)
        return scales.float()

    def _buffer(self, elements: int, dtype: torch.dtype) -> Tensor:
        need = elements * dtype.itemsize
        if self._bounce.numel() < need:
            self._bounce = torch.empty(max(need, BOUNCE_BYTES), dtype=torch.uint8)
        return self._bounce[:need].view(dtype)

    def _fill(self, block: Block, skip: int, target: Tensor) -> None:
        """Fill contiguous `target` from `skip` bytes into `block`."""
        view: memoryview = target.reshape(-1).view(torch.uint8).numpy().data
        at, descriptor = block.offset + skip, self._open(block.file)
        while view:
            try:
                got = os.preadv(descriptor, [view], at)
            except OSError as error:
                message = f"`{self.folder / block.file}` cannot be read: {error.strerror} (tensor `{block.tensor}`)"
                raise fail("E0745", message, "check the disk, or fetch the file again") from None
            if got == 0:
                size = os.fstat(descriptor).st_size
                message = f"`{self.folder / block.file}` has {size} bytes now, and tensor `{block.tensor}` needs "
                raise fail("E0745", f"{message}{at + len(view)}: it was cut short", "fetch the file again")
            view, at = view[got:], at + got

    def _open(self, file: str) -> int:
        if file not in self._files:
            if len(self._files) >= MAX_OPEN:
                os.close(self._files.pop(next(iter(self._files))))
            try:
                self._files[file] = os.open(self.folder / file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                message = f"`{self.folder / file}` cannot be opened: {error.strerror}"
                raise fail("E0745", message, "it was there when the headers were read; put it back") from None
        return self._files[file]

    def _refuse_values(self, block: Block, target: Tensor) -> None:
        count = int((~torch.isfinite(target.float())).sum())
        dtype = next(name for name, found in TORCH_DTYPES.items() if found == target.dtype)
        what = f"NaN or infinite as {dtype} in {count} of the {target.numel()} values read"
        message = f"tensor `{block.tensor}` of `{self.folder / block.file}` is {what}"
        raise fail("E0746", message, "the weights are damaged, or too large for this dtype")


def _is_finite(values: Tensor) -> bool:
    """Whether all are numbers. Of e4m3's codes two are NaN and none is infinite."""
    if values.dtype == FP8:
        return not bool(((values.view(torch.uint8) & 0x7F) == 0x7F).any())
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) and torch.isfinite(high))


def _scaled(values: Tensor, scales: Tensor, rows: range, columns: range) -> Tensor:
    """Values of an fp8 matrix at these rows and columns times the scales of their blocks, in fp32."""
    row_blocks, column_blocks = (torch.arange(held.start, held.stop) // BLOCK for held in (rows, columns))
    return values.float().mul_(scales[row_blocks][:, column_blocks])
