"""A layer's experts on the rows of a step, from Triton templates: few pairs one by one, more of them sorted.

Which of the two follows from the number of rows alone, which the host knows: nothing is waited for.

Shapes: R rows, k choices, P = R k pairs, M experts held here, D hidden, I inner, G = 2 I.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moec.codegen.gemm_variant import Projection
from moec.codegen.kernel_module import load_kernel
from moec.codegen.offline import FP_FUSION
from moec.codegen.pair_product import PairProduct, render_pairs, specialise_pairs
from moec.codegen.tiles import power_of_two
from moec.runtime.context import Context
from moec.runtime.device_flags import flags_on, is_deferred
from moec.runtime.kernels.torch_pairs import slots_here
from moec.runtime.kernels.triton_fused import gathered_gate_up, group_pairs, reduced_linear
from moec.runtime.kernels.triton_products import DTYPES, grouped_linear, target_of
from moec.runtime.kernels.triton_route import check_tensor
from moec.runtime.kernels.triton_rows import reduce_rows, sorting_flag

#: Columns and summed elements of a program in Triton's interpreter, where a step takes as long whatever its size.
INTERPRETED_COLUMNS, INTERPRETED_STEP = 64, 1024


def paired_experts(
    ctx: Context,
    rows_RD: Tensor,
    ids_Rk: Tensor,
    weights_Rk: Tensor,
    gate_up_MGD: Tensor,
    down_MDI: Tensor,
    *,
    table: str,
    rows: int,
    sums: str,
) -> Tensor:
    """Per row the sum over its choices of weight times what their expert gives: [R, D].

    Ids of other ranks' experts and -1 add nothing. Steps of up to `rows` rows are multiplied pair by pair; with `sums`
    any, larger ones are added in any order. Raises E0507 for an id that is no expert, left to
    `device_flags.raise_faults` in a step of fixed shape, and E0525 or E0526 for tensors that do not fit.
    """
    num_rows, top = ids_Rk.shape
    if num_rows <= rows:
        out_RD = multiply_pairs(ctx, rows_RD, ids_Rk, weights_Rk, gate_up_MGD, down_MDI, table=table)
        if not is_deferred(ctx):
            flags_on(ctx, out_RD.device).raise_lowered()
        return out_RD
    offsets_M, pairs_X = group_pairs(ctx, ids_Rk, table=table)
    act_XI = gathered_gate_up(ctx, rows_RD, offsets_M, pairs_X, gate_up_MGD, table=table, top=top)
    if sums == "any":
        return reduced_linear(ctx, act_XI, offsets_M, down_MDI, pairs_X, weights_Rk, table=table)
    out_XD = grouped_linear(ctx, act_XI, offsets_M, down_MDI)
    return reduce_rows(ctx, out_XD, pairs_X, weights_Rk, table=table)


def multiply_pairs(
    ctx: Context,
    rows_RD: Tensor,
    ids_Rk: Tensor,
    weights_Rk: Tensor,
    gate_up_MGD: Tensor,
    down_MDI: Tensor,
    *,
    table: str,
) -> Tensor:
    """`paired_experts` in two launches, whatever the number of rows; waits for nothing.

    Of an id that is no expert only a flag tells, which `device_flags.raise_faults` reads; its pair adds nothing.
    """
    device, dtype = rows_RD.device, rows_RD.dtype if rows_RD.dtype in DTYPES else torch.float32
    rows_RD, ids_Rk, weights_Rk = rows_RD.contiguous(), ids_Rk.contiguous(), weights_Rk.contiguous()
    check_tensor("ids", ids_Rk, torch.int64, (None, None), device)
    num_rows, top = ids_Rk.shape
    held, inner = len(ctx.held(table)), down_MDI.shape[-1]
    check_tensor("rows", rows_RD, dtype, (num_rows, None), device)
    hidden = rows_RD.shape[1]
    check_tensor("weights", weights_Rk, torch.float32, (num_rows, top), device)
    check_tensor("weights of gate and up", gate_up_MGD, dtype, (held, 2 * inner, hidden), device)
    check_tensor("weights of down", down_MDI, dtype, (held, hidden, inner), device)
    out_RD = torch.empty((num_rows, hidden), dtype=dtype, device=device)
    if not num_rows or not held:
        return out_RD.zero_()
    experts, flag = ctx.placements[table].num_experts, sorting_flag(ctx, table, ids_Rk)
    slots, act_PI = slots_here(ctx, table, device), rows_RD.new_empty((num_rows * top, inner))
    up, down = (
        _specialise(op, hidden, inner, experts, held, top, DTYPES[dtype], target_of(device)) for op in Projection
    )
    launch_pairs(up, rows_RD, ids_Rk, slots, flag, gate_up_MGD.contiguous(), act_PI)
    launch_pairs(down, act_PI, ids_Rk, slots, weights_Rk, down_MDI.contiguous(), out_RD)
    return out_RD


def launch_pairs(
    values: PairProduct, rows: Tensor, ids_Rk: Tensor, slots: Tensor, flag_or_weights: Tensor, w: Tensor, out: Tensor
) -> None:
    """Launch one specialised kernel into `out`; the tensors fit together and hold at least one row.

    Gate and up take a flag to lower, down the weights of the pairs. Allocates nothing and waits for nothing.
    """
    is_interpreted = out.device.type == "cpu"
    if is_interpreted:
        columns, step = power_of_two(values.width), power_of_two(values.depth)
        values = replace(values, columns=min(columns, INTERPRETED_COLUMNS), step=min(step, INTERPRETED_STEP))
    num_rows = ids_Rk.shape[0]
    _kernel(values, is_interpreted)[(values.num_programs(num_rows),)](
        rows,
        ids_Rk,
        slots,
        flag_or_weights,
        w,
        out,
        num_rows,
        INTERPRET=is_interpreted,
        num_warps=values.warps,
        num_stages=values.stages,
        enable_fp_fusion=FP_FUSION,
    )


_specialise = functools.cache(specialise_pairs)


@functools.cache
def _kernel(values: PairProduct, is_interpreted: bool) -> Any:
    return load_kernel(render_pairs(values), values.kernel, is_interpreted)
