"""The experts' products joined with their neighbours, from the grouped GEMM's template.

`group_pairs` is the sorting of `group_rows` without its rows, `gathered_gate_up` a product that reads them through
their pairs, `reduced_linear` one that adds its results into the rows' sums as they come.

Shapes: R rows, X pairs served here (room for R * k in a step of fixed shape), M experts held here, D hidden, I inner,
G = 2 I, k choices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moec.codegen.gemm_variant import Projection, RowSource, Store
from moec.runtime.context import Context
from moec.runtime.device_flags import flags_on, is_deferred
from moec.runtime.kernels.torch_moe import lost_rows
from moec.runtime.kernels.triton_products import check_fit, launch_grouped_gemm, specialise_for
from moec.runtime.kernels.triton_rows import PLACES, sort_pairs


def group_pairs(ctx: Context, ids_Rk: Tensor, *, table: str) -> tuple[Tensor, Tensor]:
    """Pairs of this rank's experts, expert by expert in order of arrival: offsets i32 [M], pairs i64 [X].

    Raises E0507 for an id that is no expert. In a step of fixed shape the pairs have room for all, and the fault is
    left to `device_flags.raise_faults`.
    """
    unread = ids_Rk.new_empty((ids_Rk.shape[0], 1), dtype=torch.float32)
    found = sort_pairs(ctx, unread, ids_Rk, table=table, copies=False)
    pairs = found.pairs
    if not is_deferred(ctx):
        flags_on(ctx, ids_Rk.device).raise_lowered()
        pairs = pairs[: int(found.offsets[-1]) if found.offsets.numel() else 0]
    ctx.step_memo[PLACES, id(pairs)] = pairs, found.places
    return found.offsets, pairs


def gathered_gate_up(
    ctx: Context, rows_RD: Tensor, offsets_M: Tensor, pairs_X: Tensor, w_MGD: Tensor, *, table: str, top: int
) -> Tensor:
    """`grouped_gate_up` of row pairs[x] // top for each x: [X, I]. Raises E0525 for tensors that do not fit together.

    What stands at pairs behind the last end is neither read nor written.
    """
    rows_RD = rows_RD.contiguous()
    check_fit(Projection.GATE_UP, rows_RD, offsets_M, w_MGD, pairs_X)
    out_XI = rows_RD.new_empty((pairs_X.shape[0], w_MGD.shape[1] // 2))
    if out_XI.numel():
        values = specialise_for(
            ctx, Projection.GATE_UP, rows_RD, w_MGD, pairs_X.shape[0], top=top, rows=RowSource.GATHERED
        )
        launch_grouped_gemm(values, rows_RD, offsets_M, w_MGD, out_XI, pairs_X)
    return out_XI


def reduced_linear(
    ctx: Context, rows_XI: Tensor, offsets_M: Tensor, w_MDI: Tensor, pairs_X: Tensor, weights_Rk: Tensor, *, table: str
) -> Tensor:
    """`grouped_linear`, each result times its pair's weight and added to its row: [R, D].

    Atomic adds in fp32, in no fixed order. What exceeds fp16's largest number becomes that number, as in `reduce_rows`.
    Raises E0525 for tensors that do not fit together and E0508 where there is not one row for each pair.
    """
    rows_XI, weights_Rk = rows_XI.contiguous(), weights_Rk.contiguous()
    num_rows, top = weights_Rk.shape
    check_fit(Projection.DOWN, rows_XI, offsets_M, w_MDI, pairs_X)
    if rows_XI.shape[0] != pairs_X.shape[0]:
        raise lost_rows(ctx, f"`{table}` gave {rows_XI.shape[0]} rows for {pairs_X.shape[0]} pairs")
    ctx.step_memo.pop((PLACES, id(pairs_X)), None)
    sums_RD = torch.zeros((num_rows, w_MDI.shape[1]), dtype=torch.float32, device=rows_XI.device)
    if rows_XI.numel() and sums_RD.numel():
        values = specialise_for(
            ctx, Projection.DOWN, rows_XI, w_MDI, rows_XI.shape[0], top=top, store=Store.ACCUMULATED
        )
        launch_grouped_gemm(values, rows_XI, offsets_M, w_MDI, sums_RD, pairs_X, weights_Rk.flatten())
    if rows_XI.dtype is torch.float16:
        largest = torch.finfo(torch.float16).max
        sums_RD.clamp_(-largest, largest)
    return sums_RD.to(rows_XI.dtype)
