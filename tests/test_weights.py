"""The loader against the checkpoint's own tensors: every slice of every rank, every spelling, every read fault."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moec.checkpoint.family import family_of
from moec.checkpoint.folder import open_checkpoint, read_config
from moec.checkpoint.map import Sources, open_sources
from moec.diagnostics import MoecError, SourceFile
from moec.importer.folder import import_config, import_model
from moec.ir.params import Param
from moec.ir.program import Body, Program, Run
from moec.layout import Layout, Place, Placed, Replicate, Shard
from moec.lowering import lower
from moec.mesh import Mesh
from moec.parameters import logical_parameters
from moec.passes.base import Pass
from moec.passes.fuse_gate_up import FuseGateUp
from moec.passes.infer_shapes import InferShapes
from moec.passes.insert_exchange import InsertExchange
from moec.passes.join_shared import JoinShared
from moec.passes.merge_linears import MergeLinears
from moec.passes.place_experts import PlaceExperts
from moec.passes.runner import run_passes
from moec.passes.shard_attention import ShardAttention
from moec.passes.shard_experts import ShardExperts
from moec.passes.split_tokens import SplitTokens
from moec.placement import Placement, linear
from moec.runtime import weights, weights_reader
from moec.semantics.checker import check
from tests import checkpoints


def sources_of(folder: Path) -> Sources:
    config, _ = read_config(folder)
    model = import_config(config, family_of(config, folder), folder)
    return open_sources(folder, logical_parameters(model))


def one(
    sources: Sources, param: Param, mesh: Mesh, rank: int, placements: Mapping[str, Placement] | None = None
) -> torch.Tensor:
    return weights.load(sources, {"it": param}, mesh, placements or {}, rank)["it"]


def everything(sources: Sources) -> dict[str, torch.Tensor]:
    return {name: weights.read_whole(sources, name) for name in sources.parameters}


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtral")
    checkpoints.make("mixtral", folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_the_four_spellings_hold_the_same_weights(family: str, tmp_path: Path) -> None:
    found = {}
    for layout in checkpoints.LAYOUTS:
        model = checkpoints.make(family, tmp_path / layout, layout=layout)
        found[layout] = everything(sources_of(tmp_path / layout))
    state = model.state_dict()
    for name, tensor in found["original"].items():
        assert all(torch.equal(tensor, found[layout][name]) for layout in checkpoints.LAYOUTS), name
    for layer, (kind, part) in itertools.product(range(8), (("gate", 0), ("up", 1))):
        if f"layers.{layer}.experts.{kind}" in found["original"]:
            whole = state[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
            assert torch.equal(found["original"][f"layers.{layer}.experts.{kind}"], whole.chunk(2, dim=1)[part])
    assert torch.equal(found["original"]["embed"], state["model.embed_tokens.weight"])
    assert torch.equal(found["original"]["layers.1.attention.o"], state["model.layers.1.self_attn.o_proj.weight"])


@pytest.mark.parametrize("ep", [1, 2, 3, 4])
@pytest.mark.parametrize("etp", [1, 2])
def test_each_slot_holds_the_bytes_of_its_expert(mixtral: Path, ep: int, etp: int) -> None:
    """Fault B10: a placement that the router follows and the loader does not."""
    sources, mesh = sources_of(mixtral), Mesh(dp=ep, tp=etp, ep=ep, etp=etp)
    raw = {name: tensor for shard in mixtral.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    order = list(range(11))
    random.Random(ep).shuffle(order)
    cuts = [0, *itertools.accumulate(len(x) for x in linear(11, ep).slots)]
    table = Placement(tuple(tuple(order[a:b]) for a, b in itertools.pairwise(cuts)))
    for kind, letter, dim in (("gate", "w1", 0), ("up", "w3", 0), ("down", "w2", 1)):
        whole = sources.parameters[f"layers.1.experts.{kind}"]
        places: list[tuple[str, Place]] = [("ep", Placed("routed"))]
        places += [("etp", Shard(dim + 1))] if etp > 1 else []
        param = Param((f"layers.1.experts.{kind}",), whole, "fp32", Layout("experts", tuple(places)))
        for rank in range(mesh.size):
            held = one(sources, param, mesh, rank, {"routed": table})
            ids = table.slots[mesh.coordinate(rank, "ep")]
            assert len(held) == len(ids)
            for slot, expert in enumerate(ids):
                matrix = raw[f"model.layers.1.block_sparse_moe.experts.{expert}.{letter}.weight"]
                want = matrix.chunk(etp, dim)[mesh.coordinate(rank, "etp")].contiguous()
                assert bytes(held[slot].contiguous().view(torch.uint8).numpy().data) == bytes(
                    want.view(torch.uint8).numpy().data
                ), (rank, slot, expert)


def test_parts_are_cut_before_they_are_joined(mixtral: Path) -> None:
    sources, mesh = sources_of(mixtral), Mesh(tp=2, etp=2)
    gate, up = (weights.read_whole(sources, f"layers.0.experts.{kind}") for kind in ("gate", "up"))
    e, i, d = gate.shape
    parts = ("layers.0.experts.gate", "layers.0.experts.up")
    param = Param(parts, (e, 2 * i, d), "fp32", Layout("experts", (("etp", Shard(1)),)), dim=1)
    for rank in range(2):
        want = torch.cat([gate.chunk(2, 1)[rank], up.chunk(2, 1)[rank]], dim=1)
        assert torch.equal(one(sources, param, mesh, rank), want)


def test_parts_of_several_sizes_are_cut_before_they_are_joined(mixtral: Path) -> None:
    sources, mesh = sources_of(mixtral), Mesh(tp=2, etp=2)
    parts = tuple(f"layers.0.attention.{name}" for name in ("q", "k", "v"))
    whole = [weights.read_whole(sources, part) for part in parts]
    sizes, width = tuple(len(part) for part in whole), whole[0].shape[1]
    assert len(set(sizes)) == 2
    for dim in (0, 1):
        param = Param(parts, (sum(sizes), width), "fp32", Layout("attention", (("tp", Shard(dim)),)), sizes=sizes)
        for rank in range(2):
            want = torch.cat([part.chunk(2, dim)[rank] for part in whole])
            assert torch.equal(one(sources, param, mesh, rank), want)


@pytest.mark.parametrize("mesh", [None, "tp=2,etp=2", "dp=2,edp=2,ep=1"])
def test_shared_experts_are_slots_behind_the_routed_ones(mesh: str | None, tmp_path: Path) -> None:
    """20 routed experts of 24 columns and two shared ones, which the checkpoint has as one matrix of 48."""
    checkpoints.make("deepseek_v3", tmp_path)
    programs = programs_of(tmp_path, mesh, (*LAYOUT_PASSES, JoinShared("triton")))
    whole, sources, grid = everything(sources_of(tmp_path)), weights.account(programs, tmp_path), programs[0].mesh
    assert not any(".shared." in name for name in weights.wanted(programs))
    for rank in range(grid.size):
        held, part = weights.load_rank(programs, sources, rank), grid.coordinate(rank, "etp")
        for index, name in enumerate(("gate", "up")):
            matrices = held["layers.2.experts.gate_up"].chunk(2, 1)[index]
            assert len(matrices) == 22
            for slot, wanted in enumerate(whole[f"layers.2.shared.{name}"].chunk(2), 20):
                assert torch.equal(matrices[slot], wanted.chunk(grid.etp)[part])
            routed = whole[f"layers.2.experts.{name}"].chunk(grid.etp, 1)[part]
            assert torch.equal(matrices[:20], routed)
        for slot, wanted in enumerate(whole["layers.2.shared.down"].chunk(2, 1), 20):
            assert torch.equal(held["layers.2.experts.down"][slot], wanted.chunk(grid.etp, 1)[part])


def test_ranks_that_share_a_key_value_head_hold_the_same_rows(mixtral: Path) -> None:
    sources, mesh = sources_of(mixtral), Mesh(tp=4, ep=4)
    k = weights.read_whole(sources, "layers.2.attention.k")
    param = Param(("layers.2.attention.k",), tuple(k.shape), "fp32", Layout("attention", (("tp", Shard(0, 2)),)))
    for rank, half in enumerate((0, 0, 1, 1)):
        assert torch.equal(one(sources, param, mesh, rank), k.chunk(2)[half])


@pytest.mark.parametrize(("bounce", "strided"), [(1 << 20, 1 << 20), (500, 1 << 20), (500, 1), (1, 1)])
def test_columns_are_read_in_blocks_of_rows(
    mixtral: Path, bounce: int, strided: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_reader, "BOUNCE_BYTES", bounce)
    monkeypatch.setattr(weights_reader, "MIN_STRIDED_BYTES", strided)
    sources, mesh = sources_of(mixtral), Mesh(tp=2, etp=2)
    o = weights.read_whole(sources, "layers.0.attention.o")
    for dtype, torch_dtype in weights_reader.TORCH_DTYPES.items():
        param = Param(("layers.0.attention.o",), tuple(o.shape), dtype, Layout("attention", (("tp", Shard(1)),)))
        for rank in range(2):
            assert torch.equal(one(sources, param, mesh, rank), o.chunk(2, 1)[rank].to(torch_dtype))


def test_the_bounce_buffer_stays_within_its_limit(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_reader, "BOUNCE_BYTES", 4096)
    sources = sources_of(mixtral)
    with weights_reader.ShardReader(mixtral) as reader:
        block = sources.block("embed")
        reader.read(block, range(block.shape[0]), range(block.shape[1]), torch.empty(block.shape, dtype=torch.float16))
        assert block.shape[0] * block.shape[1] * 4 > 4 * 4096
        assert reader._bounce.numel() == 4096


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_are_converted_and_the_selection_bias_stays_fp32(stored: torch.dtype, tmp_path: Path) -> None:
    model = checkpoints.make("deepseek_v3", tmp_path, dtype=stored)
    sources = sources_of(tmp_path)
    state = model.state_dict()
    for dtype, torch_dtype in weights_reader.TORCH_DTYPES.items():
        param = Param(("layers.1.attention.kv_b",), sources.parameters["layers.1.attention.kv_b"], dtype)
        want = state["model.layers.1.self_attn.kv_b_proj.weight"].to(torch_dtype)
        assert torch.equal(one(sources, param, Mesh(), 0), want)
    bias = weights.read_whole(sources, "layers.1.router.bias")
    assert torch.equal(bias, state["model.layers.1.mlp.gate.e_score_correction_bias"])
    assert bias.abs().min() > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_names_tensor_and_file(value: float, tmp_path: Path) -> None:
    checkpoints.make("mixtral", tmp_path)
    name = "model.layers.2.block_sparse_moe.experts.7.w2.weight"

    def spoil(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors[name][3, 5] = tensors[name][4, 5] = value
        return tensors

    checkpoints.respell(tmp_path, spoil)
    sources = sources_of(tmp_path)
    with pytest.raises(MoecError) as caught:
        weights.read_whole(sources, "layers.2.experts.down")
    line = caught.value.diagnostics[0].one_line()
    assert caught.value.exit_code == 6
    assert "E0746" in line and name in line and "model.safetensors" in line and " in 2 of the " in line
    assert weights.read_whole(sources, "layers.1.experts.down").isfinite().all()


def test_a_value_too_large_for_fp16_is_refused(tmp_path: Path) -> None:
    checkpoints.make("mixtral", tmp_path)
    checkpoints.respell(tmp_path, lambda tensors: tensors | {"model.norm.weight": torch.full((48,), 1e5)})
    sources = sources_of(tmp_path)
    assert weights.read_whole(sources, "norm")[0] == 1e5
    with pytest.raises(MoecError, match=r"NaN or infinite as fp16 in 48 of the 48 values"):
        weights.read_whole(sources, "norm", torch.float16)


def test_a_shard_cut_after_its_header_was_read_is_an_error_that_names_it(mixtral: Path, tmp_path: Path) -> None:
    for file in mixtral.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    sources = sources_of(tmp_path)
    block = sources.block("layers.2.attention.q")
    os.truncate(tmp_path / block.file, block.offset + 10)
    with pytest.raises(MoecError) as caught:
        weights.read_whole(sources, "layers.2.attention.q")
    text = caught.value.render()
    assert "E0745" in text and block.file in text and block.tensor in text and f"has {block.offset + 10} bytes" in text
    (tmp_path / block.file).unlink()
    with pytest.raises(MoecError, match="cannot be opened"):
        weights.read_whole(sources, "layers.2.attention.q")


LAYOUT_PASSES = (
    InferShapes(), PlaceExperts(), ShardAttention(), SplitTokens(), ShardExperts(), InsertExchange(), FuseGateUp(),
    MergeLinears(),
)  # fmt: skip


def programs_of(folder: Path, mesh: str | None, passes: tuple[Pass, ...] = LAYOUT_PASSES) -> list[Program]:
    """Both phases of the imported model, as far as the passes that lay parameters out take them."""
    plan = check(SourceFile("it.moe", import_model(folder, mesh))).plan()
    programs = [lower(plan, phase, "it.moe") for phase in (plan.prefill, plan.decode)]
    for program in programs:
        run_passes(program, passes)
    return programs


@pytest.mark.parametrize("mesh", ["ep=3", "tp=2,etp=2", "dp=2,tp=2", "dp=2,edp=2,ep=1", "ep=2,etp=2"])
@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_the_ranks_of_a_compiled_program_hold_the_whole_model(family: str, mesh: str, tmp_path: Path) -> None:
    """What the layouts promise: each rank has the values of its place, and together the ranks have all of them."""
    checkpoints.make(family, tmp_path)
    programs = programs_of(tmp_path, mesh)
    params, grid = weights.wanted(programs), programs[0].mesh
    whole = everything(sources_of(tmp_path))
    assert {part for param in params.values() for part in param.parts} == set(whole)
    sources = weights.account(programs, tmp_path)
    ranks = [weights.load_rank(programs, sources, rank) for rank in range(grid.size)]
    for name, param in params.items():
        sizes = [whole[part].shape[param.dim] for part in param.parts]
        for index, part in enumerate(param.parts):
            shares = [rank[name].shape[param.dim] for rank in ranks]
            cuts = [[size * share // sum(sizes) for size in sizes] for share in shares]
            pieces = [torch.split(rank[name], cut, param.dim)[index] for rank, cut in zip(ranks, cuts, strict=True)]
            held = torch.zeros(whole[part].shape, dtype=torch.bool)
            for rank, piece in enumerate(pieces):
                where = _place(held.shape, param, grid, programs[0].placements, rank)
                assert torch.equal(piece, whole[part][where]), (name, part, rank)
                held[where] = True
            assert held.all(), (name, part)


def _place(
    shape: torch.Size, param: Param, mesh: Mesh, tables: dict[str, Placement], rank: int
) -> tuple[torch.Tensor, ...]:
    """Where a rank's piece belongs in a part, index by index along each dim."""
    index: list[Any] = [torch.arange(size) for size in shape]
    for axis, place in param.layout.places:
        at = mesh.coordinate(rank, axis)
        if isinstance(place, Shard):
            index[place.dim] = index[place.dim].chunk(mesh.axis_size(axis) // place.copies)[at // place.copies]
        elif isinstance(place, Placed):
            index[0] = torch.tensor(tables[place.table].slots[at])
        else:
            assert isinstance(place, Replicate)
    return torch.meshgrid(*index, indexing="ij")


def test_a_tied_head_is_the_embedding_itself(tmp_path: Path) -> None:
    checkpoints.make("qwen3_moe", tmp_path, tie_word_embeddings=True)
    programs = programs_of(tmp_path, "ep=2")
    held = weights.load_rank(programs, weights.account(programs, tmp_path), 0)
    assert held["head"].data_ptr() == held["embed"].data_ptr()


def test_progress_ends_at_the_bytes_that_are_held(mixtral: Path) -> None:
    seen: list[tuple[int, int]] = []
    programs = programs_of(mixtral, "ep=2,etp=2")
    sources = weights.account(programs, mixtral)
    held = weights.load_rank(programs, sources, 1, progress=lambda done, total: seen.append((done, total)))
    total = sum(tensor.numel() * tensor.element_size() for tensor in held.values())
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_programs_that_disagree_about_a_parameter_are_a_bug(mixtral: Path) -> None:
    programs = programs_of(mixtral, "ep=2")
    other = Program(**{**vars(programs[1]), "bodies": dict(programs[1].bodies)})
    other.bodies["prologue"] = Body("prologue", params={"embed": Param(("embed",), (1, 2), "fp32")})
    with pytest.raises(AssertionError, match="embed has another layout"):
        weights.wanted([programs[0], other])
    assert Run("prologue") in other.runs


def test_the_trained_models_load(shared: Path) -> None:
    for name in ("tiny-deepseek-v3", "small-qwen3-moe"):
        folder = shared / "models" / name
        sources = sources_of(folder)
        assert len(sources.parameters) == len(open_checkpoint(folder).tensors) - 31 * 3 * _sparse(sources)
        assert all(tensor.isfinite().all() for tensor in everything(sources).values())


def _sparse(sources: Sources) -> int:
    return sum(name.endswith("router.weight") for name in sources.parameters)


def test_a_tensor_of_no_values_is_read(tmp_path: Path) -> None:
    """Half a rank may be empty: fewer experts than ranks."""
    checkpoints.make("mixtral", tmp_path)
    sources = sources_of(tmp_path)
    table = Placement((tuple(range(11)), ()))
    param = Param(("layers.0.experts.gate",), (11, 28, 48), "fp32", Layout("experts", (("ep", Placed("routed")),)))
    assert one(sources, param, Mesh(dp=2, ep=2), 1, {"routed": table}).shape == (0, 28, 48)


SLICE_SCRIPT = """
import sys
import torch
from pathlib import Path
from moec.checkpoint.map import Block
from moec.runtime.weights_reader import ShardReader

def peak_mib():
    status = Path("/proc/self/status").read_text()  # ru_maxrss would count the parent before exec
    return int(status.split("VmHWM:")[1].split()[0]) / 1024

before = peak_mib()
target = torch.empty(4096, 4096)
with ShardReader(Path(sys.argv[1])) as reader:
    block = Block("w", "w.safetensors", "F32", (4096, 16384), 0)
    reader.read(block, range(4096), range(4096, 8192), target)
print(peak_mib() - before)
"""


def test_a_quarter_of_the_columns_costs_a_quarter_of_the_memory(tmp_path: Path) -> None:
    """64 MiB are kept of 256 MiB; a memory map of the file would hold all of them."""
    with (tmp_path / "w.safetensors").open("wb") as file:
        file.truncate(256 << 20)
    run = [sys.executable, "-c", SLICE_SCRIPT, str(tmp_path)]
    grown = float(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
    assert 64 < grown < 64 + 8 + 24
