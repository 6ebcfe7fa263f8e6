"""Figures read from machine code: on listings small enough to count by hand, and on kernels compiled here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from moec.codegen import machine_code as reader
from moec.codegen.devices import DEVICES, device_for, occupancy
from moec.codegen.machine_code import machine_code, parse_sass, read_cubin
from moec.codegen.machine_code_amd import parse_amdgcn, read_amdgcn
from moec.codegen.machine_loops import MatrixLoop, MatrixOp, matrix_loops
from moec.codegen.offline import Launch, Report, Signature, compile_kernel
from moec.codegen.targets import TARGETS
from moec.diagnostics import MoecError

PAGES = Path(__file__).parent.parent / "specs" / "errors"

#: Two bodies inside a loop over tiles; each waits in a loop of its own that lies behind the end, and jumps back in.
SASS = [
    "S2R R1, SR_TID.X",  # 00
    "@P1 BRA 0xf0",  # 10: which body (the tile loop begins here)
    "UTMALDG.2D [UR4], [UR8]",  # 20
    "SYNCS.PHASECHK P0, [UR9]",  # 30: first loop
    "@!P0 BRA 0x1b0",  # 40
    "@P2 UTMALDG.2D [UR4], [UR8]",  # 50
    "LDGSTS.E.128 [R4], [R8]",  # 60
    "HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24",  # 70
    "UIADD3 UR4, UR4, 0x1, URZ",  # 80
    "HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24",  # 90
    "@!P3 BRA 0x30",  # a0
    "@P4 BRA 0xd0",  # b0: the epilogue, or a shorter way
    "FMUL R1, R2, R3",  # c0
    "STG.E [R2], R1",  # d0
    "BRA 0x180",  # e0
    "SYNCS.PHASECHK P0, [UR9]",  # f0: second loop
    "@!P0 BRA 0x1d0",  # 100
    "LDSM.16.M88.4 R48, [R65]",  # 110
    "HGMMA.64x16x16.F32.BF16 R24, R48, gdesc[UR8], R24",  # 120
    "BRA.U !UP2, 0xf0",  # 130
    "STL [R1], R2",  # 140
    "LDL R2, [R1]",  # 150
    "STG.E [R2], R1",  # 160
    "LDG.E R1, [R2]",  # 170
    "@!P5 BRA 0x10",  # 180
    "EXIT",  # 190
    "NOP",  # 1a0
    "SYNCS.PHASECHK P0, [UR9]",  # 1b0
    "BRA 0x50",  # 1c0
    "SYNCS.PHASECHK P0, [UR9]",  # 1d0
    "BRA 0x110",  # 1e0
    "BRA 0x1f0",  # 1f0
]
AMDGCN = """\
gate_up: ; @gate_up
	s_load_dwordx2 s[0:1], s[2:3], 0x0
.LBB0_1: ; tiles
	v_mov_b32_e32 v0, 0
.LBB0_2: ; steps
	s_cbranch_execz .LBB0_3
	buffer_load_dwordx4 v[4:7], v1, s[4:7], 0 offen
	buffer_load_dword v1, s[4:7], 0 offen lds
.LBB0_3:
	v_mfma_f32_32x32x8_bf16 v[0:15], v[64:65], v[66:67], v[0:15]
	v_mfma_f32_32x32x8_bf16 v[0:15], v[64:65], v[66:67], v[0:15]
	s_cbranch_scc1 .LBB0_2
	global_store_dwordx4 v[0:1], v[2:5], off
	s_cbranch_scc1 .LBB0_1
	s_endpgm
	.section .rodata
	.end_amdhsa_kernel
amdhsa.kernels:
  - .agpr_count:     32
    .group_segment_fixed_size: 1024
    .sgpr_spill_count: 1
    .vgpr_count:     96
    .vgpr_spill_count: 2
