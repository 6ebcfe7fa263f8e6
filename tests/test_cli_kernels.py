"""`moec kernels`, and the kernels that `moec compile --target` leaves in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moec.artifact import load
from moec.artifact_files import canonical_json, read_artifact, write_artifact
from moec.cli.app import app
from moec.diagnostics import MoecError
from moec.explain.kernels import check_has_kernels, kernels_text, totals

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "specs" / "errors"


def call(*args: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    return result.exit_code, result.stdout, result.stderr


def entry(**changes: Any) -> dict[str, Any]:
    """What plan.json keeps of a kernel."""
    return {
        "name": "gate_up_d2048", "op": "grouped_gate_up", "phase": "prefill", "body": "sparse", "layers": 48,
        "tokens": 4096, "routing": "random", "target": "cuda:90", "device": "h200", "registers": 168, "accumulators": 0,
        "spills": 0, "shared_bytes": 196_608, "shared_limit": 232_448, "launches": 1, "form": "tma",
        "tiles": "128+16 x 128 x 128", "fallback": "", "selection": {"candidates": 3, "compiled": 1},
        "occupancy": {"blocks": 1, "share": 0.125, "limit": "shared memory"},
        "matrix": [
            {"rows": 128, "op": "HGMMA 64x256x16", "slots": 13.75, "tile_slots": 1261, "loads": {"tma": 2}},
            {"rows": 16, "op": "HGMMA 64x16x16", "slots": 10.6, "tile_slots": 420, "loads": {"tma": 2}},
        ],
        "bytes": {"moved": 1_000_000_000, "minimum": 822_000_000},
        "rows": {"useful": 32768, "padded": 33774, "tiles": 2000},
        "us": {"memory": 206.0, "predicted": 400.0, "roof": 208.0},
    } | changes  # fmt: skip


MOVING = entry(
    name="group_rows_d2048", op="group_rows", launches=2, matrix=[], rows=None, tiles="", registers=150, shared_bytes=0,
    bytes={"moved": 151_000_000, "minimum": 0}, us={"memory": 31.0, "predicted": 42.0, "roof": 0.0},
    occupancy={"blocks": 3, "share": 0.375, "limit": "registers"},
)  # fmt: skip
DECODE = entry(phase="decode", tokens=64, spills=2, fallback="16 x 64 x 64 instead of more, which spills 2 registers")
KERNELS = [DECODE, MOVING, entry()]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact for the CPU."""
    folder = tmp_path_factory.mktemp("toy") / "toy.build"
    code, _, err = call("compile", ROOT / "examples" / "toy.moe", "-o", folder)
    assert code == 0, err
    return folder


def changed(toy: Path, folder: Path, **parts: Any) -> Path:
    """The same with other parts in its plan.json."""
    files: dict[str, str | bytes] = {**read_artifact(toy)}
    files["plan.json"] = canonical_json(json.loads(files["plan.json"]) | parts)
    write_artifact(folder, files)
    return folder


def test_a_table_for_each_phase_with_prefill_first(toy: Path, tmp_path: Path) -> None:
    folder = changed(toy, tmp_path / "gpu", target="cuda:90", kernels=KERNELS)
    code, out, err = call("kernels", folder)
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == "prefill: 4096 tokens a step, random routing, cuda:90 as h200"
    assert lines[2] == "group_rows 2 150 0 0 3 r - - 151.0 - - 42.0 -"
    assert lines[3] == "grouped_gate_up 1 168 0 192 1 s HGMMA 64x256x16 13.8 1000.0 822.0 1.03 400.0 0.52"
    assert lines[4] == "HGMMA 64x16x16 10.6"
    assert lines[5] == "a layer 3 1151.0 822.0 442.0 0.47"
    assert lines[7] == "grouped_gate_up: gate_up_d2048, tiles 128+16 x 128 x 128"
    decode = lines.index("decode: 64 tokens a step, random routing, cuda:90 as h200")
    assert "fallback: 16 x 64 x 64 instead of more, which spills 2 registers" in lines[decode:]
    assert (
        lines[-1]
        == "No time here was measured, but where `tuned` is said. docs/kernels.md says how each figure comes about."
    )
    assert max(map(len, out.splitlines())) <= 132


def test_json_has_every_figure_and_the_sums(toy: Path, tmp_path: Path) -> None:
    folder = changed(toy, tmp_path / "gpu", target="cuda:90", kernels=KERNELS)
    code, out, _ = call("kernels", folder, "--json")
    found = json.loads(out)
    assert (code, found["target"], found["kernels"]) == (0, "cuda:90", KERNELS)
    assert found["phases"] == totals(KERNELS)
    assert found["phases"]["prefill"] == {
        "launches": 3, "moved": 1_151_000_000, "minimum": 822_000_000, "predicted_us": 442.0, "roof_us": 208.0,
    }  # fmt: skip


def test_a_program_without_such_operations_says_so() -> None:
    assert "no operation of this program has a GPU kernel" in kernels_text({"kernels": []})


def test_a_time_that_was_measured_is_told_from_the_others() -> None:
    assert "tuned: 233.1 us measured" in kernels_text({"kernels": [entry(tuned_us=233.14)]})
    assert "tuned:" not in kernels_text({"kernels": KERNELS})


def test_a_folder_for_the_cpu_is_refused(toy: Path) -> None:
    code, out, err = call("kernels", toy)
    assert (code, out) == (2, "")
    assert err.startswith(f"moec: error[E0534]: `{toy}` was compiled for the cpu and has no GPU kernels; moec compile ")
    with pytest.raises(MoecError) as caught:
        check_has_kernels({"target": "cpu", "source": "toy.moe"}, "toy.build")
    assert caught.value.render() in (PAGES / "E0534.md").read_text()


@pytest.mark.parametrize("parts", [{"kernels": [{}]}, {"kernels": [{"phase": "prefill"}]}, {"kernels": [3]}])
def test_a_plan_without_the_figures_is_refused(toy: Path, tmp_path: Path, parts: dict[str, Any]) -> None:
    code, out, err = call("kernels", changed(toy, tmp_path / "gpu", target="cuda:90", **parts))
    assert (code, out) == (3, "")
    assert err.startswith("moec: error[E0771]") and len(err.splitlines()) == 1


def test_what_is_no_artifact_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        code, _, err = call("kernels", folder)
        assert code == 3 and err.startswith("moec: error[E0771]")


def test_a_damaged_kernel_is_named(toy: Path, tmp_path: Path) -> None:
    """Machine code is in the manifest like every file, and comes back byte for byte."""
    code = b"\x7fELF\xff\x00\r\n" * 9
    files: dict[str, str | bytes] = {**read_artifact(toy), "kernels/a.cubin": code, "kernels/a.ptx": "text\n"}
    write_artifact(tmp_path / "gpu", files)
    artifact = load(tmp_path / "gpu")
    assert dict(artifact.binaries) == {"kernels/a.cubin": code}
    assert artifact.sources["kernels/a.ptx"] == "text\n"
    artifact.save(tmp_path / "again")
    assert (tmp_path / "again" / "kernels" / "a.cubin").read_bytes() == code
    (tmp_path / "gpu" / "kernels" / "a.cubin").write_bytes(code[:-1] + b"\x01")
    code_, _, err = call("kernels", tmp_path / "gpu")
    assert code_ == 3 and "`kernels/a.cubin` was changed after it was compiled" in err
