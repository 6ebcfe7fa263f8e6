"""What a collective moves between ranks: bytes and messages by class of link, on the busiest rank.

Everything between ranks travels as an all-to-all of exact splits, as `moec.runtime.collectives` does it: a gather sends
its rows to every peer, a reduce-scatter each peer's share to it. Each peer counts as a message, with rows or without.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from moec.cost.flow import Flow, pairs, start_of, whole
from moec.cost.sizes import Sizes
from moec.ir.ops.exchange import at
from moec.ir.ops.table import WIDTH, base_symbol
from moec.ir.program import op_of, operands, type_of


@dataclass(frozen=True)
class Load:
    """`bytes` and `messages` by class (memory, intra, inter); `rounds` of messages follow one another.

    `summed`: bytes of memory traffic to add up what came, once it is all there.
    """

    bytes: tuple[float, float, float]
    messages: tuple[int, int, int]
    rounds: int = 1
    summed: float = 0.0


def load(sizes: Sizes, node: fx.Node) -> Load | None:
    """What `node` moves between ranks, None where it stays on its rank."""
    op, group = op_of(node).name, node.kwargs.get("group")
    if "stage" in op_of(node).effects:
        return _to_neighbour(sizes, node)
    if "comm" not in op_of(node).effects or node.kwargs.get("how", "gather") != "gather":
        return None
    mesh, cluster = sizes.program.mesh, sizes.program.cluster
    if op == "all_to_all.start":
        return _all_to_all(sizes, node)
    every = whole(mesh, cluster, str(group))
    value = type_of(operands(node)[0])
    size, num_ranks = sizes.bytes(value), len(mesh.groups()[str(group)][0])
    if op in ("exchange_counts", "exchange_sizes"):
        return _load(every, WIDTH["i64"])
    if op == "reduce_scatter_rows":
        return _load(every, size / num_ranks, summed=size * (1 + 1 / num_ranks))
    if op == "all_reduce":  # each rank sums its share, then gathers the others'
        return _load(every, 2 * size / num_ranks, rounds=2, summed=size * (1 + 1 / num_ranks))
    return _load(every, size)


def _all_to_all(sizes: Sizes, node: fx.Node) -> Load:
    """Rows over one hop, out or back; equal pieces where nothing was counted."""
    rows, group = type_of(operands(node)[0]), str(node.kwargs["group"])
    dim, width = rows.shape[0], WIDTH[rows.dtype] * sizes.dim(rows.shape[1])
    mesh = sizes.program.mesh
    if len(operands(node)) == 1:
        every = whole(mesh, sizes.program.cluster, group)
        return _load(every, sizes.bytes(rows) / len(mesh.groups()[group][0]))
    share = sizes.rows * sizes.dim(dim) / sizes.dim(base_symbol(dim))
    assert sizes.route is not None
    if node.kwargs["back"] and base_symbol(dim) == "X":
        return _load(pairs(sizes.route), share * width)
    place = at(rows.layout.on("ep"))
    return _load(sizes.flow(group, start_of(group, place) if node.kwargs["back"] else place), share * width)


def _to_neighbour(sizes: Sizes, node: fx.Node) -> Load:
    """One message between two stages: sent, and on the other side received, while the rank waits."""
    size = sizes.bytes(type_of(node))
    is_inter = node.meta["stream"] == "inter"
    return Load((0.0, 0.0, size), (0, 0, 1)) if is_inter else Load((0.0, size, 0.0), (0, 1, 0))


def _load(flow: Flow, row_bytes: float, rounds: int = 1, summed: float = 0.0) -> Load:
    """A flow of rows of `row_bytes`; a row that stays is read and written."""
    stays, intra, inter = (rows * row_bytes for rows in flow.rows)
    return Load((2 * stays, intra, inter), flow.peers, rounds, summed)
