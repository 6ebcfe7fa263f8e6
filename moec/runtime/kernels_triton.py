"""Kernels rendered from Triton templates, under the names of the kernel table.

A call looks at its tensors' shapes, dtype and device, specialises the template, and launches the kernel: compiled on a
GPU, in Triton's interpreter on the CPU (slow, for tests: the text that runs is the text a GPU would compile).

Shapes: R rows, M experts held, D hidden, I inner.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moec.codegen.kernel_module import load_kernel
from moec.codegen.kernels import Form, GateUp, render_gate_up, row_tile, specialise_gate_up
from moec.codegen.offline import FP_FUSION
from moec.codegen.targets import TARGETS, Dtype, Target
from moec.diagnostics import fail

DTYPES = {torch.float32: Dtype.FP32, torch.float16: Dtype.FP16, torch.bfloat16: Dtype.BF16}
#: The device whose kernel the interpreter runs: it covers both forms, descriptors and pointers.
INTERPRETED_TARGET = TARGETS["cuda:90"]
#: Bytes a tensor descriptor's base must be a multiple of.
TMA_ALIGNMENT = 16

LOG = logging.getLogger("moec")


def grouped_gate_up(ctx: object, rows_RD: Tensor, offsets_M: Tensor, w_MGD: Tensor) -> Tensor:
    """silu(rows @ gate.T) * (rows @ up.T), each row with its expert's weights: [R, I], accumulated in fp32.

    `rows_RD` holds the rows expert by expert; `offsets_M` (int32) the end of each expert's rows; `w_MGD`, with
    G = 2 I, each expert's I rows of gate, then its I rows of up. Rows after the last end give zeros. Raises
    `MoecError` E0525 for tensors that do not fit together and E0520 without Triton.
    """
    rows_RD = rows_RD.contiguous()
    _check_fit(rows_RD, offsets_M, w_MGD)
    num_rows, hidden = rows_RD.shape
    experts, inner = w_MGD.shape[0], w_MGD.shape[1] // 2
    out_RI = torch.empty((num_rows, inner), dtype=rows_RD.dtype, device=rows_RD.device)
    if num_rows and not experts:
        return out_RI.zero_()
    if num_rows:
        target = _target(rows_RD.device)
        values = _specialise(hidden, inner, experts, DTYPES[rows_RD.dtype], target, row_tile(-(-num_rows // experts)))
        if rows_RD.data_ptr() % TMA_ALIGNMENT or w_MGD.data_ptr() % TMA_ALIGNMENT:
            values = replace(values, form=Form.POINTER)
        launch_gate_up(values, rows_RD, offsets_M, w_MGD, out_RI)
    return out_RI


def launch_gate_up(values: GateUp, rows_RD: Tensor, offsets_M: Tensor, w_MGD: Tensor, out_RI: Tensor) -> None:
    """Launch one specialised kernel into `out_RI`; the tensors fit together and hold at least one row."""
    is_interpreted = rows_RD.device.type == "cpu"
    kernel = _kernel(values, is_interpreted)
    rows: Any = rows_RD
    w: Any = w_MGD
    if values.form is Form.TMA:
        from triton.tools.tensor_descriptor import TensorDescriptor

        tile = values.tile
        rows = TensorDescriptor.from_tensor(rows_RD, [tile.m, tile.k])
        w = TensorDescriptor.from_tensor(w_MGD.flatten(0, 1), [tile.n, tile.k])
    kernel[(values.num_programs(rows_RD.shape[0]),)](
        rows,
        offsets_M,
        w,
        out_RI,
        rows_RD.shape[0],
        INTERPRET=is_interpreted,
        num_warps=values.tile.warps,
        num_stages=values.tile.stages,
        enable_fp_fusion=FP_FUSION,
    )


@functools.cache
def _kernel(values: GateUp, is_interpreted: bool) -> Any:
    return load_kernel(render_gate_up(values), "grouped_gate_up", is_interpreted)


@functools.cache
def _specialise(hidden: int, inner: int, experts: int, dtype: Dtype, target: Target, rows_per_expert: int) -> GateUp:
    values = specialise_gate_up(hidden, inner, experts, dtype, target, rows_per_expert)
    if values.fallback.text:
        LOG.warning("%s: %s", values.name, values.fallback)
    return values


def _target(device: torch.device) -> Target:
    """The target to specialise for: the nearest known architecture, with the shared memory this device has."""
    if device.type != "cuda":
        return INTERPRETED_TARGET
    properties: Any = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return replace(TARGETS["hip:gfx942"], shared_limit=properties.shared_memory_per_block)
    major = properties.major
    near = {9: "cuda:90", 10: "cuda:100"}.get(major, "cuda:80")
    return replace(TARGETS[near], shared_limit=properties.shared_memory_per_block_optin)


def _check_fit(rows_RD: Tensor, offsets_M: Tensor, w_MGD: Tensor) -> None:
    """Raise E0525 naming the first tensor that does not fit, before a kernel can read past one."""
    if rows_RD.dim() != 2 or rows_RD.dtype not in DTYPES:
        raise _misfit("rows", rows_RD, "[R, D] in fp32, fp16 or bf16")
    hidden = rows_RD.shape[1]
    if w_MGD.dim() != 3 or w_MGD.shape[2] != hidden or w_MGD.shape[1] % 2 or w_MGD.dtype != rows_RD.dtype:
        raise _misfit("weights", w_MGD, f"[M, 2 I, {hidden}] in {DTYPES[rows_RD.dtype].value}")
    if offsets_M.shape != w_MGD.shape[:1] or offsets_M.dtype != torch.int32:
        raise _misfit("offsets", offsets_M, f"[{w_MGD.shape[0]}] in int32")
    for name, tensor in (("rows", rows_RD), ("weights", w_MGD), ("offsets", offsets_M)):
        if not tensor.is_contiguous() or tensor.device != rows_RD.device:
            raise _misfit(name, tensor, f"contiguous and on {rows_RD.device}")
    if offsets_M.device.type == "cpu" and offsets_M.numel():
        ends = [0, *offsets_M.tolist()]  # on a GPU this would wait for the device
        if ends != sorted(ends) or ends[-1] > rows_RD.shape[0]:
            raise _misfit("offsets", offsets_M, f"ends that never fall and stay within {rows_RD.shape[0]} rows")


def _misfit(name: str, tensor: Tensor, wanted: str) -> Exception:
    shape, dtype, stride = list(tensor.shape), str(tensor.dtype).removeprefix("torch."), list(tensor.stride())
    return fail(
        "E0525",
        f"the {name} given to grouped_gate_up are {shape} {dtype}, strides {stride}, on {tensor.device}",
        f"they must be {wanted}",
    )
