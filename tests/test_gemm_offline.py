"""Grouped GEMM kernels compiled for four devices that are not there: instructions, loads, registers, shared memory.

The bars for sm_90 are those of Qwen3-30B-A3B's layer in bf16; what peers' kernels compile to is in `docs/kernels.md`.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest

from moec.codegen.gemm_source import compile_grouped_gemm, render_grouped_gemm
from moec.codegen.grouped_gemm import GroupedGemm
from moec.codegen.kernel_cost import match_loops
from moec.codegen.machine_code import MachineCode, read_cubin
from moec.codegen.machine_code_amd import read_amdgcn
from moec.codegen.machine_loops import MatrixLoop
from moec.codegen.offline import Report
from moec.codegen.targets import TARGETS, Dtype
from moec.codegen.tiles import Form, Tile
from tests.grouped_gemms import VARIANTS, kernel

pytest.importorskip("triton")

#: hidden, inner, experts, choices.
MODELS = {
    "mixtral": (4096, 14336, 8, 2),
    "qwen3-30b": (2048, 768, 128, 8),
    "deepseek-v3": (7168, 2048, 256, 8),
}
#: Rows an expert has in a prompt of 4096 tokens, of 1024, and in a decode step of 64 sequences, of Qwen3-30B-A3B.
PREFILL, SHORT, DECODE = 256, 64, 4


@pytest.fixture(scope="module", autouse=True)
def fresh_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile for real, whatever an earlier run has left in Triton's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def served(model: str, variant: str, target: str, rows_per_expert: int = PREFILL) -> GroupedGemm:
    hidden, inner, experts, top = MODELS[model]
    depth, width = (hidden, inner) if VARIANTS[variant][0].sides == 2 else (inner, hidden)
    return kernel(variant, depth, width, experts, Dtype.BF16, target, rows_per_expert, top)


@functools.cache
def compiled(values: GroupedGemm) -> tuple[Report, MachineCode]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = compile_grouped_gemm(values)
    is_amd = values.target.text.startswith("hip")
    return report, read_amdgcn(report.assembly) if is_amd else read_cubin(report.binary)


def loops_of(values: GroupedGemm) -> list[tuple[Tile, MatrixLoop]]:
    """The loop of each body."""
    loops = match_loops(values, compiled(values)[1].loops)
    found = [(body, loop) for body, loop in zip(values.bodies, loops, strict=True) if loop is not None]
    assert [body for body, _ in found] == list(values.bodies)
    return found


def assert_fits(values: GroupedGemm) -> None:
    report, code = compiled(values)
    target = TARGETS[values.target.text]
    assert report.spills == code.spills == 0
    assert 32 < report.registers < 256 + 256 * (target.backend == "hip")
    assert 0 < report.shared_bytes <= target.shared_limit
    if target.has_tma:  # elsewhere results on their way to memory may take more than the tiles did
        assert values.shared_bytes(target) >= report.shared_bytes
    assert not values.fallback.text


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_on_sm_90(variant: str) -> None:
    """No spills; weights by descriptors; 22 issue slots for each HGMMA 64x256x16 where rows are gathered, else 14."""
    values = served("qwen3-30b", variant, "cuda:90")
    assert_fits(values)
    assert [body.m for body in values.bodies] == (
        [128, 64, 16, 8] if variant == "accumulated" else [128, 64, 32, 16, 8]
    )
    (_, wide), *tails = loops_of(values)
    assert str(wide.op) == "HGMMA 64x256x16"
    assert wide.slots_per_op <= (22 if variant == "gathered" else 14)
    assert dict(wide.loads) == ({"tma": 1, "cp_async": 8} if variant == "gathered" else {"tma": 2})
    for tile, loop in tails:
        assert str(loop.op) == f"HGMMA 64x{tile.m}x16"
        assert loop.slots_per_op <= 13
        assert dict(loop.loads) == {"tma": values.sides, "cp_async": max(1, tile.m // 16)}


@pytest.mark.parametrize(
    ("rows_per_expert", "variant"),
    [(DECODE, "gathered"), (DECODE, "weighted"), (SHORT, "gate_up"), (SHORT, "down"), (SHORT, "accumulated")],
)
def test_decode_and_short_prompts_on_sm_90(rows_per_expert: int, variant: str) -> None:
    """Few rows are multiplied by wgmma too, as its narrow side, and two programs share a multiprocessor."""
    values = served("qwen3-30b", variant, "cuda:90", rows_per_expert)
    assert_fits(values)
    assert values.sizes == ((16,) if rows_per_expert == DECODE else (64, 32, 16))
    for tile, loop in loops_of(values):
        assert str(loop.op) == f"HGMMA 64x{tile.m}x16"
        assert dict(loop.loads) == {"tma": values.sides, "cp_async": tile.m // 8}
    report, _ = compiled(values)
    assert 2 * (report.shared_bytes + 1024) <= 228 * 1024
    assert values.programs == 2 * 132


@pytest.mark.parametrize(("model", "variant"), [("mixtral", "accumulated"), ("deepseek-v3", "gathered")])
def test_other_models_compile_for_sm_90(model: str, variant: str) -> None:
    values = served(model, variant, "cuda:90")
    assert_fits(values)
    wide = loops_of(values)[0][1]
    assert str(wide.op) == "HGMMA 64x256x16"
    assert wide.slots_per_op <= (22 if variant == "gathered" else 14)


#: What the text of each device's machine code must say.
INSTRUCTIONS = {
    "cuda:80": ("mma.sync.aligned.m16n8k16", "cp.async.cg.shared.global"),
    "cuda:100": ("tcgen05.mma", "cp.async.bulk.tensor.3d"),
    "hip:gfx942": ("v_mfma_f32_", "global_load_dwordx4"),
}
ELSEWHERE = [
    ("qwen3-30b", "gathered", PREFILL),
    ("mixtral", "weighted", SHORT),
    ("deepseek-v3", "accumulated", PREFILL),
]


@pytest.mark.parametrize("target", INSTRUCTIONS)
@pytest.mark.parametrize(("model", "variant", "rows_per_expert"), ELSEWHERE)
def test_all_models_compile_for_other_devices(model: str, variant: str, rows_per_expert: int, target: str) -> None:
    values = served(model, variant, target, rows_per_expert)
    assert_fits(values)
    report, _ = compiled(values)
    assert report.binary.startswith(b"\x7fELF")
    for instruction in INSTRUCTIONS[target]:
        assert instruction in report.assembly


def test_rows_and_weights_go_by_cp_async_on_sm_80() -> None:
    for tile, loop in loops_of(served("qwen3-30b", "gathered", "cuda:80")):
        assert list(dict(loop.loads)) == ["cp_async"], tile
        assert str(loop.op) == "HMMA 16x8x16"


@pytest.mark.parametrize(
    ("dtype", "depth", "width", "rows_per_expert"),
    [(Dtype.FP32, 50, 33, PREFILL), (Dtype.FP32, 96, 40, PREFILL), (Dtype.FP16, 50, 33, DECODE)],
)
def test_small_and_ragged_shapes_compile(dtype: Dtype, depth: int, width: int, rows_per_expert: int) -> None:
    for target, variant in (("cuda:90", "gathered"), ("hip:gfx942", "weighted")):
        values = kernel(variant, depth, width, 5, dtype, target, rows_per_expert, 2)
        assert values.form is (Form.TMA if (target, depth) == ("cuda:90", 96) else Form.POINTER)
        report, _ = compiled(values)
        assert report.spills == 0
        assert report.shared_bytes <= TARGETS[target].shared_limit


def narrow_addresses(ttir: str, values: GroupedGemm) -> list[str]:
    """Products with a row's, a line's or an expert's length that are made in 32 bits."""
    text = re.sub(r" loc\(.*\)", "", ttir)
    lengths = {values.depth, values.width, values.sides * values.depth * values.width}
    constant = {
        name: int(number) for name, number in re.findall(r"(%[\w-]+) = arith\.constant (?:dense<)?(\d+)>? : \S+", text)
    }
    products = re.findall(r"(%\w+) = arith\.muli (%\w+), (%[\w-]+) : (\S+)", text)
    addresses = [product for product in products if not (product[0].startswith("%line") and "x1x" not in product[3])]
    return [name for name, _, factor, kind in addresses if constant.get(factor) in lengths and "i64" not in kind]


