"""A cluster: nodes of equal devices, and the links between them.

All rates are per direction and per device, as vendors count them for one sender: gigabytes per second are 1e9 bytes.
`None` means not known; what needs the figure then says so instead of guessing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """One class of link of one device and direction, by the alpha-beta model.

    m messages of n bytes together take ceil(m / concurrency) * latency_us + n / (gbps * 1000) microseconds:
    `concurrency` messages are under way at once.
    """

    gbps: float
    latency_us: float = 0.0
    concurrency: int = 1

    def time_us(self, num_bytes: float, num_messages: int = 1) -> float:
        return -(-num_messages // self.concurrency) * self.latency_us + num_bytes / (self.gbps * 1e3)


@dataclass(frozen=True)
class Device:
    """One accelerator (or one CPU rank): memory in bytes, memory rate in GB/s, dense rates in TFLOP/s by dtype."""

    memory_bytes: int | None = None
    memory_gbps: float | None = None
    tflops: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Cluster:
    """`num_nodes` nodes of `devices_per_node` devices. `inter` is None on a machine that has one node only."""

    name: str
    num_nodes: int
    devices_per_node: int
    device: Device = Device()
    intra: Link | None = None
    inter: Link | None = None
    host: Link | None = None
    nvme: Link | None = None

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    def node_of(self, rank: int) -> int:
        return rank // self.devices_per_node

    def link_class(self, ranks: tuple[int, ...]) -> str:
        """`intra` when all ranks of a group sit in one node, else `inter`."""
        return "intra" if len({self.node_of(r) for r in ranks}) == 1 else "inter"
