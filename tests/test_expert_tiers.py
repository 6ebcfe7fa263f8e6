"""The tiers: right bytes from each, and whatever the nvme file does, never wrong ones; what the user is told."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moec.diagnostics import Diagnostic, MoecError
from moec.runtime.experts.file import Contents, Key, LayerBlobs
from moec.runtime.experts.pace import Rate
from moec.runtime.experts.tiers import HostTier, NvmeTier, Tier, open_nvme, print_note
from tests.expert_blobs import CONTENTS, Checkpoint, Notes, blob, failing, flip

PAGES = Path(__file__).resolve().parent.parent / "specs" / "errors"
DAMAGED: Key = (0, 1)


def brought(tier: Tier, key: Key) -> torch.Tensor:
    into = torch.zeros(CONTENTS.blob_bytes(key[0]), dtype=torch.uint8)
    for _ in tier.pieces(key, into):
        pass
    return into


def shown(code: str, text: str) -> bool:
    """Whether the page of a code shows this line as it was printed."""
    return f"\n    {text}\n" in (PAGES / f"{code}.md").read_text()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder `experts`, which names in messages are relative to."""
    monkeypatch.chdir(tmp_path)
    Path("experts").mkdir()
    return Path("experts")


# --- host -------------------------------------------------------------------------------------------------------------


def test_host_memory_holds_the_experts_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moec.runtime.experts.tiers.PIECE_BYTES", 7000)
    checkpoint, told = Checkpoint(), list[tuple[int, int]]()
    tier = HostTier(CONTENTS, [(1, 2), (0, 5)], checkpoint, progress=lambda done, total: told.append((done, total)))
    assert checkpoint.asked == [(1, 2), (0, 5)]
    assert [tier.bytes_of(key) for key in [(1, 2), (0, 5), (0, 0), (7, 7)]] == [19200, 144, None, None]
    assert all(torch.equal(brought(tier, key), blob(key)) for key in [(1, 2), (0, 5)])
    assert list(tier.pieces((1, 2), torch.empty(19200, dtype=torch.uint8))) == [7000, 14000]
    assert told == [(19200, 19392), (19392, 19392)]


def test_more_host_memory_than_there_is_is_refused() -> None:
    one = LayerBlobs(
        "layers.0", (0, 1, 2, 3), (("experts.down", "bf16", (1 << 24, 1 << 22)),)
    )  # more than addresses reach
    contents = Contents("3f2a", (one,))
    with pytest.raises(MoecError) as caught:
        HostTier(contents, contents.keys, Checkpoint())
    assert caught.value.exit_code == 4
    assert shown("E0644", caught.value.diagnostics[0].one_line())


# --- nvme -------------------------------------------------------------------------------------------------------------


def test_the_nvme_tier_reads_from_its_file(folder: Path) -> None:
    checkpoint, notes = Checkpoint(), Notes()
    tier = open_nvme(folder, CONTENTS, checkpoint, warn=notes)
    checkpoint.asked.clear()
    for key in CONTENTS.keys:
        assert torch.equal(brought(tier, key), blob(key))
        assert tier.bytes_of(key) == CONTENTS.blob_bytes(key[0])
    assert tier.bytes_of((0, 2)) is None
    assert (checkpoint.asked, notes.told, tier.num_rereads) == ([], [], 0)
    tier.close()


def test_reads_of_a_real_file_are_the_threads_however_short(folder: Path) -> None:
    real, emulated = (open_nvme(folder, CONTENTS, Checkpoint(), rate=rate) for rate in (None, Rate(5e8, 80e-6)))
    assert (real.wake_bytes, emulated.wake_bytes) == (0, HostTier.wake_bytes)


