"""No pass changes what a program computes: the fp64 reference evaluator before and after each, on random programs.

A pass that says `exact` gives the same bits; one that reorders sums stays within 1e-10. The text of the program at
every stage reads back as the same program. 200 plans: 1-3 layers, GQA and MLA, 1-16 experts on up to 8 ranks of any
degrees (more ranks than experts, experts that do not divide) and nodes, every exchange, overlap and up to 3 pipeline
stages, experts in slots with and without prefetch, fewer sequences than ranks, no rows at all, tied scores.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moec.checked import Gqa, Mla, Moe, Swiglu
from moec.cost.cache import PLACES, place_of
from moec.ir.parse import parse
from moec.ir.program import Program, op_of
from moec.ir.proof.program import prove
from moec.ir.text import print_program
from moec.passes import PASSES, Pass, place_prefetch
from moec.passes.runner import run_passes
from moec.passes.split_stages import SplitStages
from moec.plan.pairs import Pair, pairs
from moec.plan.prefetch import Option, Prefetch
from tests.programs import (
    EXCHANGES,
    SPAN,
    Steps,
    Weights,
    compiled,
    evaluate,
    few,
    moe,
    plan,
    program_of,
    random_plan,
    random_steps,
    weights_of,
)

SEEDS = range(200)
BLOCK = 20


class Preserved:
    """Holds each pass over the stages of one program against the evaluation before it."""

    def __init__(self, stages: list[Program], weights: Weights, steps: Steps, where: str) -> None:
        self.weights, self.steps, self.where = weights, steps, where
        self.text = self.read_back(stages)
        self.first = self.last = evaluate(stages[0], weights, steps)  # not split yet: each is the whole program

    def __call__(self, step: Pass, stages: list[Program]) -> None:
        before, text = self.text, "".join(map(print_program, stages))
        if without(r"^done.*\n", before) == without(r"^done.*\n", text):
            return  # a pass that had nothing to do here
        self.text = self.read_back(stages)
        if without(UNCOMPUTED, before) == without(UNCOMPUTED, text):
            return
        found = evaluate(stages, self.weights, self.steps)
        where = f"{self.where}: {step}"
        if step.exact:
            assert torch.equal(found, self.last), where
        assert close(found, self.first), where
        self.last = found

    def read_back(self, stages: list[Program]) -> str:
        """The text of all stages, of which each pass's turn is read."""
        texts = [print_program(program) for program in stages]
        turn = len(stages[0].done) % len(stages)
        again = parse(texts[turn])
        assert again == stages[turn], self.where
        assert print_program(again) == texts[turn], self.where
        return "".join(texts)


#: What cannot change a result: which passes ran, memory, kernels.
UNCOMPUTED = r"^(done|memory).*\n| by \w+"


def without(what: str, text: str) -> str:
    return re.sub(what, "", text, flags=re.MULTILINE)


def close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a - b).abs() <= 1e-10 * (1 + b.abs())).all())


def anywhere(seed: int) -> Callable[..., dict[Pair, Prefetch]]:
    """Decisions about prefetch that costs would seldom take: a place, and a number of experts, by chance."""
    rng = random.Random(seed)

    def decide(program: Program, start: object) -> dict[Pair, Prefetch]:
        places = ("ffn",) if program.cache is not None and program.cache.prefetch == "history" else PLACES
        return {
            pair: Prefetch(Option(rng.choice(places), rng.randint(1, 3)) if rng.random() < 0.8 else None, "", 0.0)
            for pair in pairs(program)
            if pair[1]
        }

    return decide


