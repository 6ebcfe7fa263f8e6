"""What commands write: a failed write leaves the older file as it was, and nothing beside it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moec.cli.app import app
from moec.diagnostics import MoecError
from moec.files import check_place, write_whole

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "tiny"


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", no_space)


def test_a_file_is_made_and_replaced_with_its_rights(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    mask = os.umask(0o027)
    try:
        write_whole(tmp_path / "file", "old\n")
    finally:
        os.umask(mask)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
    (tmp_path / "file").chmod(0o600)
    write_whole(tmp_path / "link", b"new\n")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"new\n"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_a_device_is_written_to_and_stays_one() -> None:
    write_whole(Path("/dev/null"), "gone\n")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(MoecError, match="cannot write `/dev/full`: No space left"):
        write_whole(Path("/dev/full"), "text\n")


@pytest.mark.parametrize("name", [".", "absent/file"])
def test_a_place_for_no_file_is_refused_beforehand(tmp_path: Path, name: str) -> None:
    with pytest.raises(MoecError, match="cannot write") as error:
        check_place(tmp_path / name)
    assert error.value.diagnostics[0].code == "E0618"


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize("command", ["fmt", "import"])
def test_a_full_disk_costs_no_older_file(tmp_path: Path, command: str) -> None:
    file = tmp_path / "a.moe"
    text = (EXAMPLE / "tiny.moe").read_text().replace("hidden  = 128", "hidden =    128")
    file.write_text(text)
    args = ["fmt", str(file)] if command == "fmt" else ["import", str(EXAMPLE), "-o", str(file)]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 4
    assert done.stderr.startswith(f"moec: error[E0618]: cannot write `{file}`: No space left on device; ")
    assert file.read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["a.moe"]


def test_an_import_that_check_would_refuse_writes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "a.moe"
    done = CliRunner().invoke(app, ["import", str(EXAMPLE), "--mesh", "tp=3", "-o", str(file)])
    assert (done.exit_code, done.stdout, list(tmp_path.iterdir())) == (1, "", [])
    assert f"--> {file}:" in done.stderr


def test_a_temperature_is_finite() -> None:
    for value in ("inf", "nan"):
        done = CliRunner().invoke(app, ["run", "x.moe", "--tokens", "1", "--temperature", value])
        assert done.exit_code == 2


def test_an_unknown_target_is_told_all_of_them(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["compile", str(EXAMPLE / "tiny.moe"), "--target", "xyz", "-o", str(tmp_path / "m")])
    assert "the targets are cpu, cuda:80, " in done.stderr
