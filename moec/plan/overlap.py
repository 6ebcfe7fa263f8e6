"""What overlapping a sparse layer's exchange with its compute would gain, for each way to cut its tokens in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import fx

from moec.cost.exchange import copy_body, is_sparse, planned_memory
from moec.cost.operations import NodeCost, node_cost
from moec.cost.sizes import sizes_of
from moec.ir.program import Body, Program, is_op
from moec.schedule import makespan, reorder

#: Chunks that `overlap = auto` tries: 1 only moves what is there, 2 and 4 cut at the experts, the last at the entry.
CHUNKS = ("1", "2", "4", "2:layer")
#: Differences below this share of a layer's time are within the model's error: what is simpler goes first.
LEAST_GAIN = 0.01

Lower = Callable[[Program], None]


@dataclass(frozen=True)
class Overlap:
    """Microseconds of all sparse layers by chunks (as `Program.overlap` says them), and with `overlap = off`.

    None where a rate is unknown.
    """

    off_us: float | None
    by_chunks: dict[str, float]
    chosen: str
    reason: str


def plan_overlap(program: Program, lower: Lower) -> Overlap:
    """Choose the chunks of a typed Program whose `moe` nodes are not lowered yet; `lower` lowers a copy of it."""
    if program.mesh.ep == 1 or not program.experts:
        return Overlap(None, {}, "off", "nothing is exchanged")
    is_asked = program.overlap != "auto"
    asked = "asked for; " if is_asked else ""
    off, unknown, needed = _lowered(program, lower, "off")
    if unknown:
        chosen = program.overlap if is_asked else "off"
        return Overlap(None, {}, chosen, f"{asked}the cluster gives no rate for {', '.join(unknown)}")
    tried = {chunks: _lowered(program, lower, chunks) for chunks in _candidates(program)}
    times = {chunks: us for chunks, (us, _, _) in tried.items()}
    fits = _fitting(program, {chunks: memory for chunks, (_, _, memory) in tried.items()}, needed)
    which = " of what fits" * (len(fits) < len(tried))
    gains = {chunks: (off - times[chunks]) / (off or 1.0) for chunks in fits}
    worth = [chunks for chunks in fits if is_asked or gains[chunks] >= LEAST_GAIN]
    if not worth:
        most = max([0.0, *gains.values()])
        return Overlap(off, times, "off", f"the best order{which} gains {most:.1%}, less than {LEAST_GAIN:.0%}")
    chosen = next(chunks for chunks in worth if gains[chunks] >= max(gains.values()) - LEAST_GAIN)
    return Overlap(off, times, chosen, f"{asked}predicted gain {gains[chosen]:.1%}{which and ', the best' + which}")


def _fitting(program: Program, memory: dict[str, int], off: int) -> list[str]:
    """Chunks that a device has room for. All where it has none for `off`, or for none of those asked for."""
    limit = program.cluster.device.memory_bytes
    fits = [chunks for chunks, need in memory.items() if limit is None or need <= max(limit, off)]
    return fits or (list(memory) if program.overlap != "auto" else [])


def _candidates(program: Program) -> Sequence[str]:
    """What is asked for may be cut at the experts or at the layer's entry."""
    # A padded step has one shape; a cache is asked once for all experts of a layer's rows.
    is_whole = program.exchange == "padded" or program.cache is not None
    if program.overlap == "auto":
        return CHUNKS[:1] if is_whole else CHUNKS
    is_open = program.overlap.isdigit() and program.overlap != "1" and not is_whole
    return (program.overlap, f"{program.overlap}:layer") if is_open else (program.overlap,)


def _lowered(program: Program, lower: Lower, overlap: str) -> tuple[float, tuple[str, ...], int]:
    """Microseconds of the sparse layers, what is unknown of them, and bytes of the program on the fullest rank."""
    sparse = [name for name, body in program.bodies.items() if is_sparse(body)]
    bodies = {name: copy_body(body) for name, body in program.bodies.items()}
    copied = replace(program, overlap=overlap, bodies=bodies)
    lower(copied)
    total, unknown = 0.0, set[str]()
    for name in sparse:
        costs = _costs(copied, bodies[name])
        unknown |= {term for cost in costs.values() for term in cost.unknown}
        times = {node: cost.us or 0.0 for node, cost in costs.items()}
        if overlap != "off":
            reorder(bodies[name], times.__getitem__)
        total += makespan(bodies[name], times.__getitem__) * len(copied.layers_of(name))
    memory = planned_memory(copied) if program.cluster.device.memory_bytes is not None else 0
    return total, tuple(sorted(unknown)), memory


def _costs(program: Program, body: Body) -> dict[fx.Node, NodeCost]:
    sizes = sizes_of(program, body)
    return {node: node_cost(sizes, node) for node in body.graph.nodes if is_op(node)}
