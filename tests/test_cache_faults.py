"""Whole runs with an expert file that fails: the tokens of the resident run and one note, or one error. Never a crash.

Ranks are forked from the test process, so what a test patches here is patched in them.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moec.artifact import load
from moec.compiler import compile
from moec.runtime.session import Session
from tests.commands import Command, Done, moec
from tests.expert_blobs import failing

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "tiny"
CACHED = """use "tiny.moe"
cache few { hbm = slots(3)  nvme = "experts" }
plan cached {
  run tiny on ranks with few
  context = 2048
  prefill { tokens = 2048  exchange = flat }
  decode  { batch = 8  exchange = flat }
}
"""
ARGS = ("--tokens", "34,272,497,1148,9,77", "--tokens", "1,2", "--ignore-eos", "--max-new-tokens", "5", "--json")
PAGE = 4096
#: Of two ranks, which hold 16 experts of 4 layers each: what the head and the blobs of their files take up.
BLOB_BYTES = 49152
HEAD_BYTES, FILE_BYTES = PAGE, PAGE + 64 * BLOB_BYTES


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "MOEC_DEBUG", "MOEC_FAULT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with its weights, and compiled with a cache."""
    folder = Path(shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("faults") / "model"))
    (folder / "few.moe").write_text(CACHED)
    compile(folder / "few.moe", "cached").save(folder / "few.build")
    load(folder / "few.build")  # builds the parser that every command forked from here needs
    return folder


@pytest.fixture(scope="module")
def resident(made: Path) -> list[list[int]]:
    """The tokens without a cache."""
    tokens = json.loads(moec("run", made / "tiny.moe", *ARGS).wait().out)["tokens"]
    assert isinstance(tokens, list)
    return tokens


@pytest.fixture
def home(made: Path, tmp_path: Path) -> Path:
    """A copy of it to break, with an empty folder for the experts."""
    folder = Path(shutil.copytree(made, tmp_path / "model"))
    (folder / "experts").mkdir()
    return folder


