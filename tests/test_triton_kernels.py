"""The grouped GEMM kernels in Triton's interpreter, against fp64. Helpers and shapes: `grouped_gemms`.

The numbers B14 ... B40 are faults that real engines shipped.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from moec.codegen.gemm_source import render_grouped_gemm
from moec.codegen.kernel_module import load_kernel
from moec.codegen.targets import TARGETS, Dtype
from moec.codegen.tiles import Form, Tile, cut_rows
from moec.diagnostics import MoecError
from moec.runtime.kernels import triton_products as kernels_triton
from moec.runtime.kernels.triton_products import grouped_gate_up, grouped_linear
from tests.covering import covering
from tests.grouped_gemms import TORCH, VARIANTS, assert_close, inputs, kernel, row_ends, run, wanted

pytest.importorskip("triton")

#: Device (by descriptors, by pointers), rows an expert (large, thin and smallest tiles) and dtype.
KERNELS = list(itertools.product(("cuda:90", "cuda:80"), (128, 64, 4), Dtype))
FACTORS: dict[str, tuple[object, ...]] = {
    "variant": tuple(VARIANTS),
    "made_for": tuple(KERNELS),
    "rows": (257, 64, 7, 1),
    "experts": (5, 8, 1, 64, 160),
    "depth": (64, 128, 96),
    "width": (64, 33, 50, 24),
    "top": (1, 2, 8),
    "routing": ("spread", "one", "gaps", "tail"),
}
#: Depths that descriptors cannot take.
RAGGED = {
    "variant": tuple(VARIANTS),
    "made_for": (*KERNELS[:9], ("hip:gfx942", 128, Dtype.BF16), ("cuda:100", 64, Dtype.FP16)),
    "rows": (64, 7),
    "experts": (5, 1),
    "depth": (50, 33, 1025),
    "width": (33, 50, 1025),
    "top": (2,),
    "routing": ("gaps", "tail"),
}
CASES = covering(FACTORS) + covering(RAGGED)


@pytest.mark.parametrize(tuple(FACTORS), CASES)
def test_interpreted_kernel_equals_fp64(
    variant: str,
    made_for: tuple[str, int, Dtype],
    rows: int,
    experts: int,
    depth: int,
    width: int,
    top: int,
    routing: str,
) -> None:
    """B14, B19, B36: every pair of variants, sizes, dtypes, targets, tiles and routings."""
    target, rows_per_expert, dtype = made_for
    values = kernel(variant, depth, width, experts, dtype, target, rows_per_expert, top)
    case = inputs(values, rows, row_ends(rows, experts, routing))
    assert_close(values, run(values, case), wanted(values, case))


def test_the_cases_have_every_form_and_body() -> None:
    seen = set()
    for variant, (target, rows, dtype), _, experts, depth, width, top, _ in CASES:
        values = kernel(variant, depth, width, experts, dtype, target, rows, top)
        seen |= {(values.form, variant, body.m, body.swapped) for body in values.bodies}
    bodies = {(128, False), (64, True), (32, True), (16, True), (8, True), (64, False), (16, False)}
    assert {(form, variant, *body) for form in Form for variant in VARIANTS for body in bodies} == seen


@pytest.mark.parametrize("dtype", Dtype)
def test_table_entries_equal_torch_kernels(dtype: Dtype) -> None:
    values = kernel("gate_up", 64, 24, 3, dtype, "cuda:90", 16)
    case = inputs(values, 40, torch.tensor([13, 13, 40], dtype=torch.int32))
    rows_RD = case.rows * 0.5  # torch rounds gate and up on the way
    first, second = (grouped_gate_up(None, rows_RD, case.ends, case.weights) for _ in range(2))
    assert torch.equal(first, second)
    assert first.dtype == TORCH[dtype]
    both = rows_RD[:13] @ case.weights[0].T
    gate, up = both.chunk(2, dim=-1)
    tolerance = {"rtol": 1e-5 if dtype is Dtype.FP32 else 0, "atol": 2e-2}
    torch.testing.assert_close(first[:13], silu(gate) * up, **tolerance)
    torch.testing.assert_close(grouped_linear(None, rows_RD, case.ends, case.weights)[:13], both, **tolerance)


@pytest.mark.parametrize("call", [grouped_gate_up, grouped_linear])
def test_no_rows_and_no_experts_launch_nothing(call, monkeypatch: pytest.MonkeyPatch) -> None:
    """B36: a rank that received nothing still answers with the right shape."""
    monkeypatch.setattr(kernels_triton, "launch_grouped_gemm", lambda *_: pytest.fail("launched"))
    width = 33 if call is grouped_gate_up else 66
    ends_M = torch.zeros(8, dtype=torch.int32)
    assert call(None, torch.empty(0, 16), ends_M, torch.ones(8, 66, 16)).shape == (0, width)
    assert torch.equal(call(None, torch.ones(2, 16), ends_M[:0], torch.ones(0, 66, 16)), torch.zeros(2, width))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_gate_comes_first_and_the_activation_is_silu() -> None:
    """B14: SiLU(1) * 2 = 1.462117, no clamp; and nothing overflows on the way."""
    pairs = [(1.0, 2.0, 1.462117), (10.0, -10.0, -99.995460), (-10.0, 10.0, -0.0045398), (-200.0, 3.0, 0.0)]
    w_MGD = torch.tensor([[[gate], [up]] for gate, up, _ in pairs])
    out_RI = grouped_gate_up(None, torch.ones(4, 1), torch.arange(1, 5, dtype=torch.int32), w_MGD)
    torch.testing.assert_close(out_RI.flatten(), torch.tensor([wanted for *_, wanted in pairs]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90"])
@pytest.mark.parametrize("size", [50, 511, 512, 513, 1000, 1001, 1025])
def test_sums_over_ragged_dimensions_are_exact(size: int, target: str) -> None:
    """B23: with all ones each sum is the dimension itself; silu(n) * n is n * n in fp32 from 50 on."""
    ends_M = torch.tensor([3], dtype=torch.int32)
    for depth, width in ((size, 32), (64, size)):
        for variant, result in (("gate_up", depth * depth), ("accumulated", depth + 1)):
            values = kernel(variant, depth, width, 1, Dtype.FP32, target, 4)
            k = 128 if values.form is Form.POINTER else values.tiles[0].k
            values = replace(values, tiles=tuple(replace(tile, n=128, k=k) for tile in values.tiles))
            case = inputs(values, 3, ends_M)
            ones = replace(case, rows=torch.ones_like(case.rows), weights=torch.ones_like(case.weights))
            out = run(values, replace(ones, pair_weights=torch.ones_like(case.pair_weights)))
            rows = case.pairs if variant == "accumulated" else slice(None)
            assert torch.equal(out[rows], torch.full((3, width), float(result)))


@pytest.mark.parametrize("experts", [5, 7, 60, 257, 384])
def test_the_last_expert_is_found(experts: int) -> None:
    """B24: any number of experts, no power of two, nothing special past 255."""
    values = kernel("down", 16, 16, experts, Dtype.FP32, "cuda:90", 1)
    case = inputs(values, 2, row_ends(2, experts, "one"))
    assert_close(values, run(values, case), wanted(values, case))


@pytest.mark.parametrize("rows", [65_535, 65_536, 65_537])
def test_more_rows_than_a_grid_axis_holds(rows: int) -> None:
    """B39: however many rows, the programs are those that a device runs at once, on the first axis."""
    values = kernel("down", 16, 16, 2, Dtype.FP32, "cuda:90", 128)
    assert (values.programs, values.most_tiles(rows)) == (264, 4098 if rows > 65_535 else 4097)
    large = replace(values, tiles=(Tile(8192, 16, 16),))  # the interpreter takes as long for a tile of any size
    case = inputs(large, rows, torch.tensor([1, rows], dtype=torch.int32))
    assert_close(large, run(large, case), wanted(large, case))


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90"])
@pytest.mark.parametrize("dtype", [Dtype.FP32, Dtype.BF16])
@pytest.mark.parametrize("rows_per_expert", [4, 128])
def test_a_row_of_nan_stays_alone(target: str, dtype: Dtype, rows_per_expert: int) -> None:
    """B19: tiles reach into the next expert's rows, and into unused weights, without mixing them in."""
    values = kernel("gate_up", 64, 24, 4, dtype, target, rows_per_expert)
    case = inputs(values, 20, torch.tensor([3, 3, 9, 20], dtype=torch.int32))
    case.rows[3] = torch.nan
    case.weights[1] = torch.nan
    out_RI = run(values, case)
    assert out_RI[3].isnan().all()
    assert out_RI.isfinite().all(dim=1).tolist() == [row != 3 for row in range(20)]


