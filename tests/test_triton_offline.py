"""The grouped gate-up kernel compiled offline for four devices: its tile, its machine code, its text, its errors."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moec.codegen.kernel_module import load_kernel
from moec.codegen.kernels import (
    GateUp,
    Tile,
    render_gate_up,
    select_tile,
    specialise_gate_up,
)
from moec.codegen.offline import compile_gate_up, plan_entry, report_lines
from moec.codegen.renderer import Comment
from moec.codegen.targets import TARGETS, Dtype, Target, find_target
from moec.diagnostics import MoecError
from moec.runtime.kernels_triton import grouped_gate_up

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden" / "codegen" / "triton"
#: hidden, inner and number of experts.
MODELS = {"mixtral": (4096, 14336, 8), "qwen3-30b": (2048, 768, 128), "deepseek-v3": (7168, 2048, 256)}


def gate_up(hidden: int, inner: int, experts: int, dtype: Dtype, target: str, rows_per_expert: int = 128) -> GateUp:
    return specialise_gate_up(hidden, inner, experts, dtype, TARGETS[target], rows_per_expert)


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_every_tile_chosen_fits(target: Target) -> None:
    for dtype, rows, limit in itertools.product(Dtype, (1, 16, 17, 64, 65, 4096), (24_000, 49_152, 65_536, 232_448)):
        device = replace(target, shared_limit=limit)
        tile = specialise_gate_up(4096, 768, 8, dtype, device, rows).tile
        assert tile.shared_bytes(dtype, device) <= limit
        assert min(tile.m, tile.n, tile.k) >= 16


def test_the_smaller_tile_of_a_small_device_is_reported() -> None:
    """B39: with a pretended limit of 101,376 bytes the kernel asks for less than that, and the report says why."""
    small = replace(TARGETS["cuda:90"], shared_limit=101_376)
    values = specialise_gate_up(4096, 14336, 8, Dtype.BF16, small)
    report = compile_gate_up(values)
    assert values.tile.shared_bytes(values.dtype, small) <= 101_376
    assert report.shared_bytes <= 101_376
    assert "smaller tile: 128x(2x128)x64, 2 stages" in report_lines(values, report)[2]


def rows_times_width_is_64_bit(ttir: str) -> bool:
    """Whether every product of a row number [BLOCK_M, 1] and a width is made in 64 bits, and the expert's as well."""
    products = re.findall(r"arith\.muli .*: (tensor<128x1xi\d+>|i64)", re.sub(r" loc\(.*\)", "", ttir))
    return sorted(products) == ["i64", "tensor<128x1xi64>", "tensor<128x1xi64>"]


def test_addresses_pass_2_to_the_31() -> None:
    """B22: 56,000 tokens x 8 x 7168 is 3,211,264,000; the check itself sees a kernel that multiplies in 32 bits."""
    values = gate_up(7168, 2048, 256, Dtype.BF16, "cuda:80")
    source = render_gate_up(values)
    assert rows_times_width_is_64_bit(compile_gate_up(values, source).ir)
    narrow = source.replace("rows + row_M.to(tl.int64)[:, None]", "rows + row_M[:, None]")
    assert narrow != source
    assert not rows_times_width_is_64_bit(compile_gate_up(values, narrow).ir)


@pytest.fixture(scope="module", autouse=True)
def fresh_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile for real, whatever an earlier run has left in Triton's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


