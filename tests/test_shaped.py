"""The cluster of namespaces that the exchange benchmarks run on: ranks talk, links count, nothing is left behind."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from moec.runtime.launch.rank import Rank

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # as for a script there
nodes: ModuleType = importlib.import_module("shaped_nodes")
shaped: ModuleType = importlib.import_module("shaped")
bench: ModuleType = importlib.import_module("shaped_cluster")
overlap: ModuleType = importlib.import_module("shaped_overlap")

needs_cluster = pytest.mark.skipif(nodes.unavailable() is not None, reason=str(nodes.unavailable()))
PIECE = 1 << 18  # floats


def namespaces(pid: str = "[0-9]*") -> set[str]:
    """Network namespaces that processes are in or hold open, `net:[...]`."""
    found = set()
    for link in [*Path("/proc").glob(f"{pid}/ns/net"), *Path("/proc").glob(f"{pid}/fd/*")]:
        try:
            found.add(os.readlink(link))
        except OSError:  # the process, or the descriptor of the listing itself, is gone
            continue
    return {name for name in found if name.startswith("net:")}


def exchange(rank: Rank) -> dict[str, object]:
    """An all-to-all whose pieces say where they come from and where they go."""
    world = dist.get_world_size()
    sent = torch.tensor([100.0 * rank.rank + peer for peer in range(world)]).repeat_interleave(PIECE)
    received = torch.empty_like(sent)
    dist.barrier()
    before = nodes.traffic()
    dist.barrier()
    dist.all_to_all_single(received, sent)
    dist.barrier()
    carried = nodes.traffic() - before
    wanted = torch.tensor([100.0 * peer + rank.rank for peer in range(world)]).repeat_interleave(PIECE)
    return {
        "right": torch.equal(received, wanted),
        "sent": carried.sent,
        "received": carried.received,
        "local": [rank.local_rank, rank.local_world],
        "namespace": os.readlink("/proc/self/ns/net"),
    }


def fail_on_one(rank: Rank) -> None:
    if rank.rank == 1:
        raise ValueError("rank 1 has had enough")
    dist.barrier()


@needs_cluster
def test_ranks_exchange_over_links_that_count_and_leave_nothing() -> None:
    before, devices = namespaces(), os.listdir("/sys/class/net")
    with shaped.ShapedCluster(2, 2) as cluster:
        results = cluster.run(exchange, timeout_s=60)
        assert all(result["right"] for result in results)
        assert [result["local"] for result in results] == [[0, 2], [1, 2], [0, 2], [1, 2]]
        inside = [result["namespace"] for result in results]
        assert inside[0] == inside[1] != inside[2] == inside[3]
        assert not set(inside) & before
        payload = 2 * 2 * 4 * PIECE  # each of 2 ranks of a node sends a piece to each of 2 ranks elsewhere
        for result in results:
            assert payload < result["sent"] < 1.02 * payload
            assert payload < result["received"] < 1.02 * payload
        for counted in cluster.counters():
            assert payload < counted.sent
        with pytest.raises(nodes.ClusterError, match=r"^rank 1: ValueError: rank 1 has had enough"):
            cluster.run(fail_on_one, timeout_s=60)
    assert not set(inside) & namespaces()
    assert namespaces(str(os.getpid())) <= before
    assert os.listdir("/sys/class/net") == devices
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@needs_cluster
def test_bytes_follow_from_the_routing_and_two_hop_sends_the_fewest() -> None:
    """Each case's output is checked by the benchmark itself."""
    cell = bench.Cell(2, 2, num_experts=16, top=4, phase="decode", hidden=2048)
    programs = {name: bench.compile_layer(cell, *bench.LOWERINGS[name]) for name in ("two_hop", "flat ordered")}
    with shaped.ShapedCluster(2, 2) as cluster:
        row, two_hop, ordered = bench.measure(cluster, cell, 1, programs)
    crossing = distinct = 0
    for rank in range(4):
        _, ids, _ = bench.route(cell, rank)
        for token in ids.tolist():
            away = [expert for expert in token if (expert < 8) != (rank < 2)]
            crossing += len(away)
            distinct += bool(away)
    row_bytes = 2 * cell.hidden * 4  # out and back
    assert row.bound_bytes == distinct * row_bytes
    assert crossing * row_bytes < row.sent_bytes < 1.03 * crossing * row_bytes
    assert row.bound_bytes < two_hop.sent_bytes < 1.10 * row.bound_bytes < ordered.sent_bytes
    assert [r.case for r in (row, two_hop, ordered)] == ["per_expert", "two_hop", "flat ordered"]


