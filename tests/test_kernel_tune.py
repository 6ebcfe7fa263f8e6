"""`moec compile --tune`: the fastest is taken, what is timed runs, and where nothing can be timed that is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from moec.cli.app import app
from moec.codegen.devices import DEVICES
from moec.codegen.expected_rows import Rows, even_rows
from moec.codegen.gemm_variant import Projection, RowSource, Store
from moec.codegen.grouped_gemm import GroupedGemm, specialise
from moec.codegen.kernel_entry import gemm_entry
from moec.codegen.kernel_select import Choice, describe
from moec.codegen.kernel_store import Compiled
from moec.codegen.kernel_tune import MOST_TIMED, tune
from moec.codegen.machine_code import MachineCode
from moec.codegen.machine_loops import MatrixLoop, MatrixOp
from moec.codegen.offline import Report
from moec.codegen.targets import TARGETS, Dtype
from moec.diagnostics import MoecError, fail
from moec.explain.kernels import kernels_text
from moec.runtime.tune import measurer, prepare

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "specs" / "errors"
ROWS = even_rows(128, 8, 4096)


def gemm(n: int) -> GroupedGemm:
    values = specialise(Projection.GATE_UP, 2048, 768, 128, Dtype.BF16, TARGETS["cuda:90"], top=8, rows_per_expert=256)
    return replace(values, tiles=tuple(replace(tile, n=n) for tile in values.tiles))


def build(values: GroupedGemm) -> Compiled:
    """64 columns spill, 32 do not compile."""
    if (n := values.tiles[0].n) == 32:
        raise fail("E0524", "does not compile")
    loop = MatrixLoop(MatrixOp("HGMMA", (64, 2 * n, 16)), num_ops=8, slots=98)
    code = MachineCode(168, 4 * (n == 64), 1024, 3000, (), (loop,) * len(values.bodies))
    return Compiled(Report("k", "cuda:90", 168, 0, 1024, "", b"", ""), code)


class Watch:
    """Gives kernels times by their columns, and remembers whom."""

    def __init__(self, **times: float) -> None:
        self.times, self.asked = times, list[int]()

    def __call__(self, values: GroupedGemm, rows: Rows, tokens: int) -> float:
        assert (rows is ROWS, tokens) == (True, 4096)
        self.asked.append(values.tiles[0].n)
        return self.times[f"n{values.tiles[0].n}"]


def tuned(watch: Watch, *columns: int) -> Choice:
    return tune([gemm(n) for n in columns], ROWS, 4096, DEVICES["h200"], build, watch)


def test_the_fastest_is_taken_whatever_the_cost_model_says() -> None:
    """The model prefers more columns: tiles of fewer load rows more often."""
    watch = Watch(n128=700.0, n256=900.0, n16=650.04)
    choice = tuned(watch, 16, 32, 64, 128, 256)
    assert sorted(watch.asked) == [16, 128, 256]
    assert choice.values == gemm(16)
    assert dict(choice.times) == {describe(gemm(n)): watch.times[f"n{n}"] for n in (16, 128, 256)}
    entry = gemm_entry(choice, DEVICES["h200"], 256)
    assert entry["tuned_us"] == 650.04 and entry["selection"]["times"] == dict(choice.times)
    heading = {"name": "k", "op": "grouped_gate_up", "phase": "prefill", "tokens": 4096, "routing": "random"}
    assert "tuned: 650.0 us measured" in kernels_text({"kernels": [heading | entry]})


def test_no_more_than_so_many_are_timed() -> None:
    watch = Watch(n128=1.0)
    tune([replace(gemm(128), programs=132 + i) for i in range(20)], ROWS, 4096, DEVICES["h200"], build, watch)
    assert len(watch.asked) == MOST_TIMED


def test_where_none_can_be_timed_the_cost_model_chooses_and_says_what_is_wrong() -> None:
    watch = Watch()
    choice = tuned(watch, 64, 32)
    assert watch.asked == [] and choice.times == ()
    assert "spills 4 registers" in choice.values.fallback.text
    with pytest.raises(MoecError, match="does not compile"):
        tuned(watch, 32)


@pytest.mark.parametrize(
    ("op", "rows", "store"),
    [
        (Projection.GATE_UP, RowSource.SORTED, Store.PLAIN),
        (Projection.GATE_UP, RowSource.GATHERED, Store.PLAIN),
        *((Projection.DOWN, RowSource.SORTED, store) for store in Store),
    ],
)
def test_what_is_timed_runs(op: Projection, rows: RowSource, store: Store) -> None:
    """In Triton's interpreter: every tensor that a kernel asks for is there and has its size."""
    pytest.importorskip("triton")
    values = specialise(
        op, 64, 32, 3, Dtype.FP32, TARGETS["cuda:80"], top=2, rows=rows, store=store, rows_per_expert=4
    )  # fmt: skip
    run = prepare(values, np.array([3, 0, 4]), 5, torch.device("cpu"))
    run()
    closure = dict(zip(run.__code__.co_freevars, (cell.cell_contents for cell in run.__closure__ or ()), strict=True))
    assert closure["out"].isfinite().all() and closure["out"].abs().sum() > 0


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["compile", str(ROOT / "examples" / "toy.moe"), "--target", "cuda:90", "--tune"])
    assert result.exit_code == 4 and result.stderr.startswith("moec: error[E0535]: ")
    assert len(result.stderr.splitlines()) == 1
    with pytest.raises(MoecError) as caught:
        measurer("cuda:90")
    assert caught.value.render() in (PAGES / "E0535.md").read_text()


def test_on_a_gpu_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("moec.runtime.tune.architecture_of", lambda device: "cuda:80")
    with pytest.raises(MoecError) as caught:
        measurer("cuda:90")
    assert (caught.value.exit_code, caught.value.render() in (PAGES / "E0536.md").read_text()) == (4, True)
    assert measurer("cuda:80") is not None
    monkeypatch.setattr("moec.runtime.tune.architecture_of", lambda device: "cuda:89")
    with pytest.raises(MoecError, match="the GPU here is cuda:89") as caught:
        measurer("cuda:80")
    assert "--target" not in caught.value.render()


def test_for_the_cpu_there_is_nothing_to_tune() -> None:
    result = CliRunner().invoke(app, ["compile", str(ROOT / "examples" / "toy.moe"), "--tune"])
    assert result.exit_code == 2 and "--tune" in result.stderr


def test_a_target_that_is_none_is_told_before_the_gpu_is() -> None:
    result = CliRunner().invoke(app, ["compile", str(ROOT / "examples" / "toy.moe"), "--tune", "--target", "cuda:9"])
    assert result.exit_code == 1 and "E0521" in result.stderr
