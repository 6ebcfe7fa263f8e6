"""The kernels that route, sort and sum rows, compiled offline for four devices: machine code, text and errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from moec.codegen.kernel_route import Route, Score, compile_route, render_route, route_signature, specialise_route
from moec.codegen.kernel_rows import (
    chunk_rows,
    compile_group,
    compile_reduce,
    place_signature,
    reduce_signature,
    render_group,
    render_reduce,
    specialise_group,
    specialise_reduce,
)
from moec.codegen.offline import Launch, Report, compile_kernel
from moec.codegen.renderer import Comment
from moec.codegen.targets import TARGETS, Dtype, Target
from moec.diagnostics import MoecError
from moec.runtime.kernels.triton_route import route
from tests.contexts import context

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden" / "codegen" / "triton" / "routing"


def softmax(experts: int, top: int) -> Route:
    return specialise_route(experts, top, Score.SOFTMAX, groups=1, keep=1, has_bias=False, renormalize=True, scale=1.0)


#: Qwen3-30B-A3B, and DeepSeek-V3 with its 256 experts on 8 ranks.
QWEN3 = softmax(128, 8)
DEEPSEEK = specialise_route(256, 8, Score.SIGMOID, groups=8, keep=4, has_bias=True, renormalize=True, scale=2.5)
PROMPT = specialise_group(128, 128, 8, 2048, Dtype.BF16, 4096)
DECODE = specialise_group(256, 32, 8, 7168, Dtype.FP16, 64)
ODD = specialise_group(160, 80, 12, 50, Dtype.FP32, 7, stride=56)
GATHERED = specialise_group(128, 128, 8, 2048, Dtype.BF16, 4096, copies=False)
FEW = specialise_group(256, 256, 8, 7168, Dtype.BF16, 32, copies=False)
LONG = specialise_group(128, 128, 8, 2048, Dtype.BF16, 65536)
WEIGHTED = specialise_reduce(8, 2048, Dtype.BF16)
ADDED = specialise_reduce(12, 50, Dtype.FP16, is_weighted=False)


@pytest.fixture(scope="module", autouse=True)
def fresh_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile for real, whatever an earlier run has left in Triton's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_compile_offline_without_spills(target: Target) -> None:
    reports = [compile_route(DEEPSEEK, target), *compile_group(PROMPT, target), compile_reduce(WEIGHTED, target)]
    reports += [*compile_group(FEW, target), *compile_group(LONG, target)]
    if target.name in ("cuda:90", "hip:gfx942"):
        reports += [*compile_group(DECODE, target), *compile_group(ODD, target), compile_reduce(ADDED, target)]
    for report in reports:
        assert report.spills == 0 and 0 < report.registers <= 192, report
        assert report.shared_bytes <= 16 * 1024 and report.binary.startswith(b"\x7fELF")


def test_choices_are_reductions_of_integers_in_one_warp() -> None:
    """A redux each for the best key and its expert, K times; nothing waits for another warp."""
    assembly = compile_route(QWEN3, TARGETS["cuda:90"]).assembly
    assert "redux.sync.max.s32" in assembly and "redux.sync.min.s32" in assembly
    assert QWEN3.warps == 1 and QWEN3.rows == 1


def last_loop(assembly: str) -> str:
    """PTX from the label that the last backward branch jumps to, up to the branch."""
    label = re.findall(r"bra\s+(\$L__BB\d+_\d+);", assembly)[-1]
    start = assembly.index(f"{label}:")
    return assembly[start : assembly.index(f"bra \t{label};", start)]


def copies_in_loop(report: Report) -> tuple[int, int, int]:
    """16-byte loads and stores of the loop that copies rows, and its barriers."""
    loop = last_loop(report.assembly)
    return loop.count("ld.global.v4.b32"), loop.count("st.global.v4.b32"), loop.count("bar.sync")


def test_rows_are_read_once_and_written_without_waiting() -> None:
    """16 rows x 256 columns of 4 warps are 4 loads a thread and 8 times as many stores, and no barrier among them."""
    _, place = compile_group(PROMPT, TARGETS["cuda:90"])
    assert (PROMPT.rows, PROMPT.block_hidden, PROMPT.warps) == (16, 256, 4)
    assert copies_in_loop(place) == (4, 32, 0)
    reduce = compile_reduce(WEIGHTED, TARGETS["cuda:90"])
    assert "ld.global.v4.b32" in reduce.assembly and "bar.sync" not in reduce.assembly


#: Kernels that serve several rows a program, and what in their texts makes a product of a row and a width wide.
WIDE = {
    "route": (render_route(softmax(8, 2)), route_signature(softmax(8, 2)), "row_S.to(tl.int64)[:, None] * E"),
    "place_pairs": (render_group(DECODE), place_signature(DECODE), "place_R.to(tl.int64)[:, None] * D"),
    "reduce_rows": (render_reduce(WEIGHTED), reduce_signature(WEIGHTED), "place_R.to(tl.int64)[:, None] * D"),
}


@pytest.mark.parametrize("name", WIDE)
def test_b22_addresses_pass_2_to_the_31(name: str) -> None:
    """56,000 tokens x 8 x 7168 is 3,211,264,000; the check itself sees a kernel that multiplies in 32 bits."""
    source, signature, wide = WIDE[name]
    narrow = source.replace(wide, wide.replace(".to(tl.int64)", ""))
    assert narrow != source
    for text, bits in ((source, {"64"}), (narrow, {"32", "64"})):
        ttir = compile_kernel(text, name, signature, TARGETS["cuda:90"], Launch(name, 4, 1)).ir
        products = re.findall(r"arith\.muli .*: tensor<\d+x1xi(\d+)>", re.sub(r" loc\(.*\)", "", ttir))
        assert set(products) == bits


def test_chunks_spread_a_decode_step_and_keep_a_prompts_counts_few() -> None:
    """Rows of a chunk: at most 256 pairs of 8 choices, at least 16, and some 256 chunks in between."""
    assert [chunk_rows(rows, 8) for rows in (0, 1, 64, 1024, 4096, 16384, 10**6)] == [2, 2, 2, 4, 16, 32, 32]
    assert [chunk_rows(64, top) for top in (1, 6, 16, 17, 160, 300)] == [16, 2, 1, 1, 1, 1]
    assert PROMPT.num_programs(4096) == 256 and DECODE.num_programs(64) == 32


def test_programs_that_read_each_others_counts_stay_few() -> None:
    """Chunks of 32 rows at most: from 8192 rows on programs take several, in order, the last ones perhaps fewer."""
    for num_rows, programs, parts in ((8192, 256, 1), (8193, 129, 2), (65536, 256, 8), (10**6, 255, 123)):
        values = specialise_group(128, 128, 8, 2048, Dtype.BF16, num_rows)
        assert (values.num_programs(num_rows), values.parts(num_rows)) == (programs, parts)
        assert programs * parts * values.rows >= num_rows > (programs - 1) * parts * values.rows


LINES = [Comment("qwen3.moe:9  experts routed = 128 * swiglu(768)")]
CASES = {
    **{values.name: render_route(values, LINES) for values in (QWEN3, DEEPSEEK)},
    **{values.name: render_group(values, LINES) for values in (PROMPT, ODD, GATHERED, FEW, LONG)},
    **{values.name: render_reduce(values, LINES) for values in (WEIGHTED, ADDED)},
}


@pytest.mark.parametrize("name", sorted({*CASES, *(path.name.removesuffix(".py.txt") for path in GOLDEN.glob("*"))}))
def test_rendered_kernels(name: str, golden: Callable[[Path, str], None]) -> None:
    golden(GOLDEN / f"{name}.py.txt", CASES[name])


@pytest.mark.parametrize(
    "make",
    [
        lambda: softmax(8, 9),
        lambda: softmax(8, 0),
        lambda: specialise_route(10, 2, Score.SIGMOID, groups=4, keep=2, has_bias=True, renormalize=True, scale=1.0),
        lambda: specialise_group(8, 8, 8, 64, Dtype.BF16, 2**28),
        lambda: specialise_group(8, 0, 2, 64, Dtype.BF16, 1),
        lambda: specialise_group(5000, 5000, 2, 64, Dtype.BF16, 1),
        lambda: specialise_reduce(0, 64, Dtype.BF16),
    ],
)
def test_numbers_that_no_kernel_serves_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(MoecError) as error:
        make()
    assert error.value.diagnostics[0].code == "E0527"


def test_pages_show_the_errors_as_printed() -> None:
    options = {"score": "softmax", "top": 2, "groups": 1, "keep": 1, "renormalize": True, "scale": 1.0}
    calls: dict[str, Callable[[], object]] = {
        "E0526": lambda: route(context(), torch.zeros(2, 4, dtype=torch.bfloat16), table="routed", **options),
        "E0527": lambda: softmax(5000, 8),
    }
    for code, call in calls.items():
        with pytest.raises(MoecError) as caught:
            call()
        page = (ROOT / "specs" / "errors" / f"{code}.md").read_text()
        assert page.startswith(f"# {code}: ") and caught.value.render() in page
