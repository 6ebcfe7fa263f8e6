"""Several nodes in one machine: network namespaces joined by rate-limited links, with gloo ranks inside them.

    with ShapedCluster(nodes=2, ranks_per_node=2, mbit=400) as cluster:
        results = cluster.run(main, 3)          # main(rank, 3) in each of the four ranks; results are JSON values
        print(cluster.counters())               # bytes each node has sent and received so far

A node is a namespace with `eth0` (a veth) and an unshaped `lo`, over which its ranks talk to each other. The other ends
of the veths are ports of a bridge in a namespace of its own, so the link of a node is shared by its ranks and a switch
joins the nodes. `tc tbf` shapes both ends of each veth: what a node sends, and what is sent to it.

- Namespaces have no name and no process: they live by file descriptors of this process and of its ranks. The kernel
  takes them down with their links when those close, however this process ends, and runs cannot meet.
- Frames are 9000 bytes, as in a cluster, and one packet each (`gso_max_segs 1`): otherwise the kernel passes and counts
  64 KiB at a time with one header, and the counters would hide the header bytes. Headers and acks come to about 1.1%.
- Queues hold more than TCP ever has on its way, so nothing is dropped and no byte is sent twice. TCP is reno, which
  every kernel has and which never slows down without losses: what is measured is the link, not congestion control.
- `burst` is what passes at once after an idle time. It is two frames: small messages are shaped as well.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from shaped_nodes import ClusterError, Traffic, configure, entered, new_namespace, set_namespace, traffic, unavailable
from torch._C._distributed_c10d import TCPStore

from moec.runtime.launch.rank import Rank, die_with, start_rank
from moec.runtime.launch.status import Status

MTU = 9000
BURST_BYTES = 2 * (MTU + 14)
QUEUE_BYTES = 64 << 20
_PORT = 29500  # each cluster has networks of its own, so the port is always free


class ShapedCluster:
    """`nodes` namespaces with `ranks_per_node` ranks each; links of `mbit` Mbit/s per direction. A context manager.

    Enter it in the main thread of a process that has started no torch threads: ranks are forked from it.
    Rank r is the rank r % ranks_per_node of node r // ranks_per_node.

    Raises:
        ClusterError: this machine cannot do it (`unavailable` says why), or `ip` or `tc` refused.
    """

    def __init__(self, nodes: int, ranks_per_node: int, mbit: int = 400) -> None:
        self.nodes, self.ranks_per_node, self.mbit = nodes, ranks_per_node, mbit
        self._namespaces: list[int] = []  # of the nodes, then of the switch

    @property
    def world(self) -> int:
        return self.nodes * self.ranks_per_node

    def __enter__(self) -> ShapedCluster:
        reason = unavailable()
        if reason is not None:
            raise ClusterError(reason)
        torch.set_num_threads(1)  # no thread may run when ranks are forked
        try:
            self._set_up()
        except BaseException:
            self._take_down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._take_down()

    def run(self, main: Callable[..., object], *args: object, timeout_s: float = 600) -> list[Any]:
        """Run `main(rank, *args)` in every rank, joined in a gloo process group; results in rank order.

        Raises:
            ClusterError: a rank raised, died, or was not done in `timeout_s` seconds. No rank is left in any case.
        """
        with _Crew(self._namespaces, self.ranks_per_node, self.world) as crew:
            for rank in range(self.world):
                crew.start(rank, main, args)
            return crew.wait(timeout_s)

    def counters(self) -> list[Traffic]:
        """What each node's link has carried so far."""
        found = []
        for namespace in self._namespaces[: self.nodes]:
            with entered(namespace):
                found.append(traffic())
        return found

    def _set_up(self) -> None:
        for _ in range(self.nodes + 1):
            self._namespaces.append(new_namespace())
        *nodes, switch = self._namespaces
        links = [(f"port{i}", f"/proc/{os.getpid()}/fd/{node}") for i, node in enumerate(nodes)]
        configure(
            switch,
            [f"link add switch mtu {MTU} type bridge mcast_snooping 0", "link set switch up"]
            + [f"link add {port} mtu {MTU} type veth peer name eth0 mtu {MTU} netns {node}" for port, node in links]
            + [f"link set {port} gso_max_segs 1 master switch up" for port, _ in links],
            [self._shape(port) for port, _ in links],
        )
        for i, node in enumerate(nodes):
            address = [f"addr add {_address(i)}/24 dev eth0", "link set lo up", "link set eth0 gso_max_segs 1 up"]
            configure(node, address, [self._shape("eth0")])

    def _shape(self, device: str) -> str:
        return f"qdisc add dev {device} root tbf rate {self.mbit}mbit burst {BURST_BYTES} limit {QUEUE_BYTES}"

    def _take_down(self) -> None:
        while self._namespaces:
            os.close(self._namespaces.pop())


