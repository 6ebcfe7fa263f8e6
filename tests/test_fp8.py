"""Models whose experts stay in fp8: from the checkpoint to logits and tokens, and what is refused on the way."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moec.blocks import SCALES
from moec.compiler import compile
from moec.cost.memory import memory_by_rank
from moec.diagnostics import MoecError
from moec.runtime import weights
from tests import checkpoints, fp8_checkpoints
from tests.cached import compile_cached, run_cached
from tests.parity import Outcome, compile_checkpoint, run, worst

NUM_TOKENS = 8
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
OUTPUT = "model.layers.0.self_attn.o_proj.weight"

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """An fp8 checkpoint, the plain one of the same numbers, prompts, and what transformers gives for the latter."""

    fp8: Path
    plain: Path
    prompts: tuple[list[int], ...]
    wanted: Outcome


def make_case(folder: Path, **dims: int) -> Case:
    fp8, plain = fp8_checkpoints.write(folder, **dims)
    model = fp8_checkpoints.reference(plain)
    prompts = checkpoints.prompts(model.config.vocab_size, (9, 5))
    with torch.inference_mode():
        logits = [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
    tokens = [checkpoints.greedy(model, prompt, NUM_TOKENS) for prompt in prompts]
    return Case(fp8, plain, tuple(prompts), Outcome(logits, tokens))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("mesh", (None, "ep=2", "ep=3", "ep=2,etp=2", "dp=2,tp=2"), ids=str)
def test_logits_are_those_of_the_numbers_that_fp8_stands_for(whole: Case, mesh: str | None, tmp_path: Path) -> None:
    artifact = compile_checkpoint(whole.fp8, tmp_path, mesh)
    found = run(artifact, whole.fp8, tmp_path, whole.prompts, NUM_TOKENS)
    assert worst(found.logits, whole.wanted.logits) < 1e-4
    assert found.tokens == whole.wanted.tokens


def test_last_blocks_may_be_smaller(tmp_path: Path) -> None:
    case = make_case(tmp_path, **fp8_checkpoints.RAGGED)
    found = run(compile_checkpoint(case.fp8, tmp_path, None), case.fp8, tmp_path, case.prompts, NUM_TOKENS)
    assert worst(found.logits, case.wanted.logits) < 1e-4


@pytest.mark.parametrize("mesh", (None, "tp=2,etp=2"), ids=str)
def test_shared_experts_among_the_routed_ones_stay_in_fp8_too(whole: Case, mesh: str | None, tmp_path: Path) -> None:
    """In a program for GPUs. Rows are in fp32, of which PyTorch's kernels take what Triton's do not."""
    artifact = compile_checkpoint(
        whole.fp8, tmp_path, mesh, "flat", "triton", "plan.prefill.tokens=16", "plan.decode.batch=2"
    )
    params = artifact.prefill.bodies["sparse"].params
    shared = {name: params[name].shared for name in ("experts.gate_up", "experts.down_scales")}
    assert [found.count for found in shared.values() if found is not None] == [2, 2] and "shared.down" not in params
    found = run(artifact, whole.fp8, tmp_path, whole.prompts, 2)
    assert worst(found.logits, whole.wanted.logits) < 1e-4
    assert found.tokens == [tokens[:2] for tokens in whole.wanted.tokens]


@pytest.mark.parametrize("mesh", (None, "ep=2,etp=2"), ids=str)
def test_a_cache_of_fp8_experts_changes_no_bit(whole: Case, mesh: str | None, tmp_path: Path) -> None:
    resident = run(compile_checkpoint(whole.fp8, tmp_path, mesh), whole.fp8, tmp_path, whole.prompts, NUM_TOKENS)
    (tmp_path / "nvme").mkdir()
    nvme = f'"{tmp_path / "nvme"}"'
    cached = run_cached(
        compile_cached(whole.fp8, tmp_path, mesh, nvme=nvme), whole.fp8, tmp_path, whole.prompts, NUM_TOKENS
    )
    assert all(map(torch.equal, cached.outcome.logits, resident.logits))
    assert cached.outcome.tokens == resident.tokens
    assert cached.total("misses") > 0


def test_without_expert_dtype_weights_are_read_as_what_they_stand_for(whole: Case, tmp_path: Path) -> None:
    """As from the plain checkpoint. In fp8, experts take a quarter of the memory that they take in fp32, and scales."""
    kept = compile_checkpoint(whole.fp8, tmp_path, None).prefill
    source = tmp_path / "model.moe"
    source.write_text("".join(line for line in source.open() if "expert_dtype" not in line))
    artifact = compile(source, overrides=["plan.compute=fp32", "plan.context=160"])
    found, wanted = (load(artifact.programs, folder) for folder in (whole.fp8, whole.plain))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
    experts = sum(tensor.numel() for name, tensor in found.items() if ".experts." in name)
    scales = [param for body in kept.bodies.values() for name, param in body.params.items() if name.endswith(SCALES)]
    num_scales = sum(math.prod(param.shape) for param in scales) * len(kept.sparse_layers)
    saved = memory_by_rank(artifact.prefill)[0].weights - memory_by_rank(kept)[0].weights
    assert saved == 3 * experts - 4 * num_scales > 0


def load(programs: tuple, folder: Path) -> Tensors:  # type: ignore[type-arg]
    return weights.load_rank(programs, weights.account(programs, folder), 0)


# --- what is refused ----------------------------------------------------------------------------------------------


def _lose_scales(tensors: Tensors) -> None:
    del tensors[EXPERT + "_scale_inv"]


def _cut_scales(tensors: Tensors) -> None:
    tensors[OUTPUT + "_scale_inv"] = tensors[OUTPUT + "_scale_inv"][:, :0]


def _round_scales(tensors: Tensors) -> None:
    tensors[EXPERT + "_scale_inv"] = tensors[EXPERT + "_scale_inv"].half()


def _widen(tensors: Tensors) -> None:
    tensors[EXPERT] = tensors[EXPERT].bfloat16()


def _damage(tensors: Tensors) -> None:
    tensors[EXPERT].view(torch.uint8)[5, 7] = 0xFF


def _damage_another(tensors: Tensors) -> None:
    tensors[OUTPUT].view(torch.uint8)[5, 7] = 0x7F


def _damage_scales(tensors: Tensors) -> None:
    tensors[EXPERT + "_scale_inv"][0, 0] = math.inf


FAULTS: dict[Callable[[Tensors], None], tuple[str, tuple[str, ...]]] = {
    _lose_scales: ("E0748", (EXPERT, f"has no `{EXPERT}_scale_inv`")),
    _cut_scales: ("E0748", (OUTPUT, "has scales [1, 0] in F32", "[1, 1]")),
    _round_scales: ("E0748", (EXPERT, "in F16", "in F32 or BF16")),
    _widen: ("E0749", (EXPERT, "in BF16")),
    _damage: ("E0746", (f"`{EXPERT}`", "as fp8 in 1 of the")),
    _damage_another: ("E0746", (f"`{OUTPUT}`", "as fp32 in 1 of the")),
    _damage_scales: ("E0746", (f"`{EXPERT}_scale_inv`", "as fp32 in 1 of the")),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__.strip("_"))
def test_what_is_wrong_is_named_with_its_file(fault: Callable[[Tensors], None], whole: Case, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    folder.mkdir()
    tensors = load_file(whole.fp8 / "model.safetensors")
    fault(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text((whole.fp8 / "config.json").read_text())
    code, words = FAULTS[fault]
    with pytest.raises(MoecError) as caught:
        load(compile_checkpoint(whole.fp8, tmp_path, None).programs, folder)
    assert caught.value.diagnostics[0].code == code
    assert all(word in str(caught.value) for word in (*words, "model.safetensors"))


def test_every_tensor_is_accounted_for(whole: Case, tmp_path: Path) -> None:
    """Scales without their weights are not enough; layers behind the last, of multi-token prediction, are left out."""
    programs = compile_checkpoint(whole.fp8, tmp_path, None).programs
    tensors, config = load_file(whole.fp8 / "model.safetensors"), json.loads((whole.fp8 / "config.json").read_text())
    extra = {
        name.replace("layers.1.", "layers.4."): tensor.clone() for name, tensor in tensors.items() if EXPERT in name
    }
    write(tmp_path / "more", {**tensors, **extra}, config | {"num_nextn_predict_layers": 1})
    assert len(extra) == 2
    weights.account(programs, tmp_path / "more")
    write(tmp_path / "less", {name: tensor for name, tensor in tensors.items() if name != EXPERT}, config)
    with pytest.raises(MoecError, match=r"nothing fills 1 parameter: `layers\.1\.experts\.up\[3\]`$"):
        weights.account(programs, tmp_path / "less")


def write(folder: Path, tensors: Tensors, config: dict[str, object]) -> None:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def test_stacked_experts_are_read_too(whole: Case, tmp_path: Path) -> None:
    """One tensor of all experts, gate's rows before up's: each with blocks of its own where they end with one."""
    stacked = tmp_path / "stacked"
    stacked.mkdir()
    (stacked / "config.json").write_text((whole.fp8 / "config.json").read_text())
    tensors = load_file(whole.fp8 / "model.safetensors")
    save_file(stack(tensors), stacked / "model.safetensors", {"format": "pt"})
    programs = compile_checkpoint(whole.fp8, tmp_path, None).programs
    found, wanted = load(programs, stacked), load(programs, whole.fp8)
    assert json.loads((stacked / "config.json").read_text())["n_routed_experts"] == 20
    assert all(torch.equal(bits(tensor), bits(wanted[name])) for name, tensor in found.items())


def test_scales_in_bf16_are_read_as_the_numbers_that_they_are(whole: Case, tmp_path: Path) -> None:
    """Those of experts that stay in fp8, and those that others are multiplied with when they are read."""
    config = json.loads((whole.fp8 / "config.json").read_text())
    rounded = {
        name: tensor.bfloat16() if name.endswith("_scale_inv") else tensor
        for name, tensor in load_file(whole.fp8 / "model.safetensors").items()
    }
    widened = {name: tensor.float() if name.endswith("_scale_inv") else tensor for name, tensor in rounded.items()}
    write(tmp_path / "bf16", rounded, config)
    write(tmp_path / "fp32", widened, config)
    programs = compile_checkpoint(whole.fp8, tmp_path, None).programs
    found, wanted = load(programs, tmp_path / "bf16"), load(programs, tmp_path / "fp32")
    assert found.keys() == wanted.keys() and all(torch.equal(bits(found[name]), bits(wanted[name])) for name in found)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def stack(tensors: Tensors) -> Tensors:
    """Experts' tensors of each layer under transformers 5's names."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in (1, 2, 3):
        for end in ("", "_scale_inv"):
            parts = {
                name: [tensors[f"model.layers.{layer}.mlp.experts.{e}.{name}_proj.weight{end}"] for e in range(20)]
                for name in ("gate", "up", "down")
            }
            both = [torch.cat([bits(g), bits(u)]) for g, u in zip(parts["gate"], parts["up"], strict=True)]
            dtype = parts["down"][0].dtype
            found[f"model.layers.{layer}.mlp.experts.gate_up_proj{end}"] = torch.stack(both).view(dtype)
            found[f"model.layers.{layer}.mlp.experts.down_proj{end}"] = torch.stack(
                list(map(bits, parts["down"]))
            ).view(dtype)
    return found
