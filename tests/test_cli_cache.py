"""`moec cache`: the table, JSON, the plot, what a model adds, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from moec.cli.app import app
from tests.traces import random_ids, written

IDS = random_ids(2, 40, 2, 8)
FILE = """
cluster desk {
  devices = 2
  memory_rate = 100 GB/s
  compute = peak(bf16 = 1 TFLOP/s)
  host = link(10 GB/s, latency = 5 us)
}
model toy {
  hidden = 64
  vocab = 100
  norm = rms(eps = 1e-6)
  dtype = bf16
  attention grouped = gqa(heads = 4, kv_heads = 4, head_dim = 16)
  router ranked { score = softmax  top = 2 }
  experts routed = 8 * swiglu(32)
  layers 0 { grouped swiglu(64) }
  layers 1..2 { grouped moe(ranked, routed) }
}
mesh alone on desk[1] { attention = dp(1) * tp(2)  experts = etp(2) }
mesh spread on desk[1] { attention = dp(2)  experts = ep(2) }
cache few {
  hbm = slots(3)
  host = tier()
  evict = trace("other.npz")
  prefetch = history("other.npz", ahead = 1)
  pin = [7]
}
plan plain { run toy on alone }
plan cached { run toy on alone with few }
plan wide { run toy on spread with few }
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    (tmp_path / "toy.moe").write_text(FILE)
    written(tmp_path / "other.npz", random_ids(2, 30, 2, 8, seed=1), 8)
    return written(tmp_path / "t.npz", IDS, 8, seq_lengths=np.array([25, 15]))


def call(*args: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["cache", *map(str, args)])
    return result.exit_code, result.stdout, result.stderr


def found(*args: str | Path) -> dict[str, Any]:
    """The JSON of a command that ends well."""
    code, out, err = call(*args, "--json")
    assert (code, err) == (0, "")
    document: dict[str, Any] = json.loads(out)
    return document


def planned(trace: Path, plan: str, *args: str) -> dict[str, Any]:
    return found(trace, "--model", trace.parent / "toy.moe", "--plan", plan, *args)


# --- without a model ------------------------------------------------------------------------------------------------


def test_the_table_has_a_block_for_each_size(trace: Path) -> None:
    code, out, err = call(trace, "--slots", "50%,2,4")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "t.npz: 40 tokens in 40 steps, 2 layers of 8 experts, 2 per token"
    assert lines[1:3] == [
        "trace and history learned from this trace, in hindsight",
        "no times: `--model FILE` gives sizes and rates",
    ]
    blocks = [line for line in lines if "experts of a layer in slots" in line]
    assert blocks == ["2 of 8 experts of a layer in slots (25.0%)", "4 of 8 experts of a layer in slots (50.0%)"]
    names = [line.split()[:2] for line in lines[6 : lines.index("", 5)]]
    assert names[:3] == [["lru", "none"], ["lru", "history"], ["layer_lru", "none"]]
    assert names[-3:-1] == [["belady", "none"], ["belady_rank", "none"]] and names[-1][0] == "floor"


def test_the_table_says_what_json_says(trace: Path) -> None:
    """Per token: demanded, fetched and copied, the last in experts where their size is not known."""
    document = found(trace, "--slots", "3")
    row = next(r for r in document["rows"] if (r["policy"], r["prefetch"]) == ("lfu", "history"))
    shown = next(line for line in call(trace, "--slots", "3")[1].splitlines() if line.split()[:2] == ["lfu", "history"])
    counts = [row[name] / 40 for name in ("demanded", "fetched", "transfers")]
    wanted = [f"{row['hit_rate']:.3f}", f"{row['gap_closed']:.1%}", f"{counts[0]:.2f}", f"{counts[1]:.2f}"]
    assert shown.split()[2:] == [*wanted, f"{row['useless'] / row['fetched']:.1%}", f"{counts[2]:.2f}"]


def test_json_has_hit_rates_by_layer_and_no_times(trace: Path) -> None:
    document = found(trace, "--slots", "3")
    assert (document["layers"], document["experts"], document["experts_per_token"]) == (2, 8, 2)
    assert document["expert_bytes"] is None and document["resident"] == {"ttft_s": None, "token_s": None}
    for row in document["rows"]:
        assert row["lookups"] == row["hits"] + row["demanded"] == 160
        assert row["hit_rate"] == pytest.approx(np.mean(row["hit_rate_by_layer"]))
        assert row["moved_bytes"] is row["token_s"] is None and row["share"] == 3 / 8
    by_name = {r["policy"]: r for r in document["rows"] if r["prefetch"] == "none"}
    assert (by_name["layer_lru"]["gap_closed"], by_name["belady"]["gap_closed"]) == (0, 1)
    assert document["floors"][0]["transfers"] == 16


