"""Faults that kernels find on a device. A kernel cannot raise: it lowers a flag, which the host reads afterwards.

A step that runs kernel by kernel reads its flags after each; in one of fixed shape, which may be captured as a graph,
nothing is read, and whoever runs it calls `raise_faults` after it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moec.diagnostics import MoecError
from moec.runtime.context import Context

#: What a flag holds until a kernel lowers it to the row or pair at fault.
NO_FAULT = 2**31 - 1
#: Flags that are made at once, each at a multiple of 16 bytes, as Triton specialises kernels by that.
ROOM, SPACING = 256, 4
#: Where `Context.memo` keeps the flags of a device.
FLAGS = "device flags"


@dataclass
class Flags:
    """The flags of a program on one device: one i32 for each key, and what it means when it is lowered."""

    device: torch.device
    blocks: list[Tensor] = field(default_factory=list)
    places: dict[Hashable, int] = field(default_factory=dict)
    faults: list[Callable[[int], MoecError]] = field(default_factory=list)

    def flag(self, key: Hashable, fault: Callable[[int], MoecError]) -> Tensor:
        """The flag of `key`, i32 [1], for a kernel to lower; `fault` makes the error from what it is lowered to."""
        if key in self.places:
            place = self.places[key]
            self.faults[place] = fault
        else:
            place = self.places[key] = len(self.faults)
            self.faults.append(fault)
            if place == ROOM * len(self.blocks):
                block = torch.full((ROOM * SPACING,), NO_FAULT, dtype=torch.int32, device=self.device)
                self.blocks.append(block)
        return self.blocks[place // ROOM][place % ROOM * SPACING :][:1]

    def raise_lowered(self) -> None:
        """Raise the fault of the flag made first among the lowered ones; all are raised again for the next step."""
        lowered = [value for block in self.blocks for value in block[::SPACING].tolist()]
        for place, value in enumerate(lowered):
            if value != NO_FAULT:
                for block in self.blocks:
                    block.fill_(NO_FAULT)
                raise self.faults[place](value)


def flags_on(ctx: Context, device: torch.device) -> Flags:
    """The flags of the context's program on a device."""
    found: Flags = ctx.memo.setdefault((FLAGS, device), Flags(device))
    return found


def raise_faults(ctx: Context) -> None:
    """Raise the first fault that a kernel has found since this was last called. Waits for the device."""
    for key, flags in ctx.memo.items():
        if isinstance(key, tuple) and key[0] == FLAGS:
            flags.raise_lowered()


def is_deferred(ctx: Context) -> bool:
    """Whether nothing may be read within the step: it is captured as a graph, or runs as one that will be."""
    return ctx.step.fixed is not None
