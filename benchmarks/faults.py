"""The fault rows of the run, each planted several times into four ranks: what is said, with what exit code, and when.

    python benchmarks/faults.py [--runs N] [F01 F02 ...]

A row passes where every run prints the one line that names the rank, ends with the row's exit code within its limit
after the fault struck, and leaves no process, port or shared memory behind. Exit code 1 where a run does not pass.
Times are seconds from the fault to the end of the command. Commands are forked from this process, which has torch
imported; ranks from outside are started by the environment alone, as torchrun and Slurm do it.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

import torch

from moec.cli.app import main as moec

ROOT = Path(__file__).resolve().parent.parent
MESH = ("--set", "mesh.attention=dp(4)", "--set", "mesh.experts=ep(4)")
RUN = ("run", str(ROOT / "examples" / "tiny" / "tiny.moe"), "--tokens", "34,272,497", "--tokens", "1,2", *MESH)
RUN += ("--ignore-eos", "--max-new-tokens", "40", "--json")
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Row:
    """A fault, and what has to follow. `line`: of standard error, which has no other; empty: there is none.

    `limit_s`: from the fault to the end (None: the run completes, and prints the tokens of a healthy run).
    `ranks`: 0 for the launcher's own, else so many ranks from outside; `extra`: arguments of the last of them.
    """

    id: str
    what: str
    env: dict[str, str]
    line: str
    codes: frozenset[int]
    limit_s: float | None
    ranks: int = 0
    world: int = 4
    args: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()


def fault(text: str, **env: str) -> dict[str, str]:
    return {"MOEC_FAULT": text, **env}


KILLED = r"error\[E0601\]: rank 2 \(pid \d+\) was killed by SIGKILL during "
STOPPED = r"error\[E0620\]: rank 2 \(pid \d+, state T: stopped\) stopped answering \d\.\d s ago during "
STUCK = r"error\[E0621\]: rank 2 \(pid \d+, state S: sleeping\) has not moved for \d\.\d s during grouped_linear of "
SLOW = r"note: rank 2 \(pid \d+.*\) is slow: its experts took .*median of 16 steps"
#: No fault, but a mark when the last rank comes to the handshake.
MET = fault("pause@handshake:seconds=0")
FIVE, DEAD = frozenset({5}), frozenset({5, -9})

ROWS = [
    Row("F01", "kill -9 in all_to_all", fault("kill@all_to_all:step=5,rank=2"), KILLED + "all_to_all of", FIVE, 5),
    Row("F02", "SIGSTOP in all_to_all", fault("stop@all_to_all:step=5,rank=2"), STOPPED + "all_to_all of", FIVE, 10),
    Row("F02", "SIGSTOP while loading", fault("stop@load:rank=2"), STOPPED + "load", FIVE, 10),
    Row("F02", "stuck in a step", fault("hang@grouped_linear:step=5,rank=2"), STUCK, FIVE, 10),
    Row("F02", "SIGSTOP, ranks from outside", fault("stop@all_to_all:step=5,rank=2"), STOPPED, DEAD, 10, ranks=4),
    Row("F03", "kill -9 of the launcher", {}, "", frozenset({-9}), 5),
    Row("F05", "kill -9 while loading", fault("kill@load:rank=2"), KILLED + "load", FIVE, 5),
    Row("F05", "kill -9 in a first collective", fault("kill@join experts.ep:rank=2"), KILLED + "join", FIVE, 5),
    Row("F06", "another plan on one rank", MET, r"error\[E0622\]: ranks 0 and 3 do not have the same program",
        frozenset({3, 5}), 10, ranks=4, extra=("--set", "plan.context=1024")),
    Row("F16", "3 of 4 ranks", MET | {"MOEC_JOIN_TIMEOUT": "10"}, r"plan wants 4 ranks .* got 3: rank 3 missing", FIVE,
        20, ranks=3),
    Row("F16", "a world of 3 for 4", MET, r"error\[E0603\]: plan wants 4 ranks .* got 3", FIVE, 10, ranks=3, world=3),
    Row("F17", "experts 5 times slower", fault("slow@experts:rank=2"), SLOW, frozenset({0}), None),
    Row("F18", "60 s in a first compile", fault("pause@compile:rank=2,seconds=60"), "", frozenset({0}), None,
        args=("--kernels", "interpret", "--max-new-tokens", "1")),
]  # fmt: skip


@dataclass(frozen=True)
class Done:
    codes: list[int]
    out: str
    err: str
    seconds: float


def start(args: Sequence[str], env: dict[str, str], out: Path, err: Path) -> int:
    """Fork `moec ARGS` into a session of its own; its pid."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        os.setsid()
        os.environ.update(env)
        for path, descriptor in ((out, 1), (err, 2)):
            os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), descriptor)
        sys.argv = ["moec", *args]
        try:
            moec()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        sys.stdout.flush()
    finally:
        os._exit(code)


