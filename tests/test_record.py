"""`moec run --record`: whatever the mesh, the trace of one rank."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from moec.cache.trace import Trace, read_trace
from moec.cli.app import app
from moec.compiler import compile
from tests.commands import moec

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "tiny"
ALONE = ("ranks.attention=dp(1)", "ranks.experts=ep(1)")
#: Layer 0 is dense: with five stages, the first one routes nothing.
MESHES = {
    "ep=2": (),
    "tp=2": ("ranks.attention=dp(1)*tp(2)",),
    "ep=1,etp=2": ("ranks.attention=dp(1)*tp(2)", "ranks.experts=ep(1)*etp(2)"),
    "dp=2,edp=2": ("ranks.experts=edp(2)*ep(1)",),
    "pp=2": (*ALONE, "ranks.stages=pp(2)"),
    "pp=5": (*ALONE, "ranks.stages=pp(5)"),
    "chunks": ("plan.overlap=2",),
}
#: Few rows a step, which need few experts: else no prefetch would pay.
CACHED = ("few.hbm=slots(8)", "plan.decode.batch=1", "plan.prefill.tokens=3")


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "MOEC_DEBUG", "MOEC_FAULT"):
        monkeypatch.delenv(name, raising=False)


def recorded(work: Path, settings: tuple[str, ...], file: str = "tiny.moe") -> Trace:
    """The trace of three prompts and the four tokens behind each, in fp32."""
    plan = ("--plan", "cached") if file == "cached.moe" else ()
    prompts = ("--tokens", "34,272,497,9", "--tokens", "7,8,9,10,11", "--tokens", "77")
    changes = [word for setting in settings for word in ("--set", setting)]
    args = (*plan, *prompts, "--max-new-tokens", "4", "--ignore-eos", "--dtype", "fp32", "--json", *changes)
    done = moec("run", EXAMPLE / file, *args, "--record", work / "run.npz").wait()
    assert (done.code, done.err) == (0, "")
    assert [len(tokens) for tokens in json.loads(done.out)["tokens"]] == [4, 4, 4]
    return read_trace(work / "run.npz")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    compile(EXAMPLE / "tiny.moe")  # builds the parser that every command forked from here needs
    return recorded(tmp_path_factory.mktemp("alone"), ALONE)


def assert_same(found: Trace, wanted: Trace) -> None:
    """The same tokens in the same order, with the same choices; stages may cut steps of decoding in smaller ones."""
    assert np.array_equal(found.expert_ids, wanted.expert_ids)
    assert found.gate_weights is not None and wanted.gate_weights is not None
    assert np.allclose(found.gate_weights, wanted.gate_weights, atol=1e-5)
    assert found.seq_lengths.tolist() == wanted.seq_lengths.tolist()
    assert found.phase.tolist() == wanted.phase.tolist()
    assert found.num_experts == wanted.num_experts == 32
    assert set(found.step_starts.tolist()) >= set(wanted.step_starts.tolist())


def test_one_rank_records_its_prompts_then_a_token_of_each(alone: Trace) -> None:
    assert alone.expert_ids.shape == (4, 10 + 3 * 3, 4)
    assert alone.seq_lengths.tolist() == [4, 5, 1, *[1] * 9]
    assert alone.step_starts.tolist() == [0, 10, 13, 16, 19]
    assert alone.phase.tolist() == [0] * 10 + [1] * 9
    assert alone.predicted_ids is None
    assert alone.gate_weights is not None
    assert np.allclose(alone.gate_weights.sum(axis=2), 2.5)  # the router's scale
    assert all(len(set(chosen)) == 4 for chosen in alone.expert_ids.reshape(-1, 4).tolist())


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_records_what_one_rank_does(mesh: str, alone: Trace, tmp_path: Path) -> None:
    found = recorded(tmp_path, MESHES[mesh])
    assert_same(found, alone)
    if not mesh.startswith("pp"):
        assert found.step_starts.tolist() == alone.step_starts.tolist()
    args = ["cache", tmp_path / "run.npz", "--model", EXAMPLE / "tiny.moe", "--slots", "4", "--json"]
    result = CliRunner().invoke(app, list(map(str, args)))
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["tokens"] == 19


def test_guesses_are_recorded_beside_what_was_chosen(tmp_path: Path) -> None:
    """Those of a plan that prefetches, which are the same on two ranks that share the tokens, too."""
    one, two = (recorded(tmp_path, (*mesh, *CACHED), "cached.moe") for mesh in (ALONE, MESHES["tp=2"]))
    assert_same(two, one)
    assert one.predicted_ids is not None and two.predicted_ids is not None
    assert np.array_equal(one.predicted_ids, two.predicted_ids)
    assert one.predicted_ids.shape == one.expert_ids.shape and (one.predicted_ids >= 0).all()
    right = (one.predicted_ids[..., None] == one.expert_ids[..., None, :]).any(axis=-1).mean(axis=(1, 2))
    assert right[0] > 0.25 and 0.5 < right[1:].min() < 1.0  # chance is right once in eight; attention alone says little
