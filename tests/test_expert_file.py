"""The expert file: what is written is read back, whatever else is found is noticed, and nothing is left half made."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moec.diagnostics import MoecError
from moec.runtime.experts.file import PAGE, Contents, ExpertFile, FileFault, Key, LayerBlobs
from moec.runtime.experts.fill import open_expert_file
from tests.expert_blobs import CONTENTS, FULL, Checkpoint, Notes, blob, failing, flip


def opened(folder: Path, contents: Contents = CONTENTS) -> tuple[ExpertFile, Checkpoint, Notes]:
    checkpoint, notes = Checkpoint(contents), Notes()
    return open_expert_file(folder, contents, checkpoint, notes), checkpoint, notes


def read(file: ExpertFile, key: Key) -> tuple[Tensor, list[int]]:
    """A blob, and the bytes that were there between two pieces."""
    into = torch.zeros(file.contents.blob_bytes(key[0]), dtype=torch.uint8)
    return into, list(file.pieces(key, into))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- whole files ------------------------------------------------------------------------------------------------------


def test_each_expert_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    file, checkpoint, notes = opened(tmp_path)
    assert checkpoint.asked == [(0, 0), (0, 1), (0, 5), (1, 1), (1, 2)]
    for key in CONTENTS.keys:
        assert torch.equal(read(file, key)[0], blob(key))
    assert (notes.told, names(tmp_path)) == ([], [CONTENTS.file_name])
    assert all(place.start % PAGE == 0 for place in CONTENTS.places.values())
    file.close()


def test_a_file_is_written_once(tmp_path: Path) -> None:
    opened(tmp_path)[0].close()
    file, checkpoint, notes = opened(tmp_path)
    assert (checkpoint.asked, notes.told) == ([], [])
    assert torch.equal(read(file, (1, 2))[0], blob((1, 2)))


def test_a_large_expert_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moec.runtime.experts.file.PIECE_BYTES", 8192)
    file, _, _ = opened(tmp_path)
    into, reached = read(file, (1, 1))
    assert (len(into), reached) == (19200, [8192, 16384])
    assert torch.equal(into, blob((1, 1)))


def test_what_decides_the_bytes_decides_the_name(tmp_path: Path) -> None:
    first, second = CONTENTS.layers
    as_fp16 = tuple((name, "fp16", shape) for name, _, shape in first.parameters)
    others = [
        replace(CONTENTS, fingerprint="3f2b"),
        replace(CONTENTS, layers=(replace(first, parameters=as_fp16), second)),
        replace(CONTENTS, layers=(second, first)),
        replace(CONTENTS, layers=(replace(first, experts=(0, 5, 1)), second)),
        replace(CONTENTS, layers=(replace(first, parameters=first.parameters[::-1]), second)),
    ]
    assert len({contents.file_name for contents in [CONTENTS, *others]}) == 6
    for contents in [CONTENTS, *others]:
        file, _, _ = opened(tmp_path, contents)
        assert all(torch.equal(read(file, key)[0], blob(key, contents)) for key in contents.keys)
    assert len(names(tmp_path)) == 6


def test_a_rank_without_experts_has_an_empty_file(tmp_path: Path) -> None:
    empty = Contents("3f2a", (LayerBlobs("layers.0", (), (("experts.down", "fp32", (2, 2)),)),))
    opened(tmp_path, empty)[0].close()
    assert opened(tmp_path, empty)[1].asked == []


def test_reads_that_come_short_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, _, _ = opened(tmp_path)
    whole = os.preadv
    monkeypatch.setattr("os.preadv", lambda fd, buffers, at: whole(fd, [buffers[0][:777]], at))
    assert torch.equal(read(file, (1, 1))[0], blob((1, 1)))


# --- damage -----------------------------------------------------------------------------------------------------------


def test_no_changed_byte_of_the_head_goes_unnoticed(tmp_path: Path) -> None:
    opened(tmp_path)[0].close()
    path = tmp_path / CONTENTS.file_name
    for offset in range(CONTENTS.head_bytes):
        flip(path, offset)
        with pytest.raises(FileFault, match="has a damaged head"):
            ExpertFile(path, CONTENTS)
        flip(path, offset)
    ExpertFile(path, CONTENTS).close()


def test_no_changed_byte_of_an_expert_goes_unnoticed(tmp_path: Path) -> None:
    file, _, _ = opened(tmp_path)
    for key, place in CONTENTS.places.items():
        for offset in [*place[:: len(place) // 48], place[-1]]:
            flip(file.path, offset)
            with pytest.raises(FileFault, match="does not have the bytes that were written"):
                read(file, key)
            flip(file.path, offset)
        assert torch.equal(read(file, key)[0], blob(key))


def test_an_expert_in_the_place_of_another_is_noticed(tmp_path: Path) -> None:
    file, _, _ = opened(tmp_path)
    data = bytearray(file.path.read_bytes())
    one, other = CONTENTS.places[0, 0], CONTENTS.places[0, 1]
    data[one.start : one.stop], data[other.start : other.stop] = (
        data[other.start : other.stop],
        data[one.start : one.stop],
    )
    file.path.write_bytes(data)
    for key in [(0, 0), (0, 1)]:
        with pytest.raises(FileFault, match="does not have the bytes"):
            read(file, key)
    assert torch.equal(read(file, (0, 5))[0], blob((0, 5)))


def test_a_file_of_other_experts_under_this_name_is_noticed(tmp_path: Path) -> None:
    other = replace(CONTENTS, fingerprint="3f2b")
    opened(tmp_path, other)[0].close()
    os.replace(tmp_path / other.file_name, tmp_path / CONTENTS.file_name)
    with pytest.raises(FileFault, match="has a damaged head"):
        ExpertFile(tmp_path / CONTENTS.file_name, CONTENTS)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda path: os.truncate(path, 0), "has 0 bytes, not "),
        (lambda path: os.truncate(path, CONTENTS.file_bytes - 1), f"has {CONTENTS.file_bytes - 1} bytes, not "),
        (lambda path: os.truncate(path, CONTENTS.file_bytes + 1), f"has {CONTENTS.file_bytes + 1} bytes, not "),
        (lambda path: flip(path, 3), "has a damaged head"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "is no plain file"),
        (lambda path: (path.unlink(), path.symlink_to("/dev/null")), "is no plain file"),
    ],
    ids=["empty", "short", "long", "head", "pipe", "device"],
)
def test_a_file_that_is_damaged_is_written_again(tmp_path: Path, damage: object, found: str) -> None:
    assert callable(damage)
    opened(tmp_path)[0].close()
    damage(tmp_path / CONTENTS.file_name)
    file, checkpoint, notes = opened(tmp_path)
    assert (notes.codes, len(checkpoint.asked)) == (["E0642"], 5)
    assert f"the expert file `{file.path}` {found}" in notes.told[0].message
    assert all(torch.equal(read(file, key)[0], blob(key)) for key in CONTENTS.keys)
    assert names(tmp_path) == [CONTENTS.file_name]


def test_what_happens_to_an_open_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, _, _ = opened(tmp_path)
    os.truncate(file.path, CONTENTS.places[1, 1].stop)
    assert torch.equal(read(file, (1, 1))[0], blob((1, 1)))
    with pytest.raises(FileFault, match="was cut short"):
        read(file, (1, 2))
    file.path.unlink()
    assert torch.equal(read(file, (0, 5))[0], blob((0, 5)))
    failing(monkeypatch, "preadv", errno.EIO)
    with pytest.raises(FileFault, match="cannot be read: Input/output error"):
        read(file, (0, 5))


# --- where it cannot be written ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["absent", "file"])
def test_a_folder_must_be_there(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MoecError, match=r"does not exist|is no folder") as caught:
        opened(tmp_path / place)
    assert (caught.value.diagnostics[0].code, caught.value.exit_code) == ("E0640", 4)


@pytest.mark.parametrize("number", FULL)
@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync"])
def test_a_full_disk_is_told_with_needed_and_free_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    failing(monkeypatch, call, number)
    monkeypatch.setattr("os.statvfs", lambda path: os.statvfs_result((4096, 1024, 99, 9, 3, 0, 0, 0, 0, 255)))
    with pytest.raises(MoecError) as caught:
        opened(tmp_path)
    found = caught.value.diagnostics[0]
    needed = f"{CONTENTS.file_bytes} bytes are needed, 3072 are free"
    assert (found.code, found.message) == (
        "E0641",
        f"no space for the expert file `{tmp_path / CONTENTS.file_name}`: {needed}",
    )
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("call", "number"),
    [("open", errno.EROFS), ("pwrite", errno.EIO), ("replace", errno.EACCES), ("posix_fallocate", errno.EFBIG)],
)
def test_other_failures_leave_nothing_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    real = os.open
    failing(monkeypatch, call, number)
    if call == "open":  # as on a file system that is read-only
        refuse = os.open
        monkeypatch.setattr("os.open", lambda *args: (refuse if args[1] & os.O_CREAT else real)(*args))
    with pytest.raises(MoecError, match=f"cannot be written: {os.strerror(number)}") as caught:
        opened(tmp_path)
    assert (caught.value.diagnostics[0].code, names(tmp_path)) == ("E0641", [])


def test_space_that_cannot_be_claimed_in_advance_is_written_to_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, "posix_fallocate", errno.EOPNOTSUPP)
    file, _, _ = opened(tmp_path)
    assert torch.equal(read(file, (1, 2))[0], blob((1, 2)))


def test_an_older_file_outlives_a_failed_attempt_at_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(tmp_path)[0].close()
    flip(tmp_path / CONTENTS.file_name, 0)
    before = (tmp_path / CONTENTS.file_name).read_bytes()
    failing(monkeypatch, "pwrite", errno.ENOSPC)
    with pytest.raises(MoecError, match="no space"):
        opened(tmp_path)
    assert (names(tmp_path), (tmp_path / CONTENTS.file_name).read_bytes()) == ([CONTENTS.file_name], before)


@pytest.mark.parametrize("error", [KeyboardInterrupt, None])
def test_a_checkpoint_that_fails_meanwhile_leaves_nothing(tmp_path: Path, error: type[BaseException] | None) -> None:
    checkpoint = Checkpoint()

    def read(key: Key, into: Tensor) -> None:
        checkpoint.is_lost = key == (0, 5)
        if checkpoint.is_lost and error is not None:
            raise error
        checkpoint(key, into)

    with pytest.raises(error or MoecError):
        open_expert_file(tmp_path, CONTENTS, read, Notes())
    assert names(tmp_path) == []


def test_a_disk_that_fails_to_open_the_file_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found damaged, written again, and still cannot be opened: that is one fault."""
    opened(tmp_path)[0].close()
    real, notes = os.open, Notes()

    def refuse(path: os.PathLike[str], flags: int, *mode: int) -> int:
        if str(path).endswith(CONTENTS.file_name) and not flags & os.O_CREAT:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, flags, *mode)

    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(MoecError, match="cannot be written: once written, it cannot be opened: Input/output error"):
        open_expert_file(tmp_path, CONTENTS, Checkpoint(), notes)
    assert notes.told == []


