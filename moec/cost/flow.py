"""How many rows each hop of an exchange moves, by the class of link they take, on the busiest rank.

Every rank of an ep group starts with equally many rows, whose choices follow one `Routing`; so a hop's rows are a
number per row that a rank starts with. Nothing here looks at pairs of ranks: a rank sends each destination the same
expected rows whoever it is, so sums over a node and over the group are enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from moec.ir.ops.exchange import HOPS
from moec.mesh import Mesh
from moec.placement import Placement
from moec.routing import Floats, Parts, Routing
from moec.topology import Cluster

#: Where bytes go: over the rank's own memory, to another rank of the node, to another node.
CLASSES = ("memory", "intra", "inter")


@dataclass(frozen=True)
class Flow:
    """One collective's rows per row that a rank starts with, and its peers, each class on its own busiest rank.

    `rows` and `peers` are by class, in the order of `CLASSES`; of sending and receiving the larger counts. `sent` and
    `arrived` are all rows of the busiest sender and receiver, those that stay included.
    """

    rows: tuple[float, float, float]
    peers: tuple[int, int, int]
    sent: float
    arrived: float


@dataclass(frozen=True)
class Route:
    """What decides who sends what to whom. A `Routing` is compared by value or identity; all else by value."""

    mesh: Mesh
    cluster: Cluster
    placement: Placement
    routing: Routing


@lru_cache(maxsize=512)
def hop(route: Route, group: str, start: str) -> Flow:
    """A hop over `group` from `start`; the way back moves the same rows in the other direction."""
    return _widest([_flow(nodes, _wanted(route, group, start, ranks)) for nodes, ranks in _groups(route, group)])


@lru_cache(maxsize=512)
def pairs(route: Route) -> Flow:
    """One row per token and expert, straight between a token's rank and its experts' (`combine = ordered`)."""
    flows = [_flow(nodes, _per_rank(route, "pairs")) for nodes, _ in _groups(route, "experts.ep")]
    return _widest(flows)


@lru_cache(maxsize=512)
def whole(mesh: Mesh, cluster: Cluster, group: str) -> Flow:
    """One row from every rank to each rank of its group: a gather, or the first half of a sum."""
    lists = mesh.groups()[group]
    patterns = {_nodes(cluster, ranks) for ranks in lists}
    return _widest([_flow(nodes, np.ones(len(nodes))) for nodes in patterns])


@lru_cache(maxsize=512)
def served_pairs(route: Route) -> float:
    """(Token, expert) pairs of the busiest rank of an ep group, per row that each of its ranks starts with."""
    return float(_per_rank(route, "pairs").max()) * route.mesh.ep


def active_experts(route: Route, tokens: float) -> float:
    """Experts of one rank that at least one of the group's `tokens` chose, on the rank with the most."""
    return float(route.routing.active(_owners(route), route.mesh.ep, tokens).max())


def start_of(group: str, end: str) -> str:
    """Where the hop over `group` that ends at `end` starts."""
    return next(start for (over, start), there in HOPS.items() if over == group and there == end)


# --- which rows -----------------------------------------------------------------------------------------------------


def _groups(route: Route, group: str) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(node of each rank, the ranks) of the groups that can differ: in nodes, or in their place in the ep group."""
    mesh, seen = route.mesh, set()
    for ranks in mesh.groups()[group]:
        nodes = _nodes(route.cluster, ranks)
        if (key := (nodes, mesh.coordinate(ranks[0], "ep"))) not in seen:
            seen.add(key)
            yield nodes, ranks


def _nodes(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Node of each rank, the nodes numbered in the order in which they appear."""
    number: dict[int, int] = {}
    return tuple(number.setdefault(cluster.node_of(rank), len(number)) for rank in ranks)


def _wanted(route: Route, group: str, start: str, ranks: tuple[int, ...]) -> Floats:
    """Expected rows that one rank of the group sends to each, per row that a rank starts with."""
    mesh = route.mesh
    node, local = mesh.ep_position(mesh.coordinate(ranks[0], "ep"))
    by_place = _per_rank(route, "touched")
    if start == "node":  # rows of every node's rank at this place
        return mesh.nodes * by_place[node * mesh.local : (node + 1) * mesh.local]
    if start == "local":  # rows of every rank of this node
        return mesh.local * by_place[local :: mesh.local]
    if group == "experts.ep":
        return by_place
    part = 0 if group == "links.node" else 1
    parts = [mesh.ep_position(owner)[part] for owner in _owners(route)]
    return route.routing.touched(parts, mesh.nodes if group == "links.node" else mesh.local)


@lru_cache(maxsize=512)
def _per_rank(route: Route, what: str) -> Floats:
    """Of each rank of an ep group: probability that a token has an expert there, or its expected number of them."""
    count = route.routing.touched if what == "touched" else route.routing.pairs
    return count(_owners(route), route.mesh.ep)


@lru_cache(maxsize=512)
def _owners(route: Route) -> Parts:
    """Rank in the ep group of each expert."""
    owner = {expert: rank for rank, held in enumerate(route.placement.slots) for expert in held}
    return tuple(owner[expert] for expert in range(route.placement.num_experts))


# --- over which links -----------------------------------------------------------------------------------------------


def _flow(nodes: tuple[int, ...], to: Floats) -> Flow:
    """Rows by class where each rank of a group, on `nodes`, sends to[j] rows to rank j."""
    at = np.asarray(nodes)
    in_node = np.bincount(at)[at]  # ranks of the group in each rank's node
    to_node = np.bincount(at, weights=to)[at]
    sends = (to, np.where(in_node > 1, to_node - to, 0.0), np.where(in_node < len(at), to.sum() - to_node, 0.0))
    receives = (to, to * (in_node - 1), to * (len(at) - in_node))
    memory, intra, inter = (max(float(s.max()), float(r.max())) for s, r in zip(sends, receives, strict=True))
    peers = (1, int(in_node.max()) - 1, len(at) - int(in_node.min()))
    return Flow((memory, intra, inter), peers, float(to.sum()), float(to.max()) * len(at))


def _widest(flows: list[Flow]) -> Flow:
    """The largest of each number."""
    memory, intra, inter = (max(flow.rows[i] for flow in flows) for i in range(3))
    peers = tuple(max(flow.peers[i] for flow in flows) for i in range(3))
    sent, arrived = max(flow.sent for flow in flows), max(flow.arrived for flow in flows)
    return Flow((memory, intra, inter), (peers[0], peers[1], peers[2]), sent, arrived)
