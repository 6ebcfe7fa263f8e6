"""What kinds of grouped GEMM there are: which product, of which weights, rows read from where, results stored how."""

from __future__ import annotations

import enum


class Projection(enum.Enum):
    """Which of an expert's two products."""

    GATE_UP = "gate_up"
    DOWN = "down"

    @property
    def sides(self) -> int:
        """Products that a column of the result is made of: gate and up, or one."""
        return 2 if self is Projection.GATE_UP else 1

    def turned(self, one: int, other: int) -> tuple[int, int]:
        """(hidden, inner) as (summed dimension, columns of the result), and the way back."""
        return (one, other) if self is Projection.GATE_UP else (other, one)


class Weights(enum.Enum):
    """How weights are stored: in the rows' dtype, or quantised with scales."""

    PLAIN = "plain"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"


class RowSource(enum.Enum):
    """Rows are sorted by expert in memory, or the row of sorted position p is `rows[pairs[p] // top]`."""

    SORTED = "sorted"
    GATHERED = "gathered"


class Store(enum.Enum):
    """Result p as it is; times `pair_weights[pairs[p]]`; or that added to row `pairs[p] // top` of `out`.

    Added atomically, in fp32, in no fixed order.
    """

    PLAIN = "plain"
    WEIGHTED = "weighted"
    ACCUMULATED = "accumulated"
