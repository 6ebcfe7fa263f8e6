"""The experts' products joined with their neighbours, in Triton's interpreter, against torch's one after the other.

Tolerances: fp32 1e-5, bf16 4e-2, fp16 5e-3 (max abs, values of a few units, activations rounded on the way).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from moec.diagnostics import MoecError
from moec.placement import linear
from moec.runtime import device_flags
from moec.runtime.context import Context
from moec.runtime.kernels import torch_fused as by_torch
from moec.runtime.kernels import triton_fused as by_triton
from moec.runtime.kernels.triton_rows import reduce_rows
from moec.runtime.step import Fixed
from tests.contexts import context

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


class Layer:
    """A layer's rows, choices and weights on the last of `ep` ranks. Some choices are -1, one expert gets no row."""

    def __init__(self, rows: int, experts: int, ep: int, top: int, hidden: int, inner: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(rows)
        self.ctx = context(placement=linear(experts, ep), rank=ep - 1)
        held = len(self.ctx.held("routed"))

        def normal(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

        self.x = normal(rows, hidden) * hidden**0.5
        self.ids = torch.randint(-1, experts - 1, (rows, top), generator=generator)
        self.weights = torch.rand(rows, top, generator=generator)
        self.gate_up, self.down, self.top = normal(held, 2 * inner, hidden), normal(held, hidden, inner), top

    def run(self, kernels: ModuleType, ctx: Context | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Offsets, pairs, activations and sums."""
        ctx = ctx or self.ctx
        offsets, pairs = kernels.group_pairs(ctx, self.ids, table="routed")
        act = kernels.gathered_gate_up(ctx, self.x, offsets, pairs, self.gate_up, table="routed", top=self.top)
        return (
            offsets,
            pairs,
            act,
            kernels.reduced_linear(ctx, act, offsets, self.down, pairs, self.weights, table="routed"),
        )


SHAPES = [(0, 4, 1, 2, 20, 12), (1, 5, 1, 5, 50, 33), (23, 7, 2, 3, 33, 50)]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_they_give_what_the_operations_apart_give(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    layer = Layer(*shape, dtype)
    wanted, found = layer.run(by_torch), layer.run(by_triton)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    for ours, theirs in zip(found[2:], wanted[2:], strict=True):
        assert_close(ours, theirs, rtol=0, atol=TOLERANCES[dtype])
    assert not layer.ctx.step_memo


def test_in_a_step_of_fixed_shape_there_is_room_for_all_pairs() -> None:
    """What stands behind the last end is neither read nor does it reach a sum, by either way to add."""
    layer = Layer(23, 7, 2, 3, 32, 16, torch.float32)
    fixed = replace(layer.ctx, step=replace(layer.ctx.step, fixed=Fixed(1)))
    _, pairs, act, sums = layer.run(by_torch)
    offsets, room, acts, found = layer.run(by_triton, fixed)
    served = len(pairs)
    assert served < len(room) == len(acts) == 23 * 3 and torch.equal(room[:served], pairs)
    assert_close(acts[:served], act, rtol=0, atol=1e-5)
    assert_close(found, sums, rtol=0, atol=1e-5)
    offsets, room = by_triton.group_pairs(fixed, layer.ids, table="routed")
    acts[served:] = torch.nan
    one_by_one = by_triton.reduced_linear(fixed, acts, offsets, layer.down, room, layer.weights, table="routed")
    assert_close(one_by_one, sums, rtol=0, atol=1e-5)
    offsets, room = by_triton.group_pairs(fixed, layer.ids, table="routed")
    rows = acts.new_full((len(room), 32), torch.nan)
    rows[:served] = 1.0
    counted = (layer.weights * (layer.ids >= 4)).sum(1)
    assert_close(reduce_rows(fixed, rows, room, layer.weights, table="routed"), counted[:, None].expand(-1, 32))


def test_sums_beyond_fp16_become_its_largest_number() -> None:
    layer = Layer(3, 2, 1, 2, 16, 16, torch.float16)
    layer.ids, layer.weights = torch.tensor([[0, 1]] * 3), torch.tensor([[1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]])
    layer.x.fill_(8.0)
    layer.gate_up.fill_(1.0)
    layer.down.fill_(4.0)
    largest = torch.finfo(torch.float16).max
    sums = layer.run(by_triton)[3]
    assert sums[:, 0].tolist() == [largest, -largest, 0.0]


def test_an_id_that_is_no_expert_is_refused_at_once_or_after_the_step() -> None:
    layer = Layer(4, 5, 1, 2, 16, 16, torch.float32)
    layer.ids[2, 1] = 5
    with pytest.raises(MoecError, match="expert 5 of `routed` does not exist") as error:
        by_triton.group_pairs(layer.ctx, layer.ids, table="routed")
    assert error.value.diagnostics[0].code == "E0507"
    fixed = replace(layer.ctx, step=replace(layer.ctx.step, fixed=Fixed(1)))
    by_triton.group_pairs(fixed, layer.ids, table="routed")
    with pytest.raises(MoecError, match="the expert of pair 5 of `routed` does not exist"):
        device_flags.raise_faults(fixed)


def test_what_does_not_fit_together_is_refused() -> None:
    layer = Layer(4, 5, 1, 2, 16, 16, torch.float32)
    offsets, pairs, act, _ = layer.run(by_torch)
    calls: dict[str, Callable[[], Tensor]] = {
        "E0525": lambda: by_triton.gathered_gate_up(
            layer.ctx, layer.x, offsets, pairs.int(), layer.gate_up, table="routed", top=2
        ),
        "E0508": lambda: by_triton.reduced_linear(
            layer.ctx, act[:2], torch.full_like(offsets, 2), layer.down, pairs, layer.weights, table="routed"
        ),
    }
    for code, call in calls.items():
        with pytest.raises(MoecError) as error:
            call()
        assert error.value.diagnostics[0].code == code
