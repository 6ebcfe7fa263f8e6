"""Dense operations on torch: one kernel per operation, `kernel(ctx, *tensors, **attributes)`.

Products accumulate in fp32 (torch's own matrix products do, whatever the dtype); norms are computed in fp32.
Every kernel takes zero rows.

Shapes: T rows, D hidden, N outputs, H heads, d head dim, I inner, L selected rows, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moec.runtime.context import Context


def embed(ctx: Context, tokens_T: Tensor, w_VD: Tensor) -> Tensor:
    """Rows of the table: [T, D]."""
    return F.embedding(tokens_T, w_VD)


def take(ctx: Context, x_TD: Tensor, select_L: Tensor) -> Tensor:
    """The rows selected: [L, D]."""
    return x_TD.index_select(0, select_L)


def rms_norm(ctx: Context, x: Tensor, w_D: Tensor, *, eps: float) -> Tensor:
    """w * x / sqrt(mean(x^2) + eps) over the last dim, in fp32, cast back to x's dtype."""
    return F.rms_norm(x.float(), w_D.shape, w_D.float(), eps).to(x.dtype)


def linear(ctx: Context, x: Tensor, w_ND: Tensor) -> Tensor:
    """x @ w.T: [..., N]."""
    return F.linear(x, w_ND)


def merged_linear(ctx: Context, x: Tensor, w_ND: Tensor, *, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """The parts of x @ w.T: [..., n] for each n of `sizes`, views of the whole."""
    return torch.split(F.linear(x, w_ND), list(sizes), dim=-1)


def add_bias(ctx: Context, x: Tensor, b_N: Tensor) -> Tensor:
    return x + b_N


def add(ctx: Context, a: Tensor, b: Tensor) -> Tensor:
    return a + b


def silu_mul(ctx: Context, gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate).mul_(up)


def gate_up(ctx: Context, x_TD: Tensor, w_GD: Tensor) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T): [T, I]. The G = 2 I rows of `w` are those of gate, then those of up."""
    gate, up = F.linear(x_TD, w_GD).chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def split_heads(ctx: Context, x_TN: Tensor, *, head_dim: int) -> Tensor:
    """[T, H * d] -> [T, H, d]. The number of heads is given, since zero rows leave it open."""
    return x_TN.view(x_TN.shape[0], x_TN.shape[1] // head_dim, head_dim)


def merge_heads(ctx: Context, x_THd: Tensor) -> Tensor:
    """[T, H, d] -> [T, H * d]."""
    return x_THd.flatten(1)


def split(ctx: Context, x: Tensor, *, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Pieces of the last dim."""
    return torch.split(x, list(sizes), dim=-1)
