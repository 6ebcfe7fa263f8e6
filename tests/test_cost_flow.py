"""Rows per class of link against exchanges that are carried out message by message."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest

from moec.cost.flow import CLASSES, Flow, Route, active_experts, hop, pairs, served_pairs, whole
from moec.mesh import Mesh
from moec.placement import Placement, linear, round_robin
from moec.routing import RandomRouting, Routing, TracedRouting
from moec.topology import Cluster

MESHES = {
    "2 nodes x 4": (Mesh(dp=8, ep=8, nodes=2), 4),
    "4 nodes x 2, copies": (Mesh(dp=8, edp=2, ep=4, nodes=2), 2),
    "etp beside ep": (Mesh(dp=8, ep=4, etp=2, nodes=2), 4),
    "one node": (Mesh(dp=4, ep=4, nodes=1), 4),
    "one rank a node": (Mesh(dp=3, ep=3, nodes=3), 1),
    "parts of nodes": (Mesh(dp=6, ep=6, nodes=0), 4),
}
PATHS = {"flat": [("experts.ep", "home")], "two_hop": [("links.node", "home"), ("links.local", "node")]}
PATHS["aggregate"] = [("links.local", "home"), ("links.node", "local")]


def route(mesh: Mesh, routing: Routing, placement: Placement, devices: int = 8) -> Route:
    return Route(mesh, Cluster("pod", -(-mesh.size // devices), devices), placement, routing)


def trace_of(num_experts: int, top: int, num_tokens: int, seed: int = 0) -> TracedRouting:
    """Skewed: low experts are chosen more often."""
    rng = np.random.default_rng(seed)
    scores = rng.gumbel(size=(num_tokens, num_experts)) - 0.15 * np.arange(num_experts)
    return TracedRouting(np.argsort(-scores, axis=1)[:, :top], num_experts)


def counted(here: Route, trace: TracedRouting, path: list[tuple[str, str]]) -> list[Flow]:
    """Each hop's rows by class on the busiest rank, where every rank starts with all tokens of the trace."""
    mesh, cluster = here.mesh, here.cluster
    owner = {expert: rank for rank, held in enumerate(here.placement.slots) for expert in held}
    members = mesh.groups()["experts.ep"]
    found = []
    rows = [
        (rank, ranks, [owner[e] for e in token]) for ranks in members for rank in ranks for token in trace.expert_ids
    ]
    for group, _ in path:
        sent: Counter[tuple[int, int]] = Counter()
        after = []
        for at, ranks, wanted in rows:
            peers = mesh.group_of(group, at)
            reached: dict[int, list[int]] = {}
            for last in wanted:
                node, local = mesh.ep_position(last)
                index = {"experts.ep": last, "links.node": node, "links.local": local}[group]
                reached.setdefault(peers[index], []).append(last)
            for there, rest in reached.items():
                sent[at, there] += 1
                after.append((there, ranks, rest))
        rows = after
        found.append(_busiest(sent, cluster, len(trace.expert_ids)))
    return found


def _busiest(sent: Counter[tuple[int, int]], cluster: Cluster, num_tokens: int) -> Flow:
    by_rank = {name: Counter[tuple[str, int]]() for name in (*CLASSES, "all")}
    for (here, there), rows in sent.items():
        same_node = cluster.node_of(here) == cluster.node_of(there)
        name = "memory" if here == there else "intra" if same_node else "inter"
        for key in (("sends", here), ("receives", there)):
            by_rank[name][key] += rows
            by_rank["all"][key] += rows
    memory, intra, inter = (max(by_rank[name].values(), default=0) / num_tokens for name in CLASSES)
    sent_by, arrived_at = (
        max(rows for (way, _), rows in by_rank["all"].items() if way == wanted) / num_tokens
        for wanted in ("sends", "receives")
    )
    return Flow((memory, intra, inter), (0, 0, 0), sent_by, arrived_at)


CASES = [
    (mesh, path)
    for mesh in MESHES
    for path, hops in PATHS.items()
    if {group for group, _ in hops} <= {*MESHES[mesh][0].groups()}
]


@pytest.mark.parametrize(("mesh", "path"), CASES)
def test_hops_move_what_is_counted_message_by_message(mesh: str, path: str) -> None:
    degrees, devices = MESHES[mesh]
    hops = PATHS[path]
    trace = trace_of(13, 3, 60)
    here = route(degrees, trace, round_robin(13, degrees.ep), devices)
    for (group, start), exact in zip(hops, counted(here, trace, hops), strict=True):
        found = hop(here, group, start)
        assert found.rows == pytest.approx(exact.rows), (group, start)
        assert (found.sent, found.arrived) == pytest.approx((exact.sent, exact.arrived))


def test_random_routing_moves_what_a_long_random_trace_does() -> None:
    mesh, top = Mesh(dp=8, ep=8, nodes=2), 4
    rng = random.Random(7)
    ids = np.array([rng.sample(range(21), top) for _ in range(40000)])
    expected = route(mesh, RandomRouting(21, top), linear(21, 8), devices=4)
    sampled = route(mesh, TracedRouting(ids, 21), linear(21, 8), devices=4)
    for group, start in itertools.chain(*PATHS.values()):
        assert hop(expected, group, start).rows == pytest.approx(hop(sampled, group, start).rows, rel=0.02)
    assert served_pairs(expected) == pytest.approx(served_pairs(sampled), rel=0.02)
    assert active_experts(expected, 5) == pytest.approx(active_experts(sampled, 5), rel=0.02)


def test_pairs_and_whole_rows() -> None:
    """A row per expert to 13 experts in 4, 3, 3 and 3; a gather sends all of a rank's rows to each peer."""
    mesh = Mesh(dp=4, ep=4, nodes=2)
    here = route(mesh, RandomRouting(13, 3), linear(13, 4), devices=2)
    share = 3 / 13
    assert pairs(here).rows == pytest.approx((4 * share, 4 * share, 2 * 4 * share))
    assert served_pairs(here) == pytest.approx(4 * 4 * share)
    assert whole(mesh, here.cluster, "experts.ep") == Flow((1.0, 1.0, 2.0), (1, 1, 2), 4.0, 4.0)


def test_messages_go_to_every_peer_of_a_class() -> None:
    mesh = Mesh(dp=8, ep=8, nodes=2)
    here = route(mesh, RandomRouting(16, 2), linear(16, 8), devices=4)
    assert [hop(here, g, s).peers for g, s in itertools.chain(*PATHS.values())] == [
        (1, 3, 4),
        (1, 0, 1),
        (1, 3, 0),
        (1, 3, 0),
        (1, 0, 1),
    ]