@pytest.mark.parametrize("block", range(len(SEEDS) // BLOCK))
def test_every_pass_preserves_random_programs(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in SEEDS[block * BLOCK : (block + 1) * BLOCK]:
        if seed % 4:
            monkeypatch.setattr(place_prefetch, "plan_prefetches", anywhere(seed))
        chosen, phase = random_plan(seed, most_stages=3), "prefill" if seed % 3 else "decode"
        stages = [program_of(chosen, phase) for _ in range(chosen.mesh.pp)]
        weights, steps = weights_of(stages[0], seed, ties=seed % 4 == 0), random_steps(seed)
        seen = Preserved(stages, weights, steps, f"seed {seed} on {stages[0].mesh.describe()}, {stages[0].exchange}")
        for cls in PASSES:
            for index, program in enumerate(stages):
                run_passes(program, [SplitStages(index) if cls is SplitStages else cls()])
            seen(cls(), stages)
        monkeypatch.undo()


@pytest.mark.parametrize(("exchange", "combine"), EXCHANGES[:-1])
def test_a_prefetch_anywhere_changes_nothing(exchange: str, combine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One dense and three sparse layers on two nodes; bits as without a cache, and every place is taken."""
    made = plan(
        [Swiglu(6, SPAN), *[moe(8, shared=4)] * 3], exchange=exchange, combine=combine, nodes=2, dp=4, tp=2, ep=4, etp=2
    )
    weights, steps = weights_of(program_of(made)), random_steps(7)
    correct = evaluate(compiled(made), weights, steps)
    for by, place in (*(("next_router", place) for place in PLACES), ("history", "ffn")):

        def decide(program: Program, start: object, place: str = place) -> dict[Pair, Prefetch]:
            return {pair: Prefetch(Option(place, 2), "", 0.0) for pair in pairs(program) if pair[1]}

        monkeypatch.setattr(place_prefetch, "plan_prefetches", decide)
        program = compiled(replace(made, cache=few(1, by)))
        prove(program)
        assert torch.equal(evaluate(program, weights, steps), correct)
        starts = [(body, node) for body, node in program.nodes() if op_of(node).name == "prefetch.start"]
        assert {place_of(body, node) for body, node in starts} == {place}
        assert [len(program.layers_of(body.name)) for body, _ in starts] == ([2] if by == "history" else [1, 2])


def test_the_random_programs_are_of_every_kind_named_above() -> None:
    met: Counter[str] = Counter()
    for seed in SEEDS:
        chosen, steps = random_plan(seed, most_stages=3), random_steps(seed)
        mesh, model, phase = chosen.mesh, chosen.model, chosen.prefill
        sparse = [layer.ffn for layer in model.layers if isinstance(layer.ffn, Moe)]
        met.update(
            {
                "mla": isinstance(model.layers[0].attention, Mla),
                "yarn": model.rotary.yarn is not None,
                "dense layer": len(sparse) < len(model.layers),
                "two tables": len({ffn.routed.name for ffn in sparse}) > 1,
                "shared": any(ffn.shared for ffn in sparse),
                "groups": any(ffn.router.keep < ffn.router.groups for ffn in sparse),
                "bias": any(ffn.router.bias for ffn in sparse),
                "uneven": any(ffn.routed.count % mesh.ep for ffn in sparse),
                "more ranks than experts": any(ffn.routed.count < mesh.ep for ffn in sparse),
                "copied KV heads": any(
                    isinstance(a, Gqa) and a.kv_heads < mesh.tp for a in (model.layers[0].attention,)
                ),
                "tp > etp > 1": mesh.tp > mesh.etp > 1,
                "etp > tp": mesh.etp > mesh.tp,
                "edp and ep": mesh.edp > 1 and mesh.ep > 1,
                "8 ranks": mesh.dp * mesh.tp == 8,
                "two hops": phase.exchange in ("two_hop", "aggregate") and mesh.ep > mesh.nodes > 1 and bool(sparse),
                "several stages": mesh.pp > 1,
                "cache": chosen.cache is not None,
                "pinned experts": chosen.cache is not None and bool(chosen.cache.pinned),
                "history": chosen.cache is not None and chosen.cache.prefetch == "history" and bool(sparse),
                "experts in several stages": mesh.pp > 1 and mesh.ep > 1 and len(sparse) > 1,
                "fewer sequences than ranks": 0 < len(steps[0]) < mesh.dp,
                "no row at all": not any(s.tokens for s in steps[0]),
            }
        )
        if sparse and mesh.ep > 1:
            met.update([f"{phase.exchange} {phase.combine}", f"overlap {phase.overlap}"])
    assert {f"{exchange} {combine}" for exchange, combine in EXCHANGES} < set(met)
    assert min(met.values()) >= 4, met
