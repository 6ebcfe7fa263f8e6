"""What a step brings to the experts of the busiest rank, which GPU kernels are chosen and costed for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moec.codegen.targets import TARGETS
from moec.compiler import checked_plan, compile_phase
from moec.compiler_kernels import GEMMS, MOVING
from moec.compiler_uses import Load, device_of, uses
from moec.ir.ops.table import OPS
from moec.ir.program import Program
from moec.routing import RoutingTrace

MODEL = """
model small {
  hidden = 64  vocab = 128  norm = rms(eps = 1e-6)
  attention full = gqa(heads = 4, kv_heads = 2, head_dim = 16)
  router plain { score = softmax  top = 2 }
  experts routed = 8 * swiglu(32)
  layers 0..1 { full  moe(plain, routed) }
}
"""


def program(folder: Path, mesh: str, trace: RoutingTrace | None = None) -> Program:
    path = folder / "small.moe"
    phases = "prefill { tokens = 256 }  decode { batch = 4 }"
    plan = f"plan serve {{ run small on ranks  compute = bf16  context = 128  {phases} }}"
    path.write_text(f"{MODEL}\nmesh ranks {{ {mesh} }}\n{plan}\n")
    checked, source = checked_plan(path)
    made = compile_phase(checked, "prefill", source.name, "triton")
    made.routing = trace
    return made


def load(made: Program) -> Load:
    return next(use.load for use in uses(made) if use.op.startswith("gr") or "gate_up" in use.op)


def test_one_rank_gets_all_choices(tmp_path: Path) -> None:
    made = program(tmp_path, "experts = ep(1)")
    found = load(made)
    assert (int(found.rows.sum()), len(found.rows)) == (256 * 2, 8)
    assert (found.tokens, found.routed, found.top, found.experts, found.routing) == (256, 256, 2, 8, "random")


def test_of_several_ranks_the_one_with_most_rows_counts(tmp_path: Path) -> None:
    found = load(program(tmp_path, "experts = ep(4)"))
    assert len(found.rows) == 2
    assert 4 * 256 * 2 / 4 <= found.rows.sum() < 1.2 * 4 * 256 * 2 / 4
    assert found.routed == 256 and 256 < found.tokens <= 4 * 256  # rows that arrive: a token's two experts may be here


def test_rows_are_in_the_proportions_of_a_trace(tmp_path: Path) -> None:
    ids = np.zeros((2, 100, 2), dtype=np.int64)
    ids[:, :, 1] = 1 + np.arange(100) % 4  # expert 0 always, 1 to 4 in turn, 5 to 7 never
    found = load(program(tmp_path, "experts = ep(1)", RoutingTrace(ids)))
    assert found.rows.tolist() == [256, 64, 64, 64, 64, 0, 0, 0]
    assert found.routing == "traced"


def test_every_operation_given_to_triton_is_found_with_its_place(tmp_path: Path) -> None:
    made = program(tmp_path, "experts = ep(1)")
    found = list(uses(made))
    given = [node for _, node in made.nodes() if node.meta["kernel"] == "triton"]
    assert [use.node for use in found] == given and found
    assert all(use.comment.startswith("prefill, sparse, ") and "small.moe:" in use.comment for use in found)
    assert not list(uses(compile_phase(checked_plan(tmp_path / "small.moe")[0], "prefill", "small.moe", "torch")))


@pytest.mark.parametrize(("target", "name"), [("cuda:80", "a100"), ("cuda:90", "h100"), ("hip:gfx942", "mi300x")])
def test_a_cluster_without_rates_gets_the_usual_device(tmp_path: Path, target: str, name: str) -> None:
    assert device_of(program(tmp_path, "experts = ep(1)"), TARGETS[target]).name == name


def test_every_operation_that_triton_serves_can_be_compiled() -> None:
    served = {name for name, op in OPS.items() if "triton" in op.kernels}
    assert served == {*GEMMS, *MOVING, "paired_experts"}  # whose two kernels are named by part