# --- ranks --------------------------------------------------------------------------------------------------------


class _Crew:
    """The ranks of one run, each with a pipe for its result; all are dead and reaped on leaving."""

    def __init__(self, namespaces: list[int], ranks_per_node: int, world: int) -> None:
        self.namespaces, self.ranks_per_node, self.world = namespaces, ranks_per_node, world
        self.pids: dict[int, int] = {}
        self.pipes: dict[int, int] = {}

    def __enter__(self) -> _Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        for pid in self.pids.values():
            if kind is not None:
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for pipe in self.pipes.values():
            os.close(pipe)

    def start(self, rank: int, main: Callable[..., object], args: tuple[object, ...]) -> None:
        launcher = os.getpid()
        sys.stdout.flush()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # raised in a hook of fork, it would be lost
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._be_rank(rank, launcher, write_end, main, args)
        self.pids[rank], self.pipes[rank] = pid, read_end
        os.close(write_end)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def wait(self, timeout_s: float) -> list[Any]:
        """Results in rank order, as soon as every rank has given one."""
        deadline = time.monotonic() + timeout_s
        data = dict.fromkeys(self.pipes, b"")
        events: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank, pipe in self.pipes.items():
                selector.register(pipe, selectors.EVENT_READ, rank)
            while len(events) < self.world:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise ClusterError(f"ranks {sorted(set(data) - set(events))} are not done after {timeout_s:.0f} s")
                for key, _ in ready:
                    chunk = os.read(key.fd, 1 << 20)
                    data[key.data] += chunk
                    if not chunk:
                        selector.unregister(key.fd)
                        events[key.data] = json.loads(data[key.data] or _DIED)
                _raise_first(events)
        return [events[rank]["result"] for rank in range(self.world)]

    def _be_rank(
        self, rank: int, launcher: int, pipe: int, main: Callable[..., object], args: tuple[object, ...]
    ) -> NoReturn:
        """The life of a forked rank. Never returns into the launcher's stack."""
        try:
            die_with(launcher)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the launcher acts
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for other in self.pipes.values():
                os.close(other)
            try:
                event = {"result": self._work(rank, main, args)}
            except BaseException as error:
                event = {
                    "error": f"{type(error).__name__}: {error}",
                    "at": time.monotonic(),
                    "trace": traceback.format_exc(),
                }
            with os.fdopen(pipe, "wb") as out:
                out.write(json.dumps(event).encode())
            sys.stdout.flush()
        finally:
            os._exit(0)

    def _work(self, rank: int, main: Callable[..., object], args: tuple[object, ...]) -> object:
        node, local = divmod(rank, self.ranks_per_node)
        set_namespace(self.namespaces[node])
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        store = TCPStore(_address(0), _PORT, None, rank == 0, timedelta(seconds=30), wait_for_workers=False)
        seat: Rank = start_rank(rank, self.world, (local, self.ranks_per_node), "cpu", store, Status(rank), threads=1)
        result = main(seat, *args)
        dist.barrier()  # a rank that leaves early takes its connections with it
        dist.destroy_process_group()
        return result


#: What stands for the word of a rank that was killed: it comes before the errors of the peers it took with it.
_DIED = '{"error": "died without a word", "at": 0, "trace": ""}'


def _raise_first(events: dict[int, dict[str, Any]]) -> None:
    """Raise the error that came first, if any: the others are mostly peers that lost their connection to that rank."""
    failed = [(event["at"], rank) for rank, event in events.items() if "error" in event]
    if failed:
        _, rank = min(failed)
        raise ClusterError(f"rank {rank}: {events[rank]['error']}\n{events[rank]['trace']}".rstrip())


def _address(node: int) -> str:
    return f"10.77.0.{node + 1}"
