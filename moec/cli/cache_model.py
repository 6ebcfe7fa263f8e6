"""What a plan says about the cache lab: experts of each rank, their bytes, and how fast one rank is. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from moec.cache.timing import Machine
from moec.checked import Layer, Model, Moe, Plan, Tier
from moec.parameters import layer_parameters
from moec.placement import STRATEGIES
from moec.topology import Link

#: Bytes of one weight.
WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Planned:
    """`held[rank][layer]`: experts of the ranks of an ep group. `expert_bytes[layer]`: of one on one rank.

    `slots`: those that the plan's cache makes, None where it has none. `machine`: None where a rate is missing, and
    `untimed` then says which.
    """

    held: list[list[tuple[int, ...]]]
    expert_bytes: list[int]
    slots: int | None
    machine: Machine | None
    untimed: str


def read_plan(plan: Plan) -> Planned:
    """Sizes and rates of a checked plan whose model has sparse layers."""
    sparse = [layer for layer in plan.model.layers if isinstance(layer.ffn, Moe)]
    counts = [layer.ffn.routed.count for layer in sparse if isinstance(layer.ffn, Moe)]
    tables = [STRATEGIES[plan.mesh.placement](count, plan.mesh.ep).slots for count in counts]
    held = [[table[rank] for table in tables] for rank in range(plan.mesh.ep)]
    expert_bytes = [_expert_bytes(plan, layer) for layer in sparse]
    machine, untimed = _machine(plan, sparse, expert_bytes, max(len(own) for rank in held for own in rank))
    return Planned(held, expert_bytes, _slots(plan, expert_bytes, held), machine, untimed)


def _expert_bytes(plan: Plan, layer: Layer) -> int:
    assert isinstance(layer.ffn, Moe)
    return 3 * plan.model.hidden * layer.ffn.routed.inner // plan.mesh.etp * WIDTH[plan.compute]


def _slots(plan: Plan, expert_bytes: list[int], held: list[list[tuple[int, ...]]]) -> int | None:
    """Slots per layer and rank that the declaration makes, at most one for each expert."""
    if (cache := plan.cache) is None:
        return None
    most = max(len(own) for rank in held for own in rank)
    if cache.slots is not None:
        return min(cache.slots, most)
    if cache.hbm is not None:
        return min(cache.hbm // sum(expert_bytes), most)
    assert cache.share is not None
    return math.floor(cache.share * most + 1e-9)  # 0.29 of 100 is 29


def _machine(plan: Plan, sparse: list[Layer], expert_bytes: list[int], most: int) -> tuple[Machine | None, str]:
    """One rank, or the rate that is missing."""
    device = plan.mesh.cluster.device
    if device.memory_gbps is None:
        return None, f"cluster `{plan.mesh.cluster.name}` gives no `memory_rate`"
    links, missing = _links(plan, sum(expert_bytes), most)
    if missing:
        return None, missing
    flops = dict(device.tflops).get(plan.compute)
    width = WIDTH[plan.compute]
    dense = [_dense_weights(plan, layer) * width for layer in sparse]
    every = sum(_dense_weights(plan, layer) for layer in plan.model.layers) + _head(plan.model) / plan.mesh.tp
    machine = Machine(
        expert_bytes=np.asarray(expert_bytes, np.float64),
        dense_bytes=np.asarray(dense, np.float64),
        other_bytes=every * width - sum(dense),
        copy_s=np.array([max(share * link.time_us(size) for share, link in links) * 1e-6 for size in expert_bytes]),
        memory_rate=device.memory_gbps * 1e9,
        flop_rate=None if flops is None else flops * 1e12,
        width=width,
        dp=plan.mesh.dp,
    )
    return machine, ""


def _links(plan: Plan, layer_bytes: int, most: int) -> tuple[list[tuple[float, Link]], str]:
    """Share of the experts that comes over each tier's link, or what rate is missing. The tiers work at once.

    Without a cache declaration all come from host memory. What host memory has no room for comes from nvme.
    """
    cluster, cache = plan.mesh.cluster, plan.cache
    host, nvme = (cache.host, cache.nvme) if cache is not None else (None, None)
    in_host = 1.0 if nvme is None else 0.0
    if host is not None and host.bytes_per_rank is not None:
        in_host = min(1.0, host.bytes_per_rank // layer_bytes / most)
    elif host is not None:
        in_host = 1.0
    found = []
    for name, share, tier, link in (("host", in_host, host, cluster.host), ("nvme", 1.0 - in_host, nvme, cluster.nvme)):
        if share == 0.0:
            continue
        rate = _rate(tier, link)
        if rate is None:
            return [], f"neither a cache nor cluster `{cluster.name}` gives a rate for `{name}`"
        found.append((share, rate))
    return found, ""


def _rate(tier: Tier | None, link: Link | None) -> Link | None:
    if tier is None or tier.bandwidth is None:
        return link
    return Link(tier.bandwidth / 1e9, tier.latency_s * 1e6)


def _dense_weights(plan: Plan, layer: Layer) -> float:
    """Weights of a layer on one rank, its routed experts left out. All but the router are cut over tp."""
    shapes = layer_parameters(layer, plan.model.hidden)
    sizes = {name: math.prod(shape) for name, shape in shapes.items() if not name.startswith("experts.")}
    router = sum(size for name, size in sizes.items() if name.startswith("router."))
    return (sum(sizes.values()) - router) / plan.mesh.tp + router


def _head(model: Model) -> int:
    return model.hidden * model.vocab
