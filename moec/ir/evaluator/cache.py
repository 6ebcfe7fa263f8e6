"""Operations on cached experts in the reference evaluator: every expert is at hand, a prefetch does nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moec.ir.evaluator.local import Context, grouped_gate_up, grouped_linear, linear, rms_norm, route


def guess(
    ctx: Context, x: Tensor, norm: Tensor, router: Tensor, bias: Tensor | None = None, *, eps: float, **choice: Any
) -> Tensor:
    logits = linear(ctx, rms_norm(ctx, x, norm, eps), router)
    return route(ctx, logits, bias, **choice, renormalize=False, scale=1.0, table="")[0]


def count_experts(ctx: Context, ids: Tensor, table: str) -> Tensor:
    return torch.bincount(ids.flatten(), minlength=ctx.program.experts[table])


def prefetch_start(ctx: Context, given: Tensor, **settings: Any) -> Tensor:
    return torch.tensor(0)


def prefetch_wait(ctx: Context, offsets: Tensor, table: str) -> Tensor:
    return torch.arange(len(offsets))


def cached_experts(
    ctx: Context,
    rows: Tensor,
    offsets: Tensor,
    slots: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *scales: Tensor,
    table: str,
) -> Tensor:
    return grouped_linear(ctx, grouped_gate_up(ctx, rows, offsets, gate_up, *scales[:1]), offsets, down, *scales[1:])


CACHE: dict[str, Callable[..., Any]] = {
    "guess": guess,
    "count_experts": count_experts,
    "prefetch.start": prefetch_start,
    "prefetch.wait": prefetch_wait,
    "cached_experts": cached_experts,
}
