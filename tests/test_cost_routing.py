"""Expected destinations of random routing against tables in print and enumeration; a trace counted as it is."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from moec.cost.flow import CLASSES, Route, hop
from moec.mesh import Mesh
from moec.placement import linear
from moec.routing import RandomRouting, RoutingTrace, expected_destinations
from moec.topology import Cluster


def equal_parts(num_experts: int, num_parts: int) -> list[int]:
    return [expert * num_parts // num_experts for expert in range(num_experts)]


def destinations(num_experts: int, top: int, num_parts: int, groups: int = 1, keep: int = 1) -> float:
    routing = RandomRouting(num_experts, top, groups, keep)
    return expected_destinations(routing, equal_parts(num_experts, num_parts), num_parts)


# --- figures in print --------------------------------------------------------------------------------------------

#: E[D] over 2, 4, 8 and 16 nodes: experts, top, groups, kept.
PRINTED = {
    (256, 8, 1, 1): "1.993 3.614 5.295 6.523",
    (256, 8, 8, 4): "1.926 2.928 3.629",
    (128, 8, 1, 1): "1.994 3.629 5.339 6.597",
    (128, 4, 1, 1): "1.881 2.754 3.342 3.680",
}


@pytest.mark.parametrize(("router", "printed"), PRINTED.items())
def test_distinct_nodes_have_the_values_in_print(router: tuple[int, int, int, int], printed: str) -> None:
    num_experts, top, groups, keep = router
    found = [f"{destinations(num_experts, top, n, groups, keep):.3f}" for n in (2, 4, 8, 16)]
    assert found[: len(printed.split())] == printed.split()


def test_gather_sends_more_than_needed_by_the_ratios_in_print() -> None:
    """P / D(P): what an all-gather moves over what a row per rank moves."""
    deepseek = [f"{p / destinations(256, 8, p):.2f}" for p in (2, 4, 8, 16, 32)]
    mixtral = [f"{p / destinations(8, 2, p):.2f}" for p in (2, 4, 8)]
    assert deepseek == ["1.00", "1.11", "1.51", "2.45", "4.40"]
    assert mixtral == ["1.27", "2.15", "4.00"]


@pytest.mark.parametrize(("nodes", "flat", "dedup"), [(2, "3.26", "1.00"), (4, "5.45", "2.71"), (8, "6.72", "4.63")])
def test_rows_between_nodes_with_and_without_a_row_per_node(nodes: int, flat: str, dedup: str) -> None:
    """256 experts, 8 chosen, 8 ranks a node: copies per token that cross nodes."""
    mesh, cluster = Mesh(dp=8 * nodes, ep=8 * nodes, nodes=nodes), Cluster("pod", nodes, 8)
    here = Route(mesh, cluster, linear(256, 8 * nodes), RandomRouting(256, 8))
    inter = CLASSES.index("inter")
    assert f"{hop(here, 'experts.ep', 'home').rows[inter]:.2f}" == flat
    assert f"{hop(here, 'links.node', 'home').rows[inter]:.2f}" == dedup


# --- enumeration -------------------------------------------------------------------------------------------------


def choices(num_experts: int, top: int, groups: int, keep: int) -> list[tuple[int, ...]]:
    """Every outcome of the two steps, each as likely as the others."""
    size = num_experts // groups
    kept = itertools.combinations(range(groups), keep)
    eligible = ([g * size + i for g in chosen for i in range(size)] for chosen in kept)
    return [chosen for experts in eligible for chosen in itertools.combinations(experts, top)]


@pytest.mark.parametrize(
    ("router", "part_of"),
    [
        ((7, 2, 1, 1), [0, 0, 0, 1, 1, 2, 2]),
        ((7, 5, 1, 1), [0, 0, 0, 0, 0, 1, 2]),
        ((8, 3, 4, 2), [0, 0, 1, 1, 1, 2, 0, 2]),
        ((12, 4, 3, 2), [0, 1, 2, 0, 1, 2, 2, 2, 2, 2, 2, 1]),
        ((6, 1, 6, 1), [0, 0, 0, 0, 0, 1]),
    ],
)
def test_touched_parts_are_exact(router: tuple[int, int, int, int], part_of: list[int]) -> None:
    num_parts = max(part_of) + 1
    outcomes = choices(*router)
    counts = Counter(part for chosen in outcomes for part in {part_of[e] for e in chosen})
    exact = [float(Fraction(counts[part], len(outcomes))) for part in range(num_parts)]
    routing = RandomRouting(*router)
    assert routing.touched(part_of, num_parts).tolist() == exact
    served = Counter(part_of[e] for chosen in outcomes for e in chosen)
    assert routing.pairs(part_of, num_parts) == pytest.approx([served[p] / len(outcomes) for p in range(num_parts)])


@pytest.mark.parametrize("top", [1, 2, 4])
def test_active_experts_are_exact(top: int) -> None:
    """Of 4 experts, 3 tokens: every outcome of three independent choices."""
    found = RandomRouting(4, top).active([0, 0, 0, 1], 2, tokens=3)
    outcomes = list(itertools.product(itertools.combinations(range(4), top), repeat=3))
    used = [{e for chosen in tokens for e in chosen} for tokens in outcomes]
    assert found == pytest.approx(
        [sum(len(u & {0, 1, 2}) for u in used) / len(used), sum(3 in u for u in used) / len(used)]
    )


def test_destinations_grow_with_choices_and_parts() -> None:
    by_top = [destinations(64, k, 8) for k in range(1, 17)]
    by_parts = [destinations(64, 6, n) for n in (1, 2, 4, 8, 16, 32, 64)]
    assert by_top == sorted(by_top) and by_parts == sorted(by_parts)
    assert (by_parts[0], by_parts[-1]) == (1.0, 6.0)
    assert all(destinations(64, 6, 8, 8, keep) <= min(keep, 6) + 1e-12 for keep in range(1, 9))
    assert math.isclose(destinations(64, 6, 8, 8, 8), destinations(64, 6, 8))


# --- traces ------------------------------------------------------------------------------------------------------


def test_a_trace_is_counted_as_it_is() -> None:
    ids = np.array([[[0, 1], [0, 2], [3, 2]], [[5, 4], [4, 5], [4, 0]]])
    part_of = [0, 0, 1, 1, 2, 2]
    first, both = (RoutingTrace(ids).of_layers(layers, 6) for layers in ([0], [0, 1]))
    assert (first.touched(part_of, 3) * 3).tolist() == [2, 2, 0]
    assert (both.touched(part_of, 3) * 6).tolist() == [3, 2, 3]
    assert (both.pairs(part_of, 3) * 6).tolist() == [4, 3, 5]
    part = RoutingTrace(ids).part([1])
    assert (part.of_layers([0], 6).touched(part_of, 3) * 3).tolist() == [1, 0, 3]
