"""Building and keeping the C++ kernels, doing without them, and whole runs with them on real ranks."""

from __future__ import annotations

import fcntl
import os
from functools import cache
from pathlib import Path

import pytest
import torch

from moec.codegen.cpp import Norm, collect, render_cpp
from moec.codegen.targets import Dtype
from moec.compiler import compile
from moec.diagnostics import MoecError
from moec.importer.folder import import_model
from moec.ir.program import op_of
from moec.runtime import cpp_build
from moec.runtime.cpp_library import Library, notes
from moec.runtime.kernels import cpp_products, torch_moe
from moec.runtime.kernels.table import kernels_for
from tests import checkpoints
from tests.cached import run_cached, same_bits
from tests.commands import Done, moec
from tests.parity import Outcome, compile_checkpoint, run, worst

PAGES = Path(__file__).parent.parent / "specs" / "errors"
TEXT = render_cpp(collect(Dtype.FP32, [Norm(3)]))
LENGTHS = (7, 12)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cpp")


@pytest.fixture
def compiler() -> None:
    """Skips where there is none."""
    try:
        cpp_build.find_compiler()
    except MoecError as error:
        pytest.skip(str(error))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cpp_build.load.cache_clear()
    return tmp_path / "cache" / "moec" / "cpp"


def norm(text: str) -> list[float]:
    """The norm of a row by the library of a text."""
    kernel = Library(text)
    return cpp_products.rms_norm(kernel, None, torch.tensor([[3.0, 3.0, 3.0]]), torch.ones(3), eps=0.0)[0].tolist()


