"""Routing and experts on torch.

A pair is one of a token's k choices: pair p = t * k + j is choice j of token t. Dispatch sorts pairs by the slot of
their expert, so an expert's rows are neighbours; combine puts them back. Rows with no pair do not exist: nothing is
padded, an expert with no rows computes nothing.

Shapes: S tokens, E experts, M experts held by this rank, k choices, P pairs or rows sent, R rows at their experts,
D hidden, N outputs, I inner.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moec.diagnostics import MoecError, fail
from moec.runtime.context import Context

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
) -> tuple[Tensor, Tensor]:
    """Choose `top` experts a token: ids i64 [S, k], best first, and weights fp32 [S, k]. All in fp32.

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
    return ids_Sk, weights_Sk * scale


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
        row = int(bad_S.nonzero()[0, 0])
        raise fail(
            "E0506",
            f"layer {ctx.layer}: the router of `{table}` has scores that are not numbers, first for row {row}",
            "an earlier layer overflowed or the weights are damaged: try `--dtype fp32`, then check the checkpoint",
        )


def dispatch(
    ctx: Context, x_SD: Tensor, ids_Sk: Tensor, *, table: str, local: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs in order of their expert's slot: rows [P, D], counts per slot i64, order i64 [P] (the pair of each row).

    `local`: only the pairs that this rank's experts serve, counts over its M slots. An id may repeat in a token's
    list; each occurrence is a pair of its own. Raises E0507 for an id that is no expert.
    """
    placement = ctx.placements[table]
    ids_P = ids_Sk.flatten()
    _check_ids(ctx, ids_P, placement.num_experts, table)
    slots_P = ctx.slot_of(table, ids_P.device)[ids_P]
    num_slots = placement.num_experts
    if local:
        held = ctx.held(table)
        num_slots = len(held)
        is_here = (slots_P >= held.start) & (slots_P < held.stop)
        slots_P = torch.where(is_here, slots_P - held.start, num_slots)  # other ranks' pairs sort behind ours
    counts = torch.bincount(slots_P, minlength=num_slots + 1)[:num_slots]
    order_P = slots_P.argsort(stable=True)
    if local:
        order_P = order_P[: int(counts.sum())]
    return x_SD.index_select(0, order_P // ids_Sk.shape[1]), counts, order_P


def _check_ids(ctx: Context, ids_P: Tensor, num_experts: int, table: str) -> None:
    outside = (ids_P < 0) | (ids_P >= num_experts)
    if outside.any():
        wrong = int(ids_P[outside][0])
        raise fail("E0507", f"layer {ctx.layer}: expert {wrong} of `{table}` does not exist, it has {num_experts}", BUG)


def offsets(ctx: Context, counts_M: Tensor) -> Tensor:
    """End of each expert's rows: i32 [M]."""
    return counts_M.cumsum(0).to(torch.int32)


def group_rows(ctx: Context, rows_RD: Tensor, recv_nM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that came rank by rank, made expert-major: rows [R, D], offsets i32 [M], perm i64 [R] (where each was).

    `recv`: rows of each expert from each of the n ranks. Raises E0508 where they are not the rows received.
    """
    num_ranks, num_held = recv_nM.shape
    expected = int(recv_nM.sum())
    if expected != rows_RD.shape[0]:
        raise _lost_rows(ctx, f"{rows_RD.shape[0]} rows arrived, {expected} were announced")
    slots_nM = torch.arange(num_held, device=recv_nM.device).expand(num_ranks, num_held)
    slots_R = slots_nM.flatten().repeat_interleave(recv_nM.flatten(), output_size=expected)
    perm_R = slots_R.argsort(stable=True)
    return rows_RD.index_select(0, perm_R), offsets(ctx, recv_nM.sum(dim=0)), perm_R


def ungroup_rows(ctx: Context, rows_RD: Tensor, perm_R: Tensor) -> Tensor:
    """Undo `group_rows`: each row back to where it was."""
    return torch.empty_like(rows_RD).index_copy_(0, perm_R, rows_RD)  # perm names every row once


def grouped_linear(ctx: Context, rows_RK: Tensor, offsets_M: Tensor, w_MNK: Tensor) -> Tensor:
    """rows @ w[m].T for the rows of each expert m, which end at offsets[m] (the last end is R): [R, N].

    Raises E0508 where the ends leave rows over, as far as that can be seen without waiting for a GPU.
    """
    num_rows, inner = rows_RK.shape
    width = w_MNK.shape[1]
    aligned = all(size * rows_RK.element_size() % GROUPED_ALIGNMENT == 0 for size in (inner, width))
    if rows_RK.is_cuda and rows_RK.dtype is torch.bfloat16 and num_rows and aligned:
        return F.grouped_mm(rows_RK, w_MNK.transpose(1, 2), offs=offsets_M)
    out_RN = rows_RK.new_empty(num_rows, width)
    first = 0
    for expert, end in enumerate(offsets_M.tolist()):
        if end > first:
            torch.mm(rows_RK[first:end], w_MNK[expert].t(), out=out_RN[first:end])
        first = end
    if first != num_rows:
        raise _lost_rows(ctx, f"experts were given {first} of {num_rows} rows")
    return out_RN


def grouped_gate_up(ctx: Context, rows_RD: Tensor, offsets_M: Tensor, w_MGD: Tensor) -> Tensor:
    """silu(rows @ gate.T) * (rows @ up.T) per expert: [R, I]. The G = 2 I rows of w[m] are gate's, then up's."""
    gate, up = grouped_linear(ctx, rows_RD, offsets_M, w_MGD).chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def combine(
    ctx: Context, rows_PD: Tensor, order_P: Tensor, weights_Sk: Tensor, *, table: str, local: bool = False
) -> Tensor:
    """Each row times its pair's weight, summed into its token in the order of the choices: [S, D].

    In fp32, cast to the rows' dtype; fp16 saturates at its largest number. With `local`, pairs of other ranks' experts
    add nothing. Raises E0508 where rows are missing.
    """
    num_tokens, num_choices = weights_Sk.shape
    num_pairs, num_rows = num_tokens * num_choices, rows_PD.shape[0]
    if num_rows != order_P.shape[0] or (not local and num_rows != num_pairs):
        raise _lost_rows(ctx, f"`{table}` gave {num_rows} rows for {num_pairs} pairs of tokens and experts")
    total_SD = torch.zeros(num_tokens, rows_PD.shape[1], device=rows_PD.device, dtype=torch.float32)
    if local:
        _add_some(total_SD, rows_PD, order_P, weights_Sk)
    else:
        _add_all(total_SD, rows_PD, order_P, weights_Sk)
    if rows_PD.dtype is torch.float16:
        largest = torch.finfo(torch.float16).max
        total_SD.clamp_(-largest, largest)
    return total_SD.to(rows_PD.dtype)


def _add_all(total_SD: Tensor, rows_PD: Tensor, order_P: Tensor, weights_Sk: Tensor) -> None:
    """Add choice after choice: every pair has a row."""
    row_of_P = torch.empty_like(order_P)
    row_of_P[order_P] = torch.arange(order_P.shape[0], device=order_P.device)
    row_of_Sk = row_of_P.view(weights_Sk.shape)
    for choice in range(weights_Sk.shape[1]):
        picked = rows_PD.index_select(0, row_of_Sk[:, choice])
        total_SD.addcmul_(picked.float(), weights_Sk[:, choice, None])


def _add_some(total_SD: Tensor, rows_RD: Tensor, order_R: Tensor, weights_Sk: Tensor) -> None:
    """Add choice after choice those pairs that have a row. One choice names a token once, so nothing is added twice."""
    num_choices = weights_Sk.shape[1]
    weights_R = weights_Sk.flatten()[order_R]
    choice_R = order_R % num_choices
    counts = torch.bincount(choice_R, minlength=num_choices).tolist()
    for picked in torch.split(choice_R.argsort(stable=True), counts):
        tokens = order_R[picked] // num_choices
        part = total_SD.index_select(0, tokens)
        part.addcmul_(rows_RD.index_select(0, picked).float(), weights_R[picked, None])
        total_SD.index_copy_(0, tokens, part)


def _lost_rows(ctx: Context, what: str) -> MoecError:
    return fail("E0508", f"layer {ctx.layer}: {what}", BUG)
