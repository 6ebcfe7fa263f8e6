"""Bytes and microseconds of what moves between ranks, from the cluster's links.

A first, closed-form account: each collective of a phase at its largest step, rows spread evenly over the group. A time
is latency + bytes / bandwidth of the slowest link the group crosses, None where the cluster does not say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import fx

from moec.ir import Program, is_op, op_of, type_of
from moec.topology import Link

#: Bytes of one element.
WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2, "i64": 8, "i32": 4, "bytes": 1}


@dataclass(frozen=True)
class Traffic:
    """One kind of collective of one body: bytes that leave a rank each time, how often a step runs it, and the time."""

    body: str
    op: str
    group: str
    num_ranks: int
    link: str  # intra | inter
    send_bytes: int
    times: int
    us: float | None


def token_rows(program: Program) -> int:
    """Most token rows that one rank routes in a step: its piece of a dp rank's rows, or those of several dp ranks."""
    mesh = program.mesh
    return -(-program.tokens // mesh.split_parts) if mesh.tp > mesh.etp else program.tokens * mesh.split_parts


def bounds(program: Program, top: int, held: int) -> dict[str, int]:
    """The largest value of each run-time symbol: `top` experts a token, `held` on this rank."""
    mesh, tokens = program.mesh, program.tokens
    piece = token_rows(program)
    gathered = piece * mesh.ep
    return {
        "T": tokens,
        "S": piece,
        "L": min(tokens, program.slots),
        "P": piece * min(top, mesh.ep),
        "K": piece * top,
        "H": gathered,
        "Q": gathered * min(top, mesh.local),
        "R": gathered,
        "X": gathered * min(top, held),
        "G": gathered,
        "M": held,
    }


def routed_tops(program: Program) -> dict[str, int]:
    """Experts per token of each table."""
    return {str(n.kwargs["table"]): int(str(n.kwargs["top"])) for _, n in program.nodes() if op_of(n).name == "route"}


def traffic(program: Program) -> list[Traffic]:
    """Every collective of a phase, in the order in which a step meets them."""
    tops = routed_tops(program)
    sizes = bounds(
        program, max(tops.values(), default=0), max((p.counts[0] for p in program.placements.values()), default=0)
    )
    out = []
    for body, node in program.nodes():
        group = node.kwargs.get("group")
        if "comm" in op_of(node).effects and node.kwargs.get("how", "gather") == "gather" and group is not None:
            times = len(program.layers_of(body.name)) or 1
            out.append(_traffic(program, body.name, node, str(group), times, sizes))
    return out


def _traffic(program: Program, body: str, node: fx.Node, group: str, times: int, sizes: dict[str, int]) -> Traffic:
    ranks = program.mesh.groups()[group][0]
    link_class = str(node.meta["stream"])
    link = program.cluster.inter if link_class == "inter" else program.cluster.intra
    sent = _send_bytes(node, len(ranks), sizes)
    time = link.time_us(sent) if isinstance(link, Link) else None
    return Traffic(body, op_of(node).name, group, len(ranks), link_class, sent, times, time)


def _send_bytes(node: fx.Node, num_ranks: int, sizes: dict[str, int]) -> int:
    """Bytes that leave one rank: its own part to each peer, or an even share of its rows in an all-to-all."""
    source = node.args[0]
    assert isinstance(source, fx.Node) and is_op(node)
    if op_of(node).name == "exchange_sizes":
        return WIDTH["i64"] * (num_ranks - 1)
    moved = type_of(source)
    # rows received are bounded by the worst routing; what travels back is what came, so count it as sent rows
    shape = ("P" if dim == "R" else dim for dim in moved.shape)
    whole = WIDTH[moved.dtype] * math.prod(dim if isinstance(dim, int) else sizes[dim] for dim in shape)
    if op_of(node).name in ("all_to_all.start", "exchange_counts", "reduce_scatter_rows"):
        return whole * (num_ranks - 1) // num_ranks
    return whole * (num_ranks - 1)
