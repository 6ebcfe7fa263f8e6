"""The grouped gate-up kernel in Triton's interpreter, against fp64.

Shapes: R rows, M experts, D hidden, I inner. The numbers B14 ... B40 are faults that real engines shipped.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from moec.codegen.kernels import Form, GateUp, specialise_gate_up
from moec.codegen.targets import TARGETS, Dtype
from moec.diagnostics import MoecError
from moec.runtime import kernels_triton
from moec.runtime.kernels_triton import grouped_gate_up, launch_gate_up

pytest.importorskip("triton")

TORCH = {dtype: name for name, dtype in kernels_triton.DTYPES.items()}
#: Relative error of one rounding to the output's dtype, plus what fp32 accumulation adds; absolute where it is 0.
TOLERANCE = {Dtype.FP32: (1e-5, 1e-6), Dtype.FP16: (2**-11 + 1e-5, 1e-5), Dtype.BF16: (2**-8 + 1e-5, 1e-5)}

FACTORS: dict[str, tuple[object, ...]] = {
    "rows": (1, 7, 64, 257),
    "experts": (1, 5, 8),
    "hidden": (16, 33, 50, 64, 128),
    "inner": (16, 33, 50, 64, 128),
    "dtype": tuple(Dtype),
    "target": tuple(TARGETS),
    "routing": ("spread", "one", "gaps", "tail"),
}


def covering(factors: dict[str, tuple[object, ...]]) -> list[tuple[object, ...]]:
    """Rows that hold every pair of values of any two factors, chosen greedily and always alike."""
    columns = list(factors.values())
    pairs = {
        (i, a, j, b)
        for i, j in itertools.combinations(range(len(columns)), 2)
        for a in range(len(columns[i]))
        for b in range(len(columns[j]))
    }
    chosen = []
    while pairs:
        row = dict(zip(*[iter(min(pairs))] * 2, strict=False))
        for i in [i for i in range(len(columns)) if i not in row]:
            row[i] = max(range(len(columns[i])), key=lambda v, i=i, row=dict(row): (_gain(pairs, row | {i: v}), -v))
        chosen.append(tuple(columns[i][row[i]] for i in range(len(columns))))
        pairs -= {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(columns)), 2)}
    return chosen


def _gain(pairs: set[tuple[int, int, int, int]], row: dict[int, int]) -> int:
    return sum((i, row[i], j, row[j]) in pairs for i, j in itertools.combinations(sorted(row), 2))


def row_ends(rows: int, experts: int, routing: str) -> Tensor:
    """Cumulative ends: spread over all, all to the last, only to every second expert, or some rows to none."""
    counts = torch.zeros(experts, dtype=torch.int64)
    takers = {"one": [experts - 1], "gaps": list(range(0, experts, 2))}.get(routing, list(range(experts)))
    served = rows * 2 // 3 if routing == "tail" else rows
    for i in range(served):
        counts[takers[i * i % len(takers)]] += 1
    return counts.cumsum(0).to(torch.int32)


def inputs(rows: int, experts: int, hidden: int, inner: int, dtype: Dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + hidden)
    x_RD = torch.randn(rows, hidden, generator=generator)
    w_MGD = torch.randn(experts, 2 * inner, hidden, generator=generator) / hidden**0.5
    return x_RD.to(TORCH[dtype]), w_MGD.to(TORCH[dtype])


def reference(x_RD: Tensor, ends_M: Tensor, w_MGD: Tensor) -> Tensor:
    """The definition, in fp64; rows of no expert are 0."""
    out_RI = torch.zeros(x_RD.shape[0], w_MGD.shape[1] // 2, dtype=torch.float64)
    start = 0
    for expert, end in enumerate(ends_M.tolist()):
        gate, up = (x_RD[start:end].double() @ w_MGD[expert].double().T).chunk(2, dim=-1)
        out_RI[start:end] = silu(gate) * up
        start = end
    return out_RI


def assert_close(out_RI: Tensor, wanted_RI: Tensor, dtype: Dtype) -> None:
    relative, absolute = TOLERANCE[dtype]
    torch.testing.assert_close(out_RI.double(), wanted_RI, rtol=relative, atol=absolute)


def gate_up(hidden: int, inner: int, experts: int, dtype: Dtype, target: str, rows_per_expert: int = 128) -> GateUp:
    return specialise_gate_up(hidden, inner, experts, dtype, TARGETS[target], rows_per_expert)


@pytest.mark.parametrize(("rows", "experts", "hidden", "inner", "dtype", "target", "routing"), covering(FACTORS))
def test_interpreted_kernel_equals_fp64(
    rows: int, experts: int, hidden: int, inner: int, dtype: Dtype, target: str, routing: str
) -> None:
    """B14, B19, B36: every pair of sizes, dtypes, targets and routings, into memory full of NaN."""
    x_RD, w_MGD = inputs(rows, experts, hidden, inner, dtype)
    ends_M = row_ends(rows, experts, routing)
    out_RI = torch.full((rows, inner), torch.nan, dtype=TORCH[dtype])
    launch_gate_up(gate_up(hidden, inner, experts, dtype, target, -(-rows // experts)), x_RD, ends_M, w_MGD, out_RI)
    assert_close(out_RI, reference(x_RD, ends_M, w_MGD), dtype)
    assert not out_RI[int(ends_M[-1]) :].any()


@pytest.mark.parametrize("dtype", Dtype)
def test_the_table_entry_equals_the_torch_kernel(dtype: Dtype) -> None:
    x_RD, w_MGD = inputs(40, 3, 64, 24, dtype)
    x_RD = x_RD * 0.5  # torch rounds gate and up on the way
    ends_M = torch.tensor([13, 13, 40], dtype=torch.int32)
    first, second = (grouped_gate_up(None, x_RD, ends_M, w_MGD) for _ in range(2))
    assert torch.equal(first, second)
    assert first.dtype == TORCH[dtype]
    gate, up = (x_RD[:13] @ w_MGD[0].T).chunk(2, dim=-1)
    torch.testing.assert_close(first[:13], silu(gate) * up, rtol=1e-5 if dtype is Dtype.FP32 else 0, atol=2e-2)


def test_no_rows_and_no_experts_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """B36: a rank that received nothing still answers with the right shape."""
    monkeypatch.setattr(kernels_triton, "launch_gate_up", lambda *_: pytest.fail("launched"))
    ends_M = torch.zeros(8, dtype=torch.int32)
    assert grouped_gate_up(None, torch.empty(0, 16), ends_M, torch.ones(8, 66, 16)).shape == (0, 33)
    out = grouped_gate_up(None, torch.ones(2, 16), ends_M[:0], torch.ones(0, 66, 16))
    assert torch.equal(out, torch.zeros(2, 33))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_gate_comes_first_and_the_activation_is_silu() -> None:
    """B14: SiLU(1) * 2 = 1.462117, no clamp; and nothing overflows on the way."""
    pairs = [(1.0, 2.0, 1.462117), (10.0, -10.0, -99.995460), (-10.0, 10.0, -0.0045398), (-200.0, 3.0, 0.0)]
    w_MGD = torch.tensor([[[gate], [up]] for gate, up, _ in pairs])
    out_RI = grouped_gate_up(None, torch.ones(4, 1), torch.arange(1, 5, dtype=torch.int32), w_MGD)
    torch.testing.assert_close(out_RI.flatten(), torch.tensor([wanted for *_, wanted in pairs]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [50, 511, 513, 1000, 1001])
def test_sums_over_ragged_dimensions_are_exact(size: int) -> None:
    """B23: with all ones each sum is the dimension itself; silu(n) * n is n * n in fp32 from 50 on."""
    out_RI = grouped_gate_up(None, torch.ones(3, size), torch.tensor([3], dtype=torch.int32), torch.ones(1, 32, size))
    assert torch.equal(out_RI, torch.full((3, 16), float(size * size)))
    out_RI = grouped_gate_up(None, torch.ones(3, 50), torch.tensor([3], dtype=torch.int32), torch.ones(1, 2 * size, 50))
    assert torch.equal(out_RI, torch.full((3, size), 2500.0))


@pytest.mark.parametrize("experts", [5, 7, 60, 257, 384])
def test_the_last_expert_is_found(experts: int) -> None:
    """B24: any number of experts, no power of two, nothing special past 255."""
    x_RD, w_MGD = inputs(2, experts, 16, 16, Dtype.FP32)
    ends_M = torch.zeros(experts, dtype=torch.int32)
    ends_M[-1] = 2
    assert_close(grouped_gate_up(None, x_RD, ends_M, w_MGD), reference(x_RD, ends_M, w_MGD), Dtype.FP32)


def test_more_rows_than_a_grid_axis_holds() -> None:
    """B39: 65,537 rows; all programs are on the first axis, the only one that holds more than 65,535."""
    x_RD, w_MGD = inputs(65_537, 2, 16, 16, Dtype.FP32)
    ends_M = torch.tensor([1, 65_537], dtype=torch.int32)
    values = gate_up(16, 16, 2, Dtype.FP32, "cuda:90")
    assert values.num_programs(65_537) == 65_537 // 128 + 3
    assert_close(grouped_gate_up(None, x_RD, ends_M, w_MGD), reference(x_RD, ends_M, w_MGD), Dtype.FP32)


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90"])
@pytest.mark.parametrize("dtype", [Dtype.FP32, Dtype.BF16])
def test_a_row_of_nan_stays_alone(target: str, dtype: Dtype) -> None:
    """B19: tiles reach into the next expert's rows, and into unused weights, without mixing them in."""
    x_RD, w_MGD = inputs(20, 4, 64, 24, dtype)
    ends_M = torch.tensor([3, 3, 9, 20], dtype=torch.int32)
    x_RD[3] = torch.nan
    w_MGD[1] = torch.nan
    out_RI = torch.full((20, 24), 7.0, dtype=TORCH[dtype])
    launch_gate_up(gate_up(64, 24, 4, dtype, target, 5), x_RD, ends_M, w_MGD, out_RI)
    assert out_RI[3].isnan().all()
    assert out_RI.isfinite().all(dim=1).tolist() == [row != 3 for row in range(20)]


