"""Embedding, sums and norms, rendered from the C++ template.

Torch's would be as quick. But its threads wait awake for milliseconds after each of its larger operations, on the cores
that the C++ kernels' threads are to use: a step stays with one set of threads.

Shapes: T tokens, V vocabulary, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moec.codegen.cpp import Norm
from moec.runtime.context import Context
from moec.runtime.cpp_library import Library
from moec.runtime.host_memory import new_empty
from moec.runtime.kernels import torch_dense


def embed(library: Library, ctx: Context, tokens_T: Tensor, w_VD: Tensor) -> Tensor:
    tokens_T, w_VD = tokens_T.contiguous(), w_VD.contiguous()
    out_TD = new_empty(w_VD, tokens_T.shape[0], w_VD.shape[1])
    row_bytes = w_VD.shape[1] * w_VD.element_size()
    places = (w_VD.data_ptr(), w_VD.shape[0], tokens_T.data_ptr(), tokens_T.shape[0], row_bytes, out_TD.data_ptr())
    return out_TD if library.get("take_rows")(*places) else torch_dense.embed(ctx, tokens_T, w_VD)


def add(library: Library, ctx: Context, a: Tensor, b: Tensor) -> Tensor:
    a, b = a.contiguous(), b.contiguous()
    out = new_empty(a, *a.shape)
    library.get("add")(a.data_ptr(), b.data_ptr(), a.numel(), out.data_ptr())
    return out


def rms_norm(library: Library, ctx: Context, x: Tensor, w_D: Tensor, *, eps: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    width = w_D.shape[0]
    library.get(Norm, width)(x.data_ptr(), x.numel() // width, w_D.data_ptr(), out.data_ptr(), eps)
    return out