def _flip_expert(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(path, CONTENTS.places[DAMAGED].start + 5)


def _cut_short(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.truncate(path, CONTENTS.places[DAMAGED].stop - 1)


def _fail_reads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "preadv", errno.EIO)


def _empty_in_place(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(b"")


FAULTS: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], None], str]] = {
    "flip": (_flip_expert, "does not have the bytes that were written"),
    "truncated": (_cut_short, "was cut short"),
    "read error": (_fail_reads, "cannot be read: Input/output error"),
    "emptied": (_empty_in_place, "was cut short"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_the_file_fails_to_give_is_read_from_the_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    checkpoint, notes = Checkpoint(), Notes()
    tier = open_nvme(folder, CONTENTS, checkpoint, warn=notes)
    checkpoint.asked.clear()
    FAULTS[fault][0](folder / CONTENTS.file_name, monkeypatch)
    for _ in range(2):
        assert all(torch.equal(brought(tier, key), blob(key)) for key in CONTENTS.keys)
    assert DAMAGED in checkpoint.asked
    assert tier.num_rereads == len(checkpoint.asked)
    assert notes.codes == ["E0642"]  # once, however many experts
    assert f"`{folder / CONTENTS.file_name}` {FAULTS[fault][1]} (expert " in notes.told[0].message
    tier.close()


def test_a_file_that_is_missing_or_replaced_while_open_changes_nothing(folder: Path) -> None:
    notes = Notes()
    tier = open_nvme(folder, CONTENTS, Checkpoint(), warn=notes)
    (folder / "other").write_bytes(b"x" * CONTENTS.file_bytes)
    os.replace(folder / "other", folder / CONTENTS.file_name)
    assert torch.equal(brought(tier, DAMAGED), blob(DAMAGED))
    (folder / CONTENTS.file_name).unlink()
    assert torch.equal(brought(tier, (1, 1)), blob((1, 1)))
    assert (tier.num_rereads, notes.told) == (0, [])


def test_an_expert_that_is_nowhere_is_named_with_its_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = Checkpoint()
    tier = open_nvme(folder, CONTENTS, checkpoint)
    flip(folder / CONTENTS.file_name, CONTENTS.places[DAMAGED].start)
    checkpoint.is_lost = True
    with pytest.raises(MoecError) as caught:
        brought(tier, DAMAGED)
    assert caught.value.exit_code == 3
    assert shown("E0643", caught.value.diagnostics[0].one_line())
    assert shown("E0642", capsys.readouterr().err.rstrip("\n"))
    assert torch.equal(brought(tier, (0, 0)), blob((0, 0)))


# --- nvme without a file ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite"])
def test_with_a_full_disk_the_checkpoint_serves(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], call: str
) -> None:
    failing(monkeypatch, call, errno.ENOSPC)
    monkeypatch.setattr("os.statvfs", lambda path: os.statvfs_result((4096, 4096, 9, 9, 1, 0, 0, 0, 0, 255)))
    checkpoint = Checkpoint()
    tier = open_nvme(folder, CONTENTS, checkpoint)
    checkpoint.asked.clear()
    assert all(torch.equal(brought(tier, key), blob(key)) for key in CONTENTS.keys)
    assert (tier.num_rereads, checkpoint.asked) == (len(CONTENTS.keys), list(CONTENTS.keys))
    assert shown("E0641", capsys.readouterr().err.rstrip("\n"))
    assert list(folder.iterdir()) == []
    tier.close()


def test_without_a_file_the_checkpoints_own_error_is_told() -> None:
    checkpoint = Checkpoint()
    tier = NvmeTier(CONTENTS, None, checkpoint, Notes())
    checkpoint.is_lost = True
    with pytest.raises(MoecError) as caught:
        brought(tier, DAMAGED)
    assert caught.value.diagnostics[0].code == "E0745"


def test_a_missing_folder_is_refused(folder: Path) -> None:
    folder.rmdir()
    with pytest.raises(MoecError) as caught:
        open_nvme(folder, CONTENTS, Checkpoint())
    assert shown("E0640", caught.value.diagnostics[0].one_line())


def test_a_note_is_one_line_that_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_note(Diagnostic("E0642", "the file `a\nb\x1b[2J` is damaged", help="delete it"))
    assert capsys.readouterr().err == "moec: note[E0642]: the file `a b\\u001b[2J` is damaged; delete it\n"
