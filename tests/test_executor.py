"""The executor on one rank: a phase module over torch kernels against the fp64 reference of the Program."""

from __future__ import annotations

import traceback
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moec.checked import Gqa, MeshSpec, Mla, Plan, Swiglu
from moec.diagnostics import MoecError
from moec.ir.evaluator.program import Reference, Sequence
from moec.ir.params import full_name
from moec.ir.program import Program, op_of
from moec.passes.plan_overlap import PlanOverlap
from moec.runtime.executor import Executor, local_shape
from moec.runtime.kv import allocate_kv
from moec.runtime.step import Piece, Step, make_step
from moec.runtime.weights_reader import TORCH_DTYPES
from tests.cached import cache_over
from tests.contexts import poisoned_memory
from tests.programs import (
    SPAN,
    Steps,
    Weights,
    compiled,
    gqa,
    mla,
    moe,
    plan,
    program_of,
    random_plan,
    random_steps,
    weights_of,
)


def tensors_of(program: Program, weights: Weights) -> dict[str, Tensor]:
    """One rank's tensors by full name: parts concatenated, in their dtypes."""
    found = {}
    for run in program.runs:
        for layer in run.layers or (None,):
            prefix = "" if layer is None else f"layers.{layer}."
            for name, param in program.bodies[run.body].params.items():
                parts = [part if layer is None else full_name(part, layer) for part in param.parts]
                found[prefix + name] = torch.cat([weights[part] for part in parts], param.dim).to(
                    TORCH_DTYPES[param.dtype]
                )
    return found


def step_of(sequences: list[Sequence]) -> Step:
    return make_step([Piece(s.tokens, s.slot, s.cached, "all") for s in sequences])


class Both:
    """The two phases of a plan over one KV memory, and the reference."""

    def __init__(self, plan: Plan) -> None:
        self.prefill, self.decode = compiled(plan), compiled(plan, phase="decode")
        self.weights = weights_of(program_of(plan))
        kv, tensors = allocate_kv(replace(self.prefill, slots=8)), tensors_of(self.prefill, self.weights)
        self.cache = cache_over(self.prefill, tensors)
        self.run_prefill, self.run_decode = (
            Executor(program, tensors_of(program, self.weights), kv, cache=self.cache).run
            for program in (self.prefill, self.decode)
        )

    def compare(self, steps: Steps) -> None:
        """The prompts by the prefill program, what continues them one token at a time by the decode program."""
        reference = Reference(self.prefill, self.weights)
        for number, sequences in enumerate(steps):
            run = self.run_decode if number else self.run_prefill
            found, exact = run(step_of(sequences)), reference.step(sequences)
            assert found.dtype == torch.float32 and found.shape == exact.shape
            torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)


def on_one_rank(plan: Plan) -> Plan:
    mesh = plan.mesh
    one = MeshSpec("mesh", replace(mesh.cluster, devices_per_node=1), 1, 1, 1, 1, 1, mesh.placement, SPAN)
    return replace(plan, mesh=one)


@pytest.mark.parametrize("seed", range(24))
def test_random_programs_are_the_reference(seed: int) -> None:
    both = Both(on_one_rank(random_plan(seed)))
    both.compare(random_steps(seed))
    if both.cache is not None:
        both.cache.close()


@pytest.mark.parametrize("attention", [gqa(bias=True, qk_norm=True), mla()], ids=["gqa", "mla"])
def test_b19_poisoned_memory_changes_nothing(attention: object) -> None:
    steps = next(steps for steps in map(random_steps, range(99)) if len(steps[0]) == 5)
    with poisoned_memory():
        Both(plan([Swiglu(12, SPAN), moe(shared=6, bias=True, score="sigmoid")], attention)).compare(steps)  # type: ignore[arg-type]


