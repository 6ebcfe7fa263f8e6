"""The pages of E0505 to E0511 show the errors as they are printed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moec.checked import Swiglu
from moec.codegen.phase import render_phase
from moec.diagnostics import MoecError
from moec.ir.program import Run
from moec.placement import linear
from moec.runtime.executor import collect_weights
from moec.runtime.kernels import torch_exchange as x
from moec.runtime.kernels import torch_moe as k
from moec.runtime.kernels import torch_pairs as pairing
from moec.runtime.kernels.table import kernels_for
from tests.contexts import context
from tests.programs import SPAN, compiled, gqa, plan

PAGES = Path(__file__).parent.parent / "specs" / "errors"


def body_named_forward() -> None:
    program = compiled(plan([Swiglu(12, SPAN)]))
    program.bodies["forward"] = program.bodies.pop("dense")
    program.bodies["forward"].name = "forward"
    program.runs = [replace(run, body="forward") if run == Run("dense", range(1)) else run for run in program.runs]
    render_phase(program)


def scores_that_are_not_numbers() -> None:
    logits = torch.zeros(7, 8)
    logits[5, 2] = float("nan")
    k.route(context(), logits, score="softmax", top=2, groups=1, keep=1, renormalize=True, scale=1.0, table="routed")


def expert_that_does_not_exist() -> None:
    pairing.group_rows(context(), torch.zeros(1, 4), torch.tensor([[2, 8]]), table="routed")


def lost_rows() -> None:
    pairing.combine(context(), torch.zeros(5, 4), torch.arange(5), torch.ones(3, 2), table="routed")


def more_rows_than_room() -> None:
    ctx, ids = context(placement=linear(4, 4)), torch.ones(5, 1, dtype=torch.int64)
    settings = {"table": "routed", "group": "experts.ep", "bound": 2, "drop": False}
    x.fan_out(ctx, torch.zeros(5, 4), ids, torch.ones(5, 1), **settings)


def kernel_that_is_not_there() -> None:
    program = compiled(plan([Swiglu(12, SPAN)]))
    next(node for _, node in program.nodes() if node.target.name == "linear").meta["kernel"] = "triton"
    kernels_for(program)


def weight_of_another_shape() -> None:
    program = compiled(plan([Swiglu(12, SPAN)], gqa(heads=12, kv_heads=4), hidden=48, dp=2, edp=2))
    tensors = {"embed": torch.zeros(11, 48), "layers.0.attention_norm": torch.zeros(48)}
    collect_weights(program, tensors | {"layers.0.attention.o": torch.zeros(48, 64)}, rank=1)


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("E0505", body_named_forward),
        ("E0506", scores_that_are_not_numbers),
        ("E0507", expert_that_does_not_exist),
        ("E0508", lost_rows),
        ("E0509", kernel_that_is_not_there),
        ("E0510", weight_of_another_shape),
        ("E0511", more_rows_than_room),
    ],
)
def test_pages_show_the_error_as_printed(code: str, cause: Callable[[], None]) -> None:
    with pytest.raises(MoecError) as error:
        cause()
    assert error.value.diagnostics[0].code == code
    page = (PAGES / f"{code}.md").read_text()
    assert page.startswith(f"# {code}: ")
    assert f"```\n{error.value.render()}\n```" in page
