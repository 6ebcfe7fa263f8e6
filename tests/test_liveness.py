"""Ranks that do not answer, are stuck or slow, and those that only look so: what the watch says, and how runs end.

Limits are shortened by MOEC_LIMITS; time is waited for, never measured.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from moec.cli.app import main
from moec.diagnostics import MoecError
from moec.runtime.launch.status import PARTS, SLOT_BYTES, WINDOW_STEPS, Place, Reading, Status, read_slot
from moec.runtime.watch import Limits, Process, Watch, look_at, read_limits
from tests.commands import Command, Done, moec

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "tiny" / "tiny.moe"
ARGS = ("run", EXAMPLE, "--tokens", "34,272,497", "--tokens", "1,2", "--ignore-eos")
QUICK = "silent=1,step=1"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "MOEC_DEBUG", "MOEC_FAULT", "MOEC_LIMITS"):
        monkeypatch.delenv(name, raising=False)


# --- what the watch makes of readings -----------------------------------------------------------------------------


class Scene:
    """A watch and ranks 0 and 1, whose readings change as the scene goes on; half a second a look."""

    def __init__(self, **ranks: object) -> None:
        self.watch = Watch(Limits())
        self.now = 0.0
        self.readings = {rank: Reading(Place("experts", 2, 7), "step") for rank in (0, 1)}
        self.processes = {rank: Process(100 + rank, "S") for rank in (0, 1)}

    def set(self, rank: int, **fields: object) -> None:
        self.readings[rank] = replace(self.readings[rank], **fields)  # type: ignore[arg-type]

    def pass_time(self, seconds: float, beating: tuple[int, ...] = (0, 1), **each_look: float) -> str:
        """What is found first within `seconds`, while `beating` ranks beat and rank 1's fields grow by `each_look`."""
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            for rank in beating:
                self.set(rank, beats=self.readings[rank].beats + 1)
            for name, growth in each_look.items():
                self.set(1, **{name: getattr(self.readings[1], name) + growth})
            if found := self.watch.look(self.now, self.readings, self.processes.__getitem__):
                return f"{found.report.code} {found.report.message}"
        return ""


def scene(section: str = "step", **of_rank_1: object) -> Scene:
    made = Scene()
    made.set(0, is_waiting=True)
    made.set(1, section=section, **of_rank_1)
    return made


def test_a_stopped_process_is_silent() -> None:
    made = scene()
    made.processes[1] = Process(101, "T")
    found = made.pass_time(10, beating=(0,))
    assert found.startswith("E0620 rank 1 (pid 101, state T: stopped) stopped answering 3.0 s ago")
    assert found.endswith(" during experts of layer 2, step 7")


def test_a_process_that_is_not_seen_to_be_stopped_has_longer() -> None:
    made = scene()
    assert made.pass_time(7, beating=(0,)) == ""
    assert made.pass_time(2, beating=(0,)).startswith("E0620 rank 1 (pid 101, state S: sleeping) stopped answering 8.")


def test_a_rank_of_another_host_is_silent_without_a_state() -> None:
    made = scene()
    made.processes[1] = Process(101, host="nodeb")
    assert "rank 1 (pid 101 on nodeb) stopped answering" in made.pass_time(10, beating=(0,))


def test_a_beat_that_waits_for_a_working_library_is_no_alarm() -> None:
    made = scene()
    for second in range(60):
        made.processes[1] = Process(101, "R", cpu=float(second))
        assert made.pass_time(1, beating=(0,)) == ""


def test_a_debugged_process_is_no_alarm() -> None:
    made = scene()
    made.processes[1] = Process(101, "t")
    assert made.pass_time(60, beating=(0,)) == ""


def test_a_watcher_that_was_stopped_itself_blames_nobody() -> None:
    made = scene()
    made.pass_time(1)
    made.now += 3600
    assert made.pass_time(1, beating=()) == ""


def test_a_rank_that_neither_moves_nor_computes_is_stuck() -> None:
    found = scene().pass_time(12)
    assert (
        found == "E0621 rank 1 (pid 101, state S: sleeping) has not moved for 7.0 s during experts of layer 2, step 7"
    )


@pytest.mark.parametrize(
    "each_look", [{"progress": 1}, {"cpu_ns": 5e8}, {"cpu_ns": 5e7}], ids=["moves", "computes", "shares its processor"]
)
def test_a_rank_that_moves_or_computes_is_not_stuck(each_look: dict[str, float]) -> None:
    assert scene().pass_time(60, **each_look) == ""


def test_a_rank_that_waits_for_a_peer_is_not_stuck() -> None:
    made = scene(is_waiting=True)
    assert made.pass_time(3600) == ""


