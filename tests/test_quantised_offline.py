"""Kernels of quantised weights compiled for four devices that are not there, on DeepSeek-V3's experts; their text."""

from __future__ import annotations

import functools
import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from moec.codegen.gemm_variant import Projection, RowSource, Weights
from moec.codegen.kernel_cost import match_loops
from moec.codegen.machine_code import read_cubin
from moec.codegen.machine_loops import MatrixLoop
from moec.codegen.offline import Report
from moec.codegen.quantise_rows import compile_quantise_rows, render_quantise_rows, specialise_quantise_rows
from moec.codegen.quantised import QuantisedGemm, compile_quantised, render_quantised, specialise_quantised
from moec.codegen.renderer import Comment
from moec.codegen.targets import TARGETS, Dtype, Target, find_target
from moec.diagnostics import MoecError

pytest.importorskip("triton")

GOLDEN = Path(__file__).resolve().parent / "golden" / "codegen" / "triton" / "quantised"
HIDDEN, INNER, EXPERTS, TOP = 7168, 2048, 256, 8
#: Rows an expert has in a prompt of 4096 tokens, and in a decode step of 64 sequences.
PREFILL, DECODE = 128, 2
UP, DOWN = Projection.GATE_UP, Projection.DOWN


@pytest.fixture(scope="module", autouse=True)
def fresh_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile for real, whatever an earlier run has left in Triton's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def served(
    weights: Weights, target: str, op: Projection, rows_per_expert: int, *, e4m3: bool = False, gathered: bool = False
) -> QuantisedGemm:
    return specialise_quantised(
        op, HIDDEN, INNER, EXPERTS, Dtype.BF16, TARGETS[target], weights, quantised_rows=e4m3, top=TOP,
        rows=RowSource.GATHERED if gathered else RowSource.SORTED, rows_per_expert=rows_per_expert,
    )  # fmt: skip


@functools.cache
def compiled(values: QuantisedGemm) -> Report:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return compile_quantised(values)


def loops_of(values: QuantisedGemm) -> list[MatrixLoop]:
    """The loop of each tile's body."""
    loops = match_loops(values, read_cubin(compiled(values).binary).loops)
    found = [loop for loop in loops if loop is not None]
    assert len(found) == len(values.tiles)
    return found


def assert_fits(values: QuantisedGemm) -> None:
    report, target = compiled(values), TARGETS[values.target.text]
    assert report.spills == 0
    assert 32 < report.registers < 256 + 256 * (target.backend == "hip")
    assert 0 < report.shared_bytes <= target.shared_limit
    assert values.shared_bytes(target) >= report.shared_bytes - 2048
    assert not values.fallback.text


@pytest.mark.parametrize("gathered", [False, True])
def test_e4m3_rows_in_prompts_on_sm_90(gathered: bool) -> None:
    """QGMMA; weights by descriptors; of the slots of a QGMMA 64x128x32 16 add up in fp32 what a group gives."""
    values = served(Weights.FP8, "cuda:90", UP, PREFILL, e4m3=True, gathered=gathered)
    assert_fits(values)
    assert values.sizes == (128, 64, 32, 16)
    wide, *tails = loops_of(values)
    assert str(wide.op) == "QGMMA 64x128x32"
    assert wide.slots_per_op <= (48 if gathered else 46)
    assert dict(wide.loads)["tma"] == (1 if gathered else 2)
    for size, loop in zip(values.sizes[1:], tails, strict=True):
        assert str(loop.op) == f"QGMMA 64x{size}x32"
        assert dict(loop.loads)["tma"] == 1


#: Most issue slots for each matrix instruction of 16 rows.
DECODE_SLOTS = [
    (Weights.FP8, True, "QGMMA 64x16x32", 21),
    (Weights.FP8, False, "HGMMA 64x16x16", 28),
    (Weights.INT8, False, "HGMMA 64x16x16", 31),
    (Weights.INT4, False, "HGMMA 64x16x16", 21),
]


