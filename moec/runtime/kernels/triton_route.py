"""The router's choice, from the Triton template: the signature and results of torch's kernel.

Shapes: S tokens, E experts, k choices (with those of shared experts, where the router adds some).
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moec.codegen.kernel_module import load_kernel
from moec.codegen.kernel_route import Route, Score, render_route, specialise_route
from moec.codegen.offline import FP_FUSION
from moec.diagnostics import MoecError, fail
from moec.runtime.context import Context
from moec.runtime.device_flags import flags_on, is_deferred
from moec.runtime.kernels.torch_moe import scores_fault

#: Rows a program in Triton's interpreter, where a program takes as long whatever its rows.
INTERPRETED_ROWS = 64


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
    """Choose `top` experts a token: ids i64 [S, k], best first, and weights fp32 [S, k]; see torch's `route`.

    Raises E0526 for tensors that do not fit and E0506 for a token whose scores are NaN; in a step of fixed shape the
    second is left to `device_flags.raise_faults`.
    """
    logits_SE = logits_SE.contiguous()
    check_tensor("logits", logits_SE, torch.float32, (None, None), logits_SE.device)
    num_rows, experts = logits_SE.shape
    if bias_E is not None:
        check_tensor("bias", bias_E, torch.float32, (experts,), logits_SE.device)
    values = specialise_route(
        experts, top, Score(score), groups=groups, keep=keep, has_bias=bias_E is not None, renormalize=renormalize,
        scale=float(scale), shared=shared,
    )  # fmt: skip
    flags = flags_on(ctx, logits_SE.device)
    flag = flags.flag(("scores", ctx.layer, table), lambda row: scores_fault(ctx, table, row))
    ids_Sk = torch.empty((num_rows, top + shared), dtype=torch.int64, device=logits_SE.device)
    weights_Sk = torch.empty(ids_Sk.shape, dtype=torch.float32, device=logits_SE.device)
    if num_rows:
        launch_route(values, logits_SE, bias_E, ids_Sk, weights_Sk, flag)
        if not is_deferred(ctx):
            flags.raise_lowered()
    return ids_Sk, weights_Sk


def launch_route(
    values: Route, logits_SE: Tensor, bias_E: Tensor | None, ids_Sk: Tensor, weights_Sk: Tensor, flag: Tensor
) -> None:
    """Launch one specialised kernel; the tensors fit together and hold at least one row."""
    is_interpreted = logits_SE.device.type == "cpu"
    if is_interpreted:
        values = replace(values, rows=max(values.rows, INTERPRETED_ROWS))
    num_rows = logits_SE.shape[0]
    _kernel(values, is_interpreted)[(values.num_programs(num_rows),)](
        logits_SE,
        *([] if bias_E is None else [bias_E]),
        ids_Sk,
        weights_Sk,
        flag,
        num_rows,
        INTERPRET=is_interpreted,
        num_warps=values.warps,
        enable_fp_fusion=FP_FUSION,
    )


@functools.cache
def _kernel(values: Route, is_interpreted: bool) -> Any:
    return load_kernel(render_route(values), "route", is_interpreted)


def check_tensor(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int | None, ...], device: torch.device
) -> None:
    """Raise E0526 unless a tensor has this dtype, shape (None for any size) and device, and rows without gaps."""
    fits = tensor.dim() == len(shape) and all(w in (None, s) for s, w in zip(tensor.shape, shape, strict=True))
    has_whole_rows = fits and (tensor.stride(-1) == 1 or tensor.shape[-1] <= 1)
    if not (has_whole_rows and tensor.dtype == dtype and tensor.device == device):
        raise _misfit(name, tensor, dtype, shape, device)


def _misfit(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int | None, ...], device: torch.device
) -> MoecError:
    found = f"{list(tensor.shape)} {_name(tensor.dtype)}, strides {list(tensor.stride())}, on {tensor.device}"
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    return fail(
        "E0526",
        f"the {name} given to a kernel that routes rows are {found}",
        f"they must be [{sizes}] {_name(dtype)}, without gaps in a row, on {device}",
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
