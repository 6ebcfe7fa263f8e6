"""Where weights are looked for: what is given, the path as written, the local cache of the hub; never elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moec.diagnostics import MoecError
from moec.weights_path import find_weights


def refused(written: str | None, base: Path | list[Path], given: Path | None = None) -> str:
    with pytest.raises(MoecError) as caught:
        find_weights(written, base, given)
    return caught.value.diagnostics[0].one_line()


def test_a_path_is_relative_to_the_file_and_a_given_folder_wins(tmp_path: Path) -> None:
    for name in ("written", "given"):
        (tmp_path / name).mkdir()
    assert find_weights("written", tmp_path) == tmp_path / "written"
    assert find_weights(str(tmp_path / "written"), tmp_path / "elsewhere") == tmp_path / "written"
    assert find_weights("written", tmp_path, tmp_path / "given") == tmp_path / "given"


def test_what_is_not_here_is_refused_with_the_places_looked_in(tmp_path: Path) -> None:
    assert "error[E0760]: the program names no weights" in refused(None, tmp_path)
    line = refused("models/mine", tmp_path)
    assert "error[E0761]" in line and f"`{tmp_path / 'models/mine'}`" in line and "--weights DIR" in line
    # a given folder that is absent is never replaced by another one
    (tmp_path / "written").mkdir()
    assert f"error[E0761]: there is no model folder at `{tmp_path / 'gone'}`" in refused(
        "written", tmp_path, tmp_path / "gone"
    )


def test_of_two_starts_the_first_with_a_model_counts(tmp_path: Path) -> None:
    bases = [tmp_path / "beside", tmp_path / "source"]
    for base in bases:
        base.mkdir()
    assert f"`{bases[0]}`, `{bases[1]}`" in refused(".", bases)
    (bases[1] / "config.json").write_text("{}")
    assert find_weights(".", bases) == bases[1]
    assert all(f"`{base / 'gone'}`" in refused("gone", bases) for base in bases)


def test_nothing_is_found_where_it_need_not_be(tmp_path: Path) -> None:
    assert find_weights(None, tmp_path, must_exist=False) is None
    assert find_weights("models/mine", tmp_path, must_exist=False) is None


def test_the_newest_snapshot_of_the_local_cache_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    snapshots = tmp_path / "hub" / "models--owner--name" / "snapshots"
    for age, name in enumerate(("new", "old")):
        (snapshots / name).mkdir(parents=True)
        os.utime(snapshots / name, (1000 - age, 1000 - age))
    assert find_weights("owner/name", tmp_path) == snapshots / "new"
    for name in ("owner/..", "../name", "owner/name/more", "owner/"):
        assert find_weights(name, tmp_path / "base", must_exist=False) is None