@pytest.mark.parametrize("variant", ["gate_up", "weighted"])
def test_a_tile_stores_its_own_expert_only(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs run in any order on a GPU: with one program of many, the next expert's rows stay as they were."""
    monkeypatch.setattr(kernels_triton, "INTERPRETED_PROGRAMS", 1)
    values = kernel(variant, 64, 24, 2, Dtype.FP32, "cuda:80", 10, 2)
    source = render_grouped_gemm(values)
    first_only = source.replace("programs = tl.num_programs(0)", "programs = 1000")
    assert first_only != source
    monkeypatch.setattr(kernels_triton, "render_grouped_gemm", lambda _: first_only)
    kernels_triton._kernel.cache_clear()
    case = inputs(values, 20, torch.tensor([9, 20], dtype=torch.int32))
    assert run(values, case).isnan().all(dim=1).tolist() == [row >= 9 for row in range(20)]
    kernels_triton._kernel.cache_clear()


@pytest.mark.parametrize("sizes", [(16,), (32, 16)])
def test_rows_of_more_than_one_band(sizes: tuple[int, ...]) -> None:
    """The last band of row tiles is lower than the others, and passes over all columns as they do."""
    values = kernel("down", 32, 40, 2, Dtype.FP16, "cuda:90", 4)
    values = replace(values, tiles=tuple(Tile(m, 16, 32, swapped=True) for m in sizes))
    case = inputs(values, 600, torch.tensor([20, 590], dtype=torch.int32))
    assert (values.num_columns, sum(values.num_tiles([570])) > values.band) == (3, True)
    assert_close(values, run(values, case), wanted(values, case))


@pytest.mark.parametrize("sizes", [(128, 64, 32, 16), (128, 16), (64, 16), (16,)])
def test_the_host_cuts_rows_as_the_device_does(sizes: tuple[int, ...]) -> None:
    values = kernel("down", 64, 64, 2, Dtype.BF16, "cuda:90", 128)
    values = replace(values, tiles=tuple(Tile(m, 64, 64, m < 128) for m in sizes))
    source = render_grouped_gemm(values)
    pad, count = (load_kernel(source, name, interpret=True).fn for name in ("pad", "count_tiles"))
    for rows in range(300):
        tiles = cut_rows(rows, sizes)
        assert count(pad(rows)) == sum(tiles)
        assert sum(m * tile for m, tile in zip(sizes, tiles, strict=True)) == pad(rows)
        assert values.num_tiles([rows, rows]) == tuple(2 * tile for tile in tiles)
    assert values.padded_rows([0, 1, 237]) == pad(1) + pad(237) - values.rest  # one row is computed as 8, not as 16
    assert values.count_rests([0, 1, 8, 9, 16, 40]) == (3 if values.rest else 0)


def test_bf16_results_halfway_round_to_even() -> None:
    """silu(32) is 32 in fp32, so the results are 32 (1 + 2^-8) and 32 (1 + 2^-7 + 2^-8): down and up to even."""
    x_RD = torch.tensor([[1.0, 2**-8]], dtype=torch.bfloat16)
    w_MGD = torch.tensor([[[32.0, 0.0], [1.0, 1.0]]], dtype=torch.bfloat16)
    out_RI = grouped_gate_up(None, x_RD, torch.tensor([1], dtype=torch.int32), w_MGD)
    assert out_RI.item() == 32.0
    w_MGD[0, 1, 0] = 1 + 2**-7
    out_RI = grouped_gate_up(None, x_RD, torch.tensor([1], dtype=torch.int32), w_MGD)
    assert out_RI.item() == 32 * (1 + 2**-6)


@pytest.mark.parametrize(("depth", "form"), [(50, Form.POINTER), (1025, Form.POINTER), (192, Form.TMA)])
def test_depths_off_the_grid_of_descriptors(depth: int, form: Form) -> None:
    """B40: descriptors cannot take some strides, so these are served by pointers, and rightly; 192 is 3 steps of 64."""
    values = kernel("gate_up", depth, 33, 2, Dtype.BF16, "cuda:90", 128)
    assert values.form is form
    case = inputs(values, 9, torch.tensor([4, 9], dtype=torch.int32))
    assert_close(values, run(values, case), wanted(values, case))


def test_rows_may_be_a_view_at_any_offset() -> None:
    """B40: transposed rows are copied, and a base off the 16-byte grid is loaded by pointers."""
    values = kernel("down", 64, 16, 2, Dtype.FP32, "cuda:90", 4)
    case = inputs(values, 9, torch.tensor([4, 9], dtype=torch.int32))
    shifted = torch.empty(9 * 64 + 1)[1:].view(9, 64).copy_(case.rows)
    assert shifted.data_ptr() % kernels_triton.TMA_ALIGNMENT
    for rows in (case.rows.T.contiguous().T, shifted):
        assert_close(values, grouped_linear(None, rows, case.ends, case.weights), wanted(values, case))


def test_the_smaller_tile_of_a_small_device_is_reported_and_right(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B39: a pretended limit of 101,376 bytes gives a smaller tile, said aloud, and the same numbers."""
    small = replace(TARGETS["cuda:90"], shared_limit=101_376)
    monkeypatch.setattr(kernels_triton, "INTERPRETED_TARGET", small)
    values = kernel("gate_up", 128, 128, 1, Dtype.BF16, "cuda:90", 257)
    case = inputs(values, 257, torch.tensor([257], dtype=torch.int32))
    assert_close(values, grouped_gate_up(None, case.rows, case.ends, case.weights), wanted(values, case))
    assert "needs 196864 of 101376 bytes of shared memory" in caplog.text


WIDE = torch.ones(2, 8, 16)
ENDS = torch.tensor([1, 3], dtype=torch.int32)


@pytest.mark.parametrize(
    ("rows", "ends", "weights", "names"),
    [
        (torch.ones(3), ENDS, WIDE, "the rows"),
        (torch.ones(3, 16, dtype=torch.float64), ENDS, WIDE, "the rows"),
        (torch.ones(3, 16), ENDS, torch.ones(2, 8, 15), "the weights"),
        (torch.ones(3, 16), ENDS, torch.ones(2, 7, 16), "the weights"),
        (torch.ones(3, 16), ENDS, WIDE.half(), "the weights"),
        (torch.ones(3, 16), ENDS, torch.ones(2, 16, 8).transpose(1, 2), "the weights"),
        (torch.ones(3, 16), ENDS.long(), WIDE, "the offsets"),
        (torch.ones(3, 16), ENDS[:1], WIDE, "the offsets"),
        (torch.ones(3, 16), ENDS.flip(0).contiguous(), WIDE, "the offsets"),
        (torch.ones(2, 16), ENDS, WIDE, "the offsets"),
    ],
)
def test_tensors_that_do_not_fit_are_named(rows: Tensor, ends: Tensor, weights: Tensor, names: str) -> None:
    with pytest.raises(MoecError) as caught:
        grouped_gate_up(None, rows, ends, weights)
    assert caught.value.diagnostics[0].code == "E0525"
    assert caught.value.diagnostics[0].message.startswith(names)
