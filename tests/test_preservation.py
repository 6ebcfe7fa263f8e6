"""No pass changes what a program computes: the fp64 reference evaluator before and after each, on random programs.

A pass that says `exact` gives the same bits; one that reorders sums stays within 1e-10. The text of the program at
every stage reads back as the same program. 200 plans: 1-3 layers, GQA and MLA, 1-16 experts on up to 8 ranks of any
degrees (more ranks than experts, experts that do not divide), fewer sequences than ranks, no rows at all, tied scores.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from torch import Tensor

from moec.checked import Gqa, Mla, Moe
from moec.ir import Program
from moec.ir_parse import parse
from moec.ir_text import print_program
from moec.passes import PASSES, Pass
from moec.passes.runner import run_passes
from tests.programs import Steps, Weights, evaluate, program_of, random_plan, random_steps, weights_of

SEEDS = range(200)
BLOCK = 20


class Preserved:
    """Observer: holds each pass against the evaluation of the stage before."""

    def __init__(self, program: Program, weights: Weights, steps: Steps, where: str) -> None:
        self.weights, self.steps, self.where = weights, steps, where
        self.text = self.read_back(program)
        self.first = self.last = evaluate(program, weights, steps)

    def __call__(self, step: Pass, program: Program) -> None:
        before, text = self.text, print_program(program)
        if without(r"^done.*\n", before) == without(r"^done.*\n", text):
            return  # a pass that had nothing to do here
        self.text = self.read_back(program)
        if without(UNCOMPUTED, before) == without(UNCOMPUTED, text):
            return
        found = evaluate(program, self.weights, self.steps)
        where = f"{self.where}: {step}"
        if step.exact:
            assert torch.equal(found, self.last), where
        assert close(found, self.first), where
        self.last = found

    def read_back(self, program: Program) -> str:
        text = print_program(program)
        again = parse(text)
        assert again == program, self.where
        assert print_program(again) == text, self.where
        return text


#: What cannot change a result: which passes ran, memory, kernels.
UNCOMPUTED = r"^(done|memory).*\n| by \w+"


def without(what: str, text: str) -> str:
    return re.sub(what, "", text, flags=re.MULTILINE)


def close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a - b).abs() <= 1e-10 * (1 + b.abs())).all())


@pytest.mark.parametrize("block", range(len(SEEDS) // BLOCK))
def test_every_pass_preserves_random_programs(block: int) -> None:
    for seed in SEEDS[block * BLOCK : (block + 1) * BLOCK]:
        program = program_of(random_plan(seed), "prefill" if seed % 3 else "decode")
        weights, steps = weights_of(program, seed, ties=seed % 4 == 0), random_steps(seed)
        seen = Preserved(program, weights, steps, f"seed {seed} on {program.mesh.describe()}, {program.exchange}")
        run_passes(program, [cls() for cls in PASSES], [seen])


def test_the_random_programs_are_of_every_kind_named_above() -> None:
    met: Counter[str] = Counter()
    for seed in SEEDS:
        chosen, steps = random_plan(seed), random_steps(seed)
        mesh, model = chosen.mesh, chosen.model
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
                "gather": chosen.prefill.exchange == "gather" and mesh.ep > 1 and bool(sparse),
                "fewer sequences than ranks": 0 < len(steps[0]) < mesh.dp,
                "no row at all": not any(s.tokens for s in steps[0]),
            }
        )
    assert min(met.values()) >= 4, met
