"""Attention over the KV memory on torch: grouped-query and latent (MLA, DeepSeek-V2, arXiv 2405.04434).

Both append the step's rows to the layer's KV memory, then let each row attend to its sequence up to itself. Only places
of the memory that hold a row are read, so what lies behind a sequence's end cannot reach a result. torch's fused
attention does softmax and sums in fp32.

Shapes: T rows, B sequences, Q rows of one sequence, L places read of a sequence (the longest where several are read
together), H query heads, K KV heads, d head dim, C latent rank, r rotated dim, n the rest of a query head, e value dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moec.runtime.context import Context
from moec.runtime.step import Fixed, Step

#: Rows of a sequence that attend together when part of it is cached: bounds the mask, [rows, L].
QUERY_ROWS = 512


@dataclass(frozen=True, eq=False)
class Reading:
    """Where the rows of a step, or of a chunk of it, lie in the KV memory; shared by the layers.

    slots_T: KV slot of each row. lengths: places of each sequence that hold rows, the step's included; nothing where
    the step is of fixed shape, which the device alone knows. is_single: every sequence has one row, so all are read
    together: place_BL are the places to read (beyond a sequence's end, its last place again; None: all to the same
    place, in slots as they lie), mask_BL says which of them count (None: all have one length).
    """

    step: Step
    slots_T: Tensor
    lengths: tuple[int, ...]
    is_single: bool
    place_BL: Tensor | None
    mask_BL: Tensor | None


#: Which of how many balanced chunks of the step's rows; None for all rows.
Chunk = tuple[int, int] | None


def attention(
    ctx: Context, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, *, scale: float, chunk: Chunk = None
) -> Tensor:
    """Causal attention, H / K query heads to a KV head: [T, H, d]. KV memory k, v [slots, context, K, d]."""
    reading = reading_of(ctx, chunk)
    _append(ctx, reading, k=k_TKd, v=v_TKd)
    if reading.is_single:
        keys, values = (_read_all(ctx, reading, name).transpose(1, 2) for name in ("k", "v"))
        q_BKGd = torch.unflatten(q_THd, 1, (k_TKd.shape[1], -1))
        return _attend(q_BKGd, keys, values, scale, _over_heads(reading.mask_BL)).flatten(1, 2)
    pieces = []
    for index, rows in _sequences(reading.step):
        keys, values = (_read_one(ctx, reading, name, index) for name in ("k", "v"))
        pieces.append(_attend_one(q_THd[rows], keys, values, scale))
    return _join(pieces, q_THd, v_TKd.shape[2])


def mla_attention(
    ctx: Context,
    q_nope_THn: Tensor,
    q_rope_THr: Tensor,
    c_TC: Tensor,
    k_rope_Tr: Tensor,
    w_kv_b: Tensor,
    *,
    scale: float,
    value: int,
    form: str,
    chunk: Chunk = None,
) -> Tensor:
    """Causal attention over latents: [T, H, e]. KV memory latent [slots, context, C], rope [slots, context, r].

    `w_kv_b` [H * (n + e), C] makes each head's key and value from a latent. `expanded` applies it to the latents read;
    `absorbed` to the query and to the result instead, so that all heads read the latents themselves.
    """
    reading = reading_of(ctx, chunk)
    _append(ctx, reading, latent=c_TC, rope=k_rope_Tr)
    if form == "expanded":
        w_HNC = torch.unflatten(w_kv_b, 0, (q_nope_THn.shape[1], -1))
        return _mla_expanded(ctx, reading, torch.cat((q_nope_THn, q_rope_THr), dim=-1), w_HNC, scale, value)
    q_THd, w_value_HeC = absorb(q_nope_THn, q_rope_THr, w_kv_b, value)
    o_THC = _mla_absorbed(ctx, reading, q_THd, scale)[..., : c_TC.shape[1]]
    return torch.bmm(o_THC.transpose(0, 1), w_value_HeC.transpose(1, 2)).transpose(0, 1)


def absorb(q_nope_THn: Tensor, q_rope_THr: Tensor, w_kv_b: Tensor, value: int) -> tuple[Tensor, Tensor]:
    """Queries [T, H, C + r] that read latents as they are, and what makes values of the result: [H, e, C]."""
    _, heads, width = q_nope_THn.shape
    w_key_HnC, w_value_HeC = torch.split(torch.unflatten(w_kv_b, 0, (heads, -1)), [width, value], dim=1)
    q_latent_THC = torch.bmm(q_nope_THn.transpose(0, 1), w_key_HnC).transpose(0, 1)
    return torch.cat((q_latent_THC, q_rope_THr), dim=-1), w_value_HeC


def _mla_expanded(ctx: Context, reading: Reading, q_THd: Tensor, w_HNC: Tensor, scale: float, value: int) -> Tensor:
    """Each sequence's latents made into keys and values of every head."""
    heads, width, _ = w_HNC.shape
    pieces = []
    for index, rows in _sequences(reading.step):
        latent_LC, rope_Lr = (_read_one(ctx, reading, name, index) for name in ("latent", "rope"))
        kv_LHN = F.linear(latent_LC, w_HNC.flatten(0, 1)).view(-1, heads, width)
        k_nope_LHn, values_LHe = torch.split(kv_LHN, [width - value, value], dim=-1)
        keys = torch.cat((k_nope_LHn, rope_Lr[:, None].expand(-1, heads, -1)), dim=-1)
        pieces.append(_attend_one(q_THd[rows], keys, values_LHe, scale))
    return _join(pieces, q_THd, value)


