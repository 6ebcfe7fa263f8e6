"""Kernels rendered from Triton templates, under the names of the kernel table.

A call looks at its tensors' shapes, dtype and device, specialises the template, and launches the kernel: compiled on a
GPU, in Triton's interpreter on the CPU (slow, for tests: the text that runs is the text a GPU would compile).

Shapes: R rows at their experts, X room for them, T tokens, M experts held, D hidden, I inner, K summed, N columns of
the result, S sides (2 of gate and up, else 1), B = M S, L = S N lines of weights.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moec.codegen.gemm_source import render_grouped_gemm
from moec.codegen.gemm_variant import Projection, RowSource, Store
from moec.codegen.grouped_gemm import GroupedGemm, specialise
from moec.codegen.kernel_choice import with_choice
from moec.codegen.kernel_module import load_kernel
from moec.codegen.offline import FP_FUSION
from moec.codegen.targets import TARGETS, Dtype, Target
from moec.codegen.tiles import Form, size_class
from moec.diagnostics import fail
from moec.runtime.context import Context

DTYPES = {torch.float32: Dtype.FP32, torch.float16: Dtype.FP16, torch.bfloat16: Dtype.BF16}
#: The device whose kernel the interpreter runs: it covers both forms, descriptors and pointers.
INTERPRETED_TARGET = TARGETS["cuda:90"]
#: Bytes a tensor descriptor's base must be a multiple of.
TMA_ALIGNMENT = 16
#: Programs in the interpreter, where they run one after the other: two, so that tiles are shared out.
INTERPRETED_PROGRAMS = 2

LOG = logging.getLogger("moec")


def grouped_gate_up(ctx: Context | None, rows_RD: Tensor, offsets_M: Tensor, w_MGD: Tensor) -> Tensor:
    """silu(rows @ gate.T) * (rows @ up.T), each row with its expert's weights: [R, I], accumulated in fp32.

    `rows_RD` holds the rows expert by expert; `offsets_M` (int32) the end of each expert's rows; `w_MGD`, with
    G = 2 I, each expert's I rows of gate, then its I rows of up. Rows after the last end give zeros. Raises
    `MoecError` E0525 for tensors that do not fit together and E0520 without Triton.
    """
    return _product(ctx, Projection.GATE_UP, rows_RD, offsets_M, w_MGD)


def grouped_linear(ctx: Context | None, rows_RK: Tensor, offsets_M: Tensor, w_MNK: Tensor) -> Tensor:
    """rows @ w[m].T for the rows of each expert m: [R, N]. Rows, ends, zeros and errors as in `grouped_gate_up`."""
    return _product(ctx, Projection.DOWN, rows_RK, offsets_M, w_MNK)


def _product(ctx: Context | None, op: Projection, rows_RK: Tensor, offsets_M: Tensor, w_MLK: Tensor) -> Tensor:
    rows_RK = rows_RK.contiguous()
    check_fit(op, rows_RK, offsets_M, w_MLK)
    num_rows, experts = rows_RK.shape[0], w_MLK.shape[0]
    out_RN = rows_RK.new_empty((num_rows, w_MLK.shape[1] // op.sides))
    if num_rows and not experts:
        return out_RN.zero_()
    if num_rows:
        values = specialise_for(ctx, op, rows_RK, w_MLK, num_rows)
        launch_grouped_gemm(values, rows_RK, offsets_M, w_MLK, out_RN)
    return out_RN


def expected_rows(ctx: Context, num_rows: int) -> int:
    """Rows that a step is expected to bring: an even share of one of fixed shape, with room for the group's pairs."""
    return num_rows if ctx.step.fixed is None else -(-num_rows // ctx.mesh.ep)


def specialise_for(
    ctx: Context | None,
    op: Projection,
    rows_RK: Tensor,
    w_MLK: Tensor,
    num_rows: int,
    *,
    top: int = 1,
    rows: RowSource = RowSource.SORTED,
    store: Store = Store.PLAIN,
) -> GroupedGemm:
    """The kernel for these tensors and about `num_rows` rows at their experts: the context's choice, or the default."""
    num_rows = num_rows if ctx is None else expected_rows(ctx, num_rows)
    experts, depth = w_MLK.shape[0], w_MLK.shape[2]
    width = w_MLK.shape[1] // op.sides
    hidden, inner = op.turned(depth, width)
    is_aligned = all(tensor.data_ptr() % TMA_ALIGNMENT == 0 for tensor in (rows_RK, w_MLK))
    rows_per_expert = size_class(-(-num_rows // experts))
    dtype, target = DTYPES[rows_RK.dtype], target_of(rows_RK.device)
    form = None if is_aligned else Form.POINTER
    values = _specialise(op, hidden, inner, experts, dtype, target, top, rows, store, rows_per_expert, form)
    return values if ctx is None else with_choice(values, rows_per_expert, ctx.chosen)


def launch_grouped_gemm(
    values: GroupedGemm,
    rows: Tensor,
    offsets_M: Tensor,
    w_MLK: Tensor,
    out: Tensor,
    pairs_X: Tensor | None = None,
    pair_weights: Tensor | None = None,
) -> None:
    """Launch one specialised kernel into `out`; the tensors fit together and hold at least one row.

    Allocates nothing and waits for nothing, so a graph can capture it. `pairs_X` (int64) are the pairs of the sorted
    rows, which number as many; an accumulating kernel adds to `out` [T, N] in fp32, which the caller has cleared.
    """
    is_interpreted = out.device.type == "cpu"
    num_rows = rows.shape[0] if pairs_X is None else pairs_X.numel()
    given = {
        "rows": rows,
        "offsets": offsets_M,
        "pairs": pairs_X,
        "pair_weights": pair_weights,
        "w": w_MLK,
        "out": out,
        "num_rows": num_rows,
    } | _descriptors(values, rows, w_MLK)
    programs = min(values.most_tiles(num_rows), INTERPRETED_PROGRAMS if is_interpreted else values.programs)
    _kernel(values, is_interpreted)[(programs,)](
        *(given[name] for name in values.arguments),
        INTERPRET=is_interpreted,
        num_warps=values.warps,
        num_stages=values.stages,
        enable_fp_fusion=FP_FUSION,
    )


def _descriptors(values: GroupedGemm, rows: Tensor, w_MLK: Tensor) -> dict[str, Any]:
    """The kernel's tensor descriptors, by argument: see the shapes in the rendered kernel."""
    if values.form is not Form.TMA:
        return {}
    from triton.tools.tensor_descriptor import TensorDescriptor

    tile, found = values.tiles[0], {}
    w_BNK = w_MLK.view(values.experts * values.sides, values.width, values.depth)
    found["w"] = TensorDescriptor.from_tensor(w_BNK, [1, tile.n, tile.k])
    if values.has_weight_pairs:
        found["w_pair"] = TensorDescriptor.from_tensor(w_BNK, [2, tile.n, tile.k])
    if values.has_row_box:
        found["row_box"] = TensorDescriptor.from_tensor(rows, [tile.m, tile.k])
    return found


@functools.cache
def _kernel(values: GroupedGemm, is_interpreted: bool) -> Any:
    return load_kernel(render_grouped_gemm(values), "grouped_gemm", is_interpreted)


@functools.cache
def _specialise(
    op: Projection, hidden: int, inner: int, experts: int, dtype: Dtype, target: Target, top: int, rows: RowSource,
    store: Store, rows_per_expert: int, form: Form | None,
) -> GroupedGemm:  # fmt: skip
    values = specialise(
        op, hidden, inner, experts, dtype, target, top=top, rows=rows, store=store, rows_per_expert=rows_per_expert,
        form=form,
    )  # fmt: skip
    if values.fallback.text:
        LOG.warning("%s: %s", values.name, values.fallback)
    return values


def architecture_of(device: torch.device) -> str:
    """What a device is: the name of its target, or `cuda:86` and the like, which kernels are not compiled for."""
    if device.type != "cuda":
        return INTERPRETED_TARGET.name
    properties: Any = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return f"hip:{properties.gcnArchName.partition(':')[0]}"
    return f"cuda:{properties.major}{properties.minor}"


def target_of(device: torch.device) -> Target:
    """The target to specialise for: the nearest known architecture, with the shared memory this device has.

    Triton compiles for the device itself; the target decides on tiles and loads. That it is another one is told once.
    """
    if device.type != "cuda":
        return INTERPRETED_TARGET
    properties: Any = torch.cuda.get_device_properties(device)
    name = architecture_of(device)
    if torch.version.hip:
        near, shared = "hip:gfx942", properties.shared_memory_per_block
    else:
        near = {9: "cuda:90", 10: "cuda:100"}.get(properties.major, "cuda:80")
        shared = properties.shared_memory_per_block_optin
    if name != near:
        _tell_apart(name, near)
    return replace(TARGETS[near], shared_limit=shared)


@functools.cache
def _tell_apart(name: str, near: str) -> None:
    LOG.warning("kernels for %s have the tiles of %s, as far as its shared memory goes", name, near)


def check_fit(op: Projection, rows_RK: Tensor, offsets_M: Tensor, w_MLK: Tensor, pairs_X: Tensor | None = None) -> None:
    """Raise E0525 naming the first tensor that does not fit, before a kernel can read past one.

    `pairs_X`: where the rows at the experts are named by pairs, of which there are as many.
    """
    if rows_RK.dim() != 2 or rows_RK.dtype not in DTYPES:
        raise _misfit(op, "rows", rows_RK, "[R, K] in fp32, fp16 or bf16")
    depth = rows_RK.shape[1]
    if w_MLK.dim() != 3 or w_MLK.shape[2] != depth or w_MLK.shape[1] % op.sides or w_MLK.dtype != rows_RK.dtype:
        lines = "2 I" if op.sides == 2 else "N"
        raise _misfit(op, "weights", w_MLK, f"[M, {lines}, {depth}] in {DTYPES[rows_RK.dtype].value}")
    if offsets_M.shape != w_MLK.shape[:1] or offsets_M.dtype != torch.int32:
        raise _misfit(op, "offsets", offsets_M, f"[{w_MLK.shape[0]}] in int32")
    num_rows = rows_RK.shape[0] if pairs_X is None else pairs_X.numel()
    if pairs_X is not None and (pairs_X.dim() != 1 or pairs_X.dtype != torch.int64):
        raise _misfit(op, "pairs", pairs_X, "[X] in int64")
    given = {"rows": rows_RK, "weights": w_MLK, "offsets": offsets_M}
    for name, tensor in (given if pairs_X is None else given | {"pairs": pairs_X}).items():
        if not tensor.is_contiguous() or tensor.device != rows_RK.device:
            raise _misfit(op, name, tensor, f"contiguous and on {rows_RK.device}")
    if offsets_M.device.type == "cpu" and offsets_M.numel():
        ends = [0, *offsets_M.tolist()]  # on a GPU this would wait for the device
        if ends != sorted(ends) or ends[-1] > num_rows:
            raise _misfit(op, "offsets", offsets_M, f"ends that never fall and stay within {num_rows} rows")


def _misfit(op: Projection, name: str, tensor: Tensor, wanted: str) -> Exception:
    shape, dtype, stride = list(tensor.shape), str(tensor.dtype).removeprefix("torch."), list(tensor.stride())
    operation = "grouped_gate_up" if op is Projection.GATE_UP else "grouped_linear"
    return fail(
        "E0525",
        f"the {name} given to {operation} are {shape} {dtype}, strides {stride}, on {tensor.device}",
        f"they must be {wanted}",
    )
