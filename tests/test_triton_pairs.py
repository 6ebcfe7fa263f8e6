"""A layer's experts pair by pair, in Triton's interpreter, against fp64 and against the same layer sorted.

Tolerances against fp64: fp32 1e-5, bf16 2e-2, fp16 2e-3 (absolute, values of a few units, activations rounded on the
way).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from torch.testing import assert_close

from moec.codegen import pair_product
from moec.codegen.gemm_variant import Projection
from moec.codegen.pair_product import render_pairs, specialise_pairs
from moec.codegen.targets import TARGETS, Dtype
from moec.diagnostics import MoecError
from moec.placement import linear
from moec.runtime import device_flags
from moec.runtime.context import Context
from moec.runtime.kernels import torch_fused, triton_pairs
from moec.runtime.kernels.triton_pairs import multiply_pairs, paired_experts
from moec.runtime.step import Fixed
from tests.contexts import context

pytest.importorskip("triton")
#: numpy, in which the interpreter computes, warns of NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


class Layer:
    """A layer on the last of `ep` ranks: x [T, D], ids and weights [T, k], gate_up [M, 2 I, D], down [M, D, I].

    Some choices are -1, expert 1 of more than one gets no row.
    """

    def __init__(
        self, rows: int, experts: int, top: int, hidden: int, inner: int, dtype: torch.dtype, ep: int = 1
    ) -> None:
        generator = torch.Generator().manual_seed(rows * 100 + top)
        self.ctx = context(placement=linear(experts, ep), rank=ep - 1)
        held = len(self.ctx.held("routed"))

        def normal(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

        self.x = normal(rows, hidden) * hidden**0.5
        self.ids = torch.randint(-1, experts, (rows, top), generator=generator)
        self.ids[self.ids == 1] = 0
        self.weights = torch.rand(rows, top, generator=generator) / top**0.5
        self.gate_up, self.down = normal(held, 2 * inner, hidden), normal(held, hidden, inner)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.x, self.ids, self.weights, self.gate_up, self.down

    def run(self, ctx: Context | None = None) -> Tensor:
        return paired_experts(ctx or self.ctx, *self.tensors, table="routed", rows=len(self.x), sums="fixed")

    def wanted(self) -> Tensor:
        """The definition, in fp64; activations are rounded to the layer's dtype, as all kernels do."""
        out = torch.zeros(self.x.shape, dtype=torch.float64)
        held = self.ctx.held_experts("routed")
        for row, ids in enumerate(self.ids.tolist()):
            for choice, expert in enumerate(ids):
                if expert in held:
                    slot = held.index(expert)
                    gate, up = (self.gate_up[slot].double() @ self.x[row].double()).chunk(2)
                    act = (silu(gate) * up).to(self.x.dtype).double()
                    out[row] += self.weights[row, choice].double() * (self.down[slot].double() @ act)
        return out