def test_one_operation_may_not_compute_for_ever_while_peers_wait() -> None:
    assert "rank 1 (pid 101, state S: sleeping) computes for 540 s while others wait" in scene().pass_time(
        600, cpu_ns=5e8
    )
    alone = scene()
    alone.set(0, is_waiting=False, section="output")
    assert alone.pass_time(600, cpu_ns=5e8) == ""


@pytest.mark.parametrize(("section", "seconds"), [("setup", 60), ("load", 120), ("compile", 600), ("output", 10_000)])
def test_sections_have_limits_of_their_own(section: str, seconds: int) -> None:
    """F18, in no time: a compiler in another process leaves this one idle for a minute."""
    made = scene(section)
    assert made.pass_time(seconds - 1) == ""
    assert (made.pass_time(2) != "") == (section != "output")


def test_limits_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEC_LIMITS", "silent=1.5,step=2")
    limits = read_limits()
    assert (limits.silent, limits.frozen, limits.sections["step"], limits.sections["load"]) == (1.5, 8, 2, 120)
    for text in ("step", "step=x", "steps=1", "step=1.2.3", "step=-1"):
        monkeypatch.setenv("MOEC_LIMITS", text)
        with pytest.raises(MoecError, match=r"MOEC_LIMITS=.* is not understood") as error:
            Watch()
        assert error.value.exit_code == 2


def timed(nanoseconds: Mapping[str, tuple[int, int]], windows: int = 2) -> Reading:
    window = tuple(nanoseconds.get(part, (0, 0)) for part in PARTS)
    return Reading(phase="decode", windows=windows, times=(window, window))


MS = 1_000_000


@pytest.mark.parametrize(
    ("mine", "others", "is_noted"),
    [
        ((5 * MS, 8), (1 * MS, 8), True),
        ((2 * MS, 8), (1 * MS, 8), False),
        ((5 * MS, 40), (1 * MS, 8), False),  # more rows: an uneven load, not a slow rank
        ((2 * MS, 1), (1 * MS, 64), False),  # slow for each row only: it has few
        ((5 * MS, 8), (0, 0), False),  # the others had nothing to do
        ((50_000, 8), (10_000, 8), False),  # too little to matter
    ],
)
def test_a_slow_rank_is_noted_once(mine: tuple[int, int], others: tuple[int, int], is_noted: bool) -> None:
    watch = Watch(Limits())
    ranks = {rank: timed({"experts": others, "attention": (MS, 8)}) for rank in range(4)}
    ranks[2] = timed({"experts": mine, "attention": (MS, 8)})
    notes = watch.slow(ranks, lambda rank: Process(rank))
    assert len(notes) == is_noted
    for note in notes:
        assert note.startswith("rank 2 (pid 2) is slow: its experts took 5.0 ms a step, on the other ranks 1.0 ms")
    assert watch.slow(ranks, lambda rank: Process(rank)) == []
    assert Watch(Limits()).slow({**ranks, 0: timed({}, windows=1)}, lambda rank: Process(rank)) == []


def test_a_status_measures_the_parts_of_steps() -> None:
    slot = memoryview(bytearray(SLOT_BYTES))
    status = Status(0, slot)
    for phase, steps in (("prefill", 1), ("decode", 2 * WINDOW_STEPS)):
        for _ in range(steps):
            status.begin("step")
            status.phase = phase
            status.worked("experts", 0, 5)
            status.worked("experts", 0, 6)
    status.begin("step")
    reading = read_slot(slot)
    assert (reading.phase, reading.windows) == ("decode", 2)
    assert [[rows for _, rows in window] for window in reading.times] == [[0, 0, 11]] * 2
    assert all(window[2][0] > window[0][0] == 0 for window in reading.times)


def test_a_status_says_what_a_rank_waits_for() -> None:
    status = Status(0)
    seen = []
    for act in (lambda: status.begin("load"), lambda: status.enter("join"), status.leave, lambda: status.work("mm")):
        act()
        reading = read_slot(status.slot)
        seen.append((str(reading.place), reading.section, reading.is_waiting))
    assert seen == [
        (" during load", "load", False),
        (" during join", "load", True),
        (" after join", "load", False),
        (" during mm", "load", False),
    ]
    with status.within("output", "writing"):
        assert read_slot(status.slot).section == "output"
    assert read_slot(status.slot).section == "load"


def test_the_state_of_a_process_is_read() -> None:
    assert look_at(os.getpid()).state == "R"
    assert look_at(os.getpid()).cpu > 0
    assert look_at(2**22 + 1).state == ""


# --- runs ---------------------------------------------------------------------------------------------------------