def run(row: Row, folder: Path) -> Done:
    """One run of a row."""
    out, err, mark = (folder / name for name in ("out", "err", "mark"))
    env = {"XDG_CACHE_HOME": str(folder.parent / "cache"), "MOEC_FAULT_MARK": str(mark), **row.env}
    began = time.time()
    if row.ranks:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
        env |= {"WORLD_SIZE": str(row.world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        seats = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(row.ranks)]
        extras = [row.extra if rank == row.ranks - 1 else () for rank in range(row.ranks)]
        pids = [
            start((*RUN, *row.args, *extra), env | seat, out, err) for seat, extra in zip(seats, extras, strict=True)
        ]
    else:
        pids = [start((*RUN, *row.args), env, out, err)]
    if row.id == "F03":
        wait_until(lambda: len(members(pids[0])) == 5, "the ranks do not start")
        began = time.time()
        os.kill(pids[0], signal.SIGKILL)
    codes = [wait(pid) for pid in pids]
    for pid in pids:
        wait_until(lambda pid=pid: not members(pid), "processes are left")  # type: ignore[misc]
    struck = mark.stat().st_mtime if mark.exists() else began
    if row.ranks:
        socket.create_server(("127.0.0.1", int(port))).close()
    return Done(codes, out.read_text(), err.read_text(), time.time() - struck)


def wait(pid: int) -> int:
    wait_until(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None, "the run hangs")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def wait_until(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(otherwise)
        time.sleep(0.005)


def members(session: int) -> list[int]:
    """Pids of the processes of a session that are not zombies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # gone meanwhile
        if fields[0] != "Z" and int(fields[3]) == session:
            found.append(int(stat.parts[2]))
    return found


def complaint(row: Row, done: Done, healthy: str) -> str:
    """What is wrong with a run, or the empty string."""
    lines = done.err.splitlines()
    if (row.line and (len(lines) != 1 or not re.search(row.line, lines[0]))) or (not row.line and lines):
        return f"standard error: {done.err[:400]!r}"
    if not set(done.codes) <= row.codes or (min(row.codes) == 3 and 3 not in done.codes):
        return f"exit codes {done.codes}"
    if row.limit_s is None:
        return "" if "--kernels" in row.args or done.out == healthy else "other tokens than a healthy run"
    return "" if done.seconds <= row.limit_s else f"{done.seconds:.1f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("ids", nargs="*", help="rows, all by default")
    args = parser.parse_args()
    torch.set_num_threads(1)
    failed = 0
    with tempfile.TemporaryDirectory() as made:
        (first := Path(made) / "healthy").mkdir()
        healthy = run(Row("", "", {}, "", frozenset({0}), None), first).out
        print(f"{'row':4} {'fault':31} {'passed':>6}  {'limit':>5}  seconds from the fault to the end")
        for number, row in enumerate(row for row in ROWS if not args.ids or row.id in args.ids):
            times, wrong = [], []
            for repeat in range(args.runs):
                (folder := Path(made) / f"{number}-{repeat}").mkdir()
                memory = set(os.listdir("/dev/shm"))
                done = run(row, folder)
                times.append(done.seconds)
                problem = complaint(row, done, healthy)
                if left := set(os.listdir("/dev/shm")) - memory:
                    problem = problem or f"shared memory is left: {sorted(left)}"
                wrong += [f"     run {repeat + 1}: {problem}"] if problem else []
            limit = "-" if row.limit_s is None else f"{row.limit_s:g}"
            passed = f"{args.runs - len(wrong)}/{args.runs}"
            print(
                f"{row.id:4} {row.what:31} {passed:>6}  {limit:>5}  {' '.join(f'{t:.2f}' for t in times)}", flush=True
            )
            print("\n".join(wrong) + "\n" if wrong else "", end="")
            failed += len(wrong)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