@pytest.mark.parametrize(("weights", "e4m3", "op", "most"), DECODE_SLOTS)
def test_decode_on_sm_90(weights: Weights, e4m3: bool, op: str, most: int) -> None:
    """Weights by descriptors, decoded in registers where they go into the product; three programs a multiprocessor."""
    values = served(weights, "cuda:90", UP, DECODE, e4m3=e4m3)
    assert_fits(values)
    (loop,) = loops_of(values)
    assert str(loop.op) == op
    assert loop.slots_per_op <= most
    assert dict(loop.loads)["tma"] == 1
    report = compiled(values)
    assert values.programs == 3 * 132
    assert 3 * (report.shared_bytes + 1024) <= 228 * 1024
    assert 3 * 128 * report.registers <= 65536


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_every_tile_chosen_fits(target: Target) -> None:
    """B39: less shared memory gives fewer stages or rows, and says so."""
    for weights, e4m3 in ((Weights.FP8, target.has_tma), (Weights.INT8, False), (Weights.INT4, False)):
        for rows, limit in itertools.product((1, 64, 4096), (49_152, 65_536, 101_376, target.shared_limit)):
            device = replace(target, shared_limit=limit)
            values = specialise_quantised(
                UP, HIDDEN, INNER, EXPERTS, Dtype.BF16, device, weights, quantised_rows=e4m3, rows_per_expert=rows
            )
            assert values.shared_bytes(device) <= limit
            full = served(weights, target.name, UP, rows, e4m3=e4m3)
            assert bool(values.fallback.text) == (values.tiles != full.tiles)
    with pytest.raises(MoecError) as caught:
        specialise_quantised(UP, 64, 64, 2, Dtype.BF16, replace(target, shared_limit=9_000), Weights.INT8)
    assert caught.value.diagnostics[0].code == "E0523"


INSTRUCTIONS = {
    "cuda:80": ("mma.sync.aligned.m16n8k16", "cp.async.cg.shared.global"),
    "cuda:90": ("wgmma.mma_async.sync.aligned", "cp.async.bulk.tensor.3d"),
    "cuda:100": ("tcgen05.mma", "cp.async.bulk.tensor.3d"),
    # Codes of the smallest e4m3 numbers pass through subnormal ones, which must not be flushed.
    "hip:gfx942": ("v_mfma_f32_", "global_load_dwordx4", ".amdhsa_float_denorm_mode_32 3"),
}
ELSEWHERE = [
    ("cuda:90", Weights.INT4, False, UP, PREFILL),
    ("cuda:90", Weights.INT8, False, DOWN, PREFILL),
    ("cuda:100", Weights.FP8, True, UP, PREFILL),
    ("cuda:100", Weights.FP8, False, DOWN, DECODE),
    ("cuda:100", Weights.INT8, False, DOWN, PREFILL),
    ("cuda:100", Weights.INT4, False, UP, DECODE),
    ("cuda:80", Weights.FP8, False, UP, PREFILL),
    ("cuda:80", Weights.INT8, False, DOWN, DECODE),
    ("cuda:80", Weights.INT4, False, UP, DECODE),
    ("hip:gfx942", Weights.FP8, False, UP, DECODE),
    ("hip:gfx942", Weights.INT8, False, DOWN, PREFILL),
    ("hip:gfx942", Weights.INT4, False, DOWN, DECODE),
]


@pytest.mark.parametrize(("target", "weights", "e4m3", "op", "rows"), ELSEWHERE)
def test_all_formats_compile_for_all_devices(
    target: str, weights: Weights, e4m3: bool, op: Projection, rows: int
) -> None:
    values = served(weights, target, op, rows, e4m3=e4m3)
    assert_fits(values)
    report = compiled(values)
    assert report.binary.startswith(b"\x7fELF")
    for instruction in INSTRUCTIONS[target]:
        assert instruction in report.assembly


