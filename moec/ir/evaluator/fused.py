"""Operations that join an expert's product with what is before or after it, in the reference evaluator: as both say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from moec.ir.evaluator.exchange import group_rows, reduce_rows
from moec.ir.evaluator.local import Context, grouped_gate_up, grouped_linear


def group_pairs(ctx: Context, ids: Tensor, table: str) -> tuple[Tensor, Tensor]:
    _, offsets, pairs = group_rows(ctx, ids, ids, table)
    return offsets, pairs


def gathered_gate_up(
    ctx: Context, rows: Tensor, offsets: Tensor, pairs: Tensor, w: Tensor, *scales: Tensor, table: str, top: int
) -> Tensor:
    return grouped_gate_up(ctx, rows[pairs // top], offsets, w, *scales)


def reduced_linear(
    ctx: Context, rows: Tensor, offsets: Tensor, w: Tensor, pairs: Tensor, weights: Tensor, table: str
) -> Tensor:
    return reduce_rows(ctx, grouped_linear(ctx, rows, offsets, w), pairs, weights, table)


def paired_experts(
    ctx: Context, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, table: str, **attrs: Any
) -> Tensor:
    rows, offsets, pairs = group_rows(ctx, x, ids, table)
    act = grouped_gate_up(ctx, rows, offsets, gate_up)
    return reduced_linear(ctx, act, offsets, down, pairs, weights, table)


FUSED: dict[str, Callable[..., Any]] = {
    "group_pairs": group_pairs,
    "gathered_gate_up": gathered_gate_up,
    "reduced_linear": reduced_linear,
    "paired_experts": paired_experts,
}