@pytest.mark.parametrize("overlap", ["2", "2:layer", "3:layer"])
@pytest.mark.parametrize("attention", [gqa(qk_norm=True), mla()], ids=["gqa", "mla"])
def test_a_layer_in_chunks_is_the_layer(attention: Gqa | Mla, overlap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences cut in the middle, chunks of no row, and a rank that needs no exchange at all."""
    monkeypatch.setattr(PlanOverlap, "run", lambda self, program: setattr(program, "overlap", overlap))
    both = Both(plan([Swiglu(12, SPAN), moe(shared=6), moe(shared=6)], attention, combine="reduced"))
    assert sum(op_of(node).name == "join_rows" for _, node in both.prefill.nodes()) == 2
    for seed in range(12):
        with poisoned_memory():
            both.compare(random_steps(seed))


def test_b41_one_executor_serves_every_batch() -> None:
    """0, 1 and many rows, and whichever experts they hit: what the first batch looked like is nowhere kept."""
    both = Both(plan([moe(count=8, top=1)]))
    batches = [[], [Piece([3], 0, 0, "all")], [Piece([5, 1, 7, 2], 0, 0, "all"), Piece([9, 10], 3, 0, "all")]]
    for pieces in (*batches, *reversed(batches)):
        reference = Reference(both.prefill, both.weights)
        steps = [_sequence(piece) for piece in pieces]
        torch.testing.assert_close(
            both.run_prefill(make_step(pieces)).double(), reference.step(steps), rtol=0, atol=1e-5
        )


def _sequence(piece: Piece) -> Sequence:
    return Sequence(tuple(piece.tokens), piece.slot, piece.cached)


def test_prefill_gives_the_rows_selected() -> None:
    both = Both(plan([moe()]))
    whole = both.run_prefill(make_step([Piece([5, 1, 7], 0, 0, "all"), Piece([9, 10], 3, 0, "all")]))
    some = both.run_prefill(make_step([Piece([5, 1, 7], 0, 0, "last"), Piece([9, 10], 3, 0, "none")]))
    torch.testing.assert_close(some, whole[2:3], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("num_dense", [0, 1, 3])
def test_b27_half_precision_is_near_whatever_the_dense_layers(dtype: str, num_dense: int) -> None:
    layers = plan([Swiglu(12, SPAN)] * num_dense + [moe(top=8, scale=2.5)] * 2)
    program, half = compiled(layers), compiled(replace(layers, compute=dtype))
    weights = weights_of(program_of(layers))
    tensors = {name: tensor.to(_dtype(half, name)) for name, tensor in tensors_of(half, weights).items()}
    step = make_step([Piece(list(range(10)), 0, 0, "all")])
    exact = Executor(program, tensors_of(program, weights), allocate_kv(program)).run(step)
    found = Executor(half, tensors, allocate_kv(half)).run(step)
    error = (found - exact).norm() / exact.norm()
    assert 1e-4 < error < (0.05 if dtype == "bf16" else 0.01)


def _dtype(program: Program, name: str) -> torch.dtype:
    return (
        torch.float32
        if name.endswith("router.bias")
        else {"bf16": torch.bfloat16, "fp16": torch.float16}[program.dtype]
    )


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.fixture
def small() -> tuple[Program, dict[str, Tensor]]:
    program = compiled(plan([moe()]))
    return program, tensors_of(program, weights_of(program_of(plan([moe()]))))


def refusal(program: Program, tensors: dict[str, Tensor]) -> MoecError:
    with pytest.raises(MoecError) as error:
        Executor(program, tensors, allocate_kv(program))
    return error.value


def test_e0510_a_weight_that_was_not_loaded(small: tuple[Program, dict[str, Tensor]]) -> None:
    program, tensors = small
    del tensors["layers.0.attention.o"]
    error = refusal(program, tensors)
    assert error.diagnostics[0].code == "E0510" and "`layers.0.attention.o` was not loaded on rank 0" in str(error)


@pytest.mark.parametrize(
    ("name", "wrong", "shown"),
    [
        ("head", torch.zeros(10, 11), "[10, 11] float32, the program declares [11, 10] fp32"),
        ("head", torch.zeros(11, 10).half(), "[11, 10] float16, the program declares [11, 10] fp32"),
        ("layers.0.experts.down", torch.zeros(7, 10, 6), "[7, 10, 6] float32, the program declares [8, 10, 6] fp32"),
    ],
)
def test_e0510_a_weight_of_another_shape(
    small: tuple[Program, dict[str, Tensor]], name: str, wrong: Tensor, shown: str
) -> None:
    program, tensors = small
    error = refusal(program, tensors | {name: wrong})
    assert error.exit_code == 70 and str(error) == f"`{name}` on rank 0 is {shown}"


def test_shapes_where_ranks_hold_different_numbers_of_experts() -> None:
    program = compiled(plan([moe(count=8)], dp=3, ep=3))
    param = program.bodies["sparse"].params["experts.down"]
    assert [local_shape(program, param, rank) for rank in range(3)] == [(3, 10, 6), (3, 10, 6), (2, 10, 6)]


def test_e0509_a_kernel_that_is_not_there(small: tuple[Program, dict[str, Tensor]]) -> None:
    program, tensors = small
    next(node for _, node in program.nodes() if node.target.name == "linear").meta["kernel"] = "triton"
    error = refusal(program, tensors)
    assert error.diagnostics[0].code == "E0509" and str(error) == "there is no triton kernel for `linear`"
    assert error.diagnostics[0].help == "it has kernels in: torch, cpp"


def test_e0509_an_operation_that_a_pass_should_have_lowered() -> None:
    program = compiled(plan([moe()]), stop_after="shard-experts")
    error = refusal(program, tensors_of(program, weights_of(program_of(plan([moe()])))))
    assert "no torch kernel for `moe`" in str(error)


def test_a_traceback_shows_the_line_of_the_module(small: tuple[Program, dict[str, Tensor]]) -> None:
    program, tensors = small
    executor = Executor(program, tensors, allocate_kv(program))
    with pytest.raises(IndexError) as error:
        executor.run(make_step([Piece([99], 0)]))
    shown = "".join(traceback.format_exception(error.value))
    assert 'x = k.embed(s, tokens, w["embed"])' in shown and "<moec prefill " in shown
