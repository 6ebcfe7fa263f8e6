"""Which hops each lowering takes. What it makes of a `moe`, operation by operation: `golden/passes/insert-exchange`."""

from __future__ import annotations

import pytest

from moec.ir.program import op_of
from tests.exchange_programs import exchange_plan, exchanged

NODE, LOCAL, EP = "links.node", "links.local", "experts.ep"
FOUR, ALONE = {"dp": 4, "ep": 4, "nodes": 2}, {"dp": 2, "ep": 2, "nodes": 2}


@pytest.mark.parametrize(
    ("exchange", "mesh", "hops"),
    [
        ("flat", FOUR, [EP, EP]),
        ("padded", FOUR, [EP, EP]),
        ("gather", FOUR, []),
        ("two_hop", FOUR, [NODE, LOCAL, LOCAL, NODE]),
        ("aggregate", FOUR, [LOCAL, NODE, NODE, LOCAL]),
        ("two_hop", ALONE, [EP, EP]),
        ("aggregate", {"dp": 4, "ep": 4}, [EP, EP]),
        ("two_hop", {"dp": 2, "edp": 2}, []),
    ],
)
def test_hops_out_are_taken_back_in_reverse(exchange: str, mesh: dict[str, int], hops: list[str]) -> None:
    program = exchanged(exchange_plan(exchange, **mesh))
    starts = [node for _, node in program.nodes() if op_of(node).name == "all_to_all.start"]
    assert [node.kwargs["group"] for node in starts] == hops
    assert [node.kwargs["back"] for node in starts] == [False] * (len(hops) // 2) + [True] * (len(hops) // 2)


@pytest.mark.parametrize(("capacity", "room"), [(None, 16), (1.0, 12), (0.5, 6), (100.0, 16)])
def test_room_in_a_padded_exchange(capacity: float | None, room: int) -> None:
    """16 tokens of 3 choices on 4 ranks: an even share is 12 rows, and no rank gets more than all tokens."""
    program = exchanged(exchange_plan("padded", capacity=capacity, dp=4, ep=4))
    assert [node.kwargs["bound"] for _, node in program.nodes() if op_of(node).name == "fan_out"] == [room]
