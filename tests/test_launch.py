"""The launcher: results, devices, seats, and what is said when ranks or their numbers are wrong."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moec.diagnostics import MoecError, fail
from moec.runtime.launch.fault import Fault, parse_fault
from moec.runtime.launch.job import run_ranks
from moec.runtime.launch.process import port_holder
from moec.runtime.launch.rank import Rank, choose_device, join_timeout, num_cores
from moec.runtime.launch.report import PeerLost, is_peer_loss
from moec.runtime.launch.seat import read_seat
from moec.runtime.launch.signals import Stopped
from moec.runtime.launch.status import SLOT_BYTES, Place, Status, read_slot
from tests.commands import Command

ROOT = Path(__file__).resolve().parent.parent


def failed(main, world: int = 3) -> MoecError:  # type: ignore[no-untyped-def]
    with pytest.raises(MoecError) as error:
        run_ranks(main, world, threads=1)
    return error.value


def lockstep(rank: Rank, step: int) -> None:
    rank.status.step = step
    rank.status.enter("all_reduce")
    dist.all_reduce(torch.ones(1))


def test_results_come_in_rank_order() -> None:
    def main(rank: Rank) -> object:
        total = torch.tensor([float(rank.rank)])
        dist.all_reduce(total)
        return {"rank": rank.rank, "local": rank.local_rank, "sum": total.item()}

    assert run_ranks(main, 4, threads=1) == [{"rank": r, "local": r, "sum": 6.0} for r in range(4)]


def test_one_rank_needs_no_process_group() -> None:
    """B18: no collective machinery where the mesh has none."""
    assert run_ranks(lambda rank: [dist.is_initialized(), rank.world], 1, threads=1) == [[False, 1]]


def test_cores_are_shared_out_among_ranks() -> None:
    assert run_ranks(lambda _: torch.get_num_threads(), 2) == [max(1, num_cores() // 2)] * 2


def listening() -> list[str]:
    """Addresses (hexadecimal, as /proc/net has them) that sockets of this process listen on."""
    mine = {os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    rows = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    return [row[1].rpartition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]


def test_ranks_listen_on_the_loopback_only() -> None:
    """Nothing that ranks send each other is authenticated, so nobody outside the host may reach them."""

    def main(rank: Rank) -> list[str]:
        lockstep(rank, 0)
        return listening()

    found = run_ranks(main, 2, threads=1)
    assert {address for addresses in found for address in addresses} == {"0100007F"}


def test_a_killed_rank_is_named_with_its_operation() -> None:
    def main(rank: Rank) -> None:
        for step in range(5):
            lockstep(rank, step)
            if step == 3 and rank.rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)

    error = failed(main, 4)
    assert error.exit_code == 5
    line = error.diagnostics[0].one_line()
    assert line.startswith("moec: error[E0601]: rank 2 (pid ")
    assert "was killed by SIGKILL during all_reduce of step 3" in line


def test_the_error_of_a_rank_wins_over_the_lost_peers() -> None:
    def main(rank: Rank) -> None:
        for step in range(5):
            lockstep(rank, step)
            if step == 3 and rank.rank == 1:
                raise fail("E0745", "shard `a.safetensors` ends early")

    error = failed(main)
    assert error.diagnostics[0].code == "E0745"
    assert error.exit_code == 3
    assert "shard `a.safetensors` ends early (rank 1, pid " in str(error)
    assert "during all_reduce of step 3)" in str(error)


def test_an_unexpected_exception_is_a_bug_of_moec() -> None:
    def main(rank: Rank) -> None:
        if rank.rank == 0:
            raise ValueError("three\nlines\nlong")
        lockstep(rank, 0)

    error = failed(main)
    assert error.exit_code == 70
    assert "internal error: ValueError: three (rank 0" in str(error)


def test_a_result_that_is_not_json_is_told() -> None:
    assert "TypeError: Object of type Tensor is not JSON serializable" in str(failed(lambda _: torch.ones(1), 1))


@pytest.mark.parametrize("leave", [lambda: os._exit(3), lambda: os._exit(0)])
def test_a_rank_that_ends_without_a_word_is_dead(leave) -> None:  # type: ignore[no-untyped-def]
    def main(rank: Rank) -> None:
        if rank.rank == 1:
            leave()
        lockstep(rank, 0)

    error = failed(main)
    assert error.diagnostics[0].code == "E0601"
    assert "rank 1 (pid " in str(error)
    assert "and no result" in str(error)


def test_only_lost_peers_is_still_an_error() -> None:
    def main(rank: Rank) -> None:
        if rank.rank == 1:
            raise PeerLost("connection closed")

    error = failed(main, 2)
    assert error.diagnostics[0].code == "E0602"
    assert error.exit_code == 5


def test_ranks_of_a_failed_run_are_gone() -> None:
    def run() -> None:
        def main(rank: Rank) -> None:
            if rank.rank == 1:
                raise fail("E0745", "no")
            signal.pause()

        with pytest.raises(MoecError):
            run_ranks(main, 3, threads=1)

    command = Command(run)
    assert command.wait().code == 0
    command.wait_until_alone()


def sleeping_ranks() -> Command:
    def run() -> None:
        def main(rank: Rank) -> None:
            sys.stdout.write(f"up{rank.rank}\n")
            sys.stdout.flush()
            signal.pause()

        try:
            run_ranks(main, 2, threads=1)
        except Stopped as stopped:
            sys.exit(stopped.exit_code)

    command = Command(run)
    command.wait_for("up0")
    command.wait_for("up1")
    return command


def test_ranks_die_with_a_killed_launcher() -> None:
    """F03: SIGKILL leaves the launcher no chance to clean up."""
    command = sleeping_ranks()
    os.kill(command.pid, signal.SIGKILL)
    assert command.wait().code == -signal.SIGKILL
    command.wait_until_alone()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_stops_all_ranks(signum: int, code: int) -> None:
    """F19, the terminal's way: the whole process group gets the signal."""
    command = sleeping_ranks()
    os.killpg(command.pid, signum)
    assert command.wait().code == code
    command.wait_until_alone()


