"""The commands: what they print, how they end, and what they never do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from moec.cli.app import app
from tests.commands import moec

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "tiny"
COMMANDS = ("import", "check", "fmt", "compile", "run", "explain", "kernels", "cache", "calibrate", "passes")
EXPECTED = json.loads((EXAMPLE / "expected.json").read_text())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "MOEC_DEBUG", "MOEC_FAULT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


def call(*args: str | Path) -> tuple[int, str, str]:
    """A command in this process (none of those that start ranks)."""
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    return result.exit_code, result.stdout, result.stderr


# --- help and usage -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example_and_exit_codes(name: str) -> None:
    code, out, _ = call(name, "--help")
    assert code == 0
    assert f"Example: moec {name}" in out
    assert "5 a rank failed or the world size does not fit" in out


def test_the_commands_are_those_of_the_design() -> None:
    code, out, _ = call("--help")
    listed = re.findall(r"^  ([a-z]+)  ", out.partition("Commands:")[2], re.MULTILINE)
    assert (code, tuple(listed)) == (0, COMMANDS)
    assert call("--version")[1].startswith("moec ")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["chekc"], "No such command 'chekc'"),
        (["check"], "Missing argument"),
        (["run", "x.moe", "--retrace", "t"], "No such option"),
        (["run", "x.moe"], "give --prompt TEXT, --tokens 1,2,3 or --prompts FILE"),
        (["run", "x.moe", "--tokens", "1", "--dtype", "fp8"], "'fp8' is not one of 'fp32', 'bf16'"),
        (["run", "x.moe", "--tokens", "1", "--max-new-tokens", "-1"], "Invalid value for '--max-new-tokens'"),
    ],
)
def test_wrong_usage_ends_with_2(args: list[str], words: str) -> None:
    code, _, err = call(*args)
    assert code == 2
    assert words in " ".join(err.split())
    assert "Traceback" not in err


def test_no_arguments_show_the_help() -> None:
    code, out, err = call()
    assert code == 2
    assert "Commands:" in out + err


QUICK = """
import sys
from moec.cli.app import app
file, folder, made = sys.argv[1:]
for args in (["--help"], ["run", "--help"], ["check", file], ["fmt", "--check", file], ["explain", "E0203"],
             ["import", folder], ["explain", made]):
    try:
        app(args)
    except SystemExit as end:
        assert end.code in (0, None), args
