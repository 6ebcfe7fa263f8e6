"""The experts' products from Triton templates, with weights in the rows' dtype or in fp8 with their scales.

With fp8 weights, rows are quantised to e4m3 where the device multiplies that (sm_90, sm_100): each row by groups of 128
columns, as models with such weights are trained to be run (`activation_scheme: dynamic`). Elsewhere rows stay as they
are. The kernels: `triton_products`, `triton_fused` and `triton_quantised`.

Shapes: R rows, X rows at their experts, M experts held, D hidden, I inner, K summed, N columns of the result, G = 2 I;
scales [M, blocks of lines, blocks of columns].
"""

from __future__ import annotations

from torch import Tensor

from moec.codegen.gemm_variant import Weights
from moec.codegen.quantise_rows import has_fp8_products
from moec.runtime.context import Context
from moec.runtime.kernels import triton_fused, triton_products, triton_quantised
from moec.runtime.kernels.triton_products import expected_rows, target_of
from moec.runtime.quantise import QuantisedRows, QuantisedWeights


def grouped_gate_up(
    ctx: Context, rows_RD: Tensor, offsets_M: Tensor, w_MGD: Tensor, scales: Tensor | None = None
) -> Tensor:
    """silu(rows @ gate.T) * (rows @ up.T), each row with its expert's weights: [R, I], accumulated in fp32.

    Raises E0525 for tensors that do not fit together, E0531 for such with scales.
    """
    if scales is None:
        return triton_products.grouped_gate_up(ctx, rows_RD, offsets_M, w_MGD)
    weights = _weights(ctx, w_MGD, scales, sides=2)
    return triton_quantised.grouped_gate_up(
        _rows(rows_RD),
        offsets_M,
        weights,
        dtype=rows_RD.dtype,
        expected=expected_rows(ctx, len(rows_RD)),
    )


def grouped_linear(
    ctx: Context, rows_RK: Tensor, offsets_M: Tensor, w_MNK: Tensor, scales: Tensor | None = None
) -> Tensor:
    """rows @ w.T, each row with its expert's weights: [R, N]; see `grouped_gate_up`."""
    if scales is None:
        return triton_products.grouped_linear(ctx, rows_RK, offsets_M, w_MNK)
    weights = _weights(ctx, w_MNK, scales)
    return triton_quantised.grouped_linear(
        _rows(rows_RK),
        offsets_M,
        weights,
        dtype=rows_RK.dtype,
        expected=expected_rows(ctx, len(rows_RK)),
    )


def gathered_gate_up(
    ctx: Context, rows_RD: Tensor, offsets_M: Tensor, pairs_X: Tensor, w_MGD: Tensor, *scales: Tensor, table: str,
    top: int,
) -> Tensor:  # fmt: skip
    """`grouped_gate_up` of row pairs[x] // top for each x: [X, I]; rows are quantised before they are gathered."""
    if not scales:
        return triton_fused.gathered_gate_up(ctx, rows_RD, offsets_M, pairs_X, w_MGD, table=table, top=top)
    weights = _weights(ctx, w_MGD, scales[0], sides=2)
    return triton_quantised.grouped_gate_up(
        _rows(rows_RD), offsets_M, weights, pairs_X=pairs_X, top=top, dtype=rows_RD.dtype,
        expected=expected_rows(ctx, len(pairs_X)),
    )  # fmt: skip


def _rows(rows_RK: Tensor) -> Tensor | QuantisedRows:
    is_multiplied = has_fp8_products(target_of(rows_RK.device))
    return triton_quantised.quantise_rows(rows_RK) if is_multiplied else rows_RK


def _weights(ctx: Context, values: Tensor, scales: Tensor, sides: int = 1) -> QuantisedWeights:
    """Weights with their scales, which are made one, and looked through for NaN, once a program."""
    key = "fp8", values.data_ptr(), values.shape
    if key not in ctx.memo:
        ctx.memo[key] = QuantisedWeights(Weights.FP8, values, scales, values.shape[2], sides)
    found: QuantisedWeights = ctx.memo[key]
    return found