def one_line(command: Command) -> tuple[Done, str]:
    """The finished command, whose standard error is one line, and that line; nothing of it is left."""
    done = command.wait()
    command.wait_until_alone()
    assert len(done.error_lines) == 1, done.err
    assert done.err.splitlines() == done.error_lines
    return done, done.error_lines[0]


def shared_memory() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir()}


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        ("stop@all_to_all:step=2,rank=1", "during all_to_all of layer 1, step 2"),
        ("stop@load:rank=1", "during load"),
    ],
)
def test_a_stopped_rank_is_named(fault: str, where: str) -> None:
    """F02. Nothing of the run is left, not even the stopped process."""
    before = shared_memory()
    done, line = one_line(moec(*ARGS, env={"MOEC_FAULT": fault, "MOEC_LIMITS": QUICK}))
    assert done.code == 5
    assert re.match(r"moec: error\[E0620\]: rank 1 \(pid \d+, state T: stopped\) stopped answering \d\.\d s ago ", line)
    assert where in line
    assert shared_memory() == before


def test_a_stuck_rank_is_named() -> None:
    fault = {"MOEC_FAULT": "hang@grouped_linear:step=2,rank=1", "MOEC_LIMITS": QUICK}
    done, line = one_line(moec(*ARGS, env=fault))
    assert done.code == 5
    assert re.match(r"moec: error\[E0621\]: rank 1 \(pid \d+, state S: sleeping\) has not moved for \d\.\d s ", line)
    assert "during grouped_linear of layer 1, step 2" in line


def test_a_slow_rank_completes_and_is_noted(tmp_path: Path) -> None:
    """F17."""
    args = (*ARGS, "--max-new-tokens", "24")
    slow = moec(*args, env={"MOEC_FAULT": "slow@experts:rank=1", "MOEC_LIMITS": "step=2"}).wait()
    usual = moec(*args).wait()
    assert (slow.code, slow.out) == (0, usual.out)
    (note,) = (line for line in slow.err.splitlines() if "rank 1 " in line)
    assert re.match(
        r"moec: note: rank 1 \(pid \d+.*\) is slow: its experts took .* \(median of 16 steps of decode\)", note
    )


def test_a_slow_compile_is_no_alarm(tmp_path: Path) -> None:
    """F18: twice as long as a step may stand still, in a kernel's first launch; in the step itself that is an alarm."""
    mark = tmp_path / "struck"
    env = {"MOEC_LIMITS": "step=1", "MOEC_FAULT_MARK": str(mark)}
    args = (*ARGS, "--max-new-tokens", "1")
    pause = "{}:rank=1,seconds=2"
    fault = {"MOEC_FAULT": "pause@" + pause.format("compile")}
    compiling = moec(*args, "--kernels", "interpret", env=env | fault).wait()
    assert (compiling.code, compiling.err) == (0, "")
    assert mark.exists()
    done, line = one_line(moec(*args, env=env | {"MOEC_FAULT": "pause@" + pause.format("step")}))
    assert done.code == 5
    assert "error[E0621]: rank 1 " in line


def test_ctrl_z_is_no_alarm() -> None:
    """The whole process group is stopped and goes on; the limit is shorter than the stop."""
    command = moec(*ARGS[:2], "--tokens", "1", "--max-new-tokens", "200", "--ignore-eos", env={"MOEC_LIMITS": QUICK})
    command.wait_for(" ")
    os.killpg(command.pid, signal.SIGSTOP)
    subprocess.run(["sleep", "2"], check=True)
    os.killpg(command.pid, signal.SIGCONT)
    done = command.wait()
    assert (done.code, done.err) == (0, "")


def test_a_reader_that_pauses_is_no_alarm() -> None:
    """`moec run ... | less`: rank 0 waits for its reader, and its peers for rank 0."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    while True:  # leave no room
        try:
            os.write(write_end, b"\n" * 4096)
        except BlockingIOError:
            break
    os.set_blocking(write_end, True)
    command = moec(*ARGS, "--max-new-tokens", "2", env={"MOEC_LIMITS": "step=1"}, pipe=(read_end, write_end))
    os.close(write_end)
    subprocess.run(["sleep", "3"], check=True)
    while os.read(read_end, 1 << 16):
        pass
    os.close(read_end)
    done = command.wait()
    assert (done.code, done.err) == (0, "")


# --- ranks that torchrun started ----------------------------------------------------------------------------------


def start_ranks(
    world: int,
    *args: str,
    ranks: int | None = None,
    each: Mapping[int, tuple[str, ...]] = {},
    hosts: Mapping[int, str] = {},
    **env: str,
) -> list[Command]:
    """`moec run` as each of `world` ranks (or the first `ranks`), by the environment.

    `each`: more arguments of some ranks; `hosts`: the name of the host that some ranks believe to run on.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **env}

    def be_rank(rank: int) -> None:
        if rank in hosts:
            socket.gethostname = lambda: hosts[rank]
        sys.argv = ["moec", *map(str, ARGS), *args, *each.get(rank, ())]
        main()

    return [
        Command(functools.partial(be_rank, rank), common | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks or world)
    ]