def test_sizes_are_an_eighth_a_quarter_and_half_by_default(trace: Path) -> None:
    assert sorted({row["slots"] for row in found(trace)["rows"]}) == [1, 2, 4]


def test_guesses_of_the_trace_are_measured_too(tmp_path: Path) -> None:
    trace = written(tmp_path / "t.npz", IDS, 8, predicted_ids=IDS)
    rows = found(trace, "--slots", "4")["rows"]
    ahead = next(r for r in rows if (r["policy"], r["prefetch"]) == ("layer_lru", "next_router"))
    assert ahead["hit_rate_by_layer"][1] == 1.0  # nobody guesses for the first layer


# --- with a model ---------------------------------------------------------------------------------------------------


def test_a_plan_adds_bytes_and_times(trace: Path) -> None:
    """etp = 2: an expert has 3 x 64 x 16 weights on a rank, and takes 5 us and a 10 GB/s link to come."""
    document = planned(trace, "plain", "--slots", "4")
    assert document["expert_bytes"] == [3 * 64 * 16 * 2] * 2 and document["untimed"] is None
    resident = document["resident"]["token_s"]
    dense = 4 * 64 * 64 // 2 + 2 * 64 // 2
    router, mlp, head = 8 * 64, 3 * 64 * 64 // 2, 64 * 100 // 2
    weights = 2 * (dense + router + 2 * 3 * 64 * 16) + dense + mlp + head
    assert resident == pytest.approx(weights * 2 / 100e9)
    for row in document["rows"]:
        assert row["moved_bytes"] == row["transfers"] * 3 * 64 * 16 * 2
        assert row["token_s"] >= row["transfers"] / 40 * (5e-6 + 6144 / 10e9)
    assert "MiB   TTFT ms  ms/token" in call(trace, "--model", trace.parent / "toy.moe", "--plan", "plain")[1]


def test_the_cache_of_a_plan_gives_size_pins_and_what_is_learned_from(trace: Path) -> None:
    document = planned(trace, "cached")
    assert {row["slots"] for row in document["rows"]} == {3}
    assert document["learned_from"] == "other.npz"
    uses = int((IDS == 7).sum())
    assert all(row["hits"] >= uses for row in document["rows"])
    assert {row["slots"] for row in planned(trace, "cached", "--slots", "50%")["rows"]} == {4}


def test_ranks_of_an_expert_group_hold_their_part(trace: Path) -> None:
    document = planned(trace, "wide", "--slots", "100%")
    assert document["ranks"] == 2
    assert {(row["slots"], row["share"]) for row in document["rows"]} == {(4, 1.0)}
    lru = next(row for row in document["rows"] if (row["policy"], row["prefetch"]) == ("lru", "none"))
    assert lru["lookups"] == 160 and lru["demanded"] == 16 - 2  # all but the two that are pinned


def test_learning_from_a_named_trace(trace: Path) -> None:
    other = trace.parent / "other.npz"
    document = found(trace, "--slots", "3", "--learn", other)
    assert document["learned_from"] == "other.npz"
    changed = [a != b for a, b in zip(document["rows"], found(trace, "--slots", "3")["rows"], strict=True)]
    taught = [row["policy"] == "trace" or row["prefetch"] == "history" for row in document["rows"]]
    assert changed == taught


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("  memory_rate = 100 GB/s\n", "", "cluster `desk` gives no `memory_rate`"),
        ("  host = link(10 GB/s, latency = 5 us)\n", "", "gives a rate for `host`"),
        ("host = tier()", 'host = tier(1 KiB per rank)  nvme = "x"', "gives a rate for `nvme`"),
    ],
)
def test_times_are_left_out_where_a_rate_is_missing(old: str, new: str, words: str, trace: Path) -> None:
    file = trace.parent / "toy.moe"
    assert FILE.count(old) == 1
    file.write_text(FILE.replace(old, new))
    document = planned(trace, "cached")
    assert words in document["untimed"] and document["resident"]["token_s"] is None
    assert document["rows"][0]["moved_bytes"] > 0


