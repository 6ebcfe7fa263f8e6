"""What `moec explain` says of what it cannot explain, of traces, and of how times differ."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moec.cli.app import app
from moec.compiler import compile
from moec.explain.exchange import _best_by
from moec.explain.page import explain_plan
from tests.conftest import ROOT

EXAMPLE = ROOT / "examples" / "tiny"


def refused(what: str) -> str:
    """The one line that `moec explain` ends in."""
    result = CliRunner().invoke(app, ["explain", what])
    assert (result.exit_code, result.stdout) == (2, "")
    line = result.stderr.removesuffix("\n")
    assert line.startswith("moec: error[E0680]: ") and "\n" not in line
    return line.removeprefix("moec: error[E0680]: ")


# --- what cannot be explained -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nothere.build", "build", "some/where", "nothere.moe"])
def test_a_folder_that_is_not_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    help = "`moec compile FILE.moe -o DIR` writes one; error codes look like E0203"
    assert refused(name) == f"there is no folder `{name}`; {help}"


def test_a_source_file_is_to_be_compiled_first(tmp_path: Path) -> None:
    file = str(shutil.copy(EXAMPLE / "tiny.moe", tmp_path))
    help = f"compile it first: moec compile {file} -o DIR"
    assert refused(file) == f"`{file}` is a source file, not a compiled folder; {help}"


def test_another_file_is_no_folder() -> None:
    file = str(EXAMPLE / "config.json")
    assert refused(file).startswith(f"`{file}` is no compiled folder; give the folder that `moec compile FILE.moe -o")


@pytest.mark.parametrize(
    ("code", "help"),
    [("E9999", "did you mean `E0699`?"), ("EO203", "did you mean `E0203`?"), ("123456", "codes look like E0203")],
)
def test_what_looks_like_a_code_is_taken_for_one(code: str, help: str) -> None:
    assert refused(code) == f"there is no error code `{code}`; {help}"


def test_the_page_shows_the_error_as_printed() -> None:
    page = (ROOT / "specs" / "errors" / "E0680.md").read_text()
    command, shown = (line.strip() for line in page.splitlines() if line.startswith("    "))
    assert shown == f"moec: error[E0680]: {refused(command.split()[-1])}"


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ({"ranks.attention": "dp(1)", "ranks.experts": "ep(1)"}, "in the products of the routed ones"),
        ({}, "by themselves: the routed ones compute other rows"),
    ],
)
def test_where_shared_experts_run_and_why(mesh: dict[str, str], said: str) -> None:
    """For each phase; nothing is said where the kernels are others."""
    overrides = [f"{key}={value}" for key, value in mesh.items()]
    lines, others = (
        explain_plan(compile(EXAMPLE / "tiny.moe", overrides=overrides, kernels=kernels).document).splitlines()
        for kernels in ("triton", "torch")
    )
    assert [line for line in lines if "shared experts" in line] == [f"    shared experts {said}"] * 2
    assert not any("shared experts" in line for line in others)


def test_import_names_every_degree() -> None:
    shown = " ".join(CliRunner().invoke(app, ["import", "--help"]).stdout.split())
    assert "dp, tp, edp, ep, etp, pp" in shown


# --- by how much an exchange is better ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "theirs", "said"),
    [
        ((20, 10, 5), (4, 9.5, 5), "0.53 of its time, 16.5 us less, most of it (16.0 us) for the latency of messages"),
        ((20, 10, 5), (4, 10, 5), "0.54 of its time, 16.0 us less, all of it for the latency of messages"),
        (
            (20, 10, 5),
            (4, 11, 5),
            "0.57 of its time, 15.0 us less: 16.0 us less for the latency of messages, 1.0 us m",
        ),
        (
            (20, 10, 5),
            (40, 10, 4),
            "1.54 times as long, 19.0 us more: 20.0 us more for the latency of messages, 1.0",
        ),
        ((20, 10, 5), (24, 13, 8), "1.29 times as long, 10.0 us more, the largest part of it (4.0 us) for the latency"),
    ],
)
def test_the_difference_and_its_largest_part(mine: tuple[float, ...], theirs: tuple[float, ...], said: str) -> None:
    chosen, other = (
        {
            "exchange": name,
            "combine": "reduced",
            "us": float(sum(spent)),
            "terms": dict(zip(("latency", "intra", "memory"), spent, strict=True)),
        }
        for name, spent in (("gather", mine), ("padded", theirs))
    )
    assert _best_by(chosen, other).startswith(f": padded, the best other, would take {said}")