"""


def listing(lines: list[str]) -> str:
    return "\n".join(f"        /*{16 * i:04x}*/    {line} ;    /* 0x00 */" for i, line in enumerate(lines))


def test_each_innermost_loop_is_read_once_whatever_jumps_back_into_it() -> None:
    wide, narrow = matrix_loops(parse_sass(listing(SASS)))
    assert wide == MatrixLoop(
        MatrixOp("HGMMA", (64, 256, 16)), num_ops=2, slots=8, loads=(("tma", 1), ("cp_async", 1)), tile_slots=6
    )
    assert (wide.slots_per_op, str(wide.op)) == (4.0, "HGMMA 64x256x16")
    assert narrow == MatrixLoop(MatrixOp("HGMMA", (64, 16, 16)), num_ops=1, slots=5, tile_slots=6)


def test_the_whole_text_is_counted_too() -> None:
    code = machine_code(parse_sass(listing(SASS)), registers=168, spills=2, static_shared=1024)
    assert code.instructions == len(SASS)
    assert [code.loads_by(kind) for kind in ("tma", "cp_async", "global")] == [2, 1, 1]


def test_matrix_instructions_before_the_loop_are_peeled_steps() -> None:
    lines = ["NOP", "UTCHMMA gdesc[UR4]", "NOP", "UTCHMMA gdesc[UR4]", "@P0 BRA 0x20", "NOP", "@P1 BRA 0x10"]
    (loop,) = matrix_loops(parse_sass(listing(lines)))
    assert loop == MatrixLoop(MatrixOp("UTCHMMA"), num_ops=1, slots=3, tile_slots=3, peeled=1)


def test_text_without_matrix_instructions_has_no_such_loops() -> None:
    assert matrix_loops(parse_sass(listing(["NOP", "FADD R1, R1, R2", "@P0 BRA 0x10", "EXIT"]))) == ()
    assert matrix_loops([]) == ()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("HMMA.16816.F32.BF16", "HMMA 16x8x16"),
        ("HMMA.1688.F32.TF32", "HMMA 16x8x8"),
        ("IMMA.16832.S8.S8.SAT", "IMMA 16x8x32"),
        ("QGMMA.64x128x32.F32.E4M3.E4M3", "QGMMA 64x128x32"),
        ("UTCHMMA", "UTCHMMA"),
        ("FFMA", "None"),
    ],
)
def test_names_of_matrix_instructions(name: str, said: str) -> None:
    assert str(reader.matrix_op(name)) == said


def test_amd_assembly() -> None:
    """A jump for the case that no lane is active is not the way that lanes take."""
    code = read_amdgcn(AMDGCN)
    assert (code.registers, code.accumulators, code.spills, code.static_shared) == (96, 32, 2, 1024)
    assert code.loops == (
        MatrixLoop(MatrixOp("MFMA", (32, 32, 8)), 2, slots=6, loads=(("cp_async", 1), ("global", 1)), tile_slots=3),
    )
    assert len(parse_amdgcn(AMDGCN)) == 11


def test_what_is_no_machine_code_is_refused() -> None:
    with pytest.raises(MoecError) as caught:
        read_amdgcn("s_endpgm\n")
    assert caught.value.diagnostics[0].code == "E0532"
    if importlib.util.find_spec("triton") is not None:
        with pytest.raises(MoecError, match="no cubin"):
            read_cubin(b"not machine code")


def test_without_a_cuobjdump(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setenv("PATH", "")
    reader._cuobjdump.cache_clear()
    with pytest.raises(MoecError) as caught:
        read_cubin(b"\x7fELF")
    reader._cuobjdump.cache_clear()
    assert caught.value.exit_code == 4
    assert caught.value.render() in (PAGES / "E0532.md").read_text()


@pytest.mark.parametrize(
    ("warps", "registers", "shared", "blocks", "limit"),
    [
        (8, 168, 100 << 10, 1, "registers"),  # 8 x 168 x 32 = 43,008 of 65,536
        (4, 128, 110 << 10, 2, "shared memory"),
        (4, 128, 0, 4, "registers"),
        (8, 24, 0, 8, "threads"),
        (4, 16, 0, 16, "threads"),
        (1, 16, 0, 32, "blocks"),
    ],
)
def test_occupancy(warps: int, registers: int, shared: int, blocks: int, limit: str) -> None:
    found = occupancy(DEVICES["h200"], TARGETS["cuda:90"], warps, registers, shared)
    assert (found.blocks, found.limit, found.share) == (blocks, limit, blocks * warps * 32 / 2048)


def test_occupancy_of_amd_goes_by_lanes() -> None:
    device, target = DEVICES["mi300x"], TARGETS["hip:gfx942"]
    assert occupancy(device, target, 4, 128, 0).blocks == 4  # 512 // 128 waves on each of four units
    assert occupancy(device, target, 4, 256, 40 << 10).limit == "shared memory"


def test_a_device_is_found_by_its_memory_and_takes_the_clusters_rates() -> None:
    target = TARGETS["cuda:90"]
    assert device_for(target).name == "h100"
    assert device_for(target, 4800.0).name == "h200"
    found = device_for(target, 4000.0, (("bf16", 148.0),))
    assert (found.memory_gbps, dict(found.tflops)["bf16"], found.num_sms) == (4000.0, 148.0, 132)
    assert device_for(TARGETS["cuda:80"], 3350.0, (("bf16", 989.0),)) == DEVICES["a100"]  # a cluster of H100


KERNEL = """
import triton
import triton.language as tl