print(sorted({"torch", "triton", "transformers", "numpy"} & set(sys.modules)), file=sys.stderr)
"""


def test_quick_commands_never_import_torch(tmp_path: Path) -> None:
    assert call("compile", EXAMPLE / "tiny.moe", "-o", tmp_path / "made")[0] == 0
    command = [sys.executable, "-c", QUICK, *map(str, (EXAMPLE / "tiny.moe", EXAMPLE, tmp_path / "made"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "[]\n")


# --- check, fmt, import, explain, passes --------------------------------------------------------------------------


def test_check_says_what_is_declared() -> None:
    file = EXAMPLE / "tiny.moe"
    assert call("check", file) == (0, f"{file}: plan serve runs tiny on 2 ranks\n", "")


def test_check_shows_all_errors_with_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "bad.moe"
    text = (EXAMPLE / "tiny.moe").read_text().replace("top         = 4", "top         = 99")
    file.write_text(text.replace("hidden  = 128", "hidden  = 0"))
    code, out, err = call("check", file)
    assert (code, out) == (1, "")
    assert err.count("error[E0") == 2
    assert f"--> {file}:" in err
    assert "^^" in err


def test_check_deep_counts_the_exchanges_it_proves() -> None:
    file = EXAMPLE / "tiny.moe"
    code, out, err = call("check", "--deep", file, "--set", "plan.exchange=gather")
    assert (code, err) == (0, "")
    proved, runs = out.splitlines()
    assert re.fullmatch(rf"{re.escape(str(file))}: plan serve: [1-9]\d* exchanges proved", proved)
    assert runs == f"{file}: plan serve runs tiny on 2 ranks"


def test_check_counts_the_ranks_of_all_stages() -> None:
    file = EXAMPLE / "tiny.moe"
    assert call("check", file, "--set", "ranks.stages=pp(2)")[1] == f"{file}: plan serve runs tiny on 4 ranks\n"


def test_fmt_checks_and_mends_in_place(tmp_path: Path) -> None:
    file = tmp_path / "a.moe"
    text = (EXAMPLE / "tiny.moe").read_text()
    file.write_text(text.replace("hidden  = 128", "hidden =    128   // kept"))
    assert call("fmt", "--check", file) == (1, "", f"{file}: would be formatted\n")
    assert call("fmt", file) == (0, "", "")
    assert "// kept" in file.read_text()
    assert call("fmt", "--check", file) == (0, "", "")


def test_import_prints_or_writes_the_same_text(tmp_path: Path) -> None:
    code, out, _ = call("import", EXAMPLE, "--mesh", "ep=2")
    assert code == 0
    assert "ep(2)" in out
    assert call("import", EXAMPLE / "config.json", "-o", tmp_path / "m.moe") == (0, "", "")
    assert "model tiny" in (tmp_path / "m.moe").read_text()
    code, _, err = call("import", EXAMPLE, "-o", tmp_path / "absent" / "m.moe")
    assert code == 4
    assert "E0618" in err


def test_explain_knows_codes_and_plans(tmp_path: Path) -> None:
    assert call("explain", "e0601")[1].startswith("# E0601: ")
    code, _, err = call("explain", "E9999")
    assert (code, "E0680" in err) == (2, True)
    call("compile", EXAMPLE / "tiny.moe", "-o", tmp_path / "made")
    code, out, _ = call("explain", tmp_path / "made")
    assert code == 0
    assert "2 ranks on localhost" in out
    code, _, err = call("explain", tmp_path)
    assert code == 3
    assert err.startswith("moec: error[E077")


def test_passes_are_listed_with_what_they_do() -> None:
    code, out, _ = call("passes")
    assert code == 0
    assert re.search(r"^insert-exchange +\S.*\.$", out, re.MULTILINE)


# --- compile ------------------------------------------------------------------------------------------------------


def test_compile_writes_a_folder_and_json_describes_it(tmp_path: Path) -> None:
    code, out, err = call("compile", EXAMPLE / "tiny.moe", "-o", tmp_path / "made", "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert set(document["parameters"]) == {"total", "active", "active_no_input_embed"}
    assert len(document["memory"]) == 2
    assert {"prefill.ir", "decode.ir", "plan.json", "MANIFEST.json"} <= {p.name for p in (tmp_path / "made").iterdir()}


def test_compile_names_the_folder_after_the_file(tmp_path: Path) -> None:
    file = Path(shutil.copy(EXAMPLE / "tiny.moe", tmp_path))
    assert call("compile", file) == (0, "", f"{tmp_path / 'tiny.build'}: plan serve for 2 ranks\n")
    assert (tmp_path / "tiny.build" / "plan.json").is_file()


def test_programs_are_printed_after_a_pass(tmp_path: Path) -> None:
    code, out, _ = call("compile", EXAMPLE / "tiny.moe", "--stop-after", "split-tokens")
    assert code == 0
    assert "all_to_all" not in out
    code, out, _ = call("compile", EXAMPLE / "tiny.moe", "-o", tmp_path / "m", "--print-after", "insert-exchange")
    assert code == 0
    assert out.count("after insert-exchange") == 2
    assert "all_to_all.start" in out
    for option in ("--stop-after", "--print-after"):
        code, _, err = call("compile", EXAMPLE / "tiny.moe", option, "insert-exchagne")
        assert code == 2
        assert "did you mean `insert-exchange`?" in err


# --- how commands fail --------------------------------------------------------------------------------------------


def broken(*_: object, **__: object) -> str:
    raise ZeroDivisionError("a bug\nof ours")


def test_a_bug_is_one_line_and_70(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moec.importer.folder.import_model", broken)
    line = "moec: error[E0699]: internal error: ZeroDivisionError: a bug"
    assert call("import", EXAMPLE) == (70, "", f"{line}; set MOEC_DEBUG=1 for the traceback, and report it\n")
    monkeypatch.setenv("MOEC_DEBUG", "1")
    code, _, err = call("import", EXAMPLE)
    assert code == 70
    assert err.endswith(f"{line}\n")


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("moec.importer.folder.import_model", interrupted)
    assert call("import", EXAMPLE) == (130, "", "moec: error[E0606]: stopped by SIGINT\n")


def test_a_closed_pipe_is_quiet() -> None:
    command = f"set -o pipefail; {sys.executable} -m moec import {EXAMPLE} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, cwd="/")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        ("passes > /dev/full", 4, "E0618"),
        ("passes >&-", 0, ""),
        (f"run {EXAMPLE}/tiny.moe --tokens 1 --max-new-tokens 1 --json > /dev/full", 4, "E0618"),
        (f"run {EXAMPLE}/tiny.moe --prompt $'\\xff'", 3, "E0615"),
        (f"run {EXAMPLE}/tiny.moe --prompts /dev/null", 3, "E0615"),
    ],
)
def test_what_the_shell_hands_over_is_no_bug(words: str, code: int, error: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m moec {words}"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (done.returncode, re.findall(r"error\[(E\d+)\]", done.stderr)) == (code, [error] if error else [])


def test_errors_of_run_are_one_line_even_with_a_source_line(tmp_path: Path) -> None:
    file = tmp_path / "bad.moe"
    file.write_text((EXAMPLE / "tiny.moe").read_text().replace("top         = 4", "top         = 99"))
    done = moec("run", file, "--tokens", "1").wait()
    assert (done.code, done.out, len(done.err.splitlines())) == (1, "", 1)
    assert done.err.startswith("moec: error[E0203]: ")
    assert f"({file}:" in done.err


# --- run ----------------------------------------------------------------------------------------------------------


def run_json(*args: str | Path) -> dict[str, list[object]]:
    done = moec("run", *args, "--json").wait()
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    assert set(found) == {"tokens", "text"}
    return found


def test_run_gives_the_reference_tokens_from_text_and_from_ids() -> None:
    ids = ",".join(map(str, EXPECTED["tokens"]))
    found = run_json(
        EXAMPLE / "tiny.moe", "--prompt", EXPECTED["prompt"], "--tokens", ids, "--dtype", "fp32",
        "--max-new-tokens", str(len(EXPECTED["continuation"])),
    )  # fmt: skip
    assert found["tokens"] == [EXPECTED["continuation"]] * 2
    assert found["text"][0] == found["text"][1] != ""


def test_run_streams_one_prompt_and_lists_several(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "In the beginning"}\n{"tokens": [1, 2]}\n')
    found = run_json(EXAMPLE / "tiny.moe", "--prompts", file, "--max-new-tokens", "6")
    one = moec("run", EXAMPLE / "tiny.moe", "--prompt", "In the beginning", "--max-new-tokens", "6").wait()
    assert (one.code, one.out, one.err) == (0, f"{found['text'][0]}\n", "")
    both = moec("run", EXAMPLE / "tiny.moe", "--prompts", file, "--max-new-tokens", "6").wait()
    assert both.out == f"[0] {found['text'][0]}\n[1] {found['text'][1]}\n"


def test_a_seed_gives_the_same_draws_whatever_the_batch_and_mesh() -> None:
    args = ("--prompt", "In the beginning", "--max-new-tokens", "8", "--temperature", "0.9", "--dtype", "fp32")
    one_rank = ("--set", "ranks.attention=dp(1)", "--set", "ranks.experts=ep(1)")
    first = run_json(EXAMPLE / "tiny.moe", *args, "--seed", "3")
    wider = run_json(EXAMPLE / "tiny.moe", *args, "--seed", "3", "--tokens", "5")
    other = run_json(EXAMPLE / "tiny.moe", *args, "--seed", "4")
    assert wider["tokens"][0] == first["tokens"][0] != other["tokens"][0]
    assert one_rank


def test_logits_are_written_with_their_tokens_and_lengths(tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    run_json(EXAMPLE / "tiny.moe", "--tokens", "1,2,3", "--tokens", "4", "--max-new-tokens", "1", "--logits", out)
    saved = load_file(out)
    assert tuple(saved["logits"].shape) == (2, 3, 2048)
    assert saved["tokens"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert saved["lengths"].tolist() == [3, 1]
    assert saved["logits"][0].abs().amax(-1).gt(0).all()
    assert saved["logits"][1, 1:].eq(0).all()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    for place in (tmp_path / "absent" / "x", tmp_path):  # refused before a rank starts
        done = moec("run", EXAMPLE / "tiny.moe", "--tokens", "1", "--logits", place).wait()
        assert (done.code, done.out, "E0618" in done.err) == (4, "", True)


def test_a_timeline_is_written_with_every_rank(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    args = "--tokens", "1,2,3", "--max-new-tokens", "2", "--timeline", out, "--json"
    done = moec("run", EXAMPLE / "tiny.moe", *args).wait()
    assert done.code == 0 and len(json.loads(done.out)["tokens"][0]) == 2
    assert done.err.count("\n") == done.err.count("note: the timeline has no prediction: cluster `localhost`") == 1
    events = json.loads(out.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == ["rank 0", "rank 1"]  # localhost has no rates to predict with
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == set(names)
    assert all(event["dur"] >= 0 for event in slices)
    for place in (tmp_path / "absent" / "x", tmp_path):
        done = moec("run", EXAMPLE / "tiny.moe", "--tokens", "1", "--timeline", place).wait()
        assert (done.code, done.out, "E0618" in done.err) == (4, "", True)


def test_a_compiled_folder_runs_and_recompiles_for_changes(tmp_path: Path, cache: Path) -> None:
    model = Path(shutil.copytree(EXAMPLE, tmp_path / "model"))
    made = model / "made"
    assert call("compile", model / "tiny.moe", "-o", made)[0] == 0
    args = ("--tokens", "1,2,3", "--max-new-tokens", "4")
    from_file = run_json(model / "tiny.moe", *args)
    assert [path.name.rpartition("-")[0] for path in (cache / "moec").iterdir()] == ["tiny"]
    assert run_json(made, *args) == from_file
    assert run_json(made, *args, "--dtype", "fp32") == run_json(model / "tiny.moe", *args, "--dtype", "fp32")
    (model / "tiny.moe").write_text((model / "tiny.moe").read_text().replace("top         = 4", "top         = 3"))
    assert run_json(made, *args) == from_file
    done = moec("run", made, *args, "--dtype", "fp32").wait()
    assert (done.code, len(done.error_lines)) == (3, 1)
    assert "E0619" in done.err
    assert "changed since" in done.err


def test_an_artifact_elsewhere_finds_weights_and_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled from another folder than the file's; run from there, from within, and after both moved together."""
    root = tmp_path / "root"
    shutil.copytree(EXAMPLE, root / "model")
    monkeypatch.chdir(root)
    assert call("compile", "model/tiny.moe", "-o", "made")[0] == 0
    args = ("--tokens", "1,2,3", "--max-new-tokens", "2")
    found = run_json("made", *args)
    root.rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved" / "made")
    assert run_json(".", *args) == found
    assert len(run_json(".", *args, "--dtype", "fp32")["tokens"]) == 1
    monkeypatch.chdir("..")
    shutil.move("model", "gone")
    done = moec("run", "made", "--tokens", "1").wait()
    assert (done.code, len(done.error_lines)) == (3, 1)