@pytest.fixture(scope="module")
def written(made: Path, resident: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy that ran once."""
    folder = Path(shutil.copytree(made, tmp_path_factory.mktemp("written") / "model"))
    (folder / "experts").mkdir()
    done = ended(start(folder))
    assert (served(done, resident)["rereads"], done.err) == (0, "")
    return folder


@pytest.fixture
def filled(written: Path, tmp_path: Path) -> Path:
    """A copy of it to break, with the files of its experts."""
    return Path(shutil.copytree(written, tmp_path / "model"))


def start(home: Path, *args: str | Path) -> Command:
    return moec("run", home / "few.build", *ARGS, *args)


def ended(command: Command) -> Done:
    """The finished command, of which no process is left, and no traceback."""
    done = command.wait()
    command.wait_until_alone()
    assert "Traceback" not in done.err
    return done


def notes(done: Done) -> list[str]:
    """The codes of what it told, a line each."""
    lines = done.err.splitlines()
    assert all(line.startswith("moec: note[E06") for line in lines), done.err
    return [line[len("moec: note[") :].partition("]")[0] for line in lines]


def served(done: Done, resident: list[list[int]]) -> dict[str, int]:
    """What the caches counted in a run that gave the resident tokens."""
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["tokens"] == resident
    counts: dict[str, int] = found["cache"]
    assert counts["hits"] + counts["misses"] == counts["lookups"] > counts["misses"] > 0
    assert counts["nvme_bytes"] == counts["misses"] * BLOB_BYTES
    return counts


def one_error(done: Done) -> str:
    assert (done.out, len(done.error_lines)) == ("", 1), done.err
    return done.error_lines[0]


def files(home: Path) -> list[Path]:
    """The experts' files, of both ranks, whole and nothing else."""
    found = sorted((home / "experts").iterdir())
    assert [path.stat().st_size for path in found] == [FILE_BYTES] * 2
    assert all(path.name.startswith("experts-") and path.suffix == ".moec" for path in found)
    return found


def overwrite(home: Path, first: int = HEAD_BYTES) -> None:
    """Damage every page of every file from `first` on. Done again, it does no more."""
    for path in (home / "experts").glob("*.moec"):
        with path.open("r+b") as file:
            for at in range(first, FILE_BYTES, PAGE):
                os.pwrite(file.fileno(), b"\xff\x7f", at)


def test_a_file_that_is_there_is_used(filled: Path, resident: list[list[int]]) -> None:
    before = [path.stat().st_mtime_ns for path in files(filled)]
    done = ended(start(filled))
    assert (served(done, resident)["rereads"], done.err) == (0, "")
    assert [path.stat().st_mtime_ns for path in files(filled)] == before


# --- before the run -----------------------------------------------------------------------------------------------


def _remove(home: Path) -> None:
    for path in files(home):
        path.unlink()


def _cut_short(home: Path) -> None:
    for path in (home / "experts").glob("*.moec"):
        os.truncate(path, FILE_BYTES // 3)


def _flip_head(home: Path) -> None:
    for path in files(home):
        with path.open("r+b") as file:
            os.pwrite(file.fileno(), b"\0", 100)


def _replace_by_pipe(home: Path) -> None:
    for path in files(home):
        path.unlink()
        os.mkfifo(path)


@pytest.mark.parametrize(
    ("fault", "told", "is_reread"),
    [
        (_remove, [], False),
        (_cut_short, ["E0642"], False),
        (_flip_head, ["E0642"], False),
        (_replace_by_pipe, ["E0642"], False),
        (overwrite, ["E0642"], True),
    ],
)
def test_a_file_that_is_damaged_is_written_again_or_not_believed(
    filled: Path, resident: list[list[int]], fault: Callable[[Path], None], told: list[str], is_reread: bool
) -> None:
    fault(filled)
    done = ended(start(filled))
    assert notes(done) == told
    assert (served(done, resident)["rereads"] > 0) == is_reread
    files(filled)


def test_a_folder_that_is_not_there_is_an_error(home: Path) -> None:
    (home / "experts").rmdir()
    done = ended(start(home))
    assert done.code == 4
    assert one_error(done).startswith(f"moec: error[E0640]: the folder for experts `{home}/experts` does not exist")
    assert not (home / "experts").exists()


# --- while it is written ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "number", "words"),
    [
        ("posix_fallocate", errno.ENOSPC, f".moec`: {FILE_BYTES} bytes are needed"),
        ("pwrite", errno.ENOSPC, "no space for the expert file"),
        ("fsync", errno.EIO, "cannot be written: Input/output error"),
        ("replace", errno.EROFS, "cannot be written: Read-only file system"),
    ],
)
def test_where_no_file_can_be_written_the_checkpoint_serves(
    home: Path, resident: list[list[int]], monkeypatch: pytest.MonkeyPatch, call: str, number: int, words: str
) -> None:
    with monkeypatch.context() as patch:
        failing(patch, call, number)
        done = ended(start(home))
    counts = served(done, resident)
    assert notes(done) == ["E0641"]
    assert counts["rereads"] > counts["misses"]  # those at the start, too
    assert words in done.err
    assert list((home / "experts").iterdir()) == []


@pytest.fixture
def disk(home: Path) -> Iterator[Callable[[str], None]]:
    """Mounts a file system of 2 MiB, less than one file, at the experts' folder."""
    folder = home / "experts"

    def mount(options: str) -> None:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("needs the right to mount")

    yield mount
    subprocess.run(["umount", str(folder)], capture_output=True, check=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [("size=2m", f"{FILE_BYTES} bytes are needed, 2097152 are free"), ("ro", "Read-only file system")],
)
def test_a_disk_that_takes_no_file(
    home: Path, resident: list[list[int]], disk: Callable[[str], None], options: str, words: str
) -> None:
    """F14, F09."""
    disk(options)
    done = ended(start(home))
    assert served(done, resident)["rereads"] > 0
    assert notes(done) == ["E0641"]
    assert words in done.err
    assert list((home / "experts").iterdir()) == []


def test_two_runs_at_once_write_each_file_once(home: Path, resident: list[list[int]]) -> None:
    runs = [start(home), start(home)]
    for done in map(ended, runs):
        assert (served(done, resident)["rereads"], done.err) == (0, "")
    files(home)


def _kill_after_five_blobs(monkeypatch: pytest.MonkeyPatch, whom: Callable[[], int]) -> None:
    pwrite, calls = os.pwrite, []

    def write(*args: Any) -> int:
        calls.append(args)
        if len(calls) > 5:
            os.kill(whom(), signal.SIGKILL)
            while True:  # this rank's death follows that of its launcher, on a busy machine only after many writes
                signal.pause()
        return pwrite(*args)

    monkeypatch.setattr(os, "pwrite", write)


@pytest.mark.parametrize("whom", ["rank", "launcher"])
def test_what_a_killed_run_left_is_no_obstacle(
    home: Path, resident: list[list[int]], monkeypatch: pytest.MonkeyPatch, whom: str
) -> None:
    with monkeypatch.context() as patch:
        _kill_after_five_blobs(patch, os.getpid if whom == "rank" else os.getppid)
        done = ended(start(home))
    if whom == "rank":
        assert done.code == 5
        assert "was killed by SIGKILL during load" in one_error(done)
    else:
        assert done.code == -signal.SIGKILL
    assert list((home / "experts").glob("*.moec")) == []
    after = ended(start(home))
    assert (served(after, resident)["rereads"], after.err) == (0, "")
    files(home)


# --- while it is read ---------------------------------------------------------------------------------------------


def strike(monkeypatch: pytest.MonkeyPatch, fault: Callable[[Session], object], rank: int | None = None) -> None:
    """Have a rank (each, where none is named) do `fault` before its first step of decoding."""
    decode, done = Session.decode, list[Any]()

    def struck(self: Session, step: Any) -> Any:
        if not done and rank in (None, self.place.rank):
            fault(self)
        done.append(step)
        return decode(self, step)

    monkeypatch.setattr(Session, "decode", struck)


def _unlink(home: Path) -> None:
    for path in (home / "experts").iterdir():
        path.unlink(missing_ok=True)


def _fail_reads(*suffixes: str) -> None:
    """Reads of files with these suffixes fail in this process."""
    preadv = os.preadv

    def read(descriptor: int, *args: Any) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(suffixes):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, *args)

    os.preadv = read


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (_unlink, ""),
        (_cut_short, "was cut short (expert "),
        (overwrite, "does not have the bytes that were written (expert "),
        (lambda home: _fail_reads(".moec"), "cannot be read: Input/output error (expert "),
    ],
    ids=["removed", "cut short", "overwritten", "unreadable"],
)
def test_a_file_that_fails_during_the_run_is_replaced_by_the_checkpoint(
    filled: Path, resident: list[list[int]], monkeypatch: pytest.MonkeyPatch, fault: Callable[[Path], None], words: str
) -> None:
    """F09."""
    strike(monkeypatch, lambda _: fault(filled))
    done = ended(start(filled))
    assert (served(done, resident)["rereads"] > 0) == bool(words)
    assert notes(done) == (["E0642"] if words else [])
    assert words in done.err


