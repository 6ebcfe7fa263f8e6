"""Rows that `capacity = N drop` leaves out are told to who runs the model: by a line and in --json."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moec.api import load
from moec.cache.trace import DECODE, PREFILL, read_trace
from moec.compiler import compile
from moec.runtime.run_counts import tell_dropped
from tests.commands import Done, moec

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "tiny"
#: Room for one row: an even share of 16 tokens or 8 sequences is 32 or 16 rows.
TIGHT = {
    "plan.prefill.tokens": "16",
    "plan.exchange": "padded",
    "plan.prefill.capacity": "0.03125 drop",
    "plan.decode.capacity": "0.0625 drop",
}
FIRST, SECOND = "34,272,497,1148,9,77,5,6,7", "1,2,3,4,5,6"


@pytest.fixture(autouse=True, scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("OMP_NUM_THREADS", "1")
        for name in ("RANK", "WORLD_SIZE", "MOEC_DEBUG", "MOEC_FAULT"):
            patch.delenv(name, raising=False)
        yield


def run(*args: str | Path, **changes: str) -> Done:
    """A run with hardly any room, or with other settings, `prefill_capacity` for `plan.prefill.capacity`."""
    settings = TIGHT | {f"plan.{key.replace('_', '.')}": value for key, value in changes.items()}
    given = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    done = moec("run", EXAMPLE / "tiny.moe", *given, "--ignore-eos", *args).wait()
    assert done.code == 0, done.err
    return done


def dropped(done: Done) -> dict[str, int]:
    """What --json counts, which is also what the line says."""
    found: dict[str, int] = json.loads(done.out)["dropped"]
    assert done.err.startswith(f"moec: note: {sum(found.values())} rows did not fit a padded exchange ")
    assert done.err.count("\n") == 1
    return found


@pytest.fixture(scope="module")
def found() -> Done:
    """Two prompts, each on a rank of its own."""
    return run("--tokens", FIRST, "--tokens", SECOND, "--max-new-tokens", "1", "--json")


def test_rows_of_all_ranks_and_layers_are_told(found: Done, tmp_path: Path) -> None:
    """Of the rows that a prompt has for either rank one goes, in each of 4 layers."""
    total = 0
    for number, prompt in enumerate((FIRST, SECOND)):
        trace = tmp_path / f"{number}.npz"
        alone = run("--tokens", prompt, "--max-new-tokens", "1", "--json", "--record", trace)
        ids = read_trace(trace).expert_ids
        wanted = sum(int((ids // 16 == rank).any(axis=2).sum(axis=1).clip(1).sum()) - len(ids) for rank in range(2))
        assert dropped(alone) == {"prefill": wanted, "decode": 0}
        total += wanted
    assert dropped(found) == {"prefill": total, "decode": 0}
    assert found.err.endswith(
        f" {total} rows did not fit a padded exchange and went on without those experts ({total} in prefill); "
        "raise `capacity` in prefill, or leave it out\n"
    )


def test_rows_of_decode_steps_are_told(tmp_path: Path) -> None:
    """Two sequences on a rank are one row too many wherever both want experts of the same rank."""
    trace = tmp_path / "t.npz"
    prompts = [part for prompt in (FIRST, SECOND, FIRST, SECOND) for part in ("--tokens", prompt)]
    done = run(*prompts, "--max-new-tokens", "3", "--record", trace, prefill_capacity="64.0 drop")
    recorded = read_trace(trace)
    steps = [ids for ids in _steps(recorded.expert_ids, recorded.step_starts) if ids.shape[1] == 4]
    assert (recorded.phase == DECODE).sum() == 8 and (recorded.phase == PREFILL).sum() == 30
    assert len(steps) == 2
    # both ranks have the same two prompts, so half of the rows for a rank are each sender's
    wants = [(ids // 16 == rank).any(axis=2).sum(axis=1) for ids in steps for rank in range(2)]
    surplus = sum(int(np.clip(rows // 2 - 1, 0, None).sum()) * 2 for rows in wants)
    assert f"moec: note: {surplus} rows did not fit" in done.err
    assert f"({surplus} in decode); raise `capacity` in decode, or" in done.err


def _steps(ids: np.ndarray, starts: np.ndarray) -> list[np.ndarray]:
    return [ids[:, first:last] for first, last in itertools.pairwise(starts)]


@pytest.mark.parametrize(
    "changes",
    [
        ("mesh.stages=pp(2)",),  # stages add up
        ("mesh.attention=dp(2)*tp(2)", "mesh.experts=edp(1)*ep(2)*etp(2)"),  # two ranks send the same rows
    ],
    ids=["pp", "etp"],
)
def test_the_count_is_the_same_on_other_meshes(changes: tuple[str, ...], found: Done) -> None:
    given = [part for change in changes for part in ("--set", change)]
    done = run("--tokens", FIRST, "--tokens", SECOND, "--max-new-tokens", "1", "--json", *given)
    assert dropped(done) == dropped(found)


def test_where_all_rows_fit_nothing_is_said_and_zero_is_counted() -> None:
    done = run("--tokens", FIRST, "--max-new-tokens", "2", "--json", prefill_capacity="64.0 drop")
    assert (done.err, json.loads(done.out)["dropped"]) == ("", {"prefill": 0, "decode": 0})


def test_a_plan_that_leaves_nothing_out_has_no_count() -> None:
    done = moec("run", EXAMPLE / "tiny.moe", "--tokens", FIRST, "--max-new-tokens", "1", "--json").wait()
    assert (done.err, sorted(json.loads(done.out))) == ("", ["text", "tokens"])


def test_the_python_api_says_it_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = Path(shutil.copytree(EXAMPLE, tmp_path / "model"))
    compile(folder / "tiny.moe", overrides=[f"{key}={value}" for key, value in TIGHT.items()]).save(tmp_path / "made")
    load(tmp_path / "made", weights=folder).generate([[34, 272, 497, 1148, 9, 77, 5]], max_new_tokens=1)
    assert capfd.readouterr().err.count("did not fit a padded exchange") == 1


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({}, ""),
        ({"prefill": 1, "decode": 0}, "1 row did not fit"),
        ({"prefill": 8, "decode": 4}, "12 rows did not fit"),
        ({"prefill": 8, "decode": 4}, "(8 in prefill and 4 in decode); raise `capacity` in prefill and decode, or"),
    ],
)
def test_the_line_names_the_phases(counts: dict[str, int], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    tell_dropped(counts)
    found = capsys.readouterr().err
    assert said in found and bool(said) == bool(found)
