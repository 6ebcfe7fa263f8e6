"""What rows must sum to, in fp64, and how far a kernel's sums may be from it."""

from __future__ import annotations

import torch
from torch import Tensor

#: Relative error of one rounding to the dtype, plus what fp32 accumulation adds; absolute where sums are near 0.
TOLERANCE = {torch.float32: (1e-5, 1e-6), torch.float16: (2**-11 + 1e-5, 1e-6), torch.bfloat16: (2**-8 + 1e-5, 1e-6)}


def exact_sums(rows_XD: Tensor, pairs_X: Tensor, weights_Rk: Tensor) -> Tensor:
    """The definition, in fp64."""
    num_rows, top = weights_Rk.shape
    out_RD = torch.zeros(num_rows, rows_XD.shape[1], dtype=torch.float64)
    weighted = rows_XD.double() * weights_Rk.flatten()[pairs_X].double()[:, None]
    return out_RD.index_add_(0, pairs_X // top, weighted)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    relative, absolute = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=relative, atol=absolute)
