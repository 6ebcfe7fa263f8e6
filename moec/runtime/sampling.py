"""The next token from logits: the most likely one, or one drawn with a temperature.

A draw depends on the seed, the prompt's index and the position alone, so it is the same in any batch, on any mesh and
on every rank that holds the logits. N sequences, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moec.diagnostics import fail


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 takes the most likely token; the lowest id of equally likely ones."""

    temperature: float = 0.0
    seed: int = 0


def next_tokens(logits_NV: Tensor, rows: Sequence[tuple[int, int]], sampling: Sampling) -> list[int]:
    """One token per row of fp32 logits. `rows`: prompt index and position of the new token, for each of the N rows.

    Raises:
        MoecError: E0612, the logits of a row are not finite.
    """
    is_finite = logits_NV.isfinite().all(dim=-1).tolist()
    for (prompt, position), fine in zip(rows, is_finite, strict=True):
        if not fine:
            message = f"the logits of prompt {prompt} at position {position} hold NaN or infinity"
            raise fail("E0612", message, "the weights or the compute dtype do not carry this input: try --dtype fp32")
    if not rows:
        return []
    if sampling.temperature == 0:
        return _most_likely(logits_NV)
    draws = torch.tensor([draw(sampling.seed, *row) for row in rows], dtype=torch.float64, device=logits_NV.device)
    cumulative_NV = (logits_NV.double() / sampling.temperature).softmax(dim=-1).cumsum(dim=-1)
    scaled = draws * cumulative_NV[:, -1]  # the sum is 1 but for rounding
    found = torch.searchsorted(cumulative_NV, scaled.unsqueeze(-1), right=True).squeeze(-1)
    return [int(token) for token in found.clamp(max=logits_NV.shape[-1] - 1).tolist()]


def draw(seed: int, prompt: int, position: int) -> float:
    """A number in [0, 1) from a hash of the three."""
    digest = hashlib.blake2b(f"{seed} {prompt} {position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def _most_likely(logits_NV: Tensor) -> list[int]:
    """argmax that promises the lowest id among equals, which torch.argmax does not."""
    ids_V = torch.arange(logits_NV.shape[-1], device=logits_NV.device)
    is_best_NV = logits_NV == logits_NV.amax(dim=-1, keepdim=True)
    best_N = torch.where(is_best_NV, ids_V, logits_NV.shape[-1]).amin(dim=-1)
    return [int(token) for token in best_N.tolist()]