#: Rows, experts, choices, hidden, inner, ranks: a covering set of odd sizes, k from 1 to E.
SHAPES = [
    (0, 4, 2, 33, 50, 1),
    (1, 1, 1, 50, 33, 1),
    (1, 8, 8, 1025, 33, 1),
    (1, 160, 3, 33, 1025, 2),
    (7, 5, 5, 33, 50, 1),
    (7, 8, 1, 50, 1025, 2),
    (7, 64, 2, 1025, 50, 1),
    (7, 8, 3, 64, 96, 1),
    (1, 12, 12, 64, 64, 3),
]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_gives_the_sum_over_a_rows_experts(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    *sizes, ep = shape
    layer = Layer(*sizes, dtype=dtype, ep=ep)
    assert_close(layer.run().double(), layer.wanted(), rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.parametrize("tiles", ["as on a GPU", "interpreted"])
def test_tiles_change_no_result(tiles: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles that a GPU has, whose last column and last step reach past the end, give what the larger ones give."""
    if tiles == "as on a GPU":
        monkeypatch.setattr(triton_pairs, "INTERPRETED_COLUMNS", 4)
        monkeypatch.setattr(triton_pairs, "INTERPRETED_STEP", 128)
    layer = Layer(2, 5, 3, 131, 50, torch.float32)
    assert_close(layer.run().double(), layer.wanted(), rtol=0, atol=1e-5)


def test_two_runs_give_the_same_bits() -> None:
    layer = Layer(5, 8, 4, 64, 48, torch.bfloat16)
    assert torch.equal(layer.run(), layer.run())


@pytest.mark.parametrize("sums", ["fixed", "any"])
def test_few_rows_go_pair_by_pair_and_more_are_sorted(sums: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both give what torch's kernel gives, which always sorts."""
    layer = Layer(7, 8, 2, 48, 32, torch.float32)
    calls: list[int] = []

    def multiply(*given: object, **named: object) -> Tensor:
        calls.append(1)
        return multiply_pairs(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(triton_pairs, "multiply_pairs", multiply)
    wanted = torch_fused.paired_experts(layer.ctx, *layer.tensors, table="routed", rows=7, sums=sums)
    for rows, called in ((6, 0), (7, 1), (64, 2)):
        found = paired_experts(layer.ctx, *layer.tensors, table="routed", rows=rows, sums=sums)
        assert_close(found, wanted, rtol=0, atol=1e-5)
        assert len(calls) == called


def test_what_is_served_elsewhere_is_not_read() -> None:
    """NaN in rows, activations' room and experts that no pair here names leaves the sums as they are."""
    layer = Layer(3, 6, 2, 40, 24, torch.float32, ep=2)
    layer.ids = torch.tensor([[3, 0], [-1, 2], [0, 1]])  # this rank has 3 to 5
    wanted = layer.wanted()
    layer.x[1:] = torch.nan
    layer.gate_up[1:], layer.down[1:] = torch.nan, torch.inf
    found = layer.run()
    assert_close(found.double(), wanted, rtol=0, atol=1e-5)
    assert found[1:].tolist() == [[0.0] * 40] * 2


def test_numbers_that_are_none_reach_their_row_only() -> None:
    layer = Layer(3, 4, 2, 40, 24, torch.float32)
    layer.ids = torch.tensor([[0, 2], [2, 3], [3, 0]])
    layer.x[1, 5], layer.weights[2, 1] = torch.nan, torch.inf
    found = layer.run()
    assert found[0].isfinite().all() and found[1].isnan().all() and not found[2].isfinite().any()


def test_sums_beyond_fp16_become_its_largest_number() -> None:
    layer = Layer(3, 2, 2, 16, 16, torch.float16)
    layer.ids, layer.weights = torch.tensor([[0, 1]] * 3), torch.tensor([[1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]])
    layer.x.fill_(8.0)
    layer.gate_up.fill_(1.0)
    layer.down.fill_(4.0)
    largest = torch.finfo(torch.float16).max
    assert layer.run()[:, 0].tolist() == [largest, -largest, 0.0]


def test_an_id_that_is_no_expert_is_refused_at_once_or_after_the_step() -> None:
    layer = Layer(4, 5, 2, 16, 16, torch.float32)
    layer.ids[2, 1] = 5
    with pytest.raises(MoecError, match="expert 5 of `routed` does not exist") as error:
        layer.run()
    assert error.value.diagnostics[0].code == "E0507"
    layer.ids[1, 0] = -2
    fixed = replace(layer.ctx, step=replace(layer.ctx.step, fixed=Fixed(1)))
    layer.run(fixed)
    with pytest.raises(MoecError, match="the expert of pair 2 of `routed` does not exist"):
        device_flags.raise_faults(fixed)


def test_what_does_not_fit_together_is_refused() -> None:
    layer = Layer(4, 5, 2, 16, 24, torch.float32)
    x, ids, weights, gate_up, down = layer.tensors
    calls: dict[str, Callable[[], Tensor]] = {
        "the ids given": lambda: multiply_pairs(layer.ctx, x, ids.int(), weights, gate_up, down, table="routed"),
        "the weights given": lambda: multiply_pairs(layer.ctx, x, ids, weights[:3], gate_up, down, table="routed"),
        "gate and up": lambda: multiply_pairs(layer.ctx, x, ids, weights, gate_up[:, 1:], down, table="routed"),
        "of down": lambda: multiply_pairs(layer.ctx, x, ids, weights, gate_up, down[:4], table="routed"),
    }
    for what, call in calls.items():
        with pytest.raises(MoecError, match=what) as error:
            call()
        assert error.value.diagnostics[0].code == "E0526"


def test_addresses_beyond_two_to_the_31() -> None:
    """Elements of DeepSeek-V3's experts, 256 x 4096 x 7168, are more: lines are 64 bits before they are multiplied."""
    for op in Projection:
        text = render_pairs(specialise_pairs(op, 7168, 2048, 256, 256, 8, Dtype.BF16, TARGETS["cuda:90"]))
        (line,) = [line for line in text.splitlines() if line.strip().startswith(("line_NS =", "line_NP ="))]
        assert line.strip().split(" = ")[1].startswith(("slot * (2 * N)", "slot_P[None, :] * N"))
        assert "slots     [E]         int64" in text
    with pytest.raises(MoecError, match="cannot serve") as error:
        specialise_pairs(Projection.DOWN, 2**16, 2**15, 8, 8, 2, Dtype.BF16, TARGETS["cuda:90"])
    assert error.value.diagnostics[0].code == "E0522"


@pytest.mark.parametrize(("top", "hidden", "inner"), [(8, 2048, 768), (2, 4096, 14336), (1, 2048, 768), (64, 50, 33)])
def test_one_row_keeps_a_device_busy_where_it_can(top: int, hidden: int, inner: int) -> None:
    for target in TARGETS.values():
        up, down = (specialise_pairs(op, hidden, inner, 64, 64, top, Dtype.BF16, target) for op in Projection)
        for values in (up, down):
            assert values.num_programs(1) >= target_sms(target.name) or values.columns == pair_product.LEAST_COLUMNS
            assert values.step_bytes <= 16384


def target_sms(name: str) -> int:
    return {"cuda:80": 108, "cuda:90": 132, "cuda:100": 148, "hip:gfx942": 304}[name]
