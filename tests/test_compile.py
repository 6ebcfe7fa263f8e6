"""One source, one artifact: the same bytes wherever it is compiled, refused when damaged, no larger with depth."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moec.artifact import load
from moec.artifact_files import MANIFEST, read_artifact, write_artifact
from moec.compiler import PHASES, compile, pipeline
from moec.diagnostics import CompileError, MoecError
from moec.explain.page import explain_plan
from moec.ir.text import print_program
from moec.passes import PASSES
from moec.specs import read

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"

#: DeepSeek-V3 on 4 nodes of 8 devices whose memory is not limited, so that any depth fits.
POD = """
cluster pod { devices = 8  intra = link(450 GB/s, latency = 3 us)  inter = link(400 Gbit/s, latency = 8 us) }
mesh ranks on pod[4] { attention = dp(4) * tp(8)  experts = ep(32) }
plan serve { run deepseek_v3 on ranks  prefill { tokens = 16384 }  decode { batch = 64  exchange = gather } }
"""


def deepseek(tmp_path: Path, layers: int) -> Path:
    model = read("models", "deepseek_v3.moe")
    assert "layers 3..60 {" in model
    path = tmp_path / f"deepseek_{layers}" / "deepseek.moe"
    path.parent.mkdir()
    path.write_text(model.replace("layers 3..60 {", f"layers {f'3..{layers - 1}':7} {{") + POD)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_same_bytes_in_other_processes_folders_zones_and_hash_seeds(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from moec.compiler import compile\n"
        "for name in sys.argv[2:]: compile(Path(name)).save(Path(sys.argv[1], Path(name).stem))"
    )
    running = []
    for place, zone, seed in [("here", "UTC", "1"), ("there/below", "Asia/Kathmandu", "77")]:
        folder = tmp_path / place
        shutil.copytree(EXAMPLES / "tiny", folder / "tiny")
        shutil.copy(EXAMPLES / "deepseek_v3_pod.moe", folder)
        env = os.environ | {"TZ": zone, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        sources = ["deepseek_v3_pod.moe", "tiny/tiny.moe"]
        command = [sys.executable, "-c", code, str(folder / "out"), *sources]
        running.append((folder / "out", subprocess.Popen(command, cwd=folder, env=env)))
    assert [process.wait(timeout=120) for _, process in running] == [0, 0]
    first, second = (contents(out) for out, _ in running)
    assert {"tiny/MANIFEST.json", "deepseek_v3_pod/prefill.ir"} <= set(first)
    assert first == second


def test_text_does_not_grow_with_depth(tmp_path: Path) -> None:
    """610 layers are the same two bodies as 61: only the ranges and the sums of memory differ."""
    shallow, deep = (compile(deepseek(tmp_path, layers)) for layers in (61, 610))
    for phase in PHASES:
        texts = [print_program(getattr(artifact, phase)) for artifact in (shallow, deep)]
        plain = [re.sub(r"^memory .*\n", "", text, flags=re.M).replace("3..609", "3..60") for text in texts]
        assert plain[0] == plain[1]
    assert deep.document["memory"][0]["kv"] == 10 * shallow.document["memory"][0]["kv"]
    assert deep.sources["prefill.py"].replace("610", "61") == shallow.sources["prefill.py"]


def test_memory_limit_is_held(tmp_path: Path) -> None:
    path = tmp_path / "one_node.moe"
    path.write_text(
        "use model deepseek_v3\nuse cluster dgx_h100\n"
        "mesh node on dgx_h100 { attention = dp(1) * tp(8)  experts = ep(8) }\n"
        "plan serve { run deepseek_v3 on node  prefill { tokens = 4096 }  decode { batch = 8 } }\n"
    )
    with pytest.raises(CompileError) as caught:
        compile(path)
    (found,) = caught.value.diagnostics
    assert (found.code, found.exit_code) == ("E0330", 1)
    assert "74.5" in found.message  # 80 GB in GiB


def test_the_pipeline_keeps_the_order_of_the_registry() -> None:
    run = [type(step) for step in pipeline()]
    assert run == [cls for cls in PASSES if cls in run] and len(run) >= 9


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "toy"
    compile(EXAMPLES / "toy.moe").save(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """An artifact of its own for a test that damages it."""
    return Path(shutil.copytree(saved, tmp_path / "toy"))


def refusal(folder: Path) -> tuple[str, str]:
    with pytest.raises(MoecError) as caught:
        load(folder)
    assert caught.value.exit_code == 3
    return caught.value.diagnostics[0].code, caught.value.diagnostics[0].message


def test_loads_what_it_saved(saved: Path) -> None:
    artifact, fresh = load(saved), compile(EXAMPLES / "toy.moe")
    assert (artifact.prefill, artifact.decode) == (fresh.prefill, fresh.decode)
    assert artifact.document == json.loads(json.dumps(fresh.document))
    assert artifact.files() == fresh.files()
    assert explain_plan(dict(artifact.document)) == explain_plan(dict(fresh.document))


@pytest.mark.parametrize("name", ["prefill.ir", "decode.py", "plan.json"])
def test_changed_file_is_named(folder: Path, name: str) -> None:
    text = (folder / name).read_text()
    (folder / name).write_text(text.replace("64", "65", 1))  # same size, another digest
    assert refusal(folder) == (
        "E0771",
        f"the artifact `{folder}` cannot be used: `{name}` was changed after it was compiled",
    )


def test_missing_file_is_named(folder: Path) -> None:
    (folder / "decode.ir").unlink()
    code, message = refusal(folder)
    assert code == "E0771" and message.endswith("`decode.ir` is missing")


@pytest.mark.parametrize("name", ["extra.py", "kernels/extra.py", ".hidden"])
def test_extra_file_is_named(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("")
    code, message = refusal(folder)
    assert code == "E0771" and message.endswith(f"`{name}` is not in the manifest")


def test_link_is_refused_even_to_the_same_bytes(folder: Path, saved: Path) -> None:
    (folder / "prefill.ir").unlink()
    (folder / "prefill.ir").symlink_to(saved / "prefill.ir")
    code, message = refusal(folder)
    assert code == "E0771" and message.endswith("`prefill.ir` is no plain file")


def test_other_version_is_refused(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"moec": "99.0"}))
    code, message = refusal(folder)
    assert code == "E0772" and "99.0" in message


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 1}', '{"files": {"../x": {"size": 1, "sha256": ""}}}', "\0"]
)
def test_broken_manifest_is_refused(folder: Path, text: str) -> None:
    (folder / MANIFEST).write_text(text)
    assert refusal(folder)[0] == "E0771"


def redigest(folder: Path, **texts: str) -> None:
    """Files changed and entered in the manifest again."""
    files = read_artifact(folder)
    shutil.rmtree(folder)
    write_artifact(folder, files | {name.replace("_", "."): text for name, text in texts.items()})


@pytest.mark.parametrize("text", ["{", "{}", "[]", "null", '{"mesh": {"pp": "1"}, "phases": []}', "[" * 100_000])
def test_a_plan_that_is_none_is_refused_by_all_readers(folder: Path, text: str) -> None:
    redigest(folder, plan_json=text)
    assert refusal(folder)[0] == "E0771"
    done = subprocess.run(
        [sys.executable, "-m", "moec", "explain", str(folder)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.partition("]")[0]) == (3, "moec: error[E0771")


def test_phases_in_each_others_place_are_refused(folder: Path) -> None:
    files = read_artifact(folder)
    redigest(folder, prefill_ir=files["decode.ir"], decode_ir=files["prefill.ir"])
    code, message = refusal(folder)
    assert code == "E0771" and message.endswith("a program of the phase decode stands in the other's place")


def test_an_ordinary_folder_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(MoecError) as caught:
        compile(EXAMPLES / "toy.moe").save(tmp_path)
    assert caught.value.diagnostics[0].code == "E0770"
    assert contents(tmp_path) == {"notes.txt": b"mine"}


def test_an_older_artifact_is_replaced_whole(folder: Path) -> None:
    compile(EXAMPLES / "mixtral_dgx.moe").save(folder)
    assert load(folder).document["model"]["name"] == "mixtral"
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


WRITER = """
import sys
from pathlib import Path
from moec.artifact_files import MANIFEST, read_artifact, write_artifact
for turn in range(20):
    write_artifact(Path(sys.argv[1]), {"plan.json": f"{sys.argv[2]} {turn}"})
