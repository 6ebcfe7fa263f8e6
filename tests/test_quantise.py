"""Formats of quantised weights and rows: what torch's quantisers give, and that the kernel rounds rows alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moec.codegen.gemm_variant import Projection, Weights
from moec.codegen.kernel_module import load_kernel
from moec.codegen.quantise_rows import QuantiseRows, render_quantise_rows, specialise_quantise_rows
from moec.codegen.quantised import specialise_quantised
from moec.codegen.targets import TARGETS, Dtype
from moec.diagnostics import MoecError
from moec.runtime.kernels import triton_quantised as kernels_triton_quantised
from moec.runtime.quantise import (
    QuantisedRows,
    QuantisedWeights,
    dequantise,
    dequantise_rows,
    pack_int4,
    quantise_fp8_blocks,
    quantise_int4,
    quantise_int8,
    quantise_rows,
    unpack_int4,
)

PAGE = Path(__file__).resolve().parent.parent / "specs" / "errors" / "E0531.md"
#: A probe of the rounding alone, for a kernel module's text.
PROBE = """

@triton.jit
def probe(x, values, INTERPRET: tl.constexpr):
    i = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    tl.store(values + i, round_to_e4m3(tl.load(x + i), INTERPRET))
"""


def same_codes(a: Tensor, b: Tensor) -> bool:
    """Equal bytes, or NaN in both: its sign says nothing."""
    return bool(((a.view(torch.uint8) == b.view(torch.uint8)) | (a.float().isnan() & b.float().isnan())).all())


@pytest.mark.filterwarnings("ignore:invalid value encountered in add")
def test_every_bf16_number_is_rounded_as_torch_rounds_it() -> None:
    """All 65,536 of them, and the fp32 neighbours of each that are no bf16, saturated; NaN stays."""
    pytest.importorskip("triton")
    bits = torch.arange(65_536, dtype=torch.int64) << 16
    kernel = load_kernel(render_quantise_rows(QuantiseRows(128, Dtype.FP32)) + PROBE, "probe", interpret=True)
    for low in (0, 1, 0xFFFF):
        x = (bits + low).to(torch.int32).view(torch.float32) if low == 0 else _fp32(bits + low)
        values = torch.empty(65_536, dtype=torch.uint8).view(torch.float8_e4m3fn)
        kernel[(16,)](x, values, INTERPRET=True)
        assert same_codes(values, x.clamp(-448, 448).to(torch.float8_e4m3fn))


def _fp32(bits: Tensor) -> Tensor:
    return torch.where(bits < 2**31, bits, bits - 2**32).to(torch.int32).view(torch.float32)


def test_numbers_up_to_448_keep_their_scale() -> None:
    """A group whose largest is 448 has a scale of 1: its e4m3 are those of the numbers themselves."""
    pytest.importorskip("triton")
    x = torch.arange(65_536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    x = x[x.abs() <= 448][: 127 * 272].view(-1, 127)
    x_RK = torch.cat([x, torch.full((len(x), 1), 448.0)], dim=1).to(torch.bfloat16)
    found = kernels_triton_quantised.quantise_rows(x_RK)
    assert torch.equal(found.scales, torch.ones(len(x), 1))
    assert same_codes(found.values, x_RK.to(torch.float8_e4m3fn))


@pytest.mark.parametrize(("rows", "depth"), [(1, 1), (7, 50), (64, 128), (5, 300), (3, 1025)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_kernel_gives_what_torch_gives(rows: int, depth: int, dtype: torch.dtype) -> None:
    """Bit by bit: groups of all sizes, of zeros, of all but zeros, with an infinity, with a NaN."""
    pytest.importorskip("triton")
    generator = torch.Generator().manual_seed(depth)
    x_RK = (torch.randn(rows, depth, generator=generator) * torch.logspace(-9, 4, depth)).to(dtype)
    for row, number in zip(range(1, rows), (0.0, 1e-7, torch.nan, torch.inf, -torch.inf), strict=False):
        x_RK[row, : 1 + depth // 2] = number
    found, wanted = kernels_triton_quantised.quantise_rows(x_RK), quantise_rows(x_RK)
    assert same_codes(found.values, wanted.values)
    torch.testing.assert_close(found.scales, wanted.scales, rtol=0, atol=0, equal_nan=True)


def test_rows_are_within_half_a_step() -> None:
    """A number's error is at most 1/16 of it, or half of 2^-9 of its group's scale; faulty groups are NaN alone."""
    x_RK = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 300)
    x_RK[0] = 0.0
    x_RK[1, 200] = torch.inf
    rows = quantise_rows(x_RK)
    error = (dequantise_rows(rows, torch.float64) - x_RK).abs()
    bound = torch.maximum(x_RK.abs().double() / 16, rows.scales.double().repeat_interleave(128, 1)[:, :300] / 1024)
    assert not dequantise_rows(rows)[0].any()
    assert error[1].isnan().tolist() == [128 <= k < 256 for k in range(300)]
    assert (error[2:] <= bound[2:] * 1.0001).all()


@pytest.mark.parametrize("sides", [1, 2])
@pytest.mark.parametrize(("lines", "depth"), [(33, 50), (128, 256), (130, 1025)])
def test_weights_are_within_half_a_step(sides: int, lines: int, depth: int) -> None:
    """B40: 1/16 of a number for e4m3 (or half of 2^-9 of the scale), half a scale for integers, also at ragged ends."""
    w_MNK = torch.randn(2, sides * lines, depth, generator=torch.Generator().manual_seed(lines))
    for quantise in (quantise_int8, quantise_int4):
        weights = quantise(w_MNK, sides)
        half = weights.scales.repeat_interleave(128, -1)[..., :depth] / 2
        assert ((dequantise(weights) - w_MNK).abs() <= half * 1.0001).all()
    weights = quantise_fp8_blocks(w_MNK, sides)
    largest = w_MNK.abs().max()
    assert ((dequantise(weights) - w_MNK).abs() <= torch.maximum(w_MNK.abs() / 16, largest / 448 / 1024) * 1.0001).all()
    assert weights.scales.shape == (2, sides * -(-lines // 128), -(-depth // 128))


def test_gate_and_up_have_blocks_of_their_own() -> None:
    """As two tensors of a checkpoint with their `weight_scale_inv`, concatenated."""
    gate, up = torch.randn(2, 3, 200, 130, generator=torch.Generator().manual_seed(3))
    both = quantise_fp8_blocks(torch.cat([gate, up], dim=1), sides=2)
    one, two = quantise_fp8_blocks(gate), quantise_fp8_blocks(up)
    assert torch.equal(both.scales, torch.cat([one.scales, two.scales], dim=1))
    assert torch.equal(both.values.view(torch.uint8), torch.cat([one.values, two.values], dim=1).view(torch.uint8))


def test_a_block_is_scaled_by_its_largest() -> None:
    w_MNK = torch.ones(1, 256, 256)
    w_MNK[0, 200, 3] = -896.0
    weights = quantise_fp8_blocks(w_MNK)
    torch.testing.assert_close(weights.scales[0], torch.tensor([[1 / 448, 1 / 448], [2.0, 1 / 448]]))
    assert weights.values[0, 200, 3].item() == -448.0
    assert weights.values[0, 128, 0].item() == 0.5


def test_int4_words_are_those_of_compressed_tensors() -> None:
    """Column 0 in the lowest four bits, biased by 8."""
    words = pack_int4(torch.arange(-8, 8, dtype=torch.int8))
    assert [word & 0xFFFFFFFF for word in words.tolist()] == [0x76543210, 0xFEDCBA98]
    assert words.view(torch.uint8)[:2].tolist() == [0x10, 0x32]
    assert torch.equal(unpack_int4(words), torch.arange(-8, 8, dtype=torch.int8))


def refusals() -> list[Callable[[], object]]:
    ends_M = torch.tensor([1, 2], dtype=torch.int32)
    loose = QuantisedWeights(Weights.INT4, torch.zeros(2, 8, 128, dtype=torch.int8), torch.ones(2, 8, 1), 100, 2)
    rows_RK = torch.ones(2, 100, dtype=torch.bfloat16)
    return [
        lambda: kernels_triton_quantised.grouped_gate_up(rows_RK, ends_M, loose),
        lambda: specialise_quantised(
            Projection.DOWN, 64, 64, 2, Dtype.BF16, TARGETS["cuda:80"], Weights.FP8, quantised_rows=True
        ),
        lambda: QuantisedWeights(Weights.FP8, with_nan(expert=1), torch.ones(2, 1, 1), 100),
    ]


def with_nan(expert: int) -> torch.Tensor:
    """FP8 weights [2, 8, 128] of which one is negative NaN, a code that kernels would decode as -480."""
    codes = torch.zeros(2, 8, 128, dtype=torch.uint8)
    codes[expert, 3, 5] = 0xFF
    return codes.view(torch.float8_e4m3fn)


def test_the_page_shows_the_errors_as_printed() -> None:
    page = PAGE.read_text()
    assert page.startswith("# E0531: ")
    for refusal in refusals():
        with pytest.raises(MoecError) as caught:
            refusal()
        assert caught.value.render() in page


@pytest.mark.parametrize(("target", "dtype"), [*itertools.product(["cuda:80", "hip:gfx942"], Dtype)])
def test_rows_are_quantised_where_e4m3_is_multiplied(target: str, dtype: Dtype) -> None:
    with pytest.raises(MoecError) as caught:
        specialise_quantise_rows(128, dtype, TARGETS[target])
    assert caught.value.diagnostics[0].code == "E0531"
    with pytest.raises(MoecError, match="the rows given to a kernel of quantised weights"):
        kernels_triton_quantised.quantise_rows(torch.ones(3, 8, dtype=torch.float64))
    assert isinstance(kernels_triton_quantised.quantise_rows(torch.ones(3, 8)), QuantisedRows)
