"""Grouped products with quantised weights, and rows quantised for them, from Triton templates.

Rows in bf16 or fp16 are multiplied with FP8, INT8 or INT4 weights on every device; rows that `quantise_rows` gave with
FP8 weights on those that multiply e4m3. Formats: `moec.runtime.quantise`. Compiled on a GPU, in Triton's interpreter
on the CPU.

Shapes: T tokens, k choices, X rows at their experts, M experts held, K summed, P padded K, N columns of the result.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from moec.codegen.gemm_variant import Projection, RowSource, Store, Weights
from moec.codegen.kernel_module import load_kernel
from moec.codegen.offline import FP_FUSION
from moec.codegen.quantise_rows import QuantiseRows, render_quantise_rows, specialise_quantise_rows
from moec.codegen.quantised import QuantisedGemm, render_quantised, specialise_quantised
from moec.codegen.targets import Target
from moec.codegen.tiles import Form, size_class
from moec.diagnostics import MoecError, fail
from moec.runtime.kernels.triton_products import DTYPES, INTERPRETED_PROGRAMS, TMA_ALIGNMENT, target_of
from moec.runtime.quantise import GROUP, QuantisedRows, QuantisedWeights

STORED = {Weights.FP8: torch.float8_e4m3fn, Weights.INT8: torch.int8, Weights.INT4: torch.int32}

LOG = logging.getLogger("moec")


def quantise_rows(x_RK: Tensor) -> QuantisedRows:
    """Rows in e4m3, each group of 128 columns over its largest absolute value / 448; see `quantise.quantise_rows`.

    Raises E0531 for rows that are not fp32, fp16 or bf16 and for devices without e4m3 products.
    """
    x_RK = x_RK.contiguous()
    if x_RK.dim() != 2 or x_RK.dtype not in DTYPES:
        raise _misfit("rows", x_RK, "[R, K] in fp32, fp16 or bf16")
    values = specialise_quantise_rows(x_RK.shape[1], DTYPES[x_RK.dtype], target_of(x_RK.device))
    num_rows, groups = x_RK.shape[0], values.groups
    values_RP = torch.empty((num_rows, groups * GROUP), dtype=torch.uint8, device=x_RK.device).view(STORED[Weights.FP8])
    scales_RG = torch.empty((num_rows, groups), dtype=torch.float32, device=x_RK.device)
    if num_rows:
        is_interpreted = x_RK.device.type == "cpu"
        _rows_kernel(values, is_interpreted)[(values.num_programs(num_rows),)](
            x_RK, values_RP, scales_RG, num_rows * groups, INTERPRET=is_interpreted, num_warps=values.warps,
            num_stages=1, enable_fp_fusion=FP_FUSION,
        )  # fmt: skip
    return QuantisedRows(values_RP, scales_RG, x_RK.shape[1])


def grouped_gate_up(
    rows: Tensor | QuantisedRows,
    offsets_M: Tensor,
    weights: QuantisedWeights,
    *,
    pairs_X: Tensor | None = None,
    top: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    expected: int | None = None,
) -> Tensor:
    """silu(rows @ gate.T) * (rows @ up.T), each row with its expert's weights: [X, N], accumulated in fp32.

    Rows are sorted by expert, or those of tokens, of which `pairs_X` (i64, token * top + choice) names one for each
    sorted position. `offsets_M` (i32) are the ends of the experts' rows; rows after the last end give zeros. Results
    are in the rows' dtype, or in `dtype` for quantised rows. Tiles are those for `expected` rows, where that is given.
    Raises E0531 for tensors that do not fit.
    """
    return _product(Projection.GATE_UP, rows, offsets_M, weights, pairs_X, top, None, dtype, expected)


def grouped_linear(
    rows: Tensor | QuantisedRows,
    offsets_M: Tensor,
    weights: QuantisedWeights,
    *,
    pairs_X: Tensor | None = None,
    pair_weights: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    expected: int | None = None,
) -> Tensor:
    """rows @ w.T, each row with its expert's weights: [X, N], accumulated in fp32; see `grouped_gate_up`.

    With `pairs_X` and `pair_weights` (fp32, of all pairs) each result is multiplied by its pair's weight.
    """
    return _product(Projection.DOWN, rows, offsets_M, weights, pairs_X, 1, pair_weights, dtype, expected)


def _product(
    op: Projection,
    rows: Tensor | QuantisedRows,
    offsets_M: Tensor,
    weights: QuantisedWeights,
    pairs_X: Tensor | None,
    top: int,
    pair_weights: Tensor | None,
    dtype: torch.dtype,
    expected: int | None,
) -> Tensor:
    if isinstance(rows, Tensor):
        rows, dtype = rows.contiguous(), rows.dtype
    row_values = rows if isinstance(rows, Tensor) else rows.values
    num_rows = row_values.shape[0] if pairs_X is None else pairs_X.numel()
    check_fit(op, rows, offsets_M, weights, num_rows)
    for name, tensor, wanted in (("pairs", pairs_X, torch.int64), ("weights of pairs", pair_weights, torch.float32)):
        if tensor is not None:
            _check(name, tensor, [wanted], (None,), row_values.device)
    experts, width = weights.values.shape[0], weights.values.shape[1] // op.sides
    out_XN = torch.empty((num_rows, width), dtype=dtype, device=row_values.device)
    if num_rows and not experts:
        return out_XN.zero_()
    if num_rows:
        hidden, inner = op.turned(weights.depth, width)
        source = RowSource.GATHERED if op is Projection.GATE_UP and pairs_X is not None else RowSource.SORTED
        store = Store.PLAIN if pair_weights is None else Store.WEIGHTED
        values = _specialise(
            op, hidden, inner, experts, dtype, target_of(row_values.device), weights.format,
            isinstance(rows, QuantisedRows), top, source, store, size_class(-(-(expected or num_rows) // experts)),
        )  # fmt: skip
        launch_quantised(values, rows, offsets_M, weights, out_XN, pairs_X, pair_weights)
    return out_XN


def launch_quantised(
    values: QuantisedGemm,
    rows: Tensor | QuantisedRows,
    offsets_M: Tensor,
    weights: QuantisedWeights,
    out: Tensor,
    pairs_X: Tensor | None = None,
    pair_weights: Tensor | None = None,
) -> None:
    """Launch one specialised kernel into `out`; the tensors fit together and hold at least one row."""
    is_interpreted = out.device.type == "cpu"
    row_values = rows if isinstance(rows, Tensor) else rows.values
    num_rows = row_values.shape[0] if pairs_X is None else pairs_X.numel()
    given: dict[str, object] = {
        "rows": row_values,
        "offsets": offsets_M,
        "pairs": pairs_X,
        "pair_weights": pair_weights,
        "w": weights.values if values.quantised_rows else weights.values.view(torch.int32),
        "scales": weights.scales,
        "out": out,
        "num_rows": num_rows,
    }
    if isinstance(rows, QuantisedRows):
        given["row_scales"] = rows.scales
        if is_interpreted:  # the interpreter knows e4m3 tensors as bytes only
            given["rows"], given["w"] = row_values.view(torch.uint8), weights.values.view(torch.uint8)
    _describe(values, given)
    programs = min(values.most_tiles(num_rows), INTERPRETED_PROGRAMS if is_interpreted else values.programs)
    _kernel(values, is_interpreted)[(programs,)](
        *[given[name] for name in values.arguments], INTERPRET=is_interpreted, num_warps=values.warps,
        num_stages=values.stages, enable_fp_fusion=FP_FUSION,
    )  # fmt: skip


def _describe(values: QuantisedGemm, given: dict[str, Any]) -> None:
    """Put descriptors in the place of tensors where the kernel loads by them."""
    if values.form is not Form.TMA:
        return
    from triton.tools.tensor_descriptor import TensorDescriptor

    tile, w, rows = values.tiles[0], given["w"], given["rows"]
    columns = GROUP if values.quantised_rows else values.group_words
    sides = w.unflatten(1, (values.sides, -1)).flatten(0, 1)
    given["w"] = TensorDescriptor.from_tensor(sides, [values.sides, tile.n, columns])
    if values.has_row_box:
        given["row_box"] = TensorDescriptor.from_tensor(rows, [tile.m, GROUP])


@functools.cache
def _kernel(values: QuantisedGemm, is_interpreted: bool) -> Any:
    return load_kernel(render_quantised(values), "grouped_gemm", is_interpreted)


@functools.cache
def _rows_kernel(values: QuantiseRows, is_interpreted: bool) -> Any:
    return load_kernel(render_quantise_rows(values), "quantise_rows", is_interpreted)


@functools.cache
def _specialise(
    op: Projection, hidden: int, inner: int, experts: int, dtype: torch.dtype, target: Target, weights: Weights,
    quantised_rows: bool, top: int, rows: RowSource, store: Store, rows_per_expert: int,
) -> QuantisedGemm:  # fmt: skip
    values = specialise_quantised(
        op, hidden, inner, experts, DTYPES[dtype], target, weights, quantised_rows=quantised_rows, top=top, rows=rows,
        store=store, rows_per_expert=rows_per_expert,
    )  # fmt: skip
    if values.fallback.text:
        LOG.warning("%s: %s", values.name, values.fallback)
    return values


def check_fit(
    op: Projection, rows: Tensor | QuantisedRows, offsets_M: Tensor, weights: QuantisedWeights, num_rows: int
) -> None:
    """Raise E0531 naming the first tensor that does not fit, before a kernel can read past one."""
    groups = -(-weights.depth // GROUP)
    values, device = weights.values, offsets_M.device
    experts, lines = values.shape[:2] if values.dim() == 3 else (-1, -1)
    if weights.sides != op.sides or lines % op.sides:
        raise _misfit("weights", values, f"[M, {'2 N' if op.sides == 2 else 'N'}, ...] of {op.sides} sides")
    if isinstance(rows, QuantisedRows):
        _check("rows", rows.values, [STORED[Weights.FP8]], (None, groups * GROUP), device)
        _check("scales of rows", rows.scales, [torch.float32], (rows.values.shape[0], groups), device)
    else:
        _check("rows", rows, list(DTYPES), (None, weights.depth), device)
    stored = groups * (GROUP // 8 if weights.format is Weights.INT4 else GROUP)
    scaled = op.sides * -(-lines // op.sides // GROUP) if weights.format is Weights.FP8 else lines
    _check("weights", values, [STORED[weights.format]], (experts, lines, stored), device)
    _check("scales of weights", weights.scales, [torch.float32], (experts, scaled, groups), device)
    _check("offsets", offsets_M, [torch.int32], (experts,), device)
    if device.type == "cpu" and offsets_M.numel():
        ends = [0, *offsets_M.tolist()]  # on a GPU this would wait for the device
        if ends != sorted(ends) or ends[-1] > num_rows:
            raise _misfit("offsets", offsets_M, f"ends that never fall and stay within {num_rows} rows")


def _check(
    name: str, tensor: Tensor, dtypes: list[torch.dtype], shape: tuple[int | None, ...], device: torch.device
) -> None:
    fits = tensor.dim() == len(shape) and all(w in (None, s) for s, w in zip(tensor.shape, shape, strict=True))
    is_placed = tensor.is_contiguous() and tensor.data_ptr() % TMA_ALIGNMENT == 0 and tensor.device == device
    if not (fits and is_placed and tensor.dtype in dtypes):
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        place = f"contiguous, at a multiple of {TMA_ALIGNMENT} bytes, on {device}"
        raise _misfit(name, tensor, f"[{sizes}] in {names}, {place}")


def _misfit(name: str, tensor: Tensor, wanted: str) -> MoecError:
    shape, dtype, stride = list(tensor.shape), str(tensor.dtype).removeprefix("torch."), list(tensor.stride())
    return fail(
        "E0531",
        f"the {name} given to a kernel of quantised weights are {shape} {dtype}, strides {stride}, on {tensor.device}",
        f"they must be {wanted}",
    )