"""


def test_writers_of_one_place_take_turns(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    left = tmp_path / "made"
    commands = [[sys.executable, "-c", WRITER, str(left), str(writer)] for writer in range(3)]
    locks = tmp_path_factory.mktemp("locks")
    where = os.environ | {"TMPDIR": str(locks)}
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=where) for command in commands]
    errors = [process.communicate()[1] for process in running]
    assert (errors, [process.returncode for process in running]) == ([""] * 3, [0] * 3)
    assert read_artifact(left)["plan.json"] in {f"{writer} 19" for writer in range(3)}
    assert not list(locks.iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_what_a_dead_writer_left_is_put_back_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that dies between its two renames has left the older artifact aside."""
    folder = tmp_path / "made"
    write_artifact(folder, {"plan.json": "old"})
    replace, died = os.replace, []

    def die(source: Path, target: Path) -> None:
        if target == folder:
            died.append(source)
            raise OSError(5, "Input/output error")
        replace(source, target)

    monkeypatch.setattr("os.replace", die)
    with pytest.raises(MoecError) as caught:
        write_artifact(folder, {"plan.json": "new"})
    assert (caught.value.diagnostics[0].code, len(died)) == ("E0681", 3)
    monkeypatch.undo()
    assert len([path.name for path in tmp_path.iterdir()]) == 1  # aside, since putting it back failed too
    monkeypatch.setattr("moec.artifact_files._publish", lambda *_: None)
    write_artifact(folder, {"plan.json": "new"})
    assert read_artifact(folder) == {"plan.json": "old"}
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
