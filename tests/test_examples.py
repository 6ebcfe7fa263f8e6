"""Every shipped `.moe` file is formatted and compiles for each of its plans; the tiny model says what it should."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moec.compiler import compile
from moec.diagnostics import SourceFile
from moec.explain.page import explain_plan
from moec.grammar.ast import Plan
from moec.grammar.formatter import format_text
from moec.grammar.parser import parse
from moec.importer.folder import import_model
from moec.specs import read, shipped

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").rglob("*.moe"))
SHIPPED = sorted((ROOT / "specs").rglob("*.moe"))

#: What a reader can hold against the vendors' model cards: total parameters by example.
PARAMETERS = {"deepseek_v3_pod": 671_026_404_352, "mixtral_dgx": 46_702_792_704, "tiny": 4_190_048}


def plans(path: Path) -> list[str]:
    """Names of the plans a file declares; an empty one for a file whose model is compiled without a plan."""
    tree = parse(SourceFile(path.name, path.read_text()))
    found = [node.name.id for node in tree.declarations if isinstance(node, Plan)]
    return found or [""]


CASES = [(path, plan) for path in EXAMPLES for plan in plans(path)]


def test_there_is_something_to_read() -> None:
    lengths = {path.stem: len(path.read_text().splitlines()) for path in EXAMPLES}
    assert min(lengths.values()) <= 15 and max(lengths.values()) >= 50 and len(lengths) >= 5


@pytest.mark.parametrize("path", EXAMPLES + SHIPPED, ids=lambda path: path.stem)
def test_is_formatted(path: Path) -> None:
    assert format_text(path.read_text(), path.name) == path.read_text()


@pytest.mark.parametrize(("path", "plan"), CASES, ids=lambda value: value.stem if isinstance(value, Path) else value)
def test_compiles(path: Path, plan: str) -> None:
    artifact = compile(path, plan=plan or None)
    total = artifact.document["parameters"]["total"]
    assert total == PARAMETERS.get(path.stem, total)
    ranks = "1 rank on" if artifact.num_ranks == 1 else f"{artifact.num_ranks} ranks on"
    assert ranks in explain_plan(artifact.document)


@pytest.mark.parametrize("cluster", shipped("clusters", ".moe"))
def test_every_shipped_cluster_carries_a_plan(cluster: str, tmp_path: Path) -> None:
    """Found by its name, it fits a model on two of its nodes and gives every exchange a time."""
    found = re.search(r"devices *= *(\d+)", read("clusters", f"{cluster}.moe"))
    nodes, ranks = (2, 2 * int(found[1])) if found else (1, 2)
    path = tmp_path / "on_cluster.moe"
    path.write_text(
        f"use cluster {cluster}\nuse model qwen3_30b_a3b\nmesh all on {cluster}[{nodes}] {{ experts = ep({ranks}) }}\n"
        "plan p { run qwen3_30b_a3b on all  prefill { tokens = 64 }  decode { batch = 1 } }\n"
    )
    document = compile(path).document
    assert (document["cluster"]["name"], document["mesh"]["ranks"]) == (cluster, ranks)
    times = [item["us"] for phase in document["phases"].values() for item in phase["traffic"]]
    assert times and all(us is not None and us > 0 for us in times)


@pytest.mark.parametrize("model", shipped("models", ".moe"))
def test_every_shipped_model_compiles(model: str, tmp_path: Path) -> None:
    path = tmp_path / "one_rank.moe"
    path.write_text(f"use model {model}\n")
    assert compile(path).document["model"]["name"] == model


def test_plans_of_one_file_differ() -> None:
    path = ROOT / "examples" / "two_plans.moe"
    wide, deep = (compile(path, plan=plan).document for plan in ("wide", "deep"))
    assert wide["parameters"] == deep["parameters"]
    links = [{t["link"] for t in document["phases"]["prefill"]["traffic"]} for document in (wide, deep)]
    assert links == [{"inter"}, {"intra"}]  # as the comments of the file say


def test_tiny_is_what_import_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # a relative model folder is written relative to the file
    path = Path("examples/tiny/tiny.moe")
    assert import_model(path.parent, mesh="ep=2", output=path) == path.read_text()


@pytest.mark.parametrize("mesh", ["as written", "mesh.experts=ep(2)*etp(2)"])
def test_tiny_generates_what_transformers_does(mesh: str) -> None:
    expected = json.loads((ROOT / "examples" / "tiny" / "expected.json").read_text())
    command = [sys.executable, "-m", "moec", "run", "examples/tiny/tiny.moe", "--prompt", expected["prompt"]]
    command += ["--dtype", "fp32", "--max-new-tokens", str(len(expected["continuation"])), "--json"]
    command += [] if mesh == "as written" else ["--set", mesh, "--set", "mesh.attention=dp(2)*tp(2)"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"] == [expected["continuation"]]