# --- several at once --------------------------------------------------------------------------------------------------


def test_of_two_that_want_a_file_one_writes_it_and_the_other_waits(tmp_path: Path) -> None:
    """The first is held in the middle of its work until the second has found the lock taken."""
    second_waits, results = threading.Event(), dict[str, list[Key]]()
    first_writes = threading.Event()

    def slow(key: Key, into: Tensor) -> None:
        first_writes.set()
        assert second_waits.wait(60)
        checkpoints["first"](key, into)

    checkpoints = {"first": Checkpoint(), "second": Checkpoint()}

    def first() -> None:
        file = open_expert_file(tmp_path, CONTENTS, slow, Notes())
        results["first"] = [key for key in CONTENTS.keys if torch.equal(read(file, key)[0], blob(key))]

    thread = threading.Thread(target=first)
    thread.start()
    assert first_writes.wait(60)
    file = open_expert_file(tmp_path, CONTENTS, checkpoints["second"], Notes(), lambda done, total: second_waits.set())
    thread.join(60)
    assert results["first"] == list(CONTENTS.keys)
    assert all(torch.equal(read(file, key)[0], blob(key)) for key in CONTENTS.keys)
    assert (checkpoints["second"].asked, names(tmp_path)) == ([], [CONTENTS.file_name])


