"""Grouped GEMMs offline: default tiles, one process with both forms of a kernel, rendered text, pages of errors."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moec.codegen.gemm_source import compile_grouped_gemm, render_grouped_gemm, tile_fault
from moec.codegen.kernel_module import load_kernel
from moec.codegen.renderer import Comment
from moec.codegen.targets import TARGETS, Dtype, Target, find_target
from moec.codegen.tiles import Form, Tile, default_blocking, descriptor_depth
from moec.diagnostics import MoecError
from moec.runtime.kernels.triton_products import grouped_gate_up
from tests.grouped_gemms import kernel

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden" / "codegen" / "triton"


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_every_default_tile_fits(target: Target) -> None:
    for dtype, rows, limit in itertools.product(Dtype, (1, 16, 17, 64, 65, 4096), (24_000, 49_152, 65_536, 232_448)):
        device = replace(target, shared_limit=limit)
        for sides, form in itertools.product((1, 2), Form if target.has_tma else [Form.POINTER]):
            blocking = default_blocking(4096, 768, sides, dtype, device, form, rows)
            for tile in blocking.tiles:
                assert tile.shared_bytes(sides, dtype, device) <= limit
                assert min(tile.m, tile.n, tile.k) >= 16
            rows_of = [tile.m for tile in blocking.tiles]
            assert all(large % small == 0 for large, small in itertools.pairwise(rows_of))


def test_the_smaller_tile_of_a_small_device_is_reported() -> None:
    """B39: with a pretended limit of 101,376 bytes the kernel asks for less than that, and the plan says why."""
    small = replace(TARGETS["cuda:90"], shared_limit=101_376)
    blocking = default_blocking(4096, 14336, 2, Dtype.BF16, small, Form.TMA, 4096)
    values = replace(kernel("gate_up", 4096, 14336, 8, Dtype.BF16, "cuda:90", 4096), tiles=blocking.tiles)
    values = replace(values, fallback=Comment(blocking.reason))
    report = compile_grouped_gemm(values)
    assert values.shared_bytes(small) <= 101_376
    assert report.shared_bytes <= 101_376
    assert values.fallback.text.startswith("128+64+32+16 x 128 x 64, 2 stages, 8 warps instead")


@pytest.mark.parametrize(
    ("depth", "dtype", "step"),
    [
        (2048, Dtype.BF16, 128), (192, Dtype.BF16, 64), (96, Dtype.BF16, 32), (48, Dtype.BF16, 0),
        (50, Dtype.BF16, 0), (1025, Dtype.BF16, 0), (1000, Dtype.FP32, 0), (96, Dtype.FP32, 32),
    ],
)  # fmt: skip
def test_descriptors_take_whole_steps_only(depth: int, dtype: Dtype, step: int) -> None:
    """B23, B40: partial steps were mis-compiled, and lines off the 16-byte grid cannot be described."""
    assert descriptor_depth(depth, dtype, 128 if dtype is Dtype.BF16 else 32) == step


@pytest.mark.parametrize(
    ("tiles", "fault"),
    [
        ((Tile(64, 64, 64), Tile(48, 64, 64)), "multiple of the next"),
        ((Tile(64, 64, 64), Tile(16, 32, 64)), "the same columns"),
        ((Tile(64, 64, 32), Tile(16, 64, 64)), "the same columns and depth"),
        ((Tile(64, 64, 128),), "192 is no multiple of 128"),
    ],
)
def test_tiles_that_no_kernel_can_be_made_of(tiles: tuple[Tile, ...], fault: str) -> None:
    values = replace(kernel("gate_up", 192, 64, 4, Dtype.BF16, "cuda:90", 128), tiles=tiles)
    assert fault in str(tile_fault(values))
    assert tile_fault(replace(values, tiles=tiles[:1], form=Form.POINTER)) is None


def test_one_process_interprets_and_compiles_whatever_the_environment() -> None:
    """With TRITON_INTERPRET set when Triton is imported, the compiler still compiles."""
    code = (
        "import triton, triton.language\n"
        "from moec.codegen.gemm_source import compile_grouped_gemm\n"
        "from moec.codegen.gemm_variant import Projection\n"
        "from moec.codegen.grouped_gemm import specialise\n"
        "from moec.codegen.targets import Dtype, find_target\n"
        "values = specialise(Projection.DOWN, 64, 64, 4, Dtype.BF16, find_target('cuda:90'), rows_per_expert=4)\n"
        "report = compile_grouped_gemm(values)\n"
        "assert triton.knobs.runtime.interpret and report.binary.startswith(b'\\x7fELF')\n"
    )
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, cwd="/", check=False).returncode == 0


def test_no_file_can_take_the_place_of_a_kernel() -> None:
    source = render_grouped_gemm(kernel("gate_up", 64, 64, 4, Dtype.BF16, "cuda:90", 128))
    loaded = load_kernel(source, "grouped_gemm", interpret=False)
    path = Path(loaded.fn.__code__.co_filename)
    assert path.parent == Path("/dev/null")
    assert loaded is load_kernel(source, "grouped_gemm", interpret=False)
    with pytest.raises(MoecError, match="uses `os`"):
        load_kernel("import os\n", "grouped_gemm", interpret=False)


CASE = re.compile(r"(?:(\w+)_)?(gate_up|down)_d(\d+)_i(\d+)_m(\d+)_([a-z]+\d+)_t(\d+)\.(\w+)-(\w+)\.py\.txt")


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.py.txt")), ids=lambda path: path.name)
def test_rendered_kernels(path: Path, golden: Callable[[Path, str], None]) -> None:
    """A case is a file name: the variant, shape, dtype and rows of the largest tile, and the target."""
    found = CASE.fullmatch(path.name)
    assert found is not None
    what, op, hidden, inner, experts, dtype, rows, backend, arch = found.groups()
    depth, width = (hidden, inner) if op == "gate_up" else (inner, hidden)
    rows_per_expert = 4 if rows == "16" else int(rows)
    target = f"{backend}:{arch}"
    values = kernel(what or op, int(depth), int(width), int(experts), Dtype(dtype), target, rows_per_expert, 2)
    assert path.name.startswith(f"{values.name}.")
    line = Comment("qwen3.moe:9  experts routed = 128 * swiglu(768)")
    golden(path, render_grouped_gemm(values, [line]))


def test_there_are_rendered_kernels_to_compare() -> None:
    assert len(list(GOLDEN.glob("*.py.txt"))) >= 4


def test_pages_show_the_errors_as_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = kernel("gate_up", 64, 64, 4, Dtype.BF16, "cuda:80", 4)
    odd = replace(odd, tiles=(replace(odd.tiles[0], m=48),))
    uneven = kernel("down", 64, 64, 4, Dtype.BF16, "cuda:90", 128)
    uneven = replace(uneven, tiles=(Tile(128, 64, 64), Tile(48, 64, 64)))
    tiny = replace(TARGETS["cuda:80"], shared_limit=1000)
    calls: dict[str, Callable[[], object]] = {
        "E0521": lambda: find_target("cuda:9"),
        "E0522": lambda: kernel("gate_up", 65536, 32768, 8, Dtype.BF16, "cuda:90", 128),
        "E0523": lambda: default_blocking(64, 64, 2, Dtype.BF16, tiny, Form.POINTER, 128),
        "E0524": lambda: compile_grouped_gemm(odd),
        "E0525": lambda: grouped_gate_up(
            None, torch.ones(3, 16), torch.tensor([1, 3], dtype=torch.int32), torch.ones(2, 16, 8)
        ),
        "E0529": lambda: render_grouped_gemm(uneven),
        "E0520": lambda: compile_grouped_gemm(odd, "x = 1\n"),
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