def test_a_slow_disk_is_no_rank_that_is_stuck(
    filled: Path, resident: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a rank waits for a copy, it has as long to do so as when it loads."""

    def slow(session: Session) -> None:
        preadv, status = os.preadv, session.place.status

        def read(descriptor: int, *args: Any) -> int:
            deadline = time.monotonic() + 15
            while (section := status.section) != "load" and time.monotonic() < deadline:
                time.sleep(0.01)
            with (filled / "sections").open("a") as file:
                file.write(f"{section}\n")
            return preadv(descriptor, *args)

        os.preadv = read

    strike(monkeypatch, slow)
    served(ended(start(filled)), resident)
    assert set((filled / "sections").read_text().splitlines()) == {"load"}


def test_an_expert_that_is_nowhere_ends_the_run(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(_: Session) -> None:
        overwrite(filled)
        (filled / "model.safetensors").unlink(missing_ok=True)

    strike(monkeypatch, lose)
    line = lost(ended(start(filled)), filled)
    assert f"in the checkpoint `{filled}/model.safetensors` cannot be opened: No such file or directory" in line


def test_a_rank_that_loses_an_expert_ends_all(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strike(monkeypatch, lambda _: _fail_reads(".moec", ".safetensors"), rank=1)
    line = lost(ended(start(filled)), filled)
    assert "(rank 1, pid " in line
    assert f"in the checkpoint `{filled}/model.safetensors` cannot be read: Input/output error" in line


def lost(done: Done, home: Path) -> str:
    """The error of a run that found an expert neither in its file nor in the checkpoint."""
    line = one_error(done)
    assert done.code == 3
    assert line.startswith("moec: error[E0643]: expert ")
    assert f"its expert file `{home}/experts/experts-" in line
    assert len(done.err.splitlines()) == 2  # and the note about the file
    return line
