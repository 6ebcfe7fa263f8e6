"""Rotary embedding on torch, plain and with YaRN's scaling of the frequencies.

Shapes: T rows, H heads, d rotated dim, F = d / 2 pairs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moec.runtime.context import Context

#: factor, original context, beta_fast, beta_slow, mscale, mscale_all_dim
Yarn = tuple[float, int, float, float, float, float]


def rope(ctx: Context, x: Tensor, positions_T: Tensor, *, theta: float, pairs: str, yarn: Yarn | None) -> Tensor:
    """Rotate pairs of the last dim of x [T, d] or [T, H, d] by position * frequency, in fp32, cast back.

    `halves`: a pair is (i, i + d/2). `interleaved`: (2i, 2i + 1). A pair stays in its place.
    """
    cos, sin = turns(ctx, positions_T, x.shape[-1], theta, yarn)
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if pairs == "interleaved":
        a, b = x.float()[..., ::2], x.float()[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype)
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def turns(ctx: Context, positions_T: Tensor, dim: int, theta: float, yarn: Yarn | None) -> tuple[Tensor, Tensor]:
    """cos and sin of every row's angles, fp32 [T, F]; computed by the first layer, kept for the step.

    Positions are known by their place in memory, which the entry keeps: each layer cuts the step's anew in chunks.
    """
    key = ("rope", dim, theta, yarn, positions_T.data_ptr(), len(positions_T))
    known: tuple[Tensor, Tensor, Tensor] | None = ctx.step_memo.get(key)
    if known is None:
        place = ("rope", dim, theta, yarn, positions_T.device)
        if place not in ctx.memo:  # copied to the device once: in a graph of kernels it could not be
            found, factor = frequencies(dim, theta, yarn)
            ctx.memo[place] = found.to(positions_T.device), factor
        frequency_F, factor = ctx.memo[place]
        angle_TF = positions_T.float()[:, None] * frequency_F
        known = positions_T, angle_TF.cos() * factor, angle_TF.sin() * factor
        ctx.step_memo[key] = known
    return known[1:]


def frequencies(dim: int, theta: float, yarn: Yarn | None) -> tuple[Tensor, float]:
    """Angle per position of each pair, fp32 [F], and the factor on cos and sin.

    YaRN (Peng et al. 2023) as transformers' `_compute_yarn_parameters` has it: pairs that turn more than `beta_fast`
    times over the original context keep their frequency, those below `beta_slow` are slowed by `factor`, and a linear
    ramp lies between; the factor is the ratio of the two attention temperatures.
    """
    wavelength_F = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if yarn is None:
        return 1.0 / wavelength_F, 1.0
    factor, original, beta_fast, beta_slow, mscale, mscale_all_dim = yarn
    low = max(math.floor(_pair_thatturns(beta_fast, dim, theta, original)), 0)
    high = min(math.ceil(_pair_thatturns(beta_slow, dim, theta, original)), dim - 1)
    width = high - low or 0.001  # transformers' guard against a ramp of no width
    slowed_F = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    kept_F = 1 - slowed_F
    frequency_F = 1.0 / (factor * wavelength_F) * (1 - kept_F) + 1.0 / wavelength_F * kept_F
    if mscale and mscale_all_dim:
        return frequency_F, _temperature(factor, mscale) / _temperature(factor, mscale_all_dim)
    return frequency_F, _temperature(factor, 1.0)


def _pair_thatturns(num_turns: float, dim: int, theta: float, original: int) -> float:
    """Index (a real number) of the pair that turns `num_turns` times over `original` positions."""
    return dim * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(theta))


def _temperature(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