def test_a_tile_stores_its_own_expert_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs run in any order on a GPU: with the first tile alone, the next expert's rows stay as they were."""
    monkeypatch.setattr(GateUp, "num_programs", lambda self, num_rows: self.tiles_n)
    x_RD, w_MGD = inputs(20, 2, 64, 24, Dtype.FP32)
    out_RI = torch.full((20, 24), torch.nan)
    ends_M = torch.tensor([9, 20], dtype=torch.int32)
    launch_gate_up(gate_up(64, 24, 2, Dtype.FP32, "cuda:80", 10), x_RD, ends_M, w_MGD, out_RI)
    assert out_RI.isnan().all(dim=1).tolist() == [row >= 9 for row in range(20)]


def test_bf16_results_halfway_round_to_even() -> None:
    """silu(32) is 32 in fp32, so the results are 32 (1 + 2^-8) and 32 (1 + 2^-7 + 2^-8): down and up to even."""
    x_RD = torch.tensor([[1.0, 2**-8]], dtype=torch.bfloat16)
    w_MGD = torch.tensor([[[32.0, 0.0], [1.0, 1.0]]], dtype=torch.bfloat16)
    out_RI = grouped_gate_up(None, x_RD, torch.tensor([1], dtype=torch.int32), w_MGD)
    assert out_RI.item() == 32.0
    w_MGD[0, 1, 0] = 1 + 2**-7
    out_RI = grouped_gate_up(None, x_RD, torch.tensor([1], dtype=torch.int32), w_MGD)
    assert out_RI.item() == 32 * (1 + 2**-6)


