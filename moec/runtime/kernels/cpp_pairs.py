"""Routing, and bringing rows to their experts and back, rendered from the C++ template.

Shapes: R rows, S tokens, D hidden, E experts, k choices, M experts held, P pairs, X pairs served here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moec.codegen.cpp import Route
from moec.codegen.kernel_route import Score
from moec.runtime.context import Context
from moec.runtime.cpp_library import Library
from moec.runtime.host_memory import new_empty
from moec.runtime.kernels import torch_moe, torch_pairs

_SCORES = {score.value: score for score in Score}


def route(
    library: Library, ctx: Context, logits_SE: Tensor, bias_E: Tensor | None = None, *, shared: int = 0, **choice: Any
) -> tuple[Tensor, Tensor]:
    logits_SE = logits_SE.contiguous()
    rows, experts = logits_SE.shape
    top, score = choice["top"], _SCORES[choice["score"]]
    kernel = library.get(Route, experts, top, choice["groups"], choice["keep"], score, choice["renormalize"])
    ids_Sk, weights_Sk = torch.empty(rows, top, dtype=torch.int64), torch.empty(rows, top)
    bias = None if bias_E is None else bias_E.data_ptr()
    if kernel(logits_SE.data_ptr(), rows, bias, choice["scale"], ids_Sk.data_ptr(), weights_Sk.data_ptr()):
        return torch_moe.route(ctx, logits_SE, bias_E, shared=shared, **choice)
    return torch_moe.with_shared(ids_Sk, weights_Sk, experts, shared)


def group_rows(
    library: Library, ctx: Context, rows_RD: Tensor, ids_Rk: Tensor, *, table: str
) -> tuple[Tensor, Tensor, Tensor]:
    rows_RD, ids_Rk = rows_RD.contiguous(), ids_Rk.contiguous()
    held = len(ctx.held(table))
    slots = torch_pairs.slots_here(ctx, table, ids_Rk.device)
    pairs_P = torch.empty(ids_Rk.numel(), dtype=torch.int64)
    out_PD = new_empty(rows_RD, ids_Rk.numel(), rows_RD.shape[1])
    ends_M = torch.empty(held, dtype=torch.int32)
    served = library.get("group_rows")(
        rows_RD.data_ptr(), *ids_Rk.shape, rows_RD.shape[1] * rows_RD.element_size(), ids_Rk.data_ptr(),
        slots.data_ptr(), slots.shape[0] - 1, held, out_PD.data_ptr(), ends_M.data_ptr(), pairs_P.data_ptr(),
    )  # fmt: skip
    if served < 0:
        return torch_pairs.group_rows(ctx, rows_RD, ids_Rk, table=table)
    return out_PD[:served], ends_M, pairs_P[:served]


def reduce_rows(
    library: Library, ctx: Context, rows_XD: Tensor, pairs_X: Tensor, weights_Rk: Tensor, *, table: str
) -> Tensor:
    if rows_XD.shape[0] != pairs_X.shape[0]:
        return torch_pairs.reduce_rows(ctx, rows_XD, pairs_X, weights_Rk, table=table)
    rows_XD, pairs_X, weights_Rk = rows_XD.contiguous(), pairs_X.contiguous(), weights_Rk.contiguous()
    out_RD = rows_XD.new_empty(weights_Rk.shape[0], rows_XD.shape[1])
    library.get("reduce_rows")(
        rows_XD.data_ptr(), *rows_XD.shape, pairs_X.data_ptr(), weights_Rk.data_ptr(), *weights_Rk.shape,
        out_RD.data_ptr(),
    )  # fmt: skip
    return out_RD