# --- devices and seats --------------------------------------------------------------------------------------------


def test_the_device_follows_the_local_rank() -> None:
    """B46: RANK=9, LOCAL_RANK=1 on the second of two nodes of 8."""
    env = {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    seat = read_seat(env | {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"})
    assert (seat.rank, seat.local_rank, seat.world, seat.local_world) == (9, 1, 16, 8)
    assert choose_device("cuda", seat.local_rank, seat.local_world, num_devices=8) == torch.device("cuda", 1)


def test_more_ranks_than_devices_are_refused_with_both_numbers() -> None:
    with pytest.raises(MoecError, match="4 ranks on this host need a CUDA device each, 2 are visible") as error:
        choose_device("cuda", 3, 4, num_devices=2)
    assert (error.value.diagnostics[0].code, error.value.exit_code) == ("E0605", 4)
    assert choose_device("cpu", 3, 4, num_devices=2) == torch.device("cpu")


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "0"}, "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT missing"),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR, MASTER_PORT missing"),
        ({"RANK": "x", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, "RANK is not a number"),
    ],
)
def test_a_half_set_environment_is_named(env: dict[str, str], words: str) -> None:
    with pytest.raises(MoecError, match=words) as error:
        read_seat(env)
    assert error.value.diagnostics[0].code == "E0609"


def test_the_holder_of_a_port_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port_holder(port) == f" by pid {os.getpid()}"
    assert port_holder(port) == ""


def test_join_timeout_must_be_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEC_JOIN_TIMEOUT", "7")
    assert join_timeout().total_seconds() == 7
    monkeypatch.setenv("MOEC_JOIN_TIMEOUT", "soon")
    with pytest.raises(MoecError, match="MOEC_JOIN_TIMEOUT=soon is not understood"):
        join_timeout()


# --- status and planted faults ------------------------------------------------------------------------------------


def test_a_status_is_read_back_from_its_slot() -> None:
    slot = memoryview(bytearray(SLOT_BYTES))
    status = Status(3, slot)
    assert str(read_slot(slot).place) == ""
    status.layer, status.step = 7, 2
    status.enter("all_to_all")
    assert read_slot(slot).place == status.place == Place("all_to_all", 7, 2)
    assert str(status.place) == " during all_to_all of layer 7, step 2"


def test_faults_are_parsed_or_refused() -> None:
    assert parse_fault("kill@all_to_all:step=2,rank=1") == Fault("kill", "all_to_all", 2, 1)
    assert parse_fault("raise@join experts.ep") == Fault("raise", "join experts.ep")
    for text in ("kill", "kill@", "burn@load", "kill@load:step", "kill@load:where=3", "kill@load:step=x", "a@b"):
        with pytest.raises(MoecError, match="is not understood") as error:
            parse_fault(text)
        assert (error.value.diagnostics[0].code, error.value.exit_code) == ("E0608", 2)


def test_a_fault_strikes_in_its_step_and_on_its_rank_only() -> None:
    fault = Fault("raise", "load", step=2, rank=1)
    fault.strike("load", 1, rank=1)
    fault.strike("load", 2, rank=0)
    fault.strike("step", 2, rank=1)
    with pytest.raises(RuntimeError, match="fault planted by MOEC_FAULT"):
        fault.strike("load", 2, rank=1)