def test_a_config_without_weights_compiles_and_says_so_when_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((EXAMPLE / "config.json").read_bytes())
    assert call("import", tmp_path / "config.json", "-o", tmp_path / "m.moe")[0] == 0
    assert call("compile", tmp_path / "m.moe")[0] == 0
    done = moec("run", tmp_path / "m.build", "--tokens", "1").wait()
    assert (done.code, done.error_lines) == (3, done.err.splitlines())
    assert "error[E0760]: the program names no weights" in done.err


def test_a_cache_that_cannot_be_written_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    done = moec("run", EXAMPLE / "tiny.moe", "--tokens", "1", "--max-new-tokens", "1").wait()
    assert done.code == 0
    assert done.err.startswith("moec: note: the compiled program is not kept: ")


# --- error pages --------------------------------------------------------------------------------------------------


def raised_codes() -> set[str]:
    """E06 codes of launcher, generation and commands, as their sources name them."""
    files = [file for folder in ("runtime", "cli") for file in (ROOT / "moec" / folder).rglob("*.py")]
    files += [ROOT / "moec" / "files.py", ROOT / "moec" / "cache_files.py"]
    return {code for file in files for code in re.findall(r"\"(E06\d\d)\"", file.read_text())}


def test_every_runtime_code_has_a_page_and_every_page_a_code() -> None:
    pages = {path.stem for path in (ROOT / "specs" / "errors").glob("E06*.md")} - {"E0680", "E0681"}
    assert pages == raised_codes()
    for code in pages:
        lines = (ROOT / "specs" / "errors" / f"{code}.md").read_text().splitlines()
        assert lines[0].startswith(f"# {code}: ")
        assert any(f"moec: {kind}[{code}]: " in line for line in lines for kind in ("error", "note"))
