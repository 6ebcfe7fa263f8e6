"""Grouped GEMMs as tests ask for them: kernels by their variant, inputs, what they should give.

Shapes: X rows at their experts, T tokens, M experts, K summed, N columns of the result, S sides, L = S N lines.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from moec.codegen.gemm_variant import Projection, RowSource, Store
from moec.codegen.grouped_gemm import GroupedGemm, specialise
from moec.codegen.targets import TARGETS, Dtype
from moec.runtime.kernels.triton_products import DTYPES, launch_grouped_gemm

TORCH = {dtype: name for name, dtype in DTYPES.items()}
#: What a kernel does with rows and results: op, rows, store.
VARIANTS = {
    "gate_up": (Projection.GATE_UP, RowSource.SORTED, Store.PLAIN),
    "gathered": (Projection.GATE_UP, RowSource.GATHERED, Store.PLAIN),
    "down": (Projection.DOWN, RowSource.SORTED, Store.PLAIN),
    "weighted": (Projection.DOWN, RowSource.SORTED, Store.WEIGHTED),
    "accumulated": (Projection.DOWN, RowSource.SORTED, Store.ACCUMULATED),
}


def kernel(
    variant: str, depth: int, width: int, experts: int, dtype: Dtype, target: str, rows_per_expert: int, top: int = 1
) -> GroupedGemm:
    op, rows, store = VARIANTS[variant]
    hidden, inner = (depth, width) if op is Projection.GATE_UP else (width, depth)
    return specialise(
        op, hidden, inner, experts, dtype, TARGETS[target], top=top, rows=rows, store=store,
        rows_per_expert=rows_per_expert,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Case:
    """Tensors of one call. `pairs` names a (token, choice) for each row; some choices of the T tokens have none."""

    rows: Tensor
    ends: Tensor
    weights: Tensor
    pairs: Tensor
    pair_weights: Tensor
    num_rows: int


def inputs(values: GroupedGemm, num_rows: int, ends_M: Tensor) -> Case:
    generator = torch.Generator().manual_seed(num_rows * 1000 + values.depth)
    tokens = -(-num_rows // values.top) + 1
    pairs_X = torch.randperm(tokens * values.top, generator=generator)[:num_rows]
    num_inputs = tokens if values.rows is RowSource.GATHERED else num_rows
    rows = torch.randn(num_inputs, values.depth, generator=generator)
    w_MLK = torch.randn(values.experts, values.sides * values.width, values.depth, generator=generator)
    pair_weights = torch.rand(tokens * values.top, generator=generator) + 0.25
    dtype = TORCH[values.dtype]
    return Case(
        rows.to(dtype), ends_M, (w_MLK / values.depth**0.5).to(dtype), pairs_X, pair_weights, num_rows
    )  # fmt: skip


def run(values: GroupedGemm, case: Case) -> Tensor:
    """What the kernel gives in the interpreter, into memory full of NaN, or of ones where it adds."""
    is_accumulated = values.store is Store.ACCUMULATED
    num_tokens = case.pair_weights.numel() // values.top
    shape = (num_tokens if is_accumulated else case.num_rows, values.width)
    fill, dtype = (1.0, torch.float32) if is_accumulated else (torch.nan, TORCH[values.dtype])
    out = torch.full(shape, fill, dtype=dtype)
    pairs_X = case.pairs if values.has_pairs else None
    launch_grouped_gemm(values, case.rows, case.ends, case.weights, out, pairs_X, case.pair_weights)
    return out


def wanted(values: GroupedGemm, case: Case) -> Tensor:
    """The definition, in fp64. Rows of no expert are 0, or NaN where the kernel leaves what was there."""
    rows_XK = case.rows.double()
    if values.rows is RowSource.GATHERED:
        rows_XK = rows_XK[case.pairs // values.top]
    fill = torch.nan if values.store is Store.WEIGHTED else 0.0
    out_XN = torch.full((case.num_rows, values.width), fill, dtype=torch.float64)
    start = 0
    for expert, end in enumerate(case.ends.tolist()):
        out_XL = rows_XK[start:end] @ case.weights[expert].double().T
        if values.sides == 2:
            gate, up = out_XL.chunk(2, dim=-1)
            out_XL = silu(gate) * up
        if values.store is not Store.PLAIN:
            out_XL = out_XL * case.pair_weights[case.pairs[start:end], None].double()
        out_XN[start:end] = out_XL
        start = end
    if values.store is not Store.ACCUMULATED:
        return out_XN
    tokens = case.pair_weights.numel() // values.top
    ones = torch.ones(tokens, values.width, dtype=torch.float64)
    return ones.index_add_(0, case.pairs[:start] // values.top, out_XN[:start])


def assert_close(values: GroupedGemm, out: Tensor, wanted: Tensor) -> None:
    """Within one rounding to the result's dtype and what accumulating in fp32 adds; absolute where it is 0."""
    relative = {torch.float32: 1e-5, torch.float16: 2**-11 + 1e-5, torch.bfloat16: 2**-8 + 1e-5}[out.dtype]
    torch.testing.assert_close(out.double(), wanted, rtol=relative, atol=1e-5, equal_nan=True)


def row_ends(rows: int, experts: int, routing: str) -> Tensor:
    """Cumulative ends: spread over all, all to the last, only to every second expert, or some rows to none."""
    counts = torch.zeros(experts, dtype=torch.int64)
    takers = {"one": [experts - 1], "gaps": list(range(0, experts, 2))}.get(routing, list(range(experts)))
    served = rows * 2 // 3 if routing == "tail" else rows
    for i in range(served):
        counts[takers[i * i % len(takers)]] += 1
    return counts.cumsum(0).to(torch.int32)
