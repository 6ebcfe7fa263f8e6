"""Quantised rows and grouped GEMMs of quantised weights in Triton's interpreter, against fp64.

The reference multiplies what the stored numbers stand for, so that a format's own error is no part of the difference:
what remains is fp32 accumulation (1e-5) and one rounding to the result's dtype, as of the kernels of plain weights. The
interpreter adds exactly; tensor cores add a group's e4m3 products in about 14 bits, which a GPU alone can show.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from moec.codegen.gemm_variant import Projection, RowSource, Store, Weights
from moec.codegen.quantised import QuantisedGemm, specialise_quantised
from moec.codegen.targets import TARGETS, Dtype
from moec.diagnostics import MoecError
from moec.runtime.kernels import triton_products, triton_quantised
from moec.runtime.kernels.triton_quantised import grouped_gate_up, grouped_linear, launch_quantised, quantise_rows
from moec.runtime.quantise import (
    GROUP,
    QuantisedRows,
    QuantisedWeights,
    dequantise,
    dequantise_rows,
    pack_int4,
    quantise_fp8_blocks,
    quantise_int4,
    quantise_int8,
)
from moec.runtime.quantise import quantise_rows as torch_quantise_rows
from tests.covering import covering
from tests.grouped_gemms import TORCH, VARIANTS, Case, assert_close, row_ends, wanted

pytest.importorskip("triton")

QUANTISERS = {Weights.FP8: quantise_fp8_blocks, Weights.INT8: quantise_int8, Weights.INT4: quantise_int4}
#: Weights, whether rows are quantised too, device (by descriptors, by pointers) and rows an expert.
KERNELS = [
    *((Weights.FP8, True, target, rows) for target, rows in (("cuda:90", 128), ("cuda:100", 64), ("cuda:90", 4))),
    *(
        (weights, False, target, rows)
        for weights in QUANTISERS
        for target, rows in (("cuda:90", 128), ("cuda:80", 64), ("hip:gfx942", 4))
    ),
]
FACTORS: dict[str, tuple[object, ...]] = {
    "made_for": tuple(KERNELS),
    "variant": tuple(VARIANTS),
    "dtype": (Dtype.BF16, Dtype.FP16),
    "rows": (7, 64, 1, 257),
    "experts": (5, 1, 8, 64, 160),
    "depth": (128, 50, 33, 200),
    "width": (33, 50, 64, 130),
    "top": (1, 8),
    "routing": ("spread", "one", "gaps", "tail"),
}
CASES = covering(FACTORS)


def kernel(
    made_for: tuple[Weights, bool, str, int], variant: str, depth: int, width: int, experts: int, dtype: Dtype, top: int
) -> QuantisedGemm:
    weights, quantised_rows, target, rows_per_expert = made_for
    op, rows, store = VARIANTS[variant]
    hidden, inner = (depth, width) if op is Projection.GATE_UP else (width, depth)
    return specialise_quantised(
        op, hidden, inner, experts, dtype, TARGETS[target], weights, quantised_rows=quantised_rows, top=top, rows=rows,
        store=store, rows_per_expert=rows_per_expert,
    )  # fmt: skip


def run(values: QuantisedGemm, num_rows: int, ends_M: Tensor, depth: int) -> tuple[Tensor, Case]:
    """What the kernel gives, into memory full of NaN, or of ones where it adds; and what it was given, dequantised."""
    generator = torch.Generator().manual_seed(num_rows * 1000 + depth)
    tokens = -(-num_rows // values.top) + 1
    pairs_X = torch.randperm(tokens * values.top, generator=generator)[:num_rows]
    x = torch.randn(tokens if values.rows is RowSource.GATHERED else num_rows, depth, generator=generator)
    x = (x * torch.logspace(-2, 1, depth)).to(TORCH[values.dtype])
    w_MLK = torch.randn(values.experts, values.sides * values.width, depth, generator=generator) / (9 * depth**0.5)
    weights = QUANTISERS[values.weights](w_MLK, values.sides)
    pair_weights = torch.rand(tokens * values.top, generator=generator) + 0.25
    rows = torch_quantise_rows(x) if values.quantised_rows else x
    is_accumulated = values.store is Store.ACCUMULATED
    fill, dtype = (1.0, torch.float32) if is_accumulated else (torch.nan, TORCH[values.dtype])
    out = torch.full((tokens if is_accumulated else num_rows, values.width), fill, dtype=dtype)
    launch_quantised(values, rows, ends_M, weights, out, pairs_X if values.has_pairs else None, pair_weights)
    given = dequantise_rows(rows, torch.float64) if isinstance(rows, QuantisedRows) else rows
    return out, Case(given, ends_M, dequantise(weights, torch.float64), pairs_X, pair_weights, num_rows)


@pytest.mark.parametrize(tuple(FACTORS), CASES)
def test_interpreted_kernel_equals_fp64(
    made_for: tuple[Weights, bool, str, int],
    variant: str,
    dtype: Dtype,
    rows: int,
    experts: int,
    depth: int,
    width: int,
    top: int,
    routing: str,
) -> None:
    """B14, B19, B36, B40: every pair of formats, targets, variants, sizes (also ragged blocks) and routings."""
    values = kernel(made_for, variant, depth, width, experts, dtype, top)
    out, case = run(values, rows, row_ends(rows, experts, routing), depth)
    assert_close(values, out, wanted(values, case))


def test_the_cases_have_every_format_body_and_variant() -> None:
    seen = set()
    for made_for, variant, dtype, _, experts, depth, width, top, _ in CASES:
        values = kernel(made_for, variant, depth, width, experts, dtype, top)
        seen |= {(made_for[0], made_for[1], variant, tile.m, tile.swapped) for tile in values.tiles}
    swapped = {(weights, False, v, m, True) for weights in QUANTISERS for v in VARIANTS for m in (128, 64, 32, 16)}
    e4m3 = {(Weights.FP8, True, variant, m, m < 128) for variant in VARIANTS for m in (128, 64, 32, 16)}
    assert seen == swapped | e4m3


@pytest.mark.parametrize("made_for", [KERNELS[2], KERNELS[5], KERNELS[7], KERNELS[11]])
def test_sizes_one_past_and_one_short_of_blocks(made_for: tuple[Weights, bool, str, int]) -> None:
    """B23, B40: along both dimensions."""
    for depth, width in ((1025, 65), (65, 1025), (511, 129)):
        values = kernel(made_for, "gate_up", depth, width, 2, Dtype.BF16, 1)
        out, case = run(values, 20, row_ends(20, 2, "spread"), depth)
        assert_close(values, out, wanted(values, case))


def codes_of(format: Weights) -> Tensor:
    """Every number that a format can store, but for NaN."""
    codes = torch.arange(256, dtype=torch.uint8)
    if format is Weights.FP8:
        return codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    return codes.view(torch.int8) if format is Weights.INT8 else torch.arange(-8, 8, dtype=torch.int8)


@pytest.mark.parametrize("made_for", KERNELS)
def test_every_number_of_a_format_is_exact(made_for: tuple[Weights, bool, str, int]) -> None:
    """Rows of the identity give the weights back, each number in each column of a word, under scales of 0.5 and 3."""
    format, quantised_rows, _, _ = made_for
    depth, codes = 2 * GROUP, codes_of(format)
    index_NK = (torch.arange(depth) + 3 * torch.arange(64)[:, None]) % len(codes)
    stored_MNP = codes.view(torch.uint8)[index_NK].view(codes.dtype)[None]
    stored_MNP = pack_int4(stored_MNP) if format is Weights.INT4 else stored_MNP
    scales_MNG = torch.tensor([0.5, 3.0]).expand(1, 1 if format is Weights.FP8 else 64, 2).contiguous()
    weights = QuantisedWeights(format, stored_MNP, scales_MNG, depth)
    x_RK = torch.eye(depth, dtype=torch.float16)
    rows = QuantisedRows(x_RK.to(torch.float8_e4m3fn), torch.ones(depth, 2), depth) if quantised_rows else x_RK
    out = torch.full((depth, 64), torch.nan, dtype=torch.float16)
    values = kernel(made_for, "down", depth, 64, 1, Dtype.FP16, 1)
    launch_quantised(values, rows, torch.tensor([depth], dtype=torch.int32), weights, out)
    wanted_NK = codes.double()[index_NK] * torch.tensor([0.5, 3.0]).double().repeat_interleave(GROUP)
    assert torch.equal(out.T.double(), wanted_NK)
    assert torch.equal(dequantise(weights, torch.float64)[0], wanted_NK)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("made_for", [KERNELS[0], KERNELS[2], KERNELS[9], KERNELS[10]])
def test_a_row_of_nan_stays_alone(made_for: tuple[Weights, bool, str, int]) -> None:
    """B19: tiles reach into the next expert's rows, and scales of unused experts are NaN."""
    values = kernel(made_for, "gate_up", 200, 24, 3, Dtype.BF16, 1)
    x_RK = torch.ones(20, 200, dtype=torch.bfloat16)
    x_RK[3, 150] = torch.nan
    weights = QUANTISERS[made_for[0]](torch.ones(3, 48, 200), 2)
    weights.scales[1] = torch.nan
    out = torch.full((20, 24), 7.0, dtype=torch.bfloat16)
    rows = torch_quantise_rows(x_RK) if made_for[1] else x_RK
    launch_quantised(values, rows, torch.tensor([3, 3, 19], dtype=torch.int32), weights, out)
    assert out[3].isnan().all()
    assert out.isfinite().all(dim=1).tolist() == [row != 3 for row in range(20)]
    assert not out[19].any()


