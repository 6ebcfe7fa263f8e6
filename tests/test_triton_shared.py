"""A layer whose shared experts are the last slots of the routed ones, in Triton's interpreter, against fp64.

The definition has them apart: the weighed sum of the chosen experts, plus one MLP of all shared ones. Tolerances: fp32
1e-5, bf16 2e-2 (max abs, values of about one, activations rounded on the way in both).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from moec.placement import linear
from moec.runtime.context import Context
from moec.runtime.kernels import triton_fused, triton_products, triton_route, triton_rows
from moec.runtime.kernels.torch_moe import route as torchs_route
from moec.runtime.step import Fixed
from tests.contexts import context

pytest.importorskip("triton")

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
TABLE = "routed"


class Layer:
    """Rows x [T, D], E routed experts of which each row chooses k, and n shared ones. `stack`: as a rank holds them."""

    def __init__(self, rows: int, experts: int, top: int, shared: int, hidden: int, inner: int, dtype: torch.dtype):
        generator = torch.Generator().manual_seed(rows + experts)

        def normal(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

        self.x, self.logits = normal(rows, hidden) * hidden**0.5, normal(rows, experts).float() * experts
        self.gate, self.up, self.down = (normal(experts, inner, hidden) for _ in range(3))
        self.shared_gate, self.shared_up = (normal(shared * inner, hidden) for _ in range(2))
        self.shared_down = normal(hidden, shared * inner)
        self.top, self.shared = top, shared
        self.ctx = context(placement=linear(experts + shared, 1))

    def stack(self) -> tuple[Tensor, Tensor]:
        """[E + n, 2 I, D] and [E + n, D, I]: experts cut from the shared ones' matrices, behind the routed ones."""
        sides = ((self.gate, self.shared_gate), (self.up, self.shared_up))
        gate_up = torch.cat([torch.cat([own, torch.stack(beside.chunk(self.shared))]) for own, beside in sides], 1)
        shared = [part.contiguous() for part in self.shared_down.chunk(self.shared, 1)]
        return gate_up, torch.cat([self.down.transpose(1, 2).contiguous(), torch.stack(shared)])

    def exact(self) -> Tensor:
        """fp64, but for activations, which have the rows' dtype."""
        ids, weights = torchs_route(context(), self.logits, table=TABLE, **self.choice())
        out = self._mlp(self.x, self.shared_gate, self.shared_up, self.shared_down)
        for row, (chosen, weighed) in enumerate(zip(ids.tolist(), weights.double(), strict=True)):
            for expert, weight in zip(chosen, weighed, strict=True):
                one = self.x[row : row + 1], self.gate[expert], self.up[expert], self.down[expert].T
                out[row] += weight * self._mlp(*one)[0]
        return out

    def choice(self) -> dict[str, Any]:
        return {"score": "sigmoid", "top": self.top, "groups": 1, "keep": 1, "renormalize": True, "scale": 2.5}

    @staticmethod
    def _mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        act = F.silu(x.double() @ gate.double().T) * (x.double() @ up.double().T)
        return act.to(x.dtype).double() @ down.double().T

    def run(self, form: str, ctx: Context | None = None) -> Tensor:
        """By the kernels: rows `sorted`, `gathered`, or gathered and `accumulated`."""
        ctx, (gate_up, down) = ctx or self.ctx, self.stack()
        ids, weights = triton_route.route(ctx, self.logits, table=TABLE, shared=self.shared, **self.choice())
        if form == "sorted":
            rows, ends, pairs = triton_rows.group_rows(ctx, self.x, ids, table=TABLE)
            act = triton_products.grouped_gate_up(ctx, rows, ends, gate_up)
        else:
            ends, pairs = triton_fused.group_pairs(ctx, ids, table=TABLE)
            top = self.top + self.shared
            act = triton_fused.gathered_gate_up(ctx, self.x, ends, pairs, gate_up, table=TABLE, top=top)
        if form == "accumulated":
            return triton_fused.reduced_linear(ctx, act, ends, down, pairs, weights, table=TABLE)
        given = triton_products.grouped_linear(ctx, act, ends, down)
        return triton_rows.reduce_rows(ctx, given, pairs, weights, table=TABLE)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("form", ["sorted", "gathered", "accumulated"])
@pytest.mark.parametrize("shape", [(0, 3, 1, 1, 20, 12), (1, 5, 5, 1, 48, 32), (40, 6, 2, 2, 33, 50)], ids=str)
def test_the_sum_is_that_of_both(shape: tuple[int, ...], form: str, dtype: torch.dtype) -> None:
    layer = Layer(*shape, dtype)
    assert_close(layer.run(form).double(), layer.exact(), rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.parametrize("form", ["sorted", "gathered", "accumulated"])
def test_in_a_step_of_fixed_shape_too(form: str) -> None:
    """What a CUDA graph captures: nothing is read back in between."""
    layer = Layer(9, 5, 2, 2, 32, 16, torch.float32)
    fixed = replace(layer.ctx, step=replace(layer.ctx.step, fixed=Fixed(1)))
    assert_close(layer.run(form, fixed).double(), layer.exact(), rtol=0, atol=1e-5)
