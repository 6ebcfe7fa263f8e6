"""What a plan counts as memory is never less than what a step takes, and not far above it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx

from moec.cost.memory import memory_by_rank, most_memory
from moec.cost.sizes import bounds
from moec.ir.evaluator.program import Reference, Sequence
from moec.ir.program import Body, Program
from tests.exchange_programs import MESHES, exchange_plan, exchanged
from tests.programs import LOWERINGS, VOCAB, program_of, weights_of


class Measured(Reference):
    """Notes the largest size that each run-time symbol had on any rank."""

    def largest(self) -> dict[str, int]:
        self.found: dict[str, int] = {}
        mesh = self.program.mesh
        prompts = [Sequence(tuple(i % VOCAB for i in range(self.program.tokens)), slot) for slot in range(mesh.dp)]
        self.step(prompts)
        return self.found

    def _check(self, node: fx.Node, value: list[Tensor], symbols: dict[str, list[int]]) -> None:
        super()._check(node, value, symbols)
        for name in symbols.keys() - {"L"}:  # every row's logits are wanted here
            sizes = symbols[name]
            self.found[name] = max(self.found.get(name, 0), *sizes)


def measured(program: Program, chosen: object) -> dict[str, int]:
    """A router whose scores are all alike takes the first experts for every token: nothing spreads less."""
    weights = weights_of(chosen)  # type: ignore[arg-type]
    for name, value in weights.items():
        if "router" in name:
            value.zero_()
    with torch.inference_mode():
        return Measured(program, weights).largest()


def counted(program: Program) -> dict[str, int]:
    body: Body = program.bodies["sparse"]
    (held,) = {max(placed.counts) for placed in program.placements.values()}
    return bounds(program, body, top=3, held=held)


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: " ".join(f"{k}={v}" for k, v in mesh.items()) or "one rank")
def test_no_step_has_more_rows_than_are_counted(mesh: dict[str, int]) -> None:
    for exchange, combine in LOWERINGS:
        for placement in ("linear", "round_robin"):
            chosen = exchange_plan(exchange, combine, placement=placement, **mesh)
            program = exchanged(chosen)
            found, most = measured(program, program_of(chosen)), counted(program)
            assert found and all(size <= most[name] for name, size in found.items()), (exchange, placement, found, most)


@pytest.mark.parametrize("exchange", ["two_hop", "aggregate"])
def test_rows_half_way_can_be_as_many_as_are_counted(exchange: str) -> None:
    """Not every row of the group, only those of the ranks from which the first hop leads here."""
    mesh = {"dp": 8, "ep": 8, "nodes": 4}
    chosen = exchange_plan(exchange, **mesh)
    program = exchanged(chosen)
    found, most = measured(program, program_of(chosen)), counted(program)
    assert found["H"] == most["H"] == 16 * {"two_hop": 4, "aggregate": 2}[exchange]
    assert found["R"] == most["R"] and found["X"] == 2 * 8 * 16 <= most["X"]


def test_the_fullest_rank_is_the_one_that_holds_most_experts() -> None:
    program = exchanged(exchange_plan("flat", dp=3, ep=3, nodes=3), stop_after=None)
    found = memory_by_rank(program)
    assert program.memory == found and found[0].total == most_memory(program) > found[2].total  # 5, 4, 4 of 13


def test_more_tokens_take_more_buffers_and_nothing_else() -> None:
    program = exchanged(exchange_plan("two_hop", dp=4, ep=4, nodes=2), stop_after=None)
    one, two = (memory_by_rank(replace(program, tokens=rows))[0] for rows in (16, 32))
    assert (one.weights, one.kv) == (two.weights, two.kv) and one.buffers < two.buffers
