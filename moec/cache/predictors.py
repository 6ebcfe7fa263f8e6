"""Predictors: which experts a later layer of the same step will look up, the best guess first.

They work on rows per expert, added up over the tokens of a step and over all ranks, as the run time has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Predictor(Protocol):
    def guess(self, step: int, layer: int, counts: Array, ahead: int) -> list[int]:
        """Experts of the layer `layer + ahead`, from the rows that each expert of `layer` has, `counts` [E]."""
        ...


def most_rows_first(counts: Sequence[int]) -> list[int]:
    """Experts that have rows, those with the most first, then by number: the order in which guesses are fetched."""
    return sorted([expert for expert, rows in enumerate(counts) if rows], key=counts.__getitem__, reverse=True)


class NextRouter:
    """What the later layer's router said when it was applied early, as a trace recorded it.

    `predicted_ids` [L, tokens, j], -1 where there was no guess; step i has the tokens from `step_starts[i]` on.
    """

    def __init__(self, predicted_ids: Array, step_starts: Array, num_experts: int) -> None:
        self._ids, self._starts, self._num_experts = predicted_ids, step_starts, num_experts

    def guess(self, step: int, layer: int, counts: Array, ahead: int) -> list[int]:
        ids = self._ids[layer + ahead, self._starts[step] : self._starts[step + 1]].ravel()
        return most_rows_first(np.bincount(ids[ids >= 0], minlength=self._num_experts).tolist())


class History:
    """What used to follow: how often a token that chose expert i of layer l chose j of layer l + ahead, in a trace.

    An expert's score is the sum, over the rows of this step, of the share in which it followed them. As many experts
    are guessed as this layer uses. Shares are whole numbers of 2 ** -20: sums are exact, and the same everywhere.
    """

    def __init__(self, expert_ids: Array, num_experts: int, ahead: int = 1) -> None:
        """Learn from `expert_ids` [L, tokens, k]. Raises ValueError where there is no layer so far ahead."""
        if not 0 < ahead < len(expert_ids):
            raise ValueError(f"history of {ahead} layers ahead in a trace of {len(expert_ids)} layers")
        self.ahead = ahead
        pairs = zip(expert_ids[:-ahead], expert_ids[ahead:], strict=True)
        self._share = [_followed(first, second, num_experts) for first, second in pairs]

    def guess(self, step: int, layer: int, counts: Array, ahead: int) -> list[int]:
        """As `Predictor`; `ahead` must be the learned one (ValueError). No guess beyond the last layer."""
        if ahead != self.ahead:
            raise ValueError(f"history was learned for {self.ahead} layers ahead, not {ahead}")
        (used,) = np.nonzero(counts)
        if layer >= len(self._share) or not used.size:
            return []
        scores = counts[used] @ self._share[layer][used]
        order: list[int] = np.argsort(-scores, kind="stable").tolist()
        return [expert for expert in order[: used.size] if scores[expert]]


def _followed(first_TK: Array, second_TK: Array, num_experts: int) -> Array:
    """[E, E]: of the choices of two layers for the same tokens, the share of j in the second after i in the first."""
    pairs = first_TK.astype(np.int64)[:, :, None] * num_experts + second_TK[:, None, :]
    counts = np.bincount(pairs.ravel(), minlength=num_experts**2).reshape(num_experts, num_experts)
    found: Array = (counts << 20) // np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return found