@pytest.mark.usefixtures("compiler")
def test_a_kept_library_is_used_and_a_damaged_one_is_built_anew(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpp_build.load(TEXT)
    (kept,) = home.iterdir()
    whole = kept.read_bytes()
    calls: list[list[str]] = []
    build = cpp_build._run
    monkeypatch.setattr(cpp_build, "_run", lambda command: calls.append(command) or build(command))
    for damaged in (whole, whole[: len(whole) // 2], b"", whole[:-1] + b"?"):
        cpp_build.load.cache_clear()
        kept.unlink()  # a loaded library is never written to
        kept.write_bytes(damaged)
        assert norm(TEXT) == [1.0] * 3
        assert len(calls) == (damaged != whole) and [path.suffix for path in home.iterdir()] == [".so"]
        calls.clear()


@pytest.mark.usefixtures("compiler")
def test_processes_may_build_at_once(home: Path) -> None:
    children = []
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            os._exit(0 if norm(TEXT) == [1.0] * 3 else 1)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0]
    assert [path.suffix for path in home.iterdir()] == [".so"]


@pytest.mark.usefixtures("compiler")
def test_where_nothing_can_be_kept_a_library_is_built_for_the_process(home: Path) -> None:
    home.parent.parent.mkdir()
    home.parent.write_text("a file where the folder should be")
    assert norm(TEXT) == [1.0] * 3


def test_a_build_that_takes_too_long_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child tells that it runs, and holds the lock that this test then gets: it must be gone."""
    lock = tmp_path / "lock"
    lock.touch()
    monkeypatch.setattr(cpp_build, "PATIENCE_SECONDS", 1)
    said = cpp_build._run(["sh", "-c", f"flock {lock} sleep 3600 & wait"])
    assert said == "error: it took longer than 1 s"
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)


@pytest.mark.parametrize(("cxx", "code"), [('"x', "E0540"), ("{no_program}", "E0541"), ("true", "E0541")])
def test_what_is_no_compiler_is_told(cxx: str, code: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_program = home / "no_program"
    no_program.parent.mkdir(parents=True, exist_ok=True)
    no_program.write_bytes(b"\x00")
    no_program.chmod(0o755)
    monkeypatch.setenv("CXX", cxx.format(no_program=no_program))
    with pytest.raises(MoecError) as raised:
        cpp_build.load(f"int nothing_{code};  // {cxx}")
    assert raised.value.diagnostics[0].code == code


def test_another_text_is_another_library() -> None:
    keys = {cpp_build._key(text, ("true",)) for text in (TEXT, TEXT + " ")} | {cpp_build._key(TEXT, ("true", "-g"))}
    assert len(keys) == 3


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    cpp_build.load(TEXT)


def compiler_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_build, "find_compiler", lambda: ("c++",))
    monkeypatch.setattr(cpp_build, "_run", lambda command: "kernels.cpp:17:1: error: no member named 'x'\n")
    cpp_build.load(TEXT + "// fails")


def library_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(command: list[str]) -> str:
        Path(command[-1]).write_bytes(b"no library")
        return ""

    def refuse(path: str) -> None:
        raise OSError("kernels.so: file too short")

    monkeypatch.setattr(cpp_build, "find_compiler", lambda: ("c++",))
    monkeypatch.setattr(cpp_build, "_run", build)
    monkeypatch.setattr(cpp_build.ctypes, "CDLL", refuse)
    monkeypatch.setattr(cpp_build, "library_folder", lambda: Path("~/.cache/moec/cpp"))
    monkeypatch.setattr(cpp_build, "write_whole", lambda place, content: None)
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: None)
    cpp_build.load(TEXT + "// cannot be loaded")


@pytest.mark.parametrize(
    ("code", "cause"),
    [("E0540", no_compiler), ("E0541", compiler_that_fails), ("E0542", library_that_cannot_be_loaded)],
)
@pytest.mark.usefixtures("home")
def test_pages_show_the_error_as_printed(code: str, cause: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(MoecError) as error:
        cause(patch)  # type: ignore[operator]
    assert error.value.diagnostics[0].code == code
    assert error.value.diagnostics[0].render() in (PAGES / f"{code}.md").read_text()


@pytest.fixture
def kept(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder that the whole runs share."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(root / "cache"))


# --- whole runs ---------------------------------------------------------------------------------------------------


@cache
def model(family: str, root: Path) -> tuple[Path, list[list[int]]]:
    made = checkpoints.make(family, root / family)
    return root / family, checkpoints.prompts(made.config.vocab_size, LENGTHS)


def both(folder: Path, prompts: list[list[int]], work: Path, mesh: str | None, *overrides: str) -> list[Outcome]:
    """What torch's kernels and the C++ kernels give."""
    found = []
    for kernels in ("torch", "cpp"):
        artifact = compile_checkpoint(folder, work, mesh, "flat", kernels, *overrides)
        found.append(run(artifact, folder, work, prompts, 12))
    return found


@pytest.mark.usefixtures("compiler", "kept")
@pytest.mark.parametrize(("family", "mesh"), [("qwen3_moe", None), ("mixtral", "ep=2"), ("deepseek_v3", "tp=2")])
def test_runs_give_what_torch_gives(family: str, mesh: str | None, root: Path, tmp_path: Path) -> None:
    folder, prompts = model(family, root)
    wanted, found = both(folder, prompts, tmp_path, mesh)
    assert worst(found.logits, wanted.logits) < 5e-5
    assert found.tokens == wanted.tokens


@pytest.mark.usefixtures("compiler", "kept")
def test_a_trained_model_gives_what_torch_gives(shared: Path, tmp_path: Path) -> None:
    folder = shared / "models" / "small-qwen3-moe"
    prompts = checkpoints.prompts(200, LENGTHS)
    wanted, found = both(folder, prompts, tmp_path, None)
    assert worst(found.logits, wanted.logits) < 1e-4
    assert found.tokens == wanted.tokens


@pytest.mark.usefixtures("compiler", "kept")
def test_cached_experts_give_the_bits_of_resident_ones(root: Path, tmp_path: Path) -> None:
    folder, prompts = model("qwen3_moe", root)
    artifact = compile_checkpoint(folder, tmp_path, None, "flat", "cpp")
    source = tmp_path / "cached.moe"
    text = import_model(folder, output=source)
    settings = 'hbm = slots(2)  host = "1 GiB per rank"  evict = lfu  prefetch = none'.replace('"', "")
    text = text.replace("plan serve {", f"cache few {{ {settings} }}\n\nplan serve {{")
    source.write_text(text.replace("on ranks\n", "on ranks with few\n"))
    cached = compile(source, overrides=["plan.compute=fp32", "plan.context=160"], kernels="cpp")
    served = {op_of(node).name for _, node in cached.decode.nodes() if node.meta["kernel"] == "cpp"}
    assert "cached_experts" in served and "grouped_linear" not in served
    resident = run(artifact, folder, tmp_path, prompts, 12)
    found = run_cached(cached, folder, tmp_path, prompts, 12)
    assert found.total("misses") > 0 and same_bits(found.outcome, resident)


def run_command(folder: Path, work: Path, **env: str) -> Done:
    source = work / "model.moe"
    source.write_text(import_model(folder, output=source))
    options = ("--tokens", "1,2,3", "--max-new-tokens", "4", "--ignore-eos", "--json", "--dtype", "fp32")
    return moec("run", source, *options, "--kernels", "cpp", env={"XDG_CACHE_HOME": str(work / "cache"), **env}).wait()


@pytest.mark.usefixtures("compiler")
def test_without_a_compiler_torch_serves_and_one_note_says_so(root: Path, tmp_path: Path) -> None:
    folder, _ = model("qwen3_moe", root)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    usual = run_command(folder, tmp_path / "a")
    without = run_command(folder, tmp_path / "b", PATH="", CXX="")
    assert (usual.code, without.code) == (0, 0) and usual.out == without.out
    assert usual.err == "" and list((tmp_path / "a" / "cache" / "moec" / "cpp").iterdir())
    assert without.err == "moec: note: there is no C++ compiler `c++`; torch's kernels serve\n"


def test_other_devices_keep_torch_kernels_and_a_note_says_so(root: Path, tmp_path: Path) -> None:
    folder, _ = model("qwen3_moe", root)
    programs = compile_checkpoint(folder, tmp_path, None, "flat", "cpp").programs
    assert notes(programs, "cuda") == ["C++ kernels are for the CPU"]
    kernels = kernels_for(programs[0], "cuda")
    assert kernels.cpp.route is torch_moe.route


def test_the_artifact_has_the_text_for_reading(root: Path, tmp_path: Path) -> None:
    folder, _ = model("qwen3_moe", root)
    artifact = compile_checkpoint(folder, tmp_path, None, "flat", "cpp")
    assert "attention_" in artifact.files()["kernels/decode.cpp"]
    assert not any(name.endswith(".cpp") for name in compile_checkpoint(folder, tmp_path, None).files())


def test_fp16_keeps_torch_kernels(root: Path, tmp_path: Path) -> None:
    folder, _ = model("qwen3_moe", root)
    artifact = compile_checkpoint(folder, tmp_path, None, "flat", "cpp", "plan.compute=fp16")
    assert {node.meta["kernel"] for _, node in artifact.decode.nodes()} == {"torch"}