@pytest.mark.parametrize("format", QUANTISERS)
def test_an_experts_products_by_the_table(format: Weights) -> None:
    """Gathered gate and up, then weighted down, each kernel chosen by its tensors; twice alike."""
    generator = torch.Generator().manual_seed(5)
    x_TD = torch.randn(9, 60, generator=generator).to(torch.bfloat16)
    gate_up = QUANTISERS[format](torch.randn(2, 2 * 40, 60, generator=generator) / 8, 2)
    down = QUANTISERS[format](torch.randn(2, 60, 40, generator=generator) / 6)
    pairs_X = torch.randperm(18, generator=generator)
    ends_M = torch.tensor([7, 18], dtype=torch.int32)
    pair_weights = torch.rand(18, generator=generator)

    def layer() -> Tensor:
        rows = quantise_rows(x_TD) if format is Weights.FP8 else x_TD
        act_XI = grouped_gate_up(rows, ends_M, gate_up, pairs_X=pairs_X, top=2)
        act = quantise_rows(act_XI) if format is Weights.FP8 else act_XI
        return grouped_linear(act, ends_M, down, pairs_X=pairs_X, pair_weights=pair_weights)

    first = layer()
    assert torch.equal(first, layer())
    x_XD = x_TD.double()[pairs_X // 2]
    w_gate_up, w_down = dequantise(gate_up, torch.float64), dequantise(down, torch.float64)
    for expert, part in ((0, slice(0, 7)), (1, slice(7, 18))):
        gate, up = (x_XD[part] @ w_gate_up[expert].T).chunk(2, dim=-1)
        result = silu(gate) * up @ w_down[expert].T * pair_weights[pairs_X[part], None].double()
        # Rows rounded twice: to 8 bits of bf16's fraction, or to e4m3's 4 (an error of up to 1/16 of each number).
        assert (first[part].double() - result).abs().max() < (
            0.06 if format is Weights.FP8 else 0.01
        ) * result.abs().max()


def test_no_rows_and_no_experts_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """B36: a rank that received nothing still answers with the right shape."""
    monkeypatch.setattr(triton_quantised, "launch_quantised", lambda *_: pytest.fail("launched"))
    weights = quantise_int8(torch.ones(8, 66, 16), 2)
    ends_M = torch.zeros(8, dtype=torch.int32)
    assert grouped_gate_up(torch.empty(0, 16, dtype=torch.half), ends_M, weights).shape == (0, 33)
    assert quantise_rows(torch.empty(0, 300)).scales.shape == (0, 3)
    empty = replace(weights, values=weights.values[:0], scales=weights.scales[:0])
    out = grouped_gate_up(torch.ones(2, 16, dtype=torch.half), ends_M[:0], empty)
    assert torch.equal(out, torch.zeros(2, 33, dtype=torch.half))


def test_the_smaller_tile_of_a_small_device_is_reported_and_right(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B39: a pretended limit of 101,376 bytes gives fewer stages, said aloud, and the same numbers."""
    small = replace(TARGETS["cuda:90"], shared_limit=101_376)
    monkeypatch.setattr(triton_products, "INTERPRETED_TARGET", small)
    x_RK = torch.ones(129, 128, dtype=torch.bfloat16)
    weights = quantise_fp8_blocks(torch.ones(1, 16, 128))
    out = grouped_linear(quantise_rows(x_RK), torch.tensor([129], dtype=torch.int32), weights)
    assert torch.equal(out, torch.full((129, 16), 128.0, dtype=torch.bfloat16))
    assert "2 stages, 8 warps instead of 128+64+32+16 rows, 4 stages" in caplog.text


ENDS = torch.tensor([1, 3], dtype=torch.int32)
ROWS = torch.ones(3, 100, dtype=torch.half)
INT8, INT4, FP8 = (
    quantise(torch.ones(2, 8, 100), 2) for quantise in (quantise_int8, quantise_int4, quantise_fp8_blocks)
)


@pytest.mark.parametrize(
    ("rows", "ends", "weights", "message"),
    [
        (ROWS[0], ENDS, INT8, "the rows"),
        (ROWS.double(), ENDS, INT8, "the rows"),
        (ROWS[:, :99].contiguous(), ENDS, INT8, "the rows"),
        (QuantisedRows(ROWS.to(torch.float8_e4m3fn), torch.ones(3, 1), 100), ENDS, FP8, "the rows"),
        (replace(torch_quantise_rows(ROWS), scales=torch.ones(3, 2)), ENDS, FP8, "the scales of rows"),
        (torch_quantise_rows(ROWS), ENDS, INT8, "e4m3 rows cannot be multiplied with int8 weights"),
        (ROWS.float(), ENDS, INT4, "fp32 rows cannot be multiplied with int4 weights"),
        (ROWS, ENDS, replace(INT8, sides=1), "the weights"),
        (ROWS, ENDS, replace(INT4, values=INT8.values), "the weights"),
        (ROWS, ENDS, replace(INT8, values=INT8.values[:, :, :100].contiguous()), "the weights"),
        (ROWS, ENDS, replace(INT8, scales=INT8.scales.half()), "the scales of weights"),
        (ROWS, ENDS, replace(FP8, scales=FP8.scales[:, :1].contiguous()), "the scales of weights"),
        (ROWS, ENDS.long(), INT8, "the offsets"),
        (ROWS, ENDS.flip(0).contiguous(), INT8, "the offsets"),
        (ROWS[:2], ENDS, INT8, "the offsets"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    rows: Tensor | QuantisedRows, ends: Tensor, weights: QuantisedWeights, message: str
) -> None:
    with pytest.raises(MoecError) as caught:
        grouped_gate_up(rows, ends, weights)
    assert caught.value.diagnostics[0].code == "E0531"
    assert caught.value.diagnostics[0].message.startswith(message)