@triton.jit
def product(x, w, out, INTERPRET: tl.constexpr):
    m = tl.arange(0, 128)
    k = tl.arange(0, 64)
    acc = tl.full((128, 128), 0.0, tl.float32)
    for d in range(0, 1024, 64):
        x_MK = x.load([0, d])
        w_NK = w.load([0, d])
        acc = tl.dot(x_MK, w_NK.T, acc)
    tl.store(out + m[:, None] * 128 + m[None, :], acc)
"""


@pytest.fixture(scope="module")
def product() -> dict[str, Report]:
    """A product with one loop, for every target."""
    pytest.importorskip("triton")
    box = "tensordesc<bf16[128, 64]>"
    arguments = Signature({"x": box, "w": box, "out": "*fp32", "INTERPRET": "constexpr"}, {"INTERPRET": False})
    return {
        name: compile_kernel(KERNEL, "product", arguments, target, Launch("product", 4, 2))
        for name, target in TARGETS.items()
    }


def hot_path(shared: Path) -> ModuleType:
    """The tool that published comparisons were made with."""
    path = shared / "tools" / "hot_path.py"
    if not path.is_file():
        pytest.skip(f"no {path}")
    spec = importlib.util.spec_from_file_location("hot_path", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "cuda:100"])
def test_figures_are_those_of_the_published_tool(
    product: dict[str, Report], shared: Path, tmp_path: Path, target: str
) -> None:
    cubin = tmp_path / "product.cubin"
    cubin.write_bytes(product[target].binary)
    theirs, ours = hot_path(shared).report(str(cubin)), read_cubin(product[target].binary)
    (loop,) = ours.loops
    assert (loop.slots, loop.num_ops) == (theirs["hot_instructions"], theirs["hot_mma"])
    assert round(loop.slots_per_op, 1) == theirs["slots_per_mma"]
    assert ours.registers == theirs["registers"]
    assert ours.static_shared == theirs["static_shared_bytes"]
    assert ours.spills == theirs["spill_loads"] + theirs["spill_stores"]
    assert ours.loads_by("cp_async") == theirs["async_copies"]
    assert ours.loads_by("tma") == sum(n for name, n in theirs["tma"].items() if "LDG" in name)


def test_instructions_of_every_architecture_are_known(product: dict[str, Report]) -> None:
    found = {name: read_cubin(report.binary) for name, report in product.items() if name.startswith("cuda")}
    found["hip:gfx942"] = read_amdgcn(product["hip:gfx942"].assembly)
    assert {name: str(code.loops[0].op).split()[0] for name, code in found.items()} == {
        "cuda:80": "HMMA", "cuda:90": "HGMMA", "cuda:100": "UTCHMMA", "hip:gfx942": "MFMA",
    }  # fmt: skip
    assert found["cuda:90"].loops[0].op.shape == (64, 128, 16)