@pytest.mark.parametrize("target", ["cuda:90", "cuda:100"])
def test_rows_are_rounded_by_the_instruction(target: str) -> None:
    """To nearest even, and what exceeds 448 to 448; 16 bytes a load and a store."""
    report = compile_quantise_rows(specialise_quantise_rows(HIDDEN, Dtype.BF16, TARGETS[target]), TARGETS[target])
    assert report.spills == 0
    assert set(re.findall(r"cvt\.\S*e4m3\S*", report.assembly)) == {"cvt.rn.satfinite.e4m3x2.f32"}
    assert "ld.global.v4.b32" in report.assembly and "st.global.v4.b32" in report.assembly


def narrow_products(ttir: str, lengths: set[int]) -> list[str]:
    """Products with one of `lengths` that are made in 32 bits."""
    text = re.sub(r" loc\(.*\)", "", ttir)
    constant = {
        name: int(number) for name, number in re.findall(r"(%[\w-]+) = arith\.constant (?:dense<)?(\d+)>? : \S+", text)
    }
    products = re.findall(r"(%\w+) = arith\.muli %\w+, (%[\w-]+) : (\S+)", text)
    return [name for name, factor, kind in products if constant.get(factor) in lengths and "i64" not in kind]


def test_addresses_pass_2_to_the_31() -> None:
    """B22: the scales of 56,000 x 8 rows are 25 million, weights of 256 experts 7.5 billion bytes."""
    values = served(Weights.INT8, "cuda:80", DOWN, DECODE)
    lengths = {HIDDEN, INNER, values.groups * values.group_words}
    source = render_quantised(values)
    assert narrow_products(compiled(values).ir, lengths) == []
    narrow = source.replace("(line_W // BLOCK_N).to(tl.int64)", "(line_W // BLOCK_N)")
    assert narrow != source
    assert narrow_products(compile_quantised(values, narrow).ir, lengths) != []


GEMM = re.compile(r"(gate_up|down)_d(\d+)_i(\d+)_m(\d+)_(\w+?)_(fp8|int8|int4)_t(\d+)\.(\w+)-(\w+)\.py\.txt")
ROWS = re.compile(r"quantise_rows_d(\d+)_(\w+)\.(\w+)-(\w+)\.py\.txt")


def rendered(name: str) -> str:
    """The kernel that a golden file's name describes."""
    serves = [Comment("deepseek-v3.moe:12  experts routed = 256 * swiglu(2048)")]
    if found := ROWS.fullmatch(name):
        depth, dtype, backend, arch = found.groups()
        rows = specialise_quantise_rows(int(depth), Dtype(dtype), find_target(f"{backend}:{arch}"))
        assert name.startswith(f"{rows.name}.")
        return render_quantise_rows(rows, serves)
    found = GEMM.fullmatch(name)
    assert found is not None
    op, hidden, inner, experts, dtype, weights, size, backend, arch = found.groups()
    target: Target = find_target(f"{backend}:{arch}")
    values = specialise_quantised(
        Projection(op), int(hidden), int(inner), int(experts), Dtype.BF16 if dtype == "e4m3" else Dtype(dtype), target,
        Weights(weights), quantised_rows=dtype == "e4m3", rows_per_expert=int(size) if int(size) > 16 else 1,
    )  # fmt: skip
    assert name.startswith(f"{values.name}.")
    return render_quantised(values, serves)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.py.txt")), ids=lambda path: path.name)
def test_rendered_kernels(path: Path, golden: Callable[[Path, str], None]) -> None:
    """A case is a file name: the shape, formats and rows of the tile, and the target."""
    golden(path, rendered(path.name))


def test_there_are_rendered_kernels_of_every_format() -> None:
    names = " ".join(path.name for path in GOLDEN.glob("*.py.txt"))
    assert {"e4m3_fp8", "bf16_fp8", "int8", "int4", "quantise_rows"} - set(
        re.findall(r"e4m3_fp8|bf16_fp8|int8|int4|quantise_rows", names)
    ) == set()