@pytest.mark.parametrize(("variant", "target"), [("gathered", "cuda:90"), ("gate_up", "cuda:80")])
def test_addresses_pass_2_to_the_31(variant: str, target: str) -> None:
    """B22: 56,000 tokens x 8 x 7168 is 3,211,264,000; the check itself sees kernels that multiply in 32 bits."""
    values = served("deepseek-v3", variant, target)
    values = replace(values, tiles=(Tile(64, 32, 32), Tile(32, 32, 32, swapped=True)), warps=4)  # quick to compile
    source = render_grouped_gemm(values)
    assert narrow_addresses(compile_grouped_gemm(values, source).ir, values) == []
    for wide, narrow in (
        ("row.to(tl.int64) * N", "row * N"),
        ("source_R[:, None]", "source_R.to(tl.int32)[:, None]"),
        ("(tl.minimum(column, N - 1) + side * N).to(tl.int64)", "(tl.minimum(column, N - 1) + side * N)"),
        ("expert.to(tl.int64)", "expert"),
    ):
        if wide in source:
            narrowed = compile_grouped_gemm(values, source.replace(wide, narrow))
            assert narrow_addresses(narrowed.ir, values), wide


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("variant", "rows_per_expert"), [("gathered", SHORT), ("down", PREFILL)])
def test_lines_at_odd_places_come_in_shallow_steps(variant: str, rows_per_expert: int, target: str) -> None:
    """1025 numbers of two bytes begin at no multiple of four: no copy past registers takes them, and none may spill."""
    values = kernel(variant, 1025, 48, 8, Dtype.FP16, target, rows_per_expert, 2)
    assert {tile.k for tile in values.tiles} == {16} and values.form is Form.POINTER
    assert compiled(values)[1].spills == 0
