"""Kernels rendered from the C++ template, under the names of the kernel table: products, and the table itself.

Each function here hands a library's function its operands' addresses. What a C++ kernel refuses goes to torch's, whose
check says why. Attention: `cpp_attention`; embedding, sums and norms: `cpp_rows`; routing, and rows on their way to
experts: `cpp_pairs`.

Shapes: T, R rows, D hidden, K summed, N outputs, I inner, S tokens, E experts, M experts held, X pairs served here,
C slots of a cache.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from moec.codegen.cpp import Product, Router
from moec.runtime.context import Context
from moec.runtime.cpp_library import Library
from moec.runtime.host_memory import new_empty
from moec.runtime.kernels import cached, torch_moe
from moec.runtime.kernels.cpp_attention import attention, mla_attention, rope
from moec.runtime.kernels.cpp_pairs import group_rows, reduce_rows, route
from moec.runtime.kernels.cpp_rows import add, embed, rms_norm


def bind(library: Library) -> dict[str, Callable[..., Any]]:
    """Operation -> kernel, over a library, which gets as many threads as torch has now."""
    library.set_threads(torch.get_num_threads())
    return {name: functools.partial(kernel, library) for name, kernel in KERNELS.items()}


#: Up to so many rows parts of a product are cut out of it. Copies of more would wake PyTorch's threads (`cpp_rows`).
FEW_ROWS = 8


@functools.cache
def _one_end(rows: int) -> ctypes.Array[ctypes.c_int32]:
    """Where the rows of the only expert end."""
    return (ctypes.c_int32 * 1)(rows)


def _multiply(kernel: Any, outer: int, x: Tensor, ends: Any, experts: int, w: Tensor) -> Tensor:
    """`ends`: address or array of the ends of each expert's rows."""
    x, w = x.contiguous(), w.contiguous()
    out = new_empty(x, *x.shape[:-1], outer)
    kernel(x.data_ptr(), ends, experts, w.data_ptr(), out.data_ptr())
    return out


def linear(library: Library, ctx: Context, x: Tensor, w_NK: Tensor) -> Tensor:
    outer, inner = w_NK.shape
    kernel = library.get(Product, inner, outer, False)
    return _multiply(kernel, outer, x, _one_end(x.numel() // inner), 1, w_NK)


def merged_linear(
    library: Library, ctx: Context, x: Tensor, w_NK: Tensor, *, sizes: tuple[int, ...]
) -> tuple[Tensor, ...]:
    """One product for few rows, views of which are next to nothing to copy where a kernel needs them whole."""
    if x.numel() <= FEW_ROWS * w_NK.shape[1]:
        return torch.split(linear(library, ctx, x, w_NK), list(sizes), dim=-1)
    return tuple(linear(library, ctx, x, part_NK) for part_NK in torch.split(w_NK, list(sizes)))


def gate_up(library: Library, ctx: Context, x_TD: Tensor, w_GD: Tensor) -> Tensor:
    outer, inner = w_GD.shape[0] // 2, w_GD.shape[1]
    kernel = library.get(Product, inner, outer, True)
    return _multiply(kernel, outer, x_TD, _one_end(x_TD.shape[0]), 1, w_GD)


def router_logits(library: Library, ctx: Context, x_SD: Tensor, w_ED: Tensor) -> Tensor:
    experts, hidden = w_ED.shape
    x_SD, w_ED = x_SD.contiguous(), w_ED.contiguous()
    out_SE = torch.empty(x_SD.shape[0], experts)
    kernel = library.get(Router, hidden, experts)
    kernel(x_SD.data_ptr(), _one_end(x_SD.shape[0]), 1, w_ED.data_ptr(), out_SE.data_ptr())
    return out_SE


def _check_rows(ctx: Context, rows_RK: Tensor, offsets_M: Tensor) -> None:
    served = int(offsets_M[-1]) if offsets_M.shape[0] else 0
    if served != rows_RK.shape[0]:
        raise torch_moe.lost_rows(ctx, f"experts were given {served} of {rows_RK.shape[0]} rows")


def grouped_linear(library: Library, ctx: Context, rows_RK: Tensor, offsets_M: Tensor, w_MNK: Tensor) -> Tensor:
    _check_rows(ctx, rows_RK, offsets_M)
    experts, outer, inner = w_MNK.shape
    return _multiply(library.get(Product, inner, outer, False), outer, rows_RK, offsets_M.data_ptr(), experts, w_MNK)


def grouped_gate_up(library: Library, ctx: Context, rows_RD: Tensor, offsets_M: Tensor, w_MGD: Tensor) -> Tensor:
    _check_rows(ctx, rows_RD, offsets_M)
    experts, outer, inner = w_MGD.shape[0], w_MGD.shape[1] // 2, w_MGD.shape[2]
    return _multiply(library.get(Product, inner, outer, True), outer, rows_RD, offsets_M.data_ptr(), experts, w_MGD)


def cached_experts(
    library: Library,
    ctx: Context,
    rows_XD: Tensor,
    offsets_M: Tensor,
    slots_M: Tensor,
    gate_up_CGD: Tensor,
    down_CDI: Tensor,
    *,
    table: str,
) -> Tensor:
    """As `cached.cached_experts`; the bits are those of resident experts."""
    hidden, inner = down_CDI.shape[1:]
    gate_up, down = library.get(Product, hidden, inner, True), library.get(Product, inner, hidden, False)
    out_XD = torch.empty_like(rows_XD)
    for slot, mine in chain.from_iterable(cached.served(ctx, rows_XD.shape[0], offsets_M, slots_M, table)):
        end = _one_end(mine.stop - mine.start)
        act_XI = _multiply(gate_up, inner, rows_XD[mine], end, 1, gate_up_CGD[slot])
        out_XD[mine] = _multiply(down, hidden, act_XI, end, 1, down_CDI[slot])
    return out_XD


KERNELS: dict[str, Callable[..., Any]] = {
    kernel.__name__: kernel
    for kernel in (
        embed, add, rms_norm, linear, merged_linear, gate_up, grouped_linear, grouped_gate_up, cached_experts,
        rope, attention, mla_attention, router_logits, route, group_rows, reduce_rows,
    )
}  # fmt: skip