@pytest.mark.parametrize("hidden", [50, 1025])
def test_hidden_sizes_off_the_16_byte_grid(hidden: int) -> None:
    """B40: descriptors cannot take such strides, so these are served by pointers, and rightly."""
    assert gate_up(hidden, 33, 2, Dtype.BF16, "cuda:90").form is Form.POINTER
    x_RD, w_MGD = inputs(9, 2, hidden, 33, Dtype.BF16)
    ends_M = torch.tensor([4, 9], dtype=torch.int32)
    assert_close(grouped_gate_up(None, x_RD, ends_M, w_MGD), reference(x_RD, ends_M, w_MGD), Dtype.BF16)


def test_rows_may_be_a_view_at_any_offset() -> None:
    """B40: transposed rows are copied, and a base off the 16-byte grid is loaded by pointers."""
    x_RD, w_MGD = inputs(9, 2, 64, 16, Dtype.FP32)
    ends_M = torch.tensor([4, 9], dtype=torch.int32)
    wanted = reference(x_RD, ends_M, w_MGD)
    assert_close(grouped_gate_up(None, x_RD.T.contiguous().T, ends_M, w_MGD), wanted, Dtype.FP32)
    shifted = torch.empty(9 * 64 + 1)[1:].view(9, 64).copy_(x_RD)
    assert shifted.data_ptr() % kernels_triton.TMA_ALIGNMENT
    assert_close(grouped_gate_up(None, shifted, ends_M, w_MGD), wanted, Dtype.FP32)


def test_the_smaller_tile_of_a_small_device_is_reported_and_right(
    caplog: pytest.LogCaptureFixture, monkeypatch
) -> None:
    """B39: a pretended limit of 101,376 bytes gives a smaller tile, said aloud, and the same numbers."""
    small = replace(TARGETS["cuda:90"], shared_limit=101_376)
    monkeypatch.setattr(kernels_triton, "INTERPRETED_TARGET", small)
    x_RD, w_MGD = inputs(257, 1, 128, 128, Dtype.BF16)
    ends_M = torch.tensor([257], dtype=torch.int32)
    assert_close(grouped_gate_up(None, x_RD, ends_M, w_MGD), reference(x_RD, ends_M, w_MGD), Dtype.BF16)
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