def _mla_absorbed(ctx: Context, reading: Reading, q_THd: Tensor, scale: float) -> Tensor:
    """One key for all heads, latent and rotated part; it serves as value too (its rotated part is cut off after)."""
    if reading.is_single:
        keys = torch.cat([_read_all(ctx, reading, name) for name in ("latent", "rope")], dim=-1).unsqueeze(1)
        return _attend(q_THd.unsqueeze(1), keys, keys, scale, _over_heads(reading.mask_BL)).squeeze(1)
    pieces = []
    for index, rows in _sequences(reading.step):
        keys = torch.cat([_read_one(ctx, reading, name, index) for name in ("latent", "rope")], dim=-1).unsqueeze(1)
        pieces.append(_attend_one(q_THd[rows], keys, keys, scale))
    return _join(pieces, q_THd, q_THd.shape[2])


# --- the KV memory ------------------------------------------------------------------------------------------------


def reading_of(ctx: Context, chunk: Chunk) -> Reading:
    """The reading of the step or of a chunk of it, made by the first layer."""
    key = "reading", chunk
    if key not in ctx.step_memo:
        ctx.step_memo[key] = _make_reading(ctx.step if chunk is None else ctx.step.chunk(*chunk))
    found: Reading = ctx.step_memo[key]
    return found


def _make_reading(step: Step) -> Reading:
    device = step.tokens.device
    if step.fixed is not None:
        return _fixed_reading(step, step.fixed)
    sizes = [stop - start for start, stop in zip(step.starts, step.starts[1:], strict=False)]
    lengths = tuple(cached + size for cached, size in zip(step.cached, sizes, strict=True))
    is_single = bool(sizes) and all(size == 1 for size in sizes)
    slots_T = torch.tensor(step.slots, dtype=torch.int64).repeat_interleave(torch.tensor(sizes, dtype=torch.int64))
    place_BL = mask_BL = None
    if is_single:
        last_B = torch.tensor(lengths)[:, None] - 1
        place_BL = torch.arange(max(lengths)).expand(len(lengths), -1)
        mask_BL = (place_BL <= last_B).to(device) if len(set(lengths)) > 1 else None
        place_BL = torch.minimum(place_BL, last_B).to(device)
    return Reading(step, slots_T.to(device), lengths, is_single, place_BL, mask_BL)


def _fixed_reading(step: Step, fixed: Fixed) -> Reading:
    """Of a step of fixed shape, made on the device alone."""
    device = step.positions.device
    slots_T = torch.arange(fixed.first, fixed.first + step.num_tokens, device=device)
    mask_BL = torch.arange(fixed.reach, device=device) <= step.positions[:, None]
    return Reading(step, slots_T, (), True, None, mask_BL)


