"""One forward pass of one dp rank: which rows it computes, whose they are, and which of them need logits.

T rows (tokens), B sequences, L rows selected. There are no padding rows; B, T and L may be 0, and a rank with none
still takes part in every collective of the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moec.placement import span


@dataclass(frozen=True)
class Piece:
    """Rows of one sequence in a step: `tokens` continue a sequence of which `cached` tokens are in KV slot `slot`.

    `select`: rows whose logits are wanted, `last` (the last one), `all` or `none`.
    """

    tokens: Sequence[int]
    slot: int
    cached: int = 0
    select: str = "last"


@dataclass(frozen=True)
class Extent:
    """The largest of all dp ranks in one decode step, which every rank knows alike.

    slots: KV slots as far as the last one with a live sequence. tokens: of a sequence, with the one of this step.
    """

    slots: int
    tokens: int


@dataclass(frozen=True, eq=False)
class Fixed:
    """What makes the shapes of a decode step those of every other one: a graph of kernels needs that.

    There is a row for each KV slot from slot `first` on, in order, whether a live sequence has it or none. Of each slot
    the first `reach` places are read, those behind the row's own without effect.
    """

    reach: int
    first: int = 0


@dataclass(frozen=True, eq=False)
class Step:
    """The rows of one step, sequence after sequence.

    tokens, positions i64[T] on the device; select i64[L] on the device, ascending; slots and cached hold B numbers,
    starts B+1 row offsets: rows starts[b]..starts[b+1] belong to the sequence in KV slot slots[b].
    `extent`: of a step in which every live sequence of this dp rank takes part. `fixed`: where it is given, the numbers
    in slots and cached are only the most they can be.
    """

    tokens: Tensor
    positions: Tensor
    select: Tensor
    slots: tuple[int, ...]
    starts: tuple[int, ...]
    cached: tuple[int, ...]
    extent: Extent | None = None
    fixed: Fixed | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def num_sequences(self) -> int:
        return len(self.slots)

    def chunk(self, index: int, parts: int) -> Step:
        """Chunk `index` of `parts` balanced chunks of the rows, as a step that selects none.

        A sequence that lies in several continues in each behind what the chunks before it have put in KV memory.
        """
        rows = span(self.num_tokens, index, parts)
        bounds = [(max(a, rows.start), min(z, rows.stop)) for a, z in zip(self.starts, self.starts[1:], strict=False)]
        held = [(b, first, stop) for b, (first, stop) in enumerate(bounds) if first < stop]
        return Step(
            self.tokens[rows],
            self.positions[rows],
            self.select[:0],
            slots=tuple(self.slots[b] for b, _, _ in held),
            starts=(0, *(stop - rows.start for _, _, stop in held)),
            cached=tuple(self.cached[b] + first - self.starts[b] for b, first, _ in held),
            fixed=self.fixed and Fixed(self.fixed.reach, self.fixed.first + rows.start),
        )


def make_step(pieces: Sequence[Piece], device: torch.device | str = "cpu", extent: Extent | None = None) -> Step:
    """The step that computes `pieces`, in order."""
    tokens: list[int] = []
    positions: list[int] = []
    select: list[int] = []
    starts = [0]
    for piece in pieces:
        tokens += piece.tokens
        positions += range(piece.cached, piece.cached + len(piece.tokens))
        first = {"last": len(tokens) - 1, "all": starts[-1], "none": len(tokens)}[piece.select]
        select += range(first, len(tokens))
        starts.append(len(tokens))

    def on_device(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    slots, cached = tuple(piece.slot for piece in pieces), tuple(piece.cached for piece in pieces)
    return Step(on_device(tokens), on_device(positions), on_device(select), slots, tuple(starts), cached, extent)