@needs_cluster
def test_a_wrong_output_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "per_expert", lambda seat, tokens, ids, weights: tokens)
    with shaped.ShapedCluster(2, 1) as cluster, pytest.raises(nodes.ClusterError, match="per_expert is wrong by"):
        bench.measure(cluster, bench.Cell(2, 1, num_experts=4, top=2, phase="decode", hidden=64), 1, {})


@needs_cluster
def test_what_is_measured_of_a_shaped_link_is_what_it_was_shaped_to() -> None:
    """No more than 400 Mbit/s, which is 0.05 GB/s; and however busy the machine is, not a fifth of it."""
    with shaped.ShapedCluster(2, 1) as cluster:
        declared = bench.calibrate(cluster)
    cell = bench.Cell(2, 1, num_experts=8, top=2, phase="prefill", hidden=2048)
    program = bench.compile_layer(cell, "auto", cluster=declared)
    assert program.exchange in ("flat", "gather")  # with one rank in a node, the others are the same as flat
    assert program.cluster.intra is None
    assert program.cluster.inter is not None
    assert 0.01 < program.cluster.inter.gbps < 0.055
    (flat,) = bench.compile_cases(cell, "flat", declared).values()
    crossing = 1024 * (1 - 4 / 8 * 3 / 7) * 2 * cell.hidden * 4  # tokens whose two experts are not both on their node
    assert bench.predicted_s(flat) > crossing / (program.cluster.inter.gbps * 1e9)


@needs_cluster
def test_interrupting_the_benchmark_leaves_nothing() -> None:
    command = [sys.executable, "shaped_cluster.py", "--clusters", "2x2", "--hidden", "64", "--repeats", "2"]
    command += ["--cases", "flat"]
    run = subprocess.Popen(
        command,
        cwd=BENCHMARKS,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs inherit that it is ignored
    )
    assert run.stdout is not None
    while "per_expert" not in run.stdout.readline():  # one cell is done, the next one is at work
        assert run.poll() is None
    held = namespaces(str(run.pid)) - namespaces(str(os.getpid()))
    assert len(held) == 3  # two nodes and the switch
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 130
    assert errors == ""
    assert not held & namespaces()


def test_a_machine_that_cannot_do_it_is_told_why_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["shaped_cluster.py"])
    assert bench.main() == 4
    assert capsys.readouterr().err == "shaped_cluster: network namespaces need root: run it with sudo\n"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("PATH", "")
    assert nodes.unavailable() == "`ip` is not installed: install the package iproute2"


class Measured:
    """In place of the cluster: pairs of steps whose ratios are known."""

    gains: dict[str, list[float]]

    def __init__(self, *shape: int) -> None:
        assert shape == (2, 2, 400)

    def __enter__(self) -> Measured:
        return self

    def __exit__(self, *error: object) -> None: ...

    def run(self, main: object, repeats: int, case: str) -> list[list[list[float]]]:
        return [[self.gains[case], [1.0] * repeats]]


@pytest.mark.parametrize(
    ("shared", "attention", "declined", "code"),
    [
        ([1.3, 1.2, 0.9], 0.5, "off", 0),
        ([1.3, 1.19, 1.1], 2.0, "off", 1),
        ([1.3, 1.3, 1.3], 2.0, "2", 1),
    ],
    ids=["enough", "too little", "another program where it declines"],
)
def test_too_little_gain_fails_the_benchmark(
    shared: list[float], attention: float, declined: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gains = {"the shared expert": shared, "attention": [attention] * 3}
    monkeypatch.setattr(Measured, "gains", gains, raising=False)
    monkeypatch.setattr(overlap, "ShapedCluster", Measured)
    monkeypatch.setattr(sys, "argv", ["shaped_overlap.py", "--repeats", "3"])
    compiled = overlap.compiled

    def compile_as(asked: str, **values: object) -> object:
        is_declined = asked == "auto" and values["tokens"] == overlap.DECLINES["tokens"]
        return compiled(declined if is_declined else asked, **values)

    monkeypatch.setattr(overlap, "compiled", compile_as)
    assert overlap.main() == code