def test_who_waits_long_for_another_process_says_so_once(tmp_path: Path) -> None:
    partial, polls, notes = tmp_path / f".{CONTENTS.file_name}.partial", list[int](), Notes()
    other = os.open(partial, os.O_CREAT | os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)

    def until(done: int, total: int) -> None:
        polls.append(done)
        if len(polls) == 30:
            os.close(other)

    open_expert_file(tmp_path, CONTENTS, Checkpoint(), notes, until)
    assert notes.codes == ["E0648"]
    line = f"another process writes the expert file `{tmp_path / CONTENTS.file_name}`"
    assert (notes.told[0].message, notes.told[0].help) == (line, "this one waits for it")


def test_a_lock_on_a_file_that_is_gone_meanwhile_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has published or removed its partial file between this one's open and lock."""
    lock, locked = fcntl.flock, list[int]()

    def lock_too_late(descriptor: int, how: int) -> None:
        lock(descriptor, how)
        locked.append(descriptor)
        if len(locked) == 1:
            (tmp_path / f".{CONTENTS.file_name}.partial").unlink()

    monkeypatch.setattr("fcntl.flock", lock_too_late)
    file, _, _ = opened(tmp_path)
    assert torch.equal(read(file, (1, 2))[0], blob((1, 2)))
    assert (len(locked), names(tmp_path)) == (2, [CONTENTS.file_name])


@pytest.mark.parametrize("contents", [CONTENTS, replace(CONTENTS, fingerprint="77")], ids=["same", "another"])
def test_what_a_killed_process_left_is_taken_over_or_removed(tmp_path: Path, contents: Contents) -> None:
    def read_and_die(key: Key, into: Tensor) -> None:
        if key == (1, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        into.copy_(blob(key))

    child = os.fork()
    if child == 0:
        open_expert_file(tmp_path, CONTENTS, read_and_die, Notes())
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert names(tmp_path) == [f".{CONTENTS.file_name}.partial"]
    file, _, _ = opened(tmp_path, contents)
    assert all(torch.equal(read(file, key)[0], blob(key, contents)) for key in contents.keys)
    assert names(tmp_path) == [contents.file_name]


def test_processes_that_start_together_all_get_the_file(tmp_path: Path) -> None:
    go, ready = os.pipe(), os.pipe()
    children = []
    for _ in range(4):
        if (child := os.fork()) == 0:
            code = 1
            try:
                os.write(ready[1], b".")
                os.read(go[0], 1)
                file, _, _ = opened(tmp_path)
                code = 0 if all(torch.equal(read(file, key)[0], blob(key)) for key in CONTENTS.keys) else 2
            finally:
                os._exit(code)
        children.append(child)
    for _ in children:
        os.read(ready[0], 1)
    os.write(go[1], b"....")
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    assert names(tmp_path) == [CONTENTS.file_name]
