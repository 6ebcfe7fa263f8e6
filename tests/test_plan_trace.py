"""`moec compile --trace`: costs, choices and tables are those of the trace, and the plan says which it was."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from moec.cache.trace import Array, read_trace
from moec.cli.app import app
from moec.compiler import PHASES, checked_plan, compile, compile_phase, routing_of
from moec.explain.page import explain_plan
from tests.conftest import ROOT
from tests.traces import random_ids, written

#: Memory no faster than the link, so sorting rows does not pay where they go everywhere anyway.
CLUSTER = """
cluster pair {{
  devices = {devices}
  memory_rate = 20 GB/s
  compute = peak(fp32 = 1 TFLOP/s)
  intra = link(20 GB/s, latency = 1 us)
}}
"""
MODEL = """
model toy {{
  hidden = {hidden}
  vocab = 64
  norm = rms(eps = 1e-6)
  dtype = fp32
  attention grouped = gqa(heads = 4, kv_heads = 4, head_dim = 16)
  router ranked {{ score = softmax  top = {top}  renormalize = true }}
  experts routed = {experts} * swiglu(32)
  {layers}
}}
mesh ranks on pair[1] {{ {stages} attention = dp({ep})  experts = ep({ep}) }}
plan serve {{
  run toy on ranks
  prefill {{ tokens = 4096  exchange = auto  combine = auto  overlap = auto }}
  decode {{ batch = 64  exchange = {decode}  combine = auto }}
}}
"""


def source(folder: Path, depth: int = 2, pp: int = 1, ep: int = 2, **changes: Any) -> Path:
    """A .moe file of `depth` sparse layers, or with `layers` written out."""
    words = {"hidden": 512, "top": 4, "experts": 8, "decode": "auto"}
    words |= {"layers": f"layers 0..{depth - 1} {{ grouped moe(ranked, routed) }}"}
    stages = f"stages = pp({pp})" if pp > 1 else ""
    path = folder / "toy.moe"
    text = CLUSTER.format(devices=ep * pp) + MODEL.format(ep=ep, stages=stages, **(words | changes))
    path.write_text(text)
    return path


def one_sided(layers: int, tokens: int = 64) -> Array:
    """Half of the tokens choose experts 0..3, all of the first rank, the others 4..7."""
    ids = np.arange(4) + 4 * (np.arange(tokens) % 2)[:, None]
    return np.tile(ids, (layers, 1, 1))


def call(*args: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    return result.exit_code, result.stdout, result.stderr


def chosen(document: Any) -> dict[str, tuple[str, str]]:
    return {name: (phase["exchange"], phase["combine"]) for name, phase in document["phases"].items()}


# --- what it changes ------------------------------------------------------------------------------------------------


def test_a_skewed_trace_changes_the_exchange(tmp_path: Path) -> None:
    """4 of 8 experts: random choices touch both ranks 69 times of 70; in the trace every token needs one rank."""
    file, trace = source(tmp_path), written(tmp_path / "t.npz", one_sided(2), 8)
    assert chosen(compile(file).document)["prefill"] == ("gather", "reduced")
    traced = compile(file, trace=trace).document
    assert chosen(traced)["prefill"] == ("flat", "reduced")
    assert traced["phases"]["prefill"]["exchanges"]["chosen"] == {"exchange": "flat", "combine": "reduced"}


def test_a_trace_of_random_routing_changes_next_to_nothing(tmp_path: Path) -> None:
    file = source(tmp_path)
    plain = compile(file).document
    traced = compile(file, trace=written(tmp_path / "t.npz", random_ids(2, 4000, 4, 8), 8)).document
    assert chosen(plain) == chosen(traced)
    for phase in PHASES:
        for mine, theirs in zip(*(d["phases"][phase]["exchanges"]["candidates"] for d in (plain, traced)), strict=True):
            assert mine["us"] is theirs["us"] is None or math.isclose(mine["us"], theirs["us"], rel_tol=0.05)


def test_each_phase_takes_its_own_tokens(tmp_path: Path) -> None:
    """Prefill tokens stay on one rank, decode tokens go to both."""
    ids = np.concatenate([one_sided(2), random_ids(2, 100, 4, 8)], axis=1)
    phase = np.repeat(np.array([0, 1], np.uint8), [64, 100])
    file, trace = source(tmp_path, decode="flat"), written(tmp_path / "t.npz", ids, 8, phase=phase)
    document = compile(file, trace=trace).document
    assert document["trace"]["tokens"] == {"prefill": 64, "decode": 100}
    sizes = {
        name: _flat(document, name)["bytes"]["intra"] / tokens for name, tokens in (("prefill", 4096), ("decode", 64))
    }
    assert sizes["decode"] > 1.9 * sizes["prefill"]


def _flat(document: Any, phase: str) -> Any:
    return next(c for c in document["phases"][phase]["exchanges"]["candidates"] if c["combine"] == "reduced")


def test_stages_of_a_pipeline_take_their_part_of_the_trace(tmp_path: Path) -> None:
    """Layers 1, 2 and 4, 5 route: the first stage's stay on one rank, the second's go to both."""
    layers = "layers 0, 3 { grouped swiglu(64) } layers 1..2, 4..5 { grouped moe(ranked, routed) }"
    ids = np.concatenate([one_sided(2, 100), random_ids(2, 100, 4, 8)])
    trace = written(tmp_path / "t.npz", ids, 8)
    document = compile(source(tmp_path, pp=2, layers=layers), trace=trace).document
    found = chosen(document)
    assert found["prefill, stage 0"] == ("flat", "reduced")
    assert found["prefill, stage 1"] == ("gather", "reduced")
    tables = [document["phases"][f"prefill, stage {stage}"]["exchanges"] for stage in range(2)]
    assert [table["chosen"]["exchange"] for table in tables] == ["flat", "gather"]


def test_overlap_is_planned_over_the_trace(tmp_path: Path) -> None:
    """The times that the plan compares are those of its traced programs."""
    file, trace = source(tmp_path), written(tmp_path / "t.npz", one_sided(2), 8)
    plain, traced = (compile(file, trace=t).document["phases"]["prefill"] for t in (None, trace))
    assert traced["exchanges"]["overlap"]["off_us"] < plain["exchanges"]["overlap"]["off_us"]
    assert traced["us"]["sparse"] < plain["us"]["sparse"]


def test_the_programs_themselves_say_nothing_of_the_trace(tmp_path: Path) -> None:
    """An exchange that is written out is the same program with a trace and without."""
    file, trace = source(tmp_path, decode="two_hop"), written(tmp_path / "t.npz", one_sided(2), 8)
    plan, checked = checked_plan(file)
    traced = compile_phase(plan, "decode", checked.name, trace=routing_of(plan, trace))
    assert traced.routing is not None
    assert traced == compile_phase(plan, "decode", checked.name)


# --- what is said ---------------------------------------------------------------------------------------------------


def test_the_plan_says_which_trace_and_explain_prints_it(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    file, trace = source(tmp_path), written(tmp_path / "kept" / "t.npz", one_sided(2), 8)
    assert call("compile", file, "-o", tmp_path / "made", "--trace", trace)[0] == 0
    text = (tmp_path / "made" / "plan.json").read_text()
    assert str(tmp_path) not in text
    told = json.loads(text)["trace"]
    assert (told["file"], told["tokens"]) == ("t.npz", {"prefill": 0, "decode": 64})
    code, out, _ = call("explain", tmp_path / "made")
    line = next(line for line in out.splitlines() if line.startswith("routing"))
    counted = "64 tokens in decode; none in prefill, which is costed with the same ones"
    assert (code, line) == (0, f"routing     as traced in t.npz (sha256 {told['sha256'][:16]}): {counted}")
    moved = shutil.copy(trace, tmp_path / "t.npz")
    assert compile(file, trace=Path(moved)).document == compile(file, trace=trace).document


@pytest.mark.parametrize(
    ("prefill", "decode", "said"),
    [
        (1, 1200, "1 token in prefill and 1,200 tokens in decode"),
        (2, 0, "2 tokens in prefill; none in decode, which is costed with the same ones"),
        (0, 1, "1 token in decode; none in prefill, which is costed with the same ones"),
    ],
)
def test_explain_counts_the_tokens_that_each_phase_has_of_its_own(
    prefill: int, decode: int, said: str, tmp_path: Path
) -> None:
    ids, phase = one_sided(2, prefill + decode), np.repeat(np.array([0, 1], np.uint8), [prefill, decode])
    document = compile(source(tmp_path), trace=written(tmp_path / "t.npz", ids, 8, phase=phase)).document
    line = next(line for line in explain_plan(dict(document)).splitlines() if line.startswith("routing"))
    assert line.endswith(f"): {said}")


def test_without_a_trace_nothing_is_said(tmp_path: Path) -> None:
    file = source(tmp_path)
    assert compile(file).document["trace"] is None
    call("compile", file, "-o", tmp_path / "made")
    assert "routing  " not in call("explain", tmp_path / "made")[1]


def test_programs_printed_after_a_pass_are_those_of_the_trace(tmp_path: Path) -> None:
    file, trace = source(tmp_path), written(tmp_path / "t.npz", one_sided(2), 8)
    options = ("--stop-after", "choose-exchange")
    assert "exchange=gather" in call("compile", file, *options)[1]
    assert "exchange=flat" in call("compile", file, *options, "--trace", trace)[1].partition("program decode")[0]


# --- what does not fit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        (random_ids(3, 9, 4, 8), "it has 3 sparse layers, the model 2"),
        (random_ids(2, 9, 3, 8), "it has 3 experts per token, layer 1 of the model 4"),
        (random_ids(2, 9, 4, 4) + 5, "it has expert 8 in layer 1, whose experts are 0..7"),
    ],
)
def test_a_trace_of_another_model_is_refused(ids: Array, reason: str, tmp_path: Path) -> None:
    layers = "layers 0 { grouped swiglu(64) } layers 1..2 { grouped moe(ranked, routed) }"
    file, trace = source(tmp_path, layers=layers), written(tmp_path / "t.npz", ids, 16)
    code, out, err = call("compile", file, "--trace", trace, "-o", tmp_path / "made")
    assert (code, out) == (3, "")
    assert err.startswith(f"moec: error[E0781]: the trace `{trace}` does not fit `toy`: {reason}; ")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("number", [7, 9, 64])
def test_a_trace_of_a_model_with_another_number_of_experts_is_refused(number: int, tmp_path: Path) -> None:
    """Though all its ids are experts here: by `compile`, by `moec cache`, and where a cache learns from it."""
    ids = random_ids(2, 9, 4, 7)
    file, trace = source(tmp_path), written(tmp_path / "t.npz", ids, number)
    reason = f"it is of a model with {number} experts, this one has 8"
    for command in (("compile", file, "--trace", trace), ("cache", trace, "--model", file)):
        code, _, err = call(*command)
        assert code == 3 and f"error[E0781]: the trace `{trace}` does not fit `toy`: {reason}; " in err
    code, _, err = call("cache", written(tmp_path / "own.npz", ids, 8), "--model", file, "--learn", trace)
    assert code == 3 and f"has 2 layers of {number} experts, the one measured 2 layers of 8 experts" in err


def test_a_trace_that_does_not_give_its_number_of_experts_fits_by_its_ids(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", expert_ids=one_sided(2)[:, :1], seq_lengths=np.array([1]))
    assert compile(source(tmp_path), trace=tmp_path / "t.npz").document["trace"]["tokens"]["decode"] == 1


@pytest.mark.parametrize("code", ["E0780", "E0781"])
def test_pages_show_the_error_as_printed(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "specs" / "errors" / f"{code}.md").read_text()
    command, shown = (line.strip() for line in page.splitlines() if line.startswith("    "))
    monkeypatch.chdir(tmp_path)
    for name in ("tiny.moe", "config.json"):
        shutil.copy(ROOT / "examples" / "tiny" / name, tmp_path)
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04")
    written(Path("law.npz"), random_ids(26, 4, 6, 64), 64)
    assert call(*command.split()[2:]) == (3, "", f"{shown}\n")


# --- a recorded trace -----------------------------------------------------------------------------------------------


def test_a_recorded_trace_is_counted_rank_by_rank(tmp_path: Path, shared: Path) -> None:
    """26 layers of 64 experts on 8 ranks, 6 chosen: the busiest receiver's rows, against a count made here."""
    trace = shared / "data" / "traces" / "deepseek-v2-lite" / "law.npz"
    layers = "layers 0 { grouped swiglu(64) } layers 1..26 { grouped moe(ranked, routed) }"
    file = source(tmp_path, ep=8, top=6, experts=64, layers=layers)
    plain, traced = (compile(file, trace=t).document for t in (None, trace))
    ranks = read_trace(trace).expert_ids.reshape(-1, 6) // 8
    touched = [float((ranks == rank).any(axis=1).mean()) for rank in range(8)]
    random = 1 - math.comb(56, 6) / math.comb(64, 6)
    ratio = _flat(traced, "prefill")["bytes"]["intra"] / _flat(plain, "prefill")["bytes"]["intra"]
    assert ratio == pytest.approx(max(touched) / random, rel=1e-3)
    assert max(touched) > 1.03 * random
