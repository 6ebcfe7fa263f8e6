"""Ranks, coordinates and groups of both views: B34 and B45 of the fault list."""

from __future__ import annotations

import itertools

import pytest

from moec.diagnostics import CompileError
from moec.ir.verifier.program import verify
from moec.mesh import VIEWS, Mesh
from tests.programs import compiled, edited, moe, plan, program_of

MESHES = [
    Mesh(tp, *rest)
    for tp, *rest in itertools.product((1, 2, 3), (1, 2, 4), (1, 2, 3), (1, 2, 4, 8), (1, 2, 4))
    if Mesh(tp, *rest).size == rest[1] * rest[2] * rest[3] and max(rest[0], rest[3]) % min(rest[0], rest[3]) == 0
]


def test_ranks_count_tp_fastest_in_attention_and_etp_fastest_among_experts() -> None:
    mesh = Mesh(dp=3, tp=4, edp=2, ep=3, etp=2)
    for rank in range(mesh.size):
        dp, tp, edp, ep, etp = (mesh.coordinate(rank, axis) for axes in VIEWS.values() for axis in axes)
        assert rank == dp * 4 + tp == (edp * 3 + ep) * 2 + etp


def test_groups_of_a_mesh_whose_axes_all_differ() -> None:
    assert Mesh(dp=4, tp=2, edp=1, ep=4, etp=2).groups() == {
        "attention.dp": ((0, 2, 4, 6), (1, 3, 5, 7)),
        "attention.tp": ((0, 1), (2, 3), (4, 5), (6, 7)),
        "experts.ep": ((0, 2, 4, 6), (1, 3, 5, 7)),
        "experts.etp": ((0, 1), (2, 3), (4, 5), (6, 7)),
    }
    assert Mesh(dp=2, tp=4, edp=2, ep=4, etp=1).groups() == {
        "attention.dp": ((0, 4), (1, 5), (2, 6), (3, 7)),
        "attention.tp": ((0, 1, 2, 3), (4, 5, 6, 7)),
        "experts.edp": ((0, 4), (1, 5), (2, 6), (3, 7)),
        "experts.ep": ((0, 1, 2, 3), (4, 5, 6, 7)),
        "split": ((0, 1, 2, 3), (4, 5, 6, 7)),
    }


def test_b34_two_copies_of_two_experts_groups() -> None:
    groups = Mesh(dp=4, edp=2, ep=2).groups()
    assert groups["experts.ep"] == ((0, 1), (2, 3))
    assert groups["experts.edp"] == ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("mesh", "split"),
    [
        (Mesh(dp=1, tp=4, ep=2, etp=2), ((0, 2), (1, 3))),
        (Mesh(dp=4, tp=2, ep=2, etp=4), ((0, 2), (1, 3), (4, 6), (5, 7))),
        (Mesh(dp=2, tp=1, etp=2), ((0, 1),)),
    ],
    ids=str,
)
def test_the_split_group_joins_the_pieces_of_one_token_block(mesh: Mesh, split: tuple[tuple[int, ...], ...]) -> None:
    assert mesh.groups()["split"] == split


@pytest.mark.parametrize("mesh", MESHES, ids=Mesh.describe)
def test_each_axis_deals_every_rank_into_one_group(mesh: Mesh) -> None:
    """Its ranks differ in that coordinate alone; every rank derives the same lists in the same order."""
    for name, groups in mesh.groups().items():
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(mesh.size))
        assert [ranks[0] for ranks in groups] == sorted(ranks[0] for ranks in groups)
        for ranks in groups:
            assert all(mesh.group_of(name, rank) == ranks for rank in ranks)
        view, _, axis = name.partition(".")
        for ranks in groups if axis else ():
            assert [mesh.coordinate(rank, axis) for rank in ranks] == list(range(mesh.axis_size(axis)))
            others = [tuple(mesh.coordinate(rank, a) for a in VIEWS[view] if a != axis) for rank in ranks]
            assert len(set(others)) == 1


def test_b45_each_rank_holds_the_experts_of_its_own_axis() -> None:
    """8 experts on 8 ranks of dp=4 tp=2 and edp=2 ep=4: by rank modulo experts per rank this would come out wrong."""
    program = compiled(plan([moe(8)], dp=4, tp=2, edp=2, ep=4))
    table = program.placements["routed"]
    held = [table.slots[program.mesh.coordinate(rank, "ep")] for rank in range(8)]
    assert held == [(0, 1), (2, 3), (4, 5), (6, 7)] * 2
    wide = compiled(plan([moe(8)], dp=4, tp=2, ep=4, etp=2))
    held = [wide.placements["routed"].slots[wide.mesh.coordinate(rank, "ep")] for rank in range(8)]
    assert held == [(0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5), (6, 7), (6, 7)]


@pytest.mark.parametrize(
    ("ep", "etp", "fault"),
    [(3, 1, "dp * tp is not edp * ep * etp"), (1, 3, "dp * tp is not edp * ep * etp")],
)
def test_b45_a_product_that_is_not_the_world_is_refused(ep: int, etp: int, fault: str) -> None:
    program = compiled(plan([moe(8)], dp=2, tp=2, ep=4), stop_after="place-experts")
    with pytest.raises(CompileError, match=fault.replace("*", r"\*")):
        verify(edited(program, ("edp=1 ep=4 etp=1", f"edp=1 ep={ep} etp={etp}")))


def test_degrees_that_do_not_nest_are_refused() -> None:
    with pytest.raises(CompileError, match="one of tp and etp must divide the other"):
        verify(program_of(plan([moe(8)], dp=3, tp=2, ep=2, etp=3)))
