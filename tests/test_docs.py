"""What README, CONTRIBUTING and docs/ say is so: files, programs, error codes, and the size of things."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import fx
from typer.main import get_command

from moec.cli.app import app
from moec.compiler import checked_plan, compile_phase
from moec.diagnostics import CompileError
from moec.ir.program import Program, is_op, op_of
from moec.ir.text import print_program
from moec.ir.verifier.program import verify

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("moec", "grammar", "passes", "codegen", "specs")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "specs" / "families").glob("*.md")])
MAX_LINES, MAX_BODY_LINES = 300, 40


def blocks(page: Path, language: str) -> list[str]:
    """Fenced blocks of a language, without their fences."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.M | re.S)


#: Names that CONTRIBUTING gives to what a reader will add.
IMAGINED = re.compile(r"drop.nothing|E0299|[{}<>]|\b[A-Z]{4,}\b(?!\.md)")


def named_paths(page: Path) -> Iterator[str]:
    """Paths of this repository in back quotes or links: those that start with an entry of its top folder."""
    top = {entry.name for entry in ROOT.iterdir()}
    for quoted, linked in re.findall(r"`([^`\s]+)`|\]\(([^)#\s]+)", page.read_text()):
        path = (quoted or linked).rstrip("/")
        if path.split("/")[0] in top and ("/" in path or "." in path) and not IMAGINED.search(path):
            yield path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    missing = [path for path in named_paths(page) if not any(ROOT.glob(path))]
    assert not missing


def test_pages_are_searched() -> None:
    """The pattern of the test above finds paths where they are known to be."""
    assert "moec/compiler.py" in set(named_paths(ROOT / "README.md"))


def program(case: str) -> Program:
    """The program that `FILE PLAN PHASE PASS` describes: compiled as far as the pass."""
    file, plan, phase, last = case.split()
    checked, source = checked_plan(ROOT / file, plan)
    return compile_phase(checked, phase, source.name, stop_after=last)


@pytest.mark.parametrize(("page", "count"), [("docs/layout.md", 4), ("docs/prefetch.md", 2), ("README.md", 2)])
def test_shown_programs_are_real(page: str, count: int) -> None:
    shown = blocks(ROOT / page, "ir")
    assert len(shown) == count
    for block in shown:
        head, *lines = block.splitlines()
        text = print_program(program(head.removeprefix("// ")))
        missing = [line for line in lines if line != "..." and line not in text.splitlines()]
        assert not missing, head


def test_layout_page_shows_a_real_refusal() -> None:
    """The page's program without its all_reduce is refused with the page's words."""
    (wanted,) = blocks(ROOT / "docs" / "layout.md", "error")
    wrong = program("examples/two_plans.moe deep prefill shard-attention")
    graph = wrong.bodies["sparse"].graph
    reduce = next(node for node in graph.nodes if is_op(node) and op_of(node).name == "all_reduce")
    assert isinstance(reduce.args[0], fx.Node)
    reduce.replace_all_uses_with(reduce.args[0])
    graph.erase_node(reduce)
    with pytest.raises(CompileError) as caught:
        verify(wrong)
    assert wanted.strip() in caught.value.diagnostics[0].message


def test_readme_shows_its_example_whole() -> None:
    (shown,) = blocks(ROOT / "README.md", "moe")
    assert shown == (ROOT / "examples" / "mixtral_dgx.moe").read_text()
    assert len(shown.splitlines()) == 20


def test_readme_python_runs(tmp_path: Path) -> None:
    (shown,) = blocks(ROOT / "README.md", "python")
    shutil.copytree(ROOT / "examples" / "tiny", tmp_path / "examples" / "tiny")
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", shown], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\[\[\d+(, \d+){7}\]\]\n", done.stdout)


def test_readme_commands_exist() -> None:
    """Every subcommand and option that README shows is known to the command line."""
    lines = [line for block in blocks(ROOT / "README.md", "sh") for line in block.splitlines()]
    calls = [found[1].split() for line in lines if (found := re.search(r"\bmoec ((?:[a-z]+ ).*?)(?:  #|$)", line))]
    assert len(calls) >= 8
    for name, *arguments in calls:
        command = get_command(app).commands[name]  # type: ignore[attr-defined]
        known = {option for parameter in command.params for option in parameter.opts}
        assert {a for a in arguments if a.startswith("-")} <= known, name


def raised_codes() -> set[str]:
    """Every code in the source, but for the table of exit codes."""
    files = [file for folder in SOURCES for file in (ROOT / folder).rglob("*.py") if file.name != "diagnostics.py"]
    strings = {
        node.value
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return {value for value in strings if re.fullmatch(r"E0\d{3}", value)}


def test_every_error_code_has_a_page_and_every_page_a_code() -> None:
    pages = {page.stem: page.read_text() for page in (ROOT / "specs" / "errors").glob("E*.md")}
    assert raised_codes() == set(pages)
    assert [code for code, text in pages.items() if not text.startswith(f"# {code}: ")] == []


def test_every_error_code_has_a_test() -> None:
    tests = {file for file in (ROOT / "tests").rglob("*") if file.is_file() and file.suffix in (".py", ".txt", ".ir")}
    text = "\n".join(f"{file.name}\n{file.read_text()}" for file in tests)
    assert raised_codes() - set(re.findall(r"E0\d{3}", text)) == set()


def test_files_and_functions_are_of_a_size_to_be_read_at_once() -> None:
    files = [file for folder in SOURCES for file in (ROOT / folder).rglob("*.py")]
    assert {file.name: n for file in files if (n := len(file.read_text().splitlines())) > MAX_LINES} == {}
    functions = {
        f"{file.name}:{node.name}": node.end_lineno - node.body[0].lineno + 1  # without a long list of options
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None
    }
    assert {name: lines for name, lines in functions.items() if lines > MAX_BODY_LINES} == {}


def test_nothing_but_the_word_law_names() -> None:
    """No utils, helpers, common, manager: a name says what is in it."""
    parts = {part for folder in SOURCES for file in (ROOT / folder).rglob("*.py") for part in file.stem.split("_")}
    assert not parts & {"util", "utils", "helper", "helpers", "common", "manager", "misc"}
