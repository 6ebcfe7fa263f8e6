"""Faults planted into `moec run` on two ranks: one line that names the rank, its exit code, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.commands import Command, Done, moec

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "tiny"
PROMPT = "34,272,497,1148"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "MOEC_DEBUG", "MOEC_FAULT"):
        monkeypatch.delenv(name, raising=False)


def run(*args: str | Path, fault: str = "", source: Path = EXAMPLE / "tiny.moe") -> Command:
    env = {"MOEC_FAULT": fault} if fault else {}
    return moec("run", source, "--tokens", PROMPT, "--tokens", "1,2", "--ignore-eos", *args, env=env)


def one_line(command: Command) -> tuple[Done, str]:
    """The finished command, whose standard error is one line, and that line."""
    done = command.wait()
    command.wait_until_alone()
    assert len(done.error_lines) == 1, done.err
    assert done.err.splitlines() == done.error_lines
    return done, done.error_lines[0]


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        ("kill@all_to_all:step=2,rank=1", "during all_to_all of layer 1, step 2"),  # F01
        ("kill@load:rank=1", "during load"),  # F05: before the first collective of the program
        ("kill@join experts.ep:rank=1", "during join experts.ep"),  # F05: inside a group's first collective
        ("kill@init:rank=1", "during init"),
    ],
)
def test_a_killed_rank_is_named(fault: str, where: str) -> None:
    done, line = one_line(run(fault=fault))
    assert done.code == 5
    assert line.startswith("moec: error[E0601]: rank 1 (pid ")
    assert f"was killed by SIGKILL {where}" in line


@pytest.mark.parametrize(("op", "where"), [("load", "during load"), ("step", "during step of step 0")])
def test_a_bug_in_a_rank_is_told_once_without_traceback(op: str, where: str) -> None:
    """F04."""
    done, line = one_line(run(fault=f"raise@{op}:rank=1"))
    assert done.code == 70
    assert line.startswith(
        "moec: error[E0699]: internal error: RuntimeError: fault planted by MOEC_FAULT (rank 1, pid "
    )
    assert where in line


def test_with_debug_the_traceback_of_the_rank_is_shown() -> None:
    done = moec("--debug", "run", EXAMPLE / "tiny.moe", "--tokens", "1", env={"MOEC_FAULT": "raise@load:rank=1"}).wait()
    assert done.code == 70
    assert len(done.error_lines) == 1
    assert "Traceback (most recent call last)" in done.err


def test_weights_that_are_not_finite_are_told_by_the_rank_that_reads_them(tmp_path: Path) -> None:
    """F04, a rank's own error: its code, its exit code, its message, and peers that are silent."""
    model = copy_of_example(tmp_path)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.2.mlp.experts.31.down_proj.weight"][3, 5] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    done, line = one_line(run(source=model / "tiny.moe"))
    assert done.code == 6
    assert line.startswith("moec: error[E0746]: ")
    assert "(rank 1, pid " in line


def copy_of_example(to: Path) -> Path:
    return Path(shutil.copytree(EXAMPLE, to / "model"))


def test_a_missing_shard_is_told_before_any_rank_starts(tmp_path: Path) -> None:
    model = copy_of_example(tmp_path)
    (model / "model.safetensors").unlink()
    done, line = one_line(run(source=model / "tiny.moe", fault="kill@init"))
    assert done.code == 3
    assert "error[E07" in line


def test_a_malformed_fault_is_told_by_one_rank() -> None:
    done, line = one_line(run(fault="kill@"))
    assert done.code == 2
    assert line.startswith("moec: error[E0608]: MOEC_FAULT=kill@ is not understood")


# --- signals ------------------------------------------------------------------------------------------------------


def streaming(*args: str) -> Command:
    """A long run of one prompt that has begun to print."""
    command = moec("run", EXAMPLE / "tiny.moe", "--prompt", "In", "--max-new-tokens", "2000", "--ignore-eos", *args)
    command.wait_for(" ")
    return command


def test_ranks_die_with_a_killed_launcher() -> None:
    """F03."""
    command = streaming()
    os.kill(command.pid, signal.SIGKILL)
    assert command.wait().code == -signal.SIGKILL
    command.wait_until_alone()


@pytest.mark.parametrize(
    ("signals", "code", "name"),
    [
        ([signal.SIGINT], 130, "SIGINT"),
        ([signal.SIGINT, signal.SIGINT], 130, "SIGINT"),
        ([signal.SIGTERM], 143, "SIGTERM"),
        ([signal.SIGHUP], 129, "SIGHUP"),
    ],
)
def test_a_signal_ends_the_run_with_one_line(signals: list[signal.Signals], code: int, name: str) -> None:
    """F19. What was printed before stays printed."""
    command = streaming()
    for signum in signals:
        os.killpg(command.pid, signum)
    done, line = one_line(command)
    assert done.code == code
    assert line == f"moec: error[E0606]: stopped by {name}"
    assert done.out


def test_a_reader_that_leaves_ends_the_run_quietly() -> None:
    """F19: `moec run ... | head`."""
    read_end, write_end = os.pipe()
    command = moec(
        "run",
        EXAMPLE / "tiny.moe",
        "--prompt",
        "In",
        "--max-new-tokens",
        "2000",
        "--ignore-eos",
        pipe=(read_end, write_end),
    )
    os.close(write_end)
    os.read(read_end, 1)
    os.close(read_end)
    done = command.wait()
    command.wait_until_alone()
    assert (done.code, done.err) == (0, "")


# --- ranks that torchrun started ----------------------------------------------------------------------------------


def from_outside(world: int, *args: str, **env: str) -> list[Done]:
    """`moec run` as each of `world` ranks, by the environment alone."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **env}
    commands = [
        moec("run", EXAMPLE / "tiny.moe", *args, env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world)
    ]
    return [command.wait() for command in commands]


def test_ranks_from_outside_print_what_the_launcher_prints() -> None:
    args = ("--prompt", "And it came to pass", "--tokens", "1,2", "--max-new-tokens", "8", "--json")
    first, second = from_outside(2, *args)
    alone = moec("run", EXAMPLE / "tiny.moe", *args).wait()
    assert (first.code, second.code, alone.code) == (0, 0, 0)
    assert (first.out, second.out, first.err, second.err) == (alone.out, "", "", "")


def test_a_world_of_another_size_is_refused_once() -> None:
    """F16."""
    done = from_outside(3, "--tokens", "1")
    assert {d.code for d in done} == {5}
    (line,) = [line for d in done for line in d.error_lines]
    assert "plan wants 2 ranks (dp=2 ep=2), got 3" in line


def test_bad_input_is_told_by_one_rank_of_many() -> None:
    done = from_outside(2, "--tokens", "4000")
    assert {2} <= {d.code for d in done} <= {2, 5}
    (line,) = [line for d in done for line in d.error_lines]
    assert line.startswith("moec: error[E0614]: token 4000 of prompt 0 is outside the vocabulary of 2048")
