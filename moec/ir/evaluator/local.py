"""Local operations of the reference evaluator: one rank, fp64, as their definitions say.

Products, activations and router scores are computed row by row in a fixed order, so that a row's bits do not depend on
which rows stand beside it (they do in a GEMM, and in vectorised exp): a pass that only moves rows must change no bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moec.blocks import BLOCK
from moec.ir.program import Program
from moec.placement import span

if TYPE_CHECKING:
    from moec.ir.evaluator.program import Sequence


@dataclass(frozen=True)
class Context:
    """What an operation may read besides its arguments."""

    program: Program
    rank: int
    layer: int | None
    batch: list[Sequence]
    states: dict[tuple[int, int, int, str], Tensor]

    def sequences(self, chunk: tuple[int, int] | None) -> list[Sequence]:
        """The batch, or the rows of chunk (index, parts) of it: each sequence behind its rows in the chunks before."""
        if chunk is None:
            return self.batch
        rows = span(sum(len(s.tokens) for s in self.batch), *chunk)
        start, out = 0, []
        for s in self.batch:
            first, stop = max(rows.start - start, 0), min(rows.stop - start, len(s.tokens))
            if first < stop:
                out.append(replace(s, tokens=s.tokens[first:stop], cached=s.cached + first))
            start += len(s.tokens)
        return out

    def append(self, name: str, slot: int, cached: int, rows: Tensor) -> Tensor:
        """Write rows behind the `cached` tokens of a slot; the whole sequence so far."""
        key = (self.rank, int(self.layer or 0), slot, name)
        before = self.states.get(key, rows[:0])
        assert len(before) >= cached, f"slot {slot} holds {len(before)} of {cached} tokens"
        self.states[key] = torch.cat([before[:cached], rows])
        return self.states[key]


def embed(ctx: Context, tokens: Tensor, w: Tensor) -> Tensor:
    return w[tokens]


def take(ctx: Context, x: Tensor, select: Tensor) -> Tensor:
    return x[select]


def rms_norm(ctx: Context, x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * w


def linear(ctx: Context, x: Tensor, w: Tensor) -> Tensor:
    rows = [(w * row).sum(-1) for row in x]
    return torch.stack(rows) if rows else x.new_zeros(0, w.shape[0])


def merged_linear(ctx: Context, x: Tensor, w: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(linear(ctx, x, part) for part in torch.split(w, list(sizes)))


def add(ctx: Context, a: Tensor, b: Tensor) -> Tensor:
    return a + b


def silu_mul(ctx: Context, gate: Tensor, up: Tensor) -> Tensor:
    rows = [g / (1 + torch.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
    return torch.stack(rows) if rows else gate


def gate_up(ctx: Context, x: Tensor, w: Tensor) -> Tensor:
    gate, up = w.chunk(2)
    return silu_mul(ctx, linear(ctx, x, gate), linear(ctx, x, up))


def split_heads(ctx: Context, x: Tensor, head_dim: int) -> Tensor:
    return x.reshape(x.shape[0], x.shape[1] // head_dim, head_dim)


def merge_heads(ctx: Context, x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2])


def split(ctx: Context, x: Tensor, sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    return x[..., : sizes[0]], x[..., sizes[0] :]


@cache
def rope_frequencies(dim: int, theta: float, yarn: tuple[float, ...] | None) -> tuple[Tensor, float]:
    """Angle per position of each pair [dim/2], and the factor on cos and sin (YaRN, as DeepSeek-V3 uses it)."""
    plain = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if yarn is None:
        return plain, 1.0
    factor, original, beta_fast, beta_slow, mscale, mscale_all_dim = yarn

    def pair_at(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair_at(beta_fast)), 0), min(math.ceil(pair_at(beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)

    def attention_factor(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        scale = attention_factor(mscale) / attention_factor(mscale_all_dim)
    else:
        scale = attention_factor(1.0)
    return plain / factor * ramp + plain * (1 - ramp), scale


def rope(
    ctx: Context, x: Tensor, positions: Tensor, theta: float, pairs: str, yarn: tuple[float, ...] | None
) -> Tensor:
    frequencies, scale = rope_frequencies(x.shape[-1], theta, yarn)
    angle = positions.double()[:, None] * frequencies
    cos, sin = torch.cos(angle) * scale, torch.sin(angle) * scale
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    half = x.shape[-1] // 2
    a, b = (x[..., :half], x[..., half:]) if pairs == "halves" else (x[..., 0::2], x[..., 1::2])
    first, second = a * cos - b * sin, b * cos + a * sin
    if pairs == "halves":
        return torch.cat([first, second], -1)
    return torch.stack([first, second], -1).flatten(-2)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, cached: int) -> Tensor:
    """Causal attention of rows q [n,H,d] at positions cached.. over k, v [m,H,d]."""
    scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
    future = torch.arange(k.shape[0])[None] > torch.arange(q.shape[0])[:, None] + cached
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(future, -math.inf).softmax(-1), v)


def attention(
    ctx: Context, q: Tensor, k: Tensor, v: Tensor, scale: float, chunk: tuple[int, int] | None = None
) -> Tensor:
    out, start = [], 0
    for s in ctx.sequences(chunk):
        rows = slice(start, start := start + len(s.tokens))
        keys, values = (ctx.append(name, s.slot, s.cached, t[rows]) for name, t in (("k", k), ("v", v)))
        repeat = q.shape[1] // k.shape[1]
        keys, values = (t.repeat_interleave(repeat, 1) for t in (keys, values))
        out.append(_attend(q[rows], keys, values, scale, s.cached))
    return torch.cat([*out, q[:0, :, :0].new_zeros(0, q.shape[1], v.shape[2])])


def mla_attention(
    ctx: Context,
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    kv_b: Tensor,
    scale: float,
    value: int,
    form: str,
    chunk: tuple[int, int] | None = None,
) -> Tensor:
    """Always expanded: the absorbed form must give the same."""
    heads, nope = q_nope.shape[1], q_nope.shape[2]
    out, start = [], 0
    for s in ctx.sequences(chunk):
        rows = slice(start, start := start + len(s.tokens))
        seen = ctx.append("latent", s.slot, s.cached, latent[rows])
        roped = ctx.append("rope", s.slot, s.cached, k_rope[rows])
        wide = (seen @ kv_b.T).reshape(len(seen), heads, nope + value)
        k = torch.cat([wide[..., :nope], roped[:, None].expand(-1, heads, -1)], -1)
        q = torch.cat([q_nope[rows], q_rope[rows]], -1)
        out.append(_attend(q, k, wide[..., nope:], scale, s.cached))
    return torch.cat([*out, q_nope.new_zeros(0, heads, value)])


def route(
    ctx: Context,
    logits: Tensor,
    bias: Tensor | None = None,
    *,
    score: str,
    top: int,
    groups: int,
    keep: int,
    renormalize: bool,
    scale: float,
    table: str,
    shared: int = 0,
) -> tuple[Tensor, Tensor]:
    """Row by row: best groups, then best experts in them, ties to the lowest id; weights from unbiased scores.

    Then the shared experts, which come behind all others, with weight 1.
    """
    scores = [torch.sigmoid(row) if score == "sigmoid" else row.softmax(-1) for row in logits]
    ids = torch.zeros(len(logits), top, dtype=torch.int64)
    for row, plain in enumerate(scores):
        biased = plain if bias is None else plain + bias
        per_group = biased.reshape(groups, -1).tolist()
        num_best = 2 if bias is not None and len(per_group[0]) > 1 else 1
        worth = [sum(sorted(group, reverse=True)[:num_best]) for group in per_group]
        kept = sorted(range(groups), key=lambda g: (-worth[g], g))[:keep]
        eligible = [e for e in range(len(biased)) if e // (len(biased) // groups) in kept]
        order = biased.tolist()
        ids[row] = torch.tensor(sorted(eligible, key=lambda e: (-order[e], e))[:top])
    weights = torch.stack(scores).gather(1, ids) if scores else logits.new_zeros(0, top)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    beside = logits.shape[1] + torch.arange(shared).expand(len(logits), shared)
    return torch.cat([ids, beside], 1), torch.cat([weights * scale, logits.new_ones(len(logits), shared)], 1)


def moe(x: Tensor, ids: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Sum over the slots of each token, in slot order."""
    out = torch.zeros_like(x)
    for row in range(len(x)):
        for expert, weight in zip(ids[row].tolist(), weights[row], strict=True):
            a, b = ((w[expert] * x[row]).sum(-1) for w in (gate, up))
            out[row] += weight * (down[expert] * (a / (1 + torch.exp(-a)) * b)).sum(-1)
    return out