def test_words_of_a_lost_peer() -> None:
    assert is_peer_loss(RuntimeError("[/x/pair.cc:553] Connection closed by peer [127.0.0.1]:33702"))
    assert is_peer_loss(RuntimeError("Read error [127.0.0.1]:4752: Connection reset by peer"))
    assert not is_peer_loss(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_peer_loss(ValueError("connection reset by peer"))


# --- torchrun -----------------------------------------------------------------------------------------------------

SCRIPT = """
from types import SimpleNamespace
import torch
from moec.mesh import Mesh
from moec.runtime import collectives
from moec.runtime.groups import make_groups
from moec.runtime.launch.torchrun import run_as_rank

def work(start):
    rank = start(2, "ep=2", "cpu")
    rank.status.enter("load")
    ctx = SimpleNamespace(groups=make_groups(Mesh(dp=2, ep=2), rank))
    for rank.status.step in range(4):
        total = collectives.all_reduce(ctx, torch.tensor([rank.rank + 1.0]), group="experts.ep")
    if rank.rank == 0:
        print("total", total.item())

run_as_rank(work)
"""


def rank_env(rank: int, world: int, port: int) -> dict[str, str]:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "MOEC_JOIN_TIMEOUT": "20"}
    return os.environ | where | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}


def start_ranks(ranks: list[int], world: int, **env: str) -> tuple[list[int], str, str]:
    """Ranks of the script by the environment alone, as Slurm starts them: exit codes, joined output and errors."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    def be_rank(rank: int) -> None:
        os.environ.update(rank_env(rank, world, port) | env)
        exec(SCRIPT, {})  # noqa: S102

    commands = [Command(lambda rank=rank: be_rank(rank)) for rank in ranks]  # type: ignore[misc]
    done = [command.wait() for command in commands]
    return [d.code for d in done], "".join(d.out for d in done), "".join(d.err for d in done)


def error_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if "moec: error[" in line]


def test_ranks_started_from_outside_do_the_same_work() -> None:
    assert start_ranks([0, 1], 2) == ([0, 0], "total 3.0\n", "")


@pytest.mark.parametrize(
    ("fault", "line", "codes"),
    [
        ("kill@all_reduce:step=2,rank=1", "rank 1 (pid ", {5, -9}),
        ("kill@load:rank=0", "rank 0 ", {5, -9}),
        ("raise@load:rank=1", "internal error: RuntimeError: fault planted by MOEC_FAULT (rank 1", {5, 70}),
    ],
)
def test_of_ranks_started_from_outside_one_reports(fault: str, line: str, codes: set[int]) -> None:
    ended, _, err = start_ranks([0, 1], 2, MOEC_FAULT=fault)
    assert set(ended) == codes
    assert len(error_lines(err)) == 1
    assert line in error_lines(err)[0]


def test_a_wrong_world_size_is_told_once_with_both_numbers() -> None:
    """F16, first half."""
    codes, _, err = start_ranks([0, 1, 2], 3)
    assert codes == [5, 5, 5]
    assert error_lines(err) == [
        "moec: error[E0603]: plan wants 2 ranks (ep=2), got 3; start it with torchrun --nproc-per-node 2"
    ]


def test_a_rank_that_never_comes_is_named() -> None:
    """F16, second half."""
    codes, _, err = start_ranks([0], 2, MOEC_JOIN_TIMEOUT="1")
    assert codes == [5]
    assert error_lines(err) == ["moec: error[E0607]: plan wants 2 ranks (ep=2), got 1: rank 1 missing"]


def test_a_taken_port_is_named_with_its_holder() -> None:
    """F15: torchrun's port is the user's choice; the launcher picks a free one of its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def be_rank() -> None:
            server.close()  # the copy that fork made: this process alone holds the port
            os.environ.update(rank_env(0, 2, port))
            exec(SCRIPT, {})  # noqa: S102

        done = Command(be_rank).wait()
    assert done.code == 4
    assert len(done.error_lines) == 1
    said = f"127.0.0.1:{port} is in use by pid {os.getpid()}; choose another MASTER_PORT"
    assert f"moec: error[E0604]: {said}" in done.err


def test_under_torchrun_the_line_of_the_dead_rank_comes_first(tmp_path: Path) -> None:
    script = tmp_path / "work.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    env = os.environ | {"MOEC_FAULT": "kill@all_reduce:step=2,rank=1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=60)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if not re.match(r"W\d{4} ", line)]
    assert len(error_lines(done.stdout + done.stderr)) == 1
    assert done.returncode == 1
    first = next(line for line in lines if "rror" in line)
    assert first.startswith("moec: error[E0601]: rank 1 (pid ")
    assert first.endswith("died during all_reduce of step 2")


@pytest.mark.parametrize("limit", [14, 20])
def test_too_few_files_are_told_as_that(limit: int) -> None:
    """Gloo and the store word it as a lost peer and as nothing in particular."""
    tiny = Path(__file__).resolve().parent.parent / "examples" / "tiny" / "tiny.moe"
    run = f'ulimit -n {limit} && exec "{sys.executable}" -m moec run "{tiny}" --tokens 1 --max-new-tokens 1'
    done = subprocess.run(["sh", "-c", run], capture_output=True, text=True, check=False, timeout=120)
    last = done.stderr.strip().splitlines()[-1]
    assert (done.returncode, last.partition("]")[0]) == (4, "moec: error[E0623"), done.stderr