INSTRUCTIONS = {
    "cuda:80": ("mma.sync.aligned.m16n8k16", "cp.async.cg.shared.global"),
    "cuda:90": ("wgmma.mma_async.sync.aligned.m64n128k16", "cp.async.bulk.tensor.2d"),
    "cuda:100": ("tcgen05.mma", "cp.async.bulk.tensor.2d"),
    "hip:gfx942": ("v_mfma_f32_", "global_load_dwordx4"),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("model", MODELS)
def test_compiles_offline_without_spills(model: str, target: str) -> None:
    values = gate_up(*MODELS[model], Dtype.BF16, target)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = compile_gate_up(values)
    limit = TARGETS[target].shared_limit
    assert report.spills == 0
    assert 32 < report.registers < 256
    assert 0 < report.shared_bytes <= values.tile.shared_bytes(values.dtype, TARGETS[target]) <= limit
    assert report.binary.startswith(b"\x7fELF")
    for instruction in INSTRUCTIONS[target]:
        assert instruction in report.assembly
    assert plan_entry(values, report)["registers"] == report.registers
    head = f"{values.name} for {target}: {report.registers} registers, 0 spilled"
    assert report_lines(values, report)[0].startswith(head)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rows_per_expert", [1, 64])
def test_decode_tiles_compile_without_spills(target: str, rows_per_expert: int) -> None:
    values = gate_up(*MODELS["qwen3-30b"], Dtype.BF16, target, rows_per_expert)
    assert values.tile.m == max(16, rows_per_expert)
    assert compile_gate_up(values).spills == 0


@pytest.mark.parametrize("dtype", [Dtype.FP32, Dtype.FP16])
def test_ragged_shapes_compile_in_other_dtypes(dtype: Dtype) -> None:
    for target in ("cuda:90", "hip:gfx942"):
        assert compile_gate_up(gate_up(50, 33, 5, dtype, target)).binary


def test_one_process_interprets_and_compiles_whatever_the_environment() -> None:
    """With TRITON_INTERPRET set when Triton is imported, the compiler still compiles."""
    code = (
        "import triton, triton.language\n"
        "from moec.codegen.kernels import specialise_gate_up\n"
        "from moec.codegen.targets import Dtype, find_target\n"
        "from moec.codegen.offline import compile_gate_up\n"
        "report = compile_gate_up(specialise_gate_up(64, 64, 4, Dtype.BF16, find_target('cuda:90')))\n"
        "assert triton.knobs.runtime.interpret and report.binary.startswith(b'\\x7fELF')\n"
    )
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, cwd="/", check=False).returncode == 0


def test_no_file_can_take_the_place_of_a_kernel() -> None:
    source = render_gate_up(gate_up(64, 64, 4, Dtype.BF16, "cuda:90"))
    kernel = load_kernel(source, "grouped_gate_up", interpret=False)
    path = Path(kernel.fn.__code__.co_filename)
    assert path.parent == Path("/dev/null")
    assert kernel is load_kernel(source, "grouped_gate_up", interpret=False)
    with pytest.raises(MoecError, match="uses `os`"):
        load_kernel("import os\n", "grouped_gate_up", interpret=False)


CASE = re.compile(r"grouped_gate_up_d(\d+)_i(\d+)_m(\d+)_(\w+?)_t(\d+)\.(\w+)-(\w+)\.py\.txt")


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.py.txt")), ids=lambda path: path.name)
def test_rendered_kernels(path: Path, golden: Callable[[Path, str], None]) -> None:
    """A case is a file name: the shape, dtype and rows of the tile, and the target."""
    found = CASE.fullmatch(path.name)
    assert found is not None
    hidden, inner, experts, dtype, rows, backend, arch = found.groups()
    target = find_target(f"{backend}:{arch}")
    values = specialise_gate_up(int(hidden), int(inner), int(experts), Dtype(dtype), target, int(rows))
    assert path.name.startswith(f"{values.name}.")
    line = Comment("qwen3.moe:9  experts routed = 128 * swiglu(768)")
    golden(path, render_gate_up(values, [line]))


def test_there_are_rendered_kernels_to_compare() -> None:
    assert len(list(GOLDEN.glob("*.py.txt"))) >= 2


def test_pages_show_the_errors_as_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = gate_up(64, 64, 4, Dtype.BF16, "cuda:80")
    odd = replace(odd, tile=replace(odd.tile, m=48))
    tiny = replace(TARGETS["cuda:80"], shared_limit=1000)
    calls: dict[str, Callable[[], object]] = {
        "E0521": lambda: find_target("cuda:9"),
        "E0522": lambda: gate_up(65536, 32768, 8, Dtype.BF16, "cuda:90"),
        "E0523": lambda: select_tile(Tile(128, 64, 64, 3, 8), Dtype.BF16, tiny),
        "E0524": lambda: compile_gate_up(odd),
        "E0525": lambda: grouped_gate_up(
            None, torch.ones(3, 16), torch.tensor([1, 3], dtype=torch.int32), torch.ones(2, 16, 8)
        ),
        "E0520": lambda: compile_gate_up(odd, "x = 1\n"),
    }
    for code, call in calls.items():
        if code == "E0520":
            monkeypatch.setitem(sys.modules, "triton", None)
        with pytest.raises(MoecError) as caught:
            call()
        page = (ROOT / "specs" / "errors" / f"{code}.md").read_text()
        assert page.startswith(f"# {code}: ")
        text = caught.value.render().replace("import of triton halted; None in sys.modules", "No module named 'triton'")
        assert text in page