def scaled(w: Tensor, scales: Tensor | None, sides: int = 1) -> Tensor:
    """Matrices [M, N, K] times the scales of their blocks, where they have some; `sides` are joined, each with its."""
    if scales is None:
        return w
    parts = zip(w.chunk(sides, 1), scales.chunk(sides, 1), strict=True)
    return torch.cat([part * _spread(scale, part.shape[2])[:, : part.shape[1]] for part, scale in parts], 1)


def _spread(scales: Tensor, columns: int) -> Tensor:
    return scales.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)[:, :, :columns]


def grouped_linear(ctx: Context, rows: Tensor, offsets: Tensor, w: Tensor, scales: Tensor | None = None) -> Tensor:
    w = scaled(w, scales)
    ends = offsets.tolist()
    parts = [linear(ctx, rows[start:end], w[m]) for m, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]
    return torch.cat([*parts, rows.new_zeros(0, w.shape[1])])


def grouped_gate_up(ctx: Context, rows: Tensor, offsets: Tensor, w: Tensor, scales: Tensor | None = None) -> Tensor:
    gate, up = (grouped_linear(ctx, rows, offsets, part) for part in scaled(w, scales, sides=2).chunk(2, 1))
    return silu_mul(ctx, gate, up)


def wait(ctx: Context, rows: Tensor) -> Tensor:
    return rows


LOCAL: dict[str, Callable[..., Any]] = {
    "embed": embed,
    "take": take,
    "rms_norm": rms_norm,
    "linear": linear,
    "merged_linear": merged_linear,
    "router_logits": linear,
    "add": add,
    "add_bias": add,
    "silu_mul": silu_mul,
    "gate_up": gate_up,
    "split_heads": split_heads,
    "merge_heads": merge_heads,
    "split": split,
    "rope": rope,
    "attention": attention,
    "mla_attention": mla_attention,
    "route": route,
    "grouped_linear": grouped_linear,
    "grouped_gate_up": grouped_gate_up,
    "all_to_all.wait": wait,
}