def _append(ctx: Context, reading: Reading, **rows: Tensor) -> None:
    """Put the step's rows at their places."""
    for name, value in rows.items():
        ctx.kv[name].index_put_((reading.slots_T, reading.step.positions), value)


def _read_one(ctx: Context, reading: Reading, name: str, index: int) -> Tensor:
    """The rows of one sequence: [L, ...], a view."""
    return ctx.kv[name][reading.step.slots[index], : reading.lengths[index]]


def _read_all(ctx: Context, reading: Reading, name: str) -> Tensor:
    """The rows of all sequences: [B, L, ...]; a view where they have one length and neighbouring slots."""
    memory, slots = ctx.kv[name], reading.step.slots
    if reading.step.fixed is not None:
        fixed = reading.step.fixed
        return memory[fixed.first : fixed.first + reading.step.num_tokens, : fixed.reach]
    if reading.mask_BL is None and slots and slots == tuple(range(slots[0], slots[0] + len(slots))):
        return memory[slots[0] : slots[-1] + 1, : reading.lengths[0]]
    assert reading.place_BL is not None, "only sequences of one row each are read together"
    places_BL = reading.slots_T[:, None] * memory.shape[1] + reading.place_BL
    rows = memory.view(-1, *memory.shape[2:]).index_select(0, places_BL.flatten())  # 5 times as fast as memory[...]
    return rows.view(*places_BL.shape, *memory.shape[2:])


def _sequences(step: Step) -> list[tuple[int, slice]]:
    """Index and rows of each sequence that has rows in the step."""
    bounds = zip(step.starts, step.starts[1:], strict=False)
    return [(index, slice(start, stop)) for index, (start, stop) in enumerate(bounds) if stop > start]


# --- softmax(q k) v -----------------------------------------------------------------------------------------------


def _attend_one(q_QHd: Tensor, keys_LKd: Tensor, values_LKe: Tensor, scale: float) -> Tensor:
    """The last Q of a sequence's L rows, each attending up to itself: [Q, H, e].

    KV heads are the batch and the query heads of each its heads, so that no key is copied for its query heads.
    """
    num_rows, length = q_QHd.shape[0], keys_LKd.shape[0]
    q_KGQd = torch.unflatten(q_QHd, 1, (keys_LKd.shape[1], -1)).permute(1, 2, 0, 3)
    keys, values = (x.transpose(0, 1).unsqueeze(1) for x in (keys_LKd, values_LKe))
    if num_rows in (1, length):
        o = _attend(q_KGQd, keys, values, scale, is_causal=num_rows > 1)
    else:
        first = length - num_rows
        blocks = [(i, min(i + QUERY_ROWS, num_rows)) for i in range(0, num_rows, QUERY_ROWS)]
        parts = []
        for start, stop in blocks:
            end = first + stop
            mask = torch.ones(stop - start, end, dtype=torch.bool, device=q_QHd.device).tril(first + start)
            parts.append(_attend(q_KGQd[:, :, start:stop], keys[:, :, :end], values[:, :, :end], scale, mask))
        o = torch.cat(parts, dim=2)
    return o.permute(2, 0, 1, 3).flatten(1, 2)


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """softmax(scale * q @ keys.T) @ values over [batch, heads, rows, dim]; one KV head may serve all heads."""
    width = values.shape[-1]
    if width != q.shape[-1]:  # the fused kernels want one head dim: zeros add nothing to a product
        wide = max(width, q.shape[-1])
        q, keys, values = (F.pad(x, (0, wide - x.shape[-1])) for x in (q, keys, values))
    keys, values = (x.expand(-1, q.shape[1], -1, -1) for x in (keys, values))
    o = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, is_causal=is_causal, scale=scale)
    return o[..., :width]


def _over_heads(mask_BL: Tensor | None) -> Tensor | None:
    return None if mask_BL is None else mask_BL[:, None, None]


def _join(pieces: list[Tensor], like_THd: Tensor, width: int) -> Tensor:
    """The sequences' rows in step order; none at all is a value of zero rows."""
    return torch.cat(pieces) if pieces else like_THd.new_empty(0, like_THd.shape[1], width)