def test_what_host_memory_has_no_room_for_comes_from_nvme(trace: Path) -> None:
    """Half of the experts at 1 GB/s, beside the others at 10 GB/s: the slower half counts."""
    file, size = trace.parent / "toy.moe", 3 * 64 * 16 * 2
    assert 8 * size == 48 * 1024  # four of the eight in each of two layers
    text = FILE.replace(
        "host = tier()", 'host = tier(48 KiB per rank)  nvme = tier("x", bandwidth = 1 GB/s, latency = 1 us)'
    )
    file.write_text(text)
    slow = planned(trace, "cached")["rows"][0]
    assert slow["token_s"] >= slow["transfers"] / 40 * 0.5 * size / 1e9


# --- the plot -------------------------------------------------------------------------------------------------------


def test_the_plot_is_the_same_each_time(trace: Path) -> None:
    first, again, png = (trace.parent / name for name in ("a.svg", "b.svg", "c.png"))
    for path in (first, again, png):
        assert call(trace, "--slots", "2,4", "--plot", path)[0] == 0
    text = first.read_text()
    assert text == again.read_text()
    for word in ("layer_lru, history", "belady", "experts copied per token", "t.npz: 40 tokens"):
        assert word in text
    assert png.read_bytes().startswith(b"\x89PNG")
    model = ("--model", trace.parent / "toy.moe", "--plan", "plain")
    call(trace, "--slots", "2,4", "--plot", first, *model)
    assert "predicted ms per token" in first.read_text()


def test_without_matplotlib_the_way_to_it_is_shown(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = (Path(__file__).resolve().parent.parent / "specs" / "errors" / "E0782.md").read_text()
    code, out, err = call(trace, "--plot", trace.parent / "law.svg")
    assert (code, out) == (4, "")
    assert err.strip() in page
    assert not (trace.parent / "law.svg").exists()


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--slots", "0"], 2, "--slots 0: a rank has 8 experts of a layer, 1 to 8 slots work"),
        (["--slots", "9"], 2, "--slots 9: a rank has 8 experts"),
        (["--slots", "inf%"], 2, "--slots inf%: a rank has 8"),
        (["--slots", "some"], 2, "--slots some: give numbers such as 8, or shares such as 25%"),
        (["--slots", "4,,8"], 2, "--slots : give numbers"),
        (["--plot", "x.pdf"], 2, "--plot x.pdf: its name must end in .svg or .png"),
        (["--plot", "absent/x.svg"], 4, "E0618"),
        (["--model", "absent.moe"], 2, "absent.moe"),
        (["--learn", "absent.npz"], 2, "error[E0783]: there is no trace `absent.npz`"),
    ],
)
def test_bad_options_are_named(args: list[str], code: int, words: str, trace: Path) -> None:
    found, out, err = call(trace, *args)
    assert (found, out) == (code, "")
    assert words in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err


def test_a_trace_of_another_model_is_refused(trace: Path) -> None:
    other = written(trace.parent / "deep.npz", random_ids(3, 10, 2, 8), 8)
    code, _, err = call(other, "--model", trace.parent / "toy.moe", "--plan", "plain")
    assert code == 3
    assert f"error[E0781]: the trace `{other}` does not fit `toy`: it has 3 sparse layers, the model 2" in err
    code, _, err = call(trace, "--learn", other)
    assert code == 3
    assert f"error[E0781]: the trace `{other}` has 3 layers of 8 experts, the one measured 2 layers of 8 experts" in err
    assert "E0780" in call(trace.parent / "toy.moe")[2]


def test_slots_that_pins_leave_no_room_in_are_refused(trace: Path) -> None:
    file = trace.parent / "toy.moe"
    file.write_text(FILE.replace("pin = [7]", "pin = [5, 6, 7]"))
    code, _, err = call(trace, "--model", file, "--plan", "cached")
    assert code == 2 and "--slots 3: a rank has 8 experts of a layer, 4 to 8 slots work" in " ".join(err.split())


def test_torch_is_never_imported(trace: Path) -> None:
    program = "import sys; from moec.cli.app import app\ntry: app(sys.argv[1:])\nexcept SystemExit: pass\n"
    program += "print(sorted({'torch', 'triton', 'transformers'} & set(sys.modules)), file=sys.stderr)"
    args = ["cache", trace, "--model", trace.parent / "toy.moe", "--plan", "wide", "--plot", trace.parent / "a.svg"]
    done = subprocess.run([sys.executable, "-c", program, *map(str, args)], capture_output=True, text=True)
    assert done.stderr == "[]\n" and "belady" in done.stdout
