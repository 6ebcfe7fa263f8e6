"""The experts' products joined with their neighbours, on torch: one after the other.

Shapes: R rows, X pairs served here, M experts held here, D hidden, I inner, k choices; G = 2 I.
"""

from __future__ import annotations

from torch import Tensor

from moec.runtime.context import Context
from moec.runtime.kernels.torch_moe import grouped_gate_up, grouped_linear
from moec.runtime.kernels.torch_pairs import group_rows, reduce_rows


def group_pairs(ctx: Context, ids_Rk: Tensor, *, table: str) -> tuple[Tensor, Tensor]:
    """Ends of each expert's pairs, i32 [M], and the pairs of this rank's experts, i64 [X]: as `group_rows` has them."""
    _, offsets_M, pairs_X = group_rows(ctx, ids_Rk, ids_Rk, table=table)
    return offsets_M, pairs_X


def gathered_gate_up(
    ctx: Context, rows_RD: Tensor, offsets_M: Tensor, pairs_X: Tensor, w_MGD: Tensor, *scales: Tensor, table: str,
    top: int,
) -> Tensor:  # fmt: skip
    """`grouped_gate_up` of row pairs[x] // top for each x: [X, I]."""
    return grouped_gate_up(ctx, rows_RD.index_select(0, pairs_X // top), offsets_M, w_MGD, *scales)


def reduced_linear(
    ctx: Context, rows_XI: Tensor, offsets_M: Tensor, w_MDI: Tensor, pairs_X: Tensor, weights_Rk: Tensor, *, table: str
) -> Tensor:
    """`grouped_linear`, each result times its pair's weight and added to its row: [R, D]."""
    return reduce_rows(ctx, grouped_linear(ctx, rows_XI, offsets_M, w_MDI), pairs_X, weights_Rk, table=table)


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
    """A layer's experts on its rows, sorted whatever their number, and summed in order: [R, D]."""
    rows_XD, offsets_M, pairs_X = group_rows(ctx, rows_RD, ids_Rk, table=table)
    act_XI = grouped_gate_up(ctx, rows_XD, offsets_M, gate_up_MGD)
    return reduced_linear(ctx, act_XI, offsets_M, down_MDI, pairs_X, weights_Rk, table=table)
