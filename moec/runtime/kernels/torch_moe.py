"""Routing and experts on torch. What brings rows to the experts and back is in `torch_exchange`.

An expert's rows are neighbours; nothing is padded, an expert with no rows computes nothing.

Shapes: S tokens, E experts, M experts held by this rank, k choices, R rows at their experts, D hidden, N outputs,
I inner; B and G blocks of 128 along N and K.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moec.diagnostics import MoecError, fail
from moec.runtime.context import Context
from moec.runtime.quantise import dequantise_blocks

#: `F.grouped_mm` wants the strides of its operands and of its result to be multiples of this many bytes.
GROUPED_ALIGNMENT = 16
BUG = "this is a bug in moec: please report it with the program"


def router_logits(ctx: Context, x_SD: Tensor, w_ED: Tensor) -> Tensor:
    """x @ w.T in fp32 from the first product on: a rounded logit may choose another expert."""
    return F.linear(x_SD.float(), w_ED.float())


def route(
    ctx: Context,
    logits_SE: Tensor,
    bias_E: Tensor | None = None,
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
    """Choose `top` experts a token: ids i64 [S, k], best first, and weights fp32 [S, k]. All in fp32.

    With `shared = n`, k is top + n: every token has experts E to E + n - 1 too, last and with weight 1.

    `bias` is added for the choice only; the weights come from the scores without it. With groups, the best `keep` are
    eligible (DeepSeek-V3's gate): a group counts the sum of its two best biased scores, or its best where there is
    no bias or one expert a group. Equal scores: the lower id first. Raises E0506 for a token whose scores are NaN.
    """
    scores_SE = logits_SE.softmax(dim=-1) if score == "softmax" else logits_SE.sigmoid()
    _check_scores(ctx, scores_SE, table)
    chosen_by_SE = scores_SE if bias_E is None else scores_SE + bias_E
    if groups > 1:
        chosen_by_SE = _mask_groups(chosen_by_SE, groups, keep, best=1 if bias_E is None else 2)
    ids_Sk = top_ids(chosen_by_SE, top)
    weights_Sk = scores_SE.gather(1, ids_Sk)
    if renormalize:
        weights_Sk = weights_Sk / (weights_Sk.sum(dim=-1, keepdim=True) + 1e-20)
    return with_shared(ids_Sk, weights_Sk * scale, scores_SE.shape[1], shared)


def with_shared(ids_Sk: Tensor, weights_Sk: Tensor, experts: int, shared: int) -> tuple[Tensor, Tensor]:
    """The choices of every token, and behind them the `shared` experts that follow the `experts` routed ones."""
    if not shared:
        return ids_Sk, weights_Sk
    beside = torch.arange(experts, experts + shared, device=ids_Sk.device).expand(len(ids_Sk), shared)
    return torch.cat([ids_Sk, beside], 1), torch.cat([weights_Sk, weights_Sk.new_ones(beside.shape)], 1)


def top_ids(scores: Tensor, top: int) -> Tensor:
    """Ids of the `top` largest fp32 scores along the last dim, largest first, equal ones by lower id. No NaN.

    torch.topk leaves open which of two equal scores it returns, so it is given keys that are all different: the
    score's bits, ordered as integers, above the id counted downwards.
    """
    bits = (scores + 0.0).view(torch.int32)  # adding 0 makes -0.0 and 0.0 equal in bits too
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    last = scores.shape[-1] - 1
    keys = (ordered << 32) | torch.arange(last, -1, -1, device=scores.device)
    return last - (keys.topk(top, dim=-1).values & 0xFFFFFFFF)


def _mask_groups(scores_SE: Tensor, groups: int, keep: int, best: int) -> Tensor:
    """-inf for every expert outside the `keep` best groups, by the sum of each group's `best` scores."""
    grouped = scores_SE.view(scores_SE.shape[0], groups, scores_SE.shape[1] // groups)
    group_scores = grouped.topk(min(best, grouped.shape[2]), dim=-1).values.sum(dim=-1)
    dropped = torch.ones_like(group_scores, dtype=torch.bool)
    dropped.scatter_(1, top_ids(group_scores, keep), value=False)
    return grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(1)


def _check_scores(ctx: Context, scores_SE: Tensor, table: str) -> None:
    bad_S = scores_SE.isnan().any(dim=-1)
    if bad_S.any():
        raise scores_fault(ctx, table, int(bad_S.nonzero()[0, 0]))


def scores_fault(ctx: Context, table: str, row: int) -> MoecError:
    """The error for a row whose scores are NaN."""
    return fail(
        "E0506",
        f"layer {ctx.layer}: the router of `{table}` has scores that are not numbers, first for row {row}",
        "an earlier layer overflowed or the weights are damaged: try `--dtype fp32`, then check the checkpoint",
    )


def grouped_linear(
    ctx: Context, rows_RK: Tensor, offsets_M: Tensor, w_MNK: Tensor, scales_MBG: Tensor | None = None
) -> Tensor:
    """rows @ w[m].T for the rows of each expert m, which end at offsets[m] (the last end is R): [R, N].

    With `scales` the weights are in fp8 (`moec.runtime.quantise`): multiplied in fp32, one expert in use at a time.
    Raises E0508 where the ends leave rows over, as far as that can be seen without waiting for a GPU.
    """
    if scales_MBG is not None:
        return _grouped_fp8(ctx, rows_RK, offsets_M, w_MNK, scales_MBG)
    num_rows, inner = rows_RK.shape
    width = w_MNK.shape[1]
    aligned = all(size * rows_RK.element_size() % GROUPED_ALIGNMENT == 0 for size in (inner, width))
    if rows_RK.is_cuda and rows_RK.dtype is torch.bfloat16 and num_rows and aligned:
        return F.grouped_mm(rows_RK, w_MNK.transpose(1, 2), offs=offsets_M)
    out_RN = rows_RK.new_empty(num_rows, width)
    for expert, first, end in all_ranges(ctx, num_rows, offsets_M):
        torch.mm(rows_RK[first:end], at_boundary(w_MNK[expert]).t(), out=out_RN[first:end])
    return out_RN


def _grouped_fp8(
    ctx: Context, rows_RK: Tensor, offsets_M: Tensor, w_MNK: Tensor, scales_MBG: Tensor, sides: int = 1
) -> Tensor:
    out_RN = rows_RK.new_empty(rows_RK.shape[0], w_MNK.shape[1])
    for expert, first, end in all_ranges(ctx, len(rows_RK), offsets_M):
        out_RN[first:end] = multiply_fp8(rows_RK[first:end], w_MNK[expert], scales_MBG[expert], sides)
    return out_RN


def multiply_fp8(rows_RK: Tensor, w_NK: Tensor, scales_BG: Tensor, sides: int = 1) -> Tensor:
    """rows @ w.T with one expert's matrix in fp8, in which `sides` of them are joined: fp32 [R, N]."""
    return rows_RK.float() @ dequantise_blocks(w_NK, scales_BG, sides).t()


def at_boundary(w_NK: Tensor) -> Tensor:
    """One expert's matrix, where it begins at a multiple of 16 bytes: a product's last bits may depend on that.

    In a stack of experts that are not so long, each begins elsewhere; in a slot of a cache, elsewhere again.
    """
    return w_NK.clone() if w_NK.data_ptr() % GROUPED_ALIGNMENT else w_NK


def grouped_gate_up(
    ctx: Context, rows_RD: Tensor, offsets_M: Tensor, w_MGD: Tensor, scales_MBG: Tensor | None = None
) -> Tensor:
    """silu(rows @ gate.T) * (rows @ up.T) per expert: [R, I]. The G = 2 I rows of w[m] are gate's, then up's."""
    if scales_MBG is None:
        both_RG = grouped_linear(ctx, rows_RD, offsets_M, w_MGD)
    else:
        both_RG = _grouped_fp8(ctx, rows_RD, offsets_M, w_MGD, scales_MBG, sides=2)
    return activated(both_RG)


def activated(both_RG: Tensor, out_RI: Tensor | None = None) -> Tensor:
    """silu(gate) * up of rows that are gate's, then up's: [R, I]. Into `out` where that is given."""
    gate_RI, up_RI = both_RG.chunk(2, dim=-1)
    act_RI = F.silu(gate_RI)
    return torch.mul(act_RI, up_RI, out=act_RI if out_RI is None else out_RI)


def all_ranges(ctx: Context, num_rows: int, offsets_M: Tensor, whose: str = "experts") -> list[tuple[int, int, int]]:
    """`ranges_of`, which must have all of the rows (E0508)."""
    found = ranges_of(offsets_M)
    if (num_served := found[-1][2] if found else 0) != num_rows:
        raise lost_rows(ctx, f"{whose} were given {num_served} of {num_rows} rows")
    return found


def ranges_of(offsets_M: Tensor) -> list[tuple[int, int, int]]:
    """(m, where its rows begin, where they end) of the experts that have rows."""
    found, first = [], 0
    for m, end in enumerate(offsets_M.tolist()):
        if end > first:
            found.append((m, first, end))
            first = end
    return found


def lost_rows(ctx: Context, what: str) -> MoecError:
    return fail("E0508", f"layer {ctx.layer}: {what}", BUG)