def finish(commands: list[Command]) -> tuple[list[int], str]:
    """Exit codes and the one line of all ranks."""
    done = [command.wait() for command in commands]
    lines = [line for d in done for line in d.err.splitlines()]
    assert len(lines) == 1, lines
    return [d.code for d in done], lines[0]


@pytest.mark.parametrize("rank", [0, 1], ids=["who serves the store", "another"])
def test_of_ranks_from_outside_the_silent_one_is_named_and_ended(rank: int) -> None:
    """F02. The stopped rank cannot end itself: where its peer knows the process, it is killed."""
    commands = start_ranks(2, MOEC_FAULT=f"stop@all_to_all:step=2,rank={rank}", MOEC_LIMITS=QUICK)
    if rank == 0:
        alive = commands[1].wait()
        os.kill(commands[0].pid, signal.SIGKILL)
        assert commands[0].wait().code == -9
        codes, lines = [alive.code], alive.err.splitlines()
    else:
        codes, line = finish(commands)
        lines = [line]
    assert set(codes) <= {5, -9}
    assert len(lines) == 1
    assert re.match(rf"moec: error\[E0620\]: rank {rank} \(pid {commands[rank].pid}, state T: stopped\)", lines[0])


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("kill", r"E0601\]: rank 1 \(pid {} on nodeb\) died, or its host is gone, during \w+ of layer 1, step 2"),
        (
            "stop",
            r"E0620\]: rank 1 \(pid {} on nodeb\) stopped answering .* rank 0 waits during .* layer 1, step 2",
        ),
    ],
)
def test_a_rank_of_another_host_is_named_by_what_it_last_showed(fault: str, line: str) -> None:
    """Nobody left on that host can tell: its status stands still."""
    env = {"MOEC_FAULT": f"{fault}@all_to_all:step=2,rank=1", "MOEC_LIMITS": "silent=1"}
    commands = start_ranks(2, hosts={1: "nodeb"}, **env)
    done = commands[0].wait()
    if fault == "stop":  # torchrun on that host would do it
        os.kill(commands[1].pid, signal.SIGKILL)
    commands[1].wait()
    assert done.code == 5
    assert re.search(line.format(commands[1].pid), "\n".join(done.error_lines))
    assert len(done.error_lines) == 1


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (("--set", "plan.context=1024"), "program"),
        (("--max-new-tokens", "7"), "prompts and options"),
    ],
)
def test_ranks_that_would_not_run_the_same_are_refused(other: tuple[str, ...], what: str) -> None:
    """F06: before the first collective, by the digests that the ranks show each other."""
    codes, line = finish(start_ranks(2, each={1: other}))
    assert 3 in codes
    assert set(codes) <= {3, 5}
    assert re.match(
        rf"moec: error\[E0622\]: ranks 0 and 1 do not have the same {what}: [0-9a-f]{{12}} and [0-9a-f]{{12}};", line
    )


def test_a_missing_rank_is_named_once() -> None:
    """F16: 3 of 4 ranks join."""
    mesh = ("--set", "mesh.attention=dp(4)", "--set", "mesh.experts=ep(4)")
    codes, line = finish(start_ranks(4, *mesh, ranks=3, MOEC_JOIN_TIMEOUT="10"))
    assert codes == [5, 5, 5]
    assert line == "moec: error[E0607]: plan wants 4 ranks (dp=4 ep=4), got 3: rank 3 missing"


def test_under_torchrun_a_stopped_rank_is_named_and_the_job_ends(tmp_path: Path) -> None:
    """torchrun by itself would name another rank, after its collectives time out, and wait 30 s for the stopped one."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "moec", *map(str, ARGS)]
    env = os.environ | {"MOEC_FAULT": "stop@all_to_all:step=2,rank=1", "MOEC_LIMITS": QUICK, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=100)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "moec: error[" in line]
    assert done.returncode == 1
    assert len(lines) == 1
    assert re.match(r"moec: error\[E0620\]: rank 1 \(pid \d+, state T: stopped\) stopped answering", lines[0])
    pid = int(re.findall(r"pid (\d+)", lines[0])[0])
    assert not Path(f"/proc/{pid}").exists()
