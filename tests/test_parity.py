"""The chain on real ranks: logits and greedy tokens equal transformers' on every mesh, with every exchange.

Tolerances: 1e-4 against transformers, 5e-5 among the meshes (fp32, max abs); the greedy tokens are identical.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moec.passes.plan_overlap import PlanOverlap
from tests import checkpoints
from tests.parity import EXCHANGES, MESHES, NODE_MESHES, Outcome, compile_checkpoint, run, worst
from tests.programs import LOWERINGS

LENGTHS = (7, 19, 12)
TRAINED = ("tiny-deepseek-v3", "small-qwen3-moe")


@dataclass(frozen=True)
class Case:
    """A model folder, prompts of different lengths, and what transformers gives for them."""

    folder: Path
    prompts: tuple[list[int], ...]
    wanted: Outcome


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@cache
def _random_case(family: str, root: Path) -> Case:
    model = checkpoints.make(family, root / family)
    prompts = checkpoints.prompts(model.config.vocab_size, LENGTHS)
    with torch.inference_mode():
        logits = [model(torch.tensor([p]), use_cache=False).logits[0] for p in prompts]
    tokens = [checkpoints.greedy(model, p, 32) for p in prompts]
    return Case(root / family, tuple(prompts), Outcome(logits, tokens))


@cache
def _trained_case(folder: Path) -> Case:
    saved = load_file(folder / "reference.safetensors")
    wanted = Outcome(list(saved["logits"]), saved["greedy"].tolist())
    return Case(folder, tuple(saved["tokens"].tolist()), wanted)


@cache
def _one_rank(case_folder: Path, prompts: tuple[tuple[int, ...], ...], root: Path) -> Outcome:
    work = root / f"one-{case_folder.name}"
    work.mkdir()
    return run(compile_checkpoint(case_folder, work, None), case_folder, work, prompts)


def _check(case: Case, mesh: str | None, exchange: str, root: Path, work: Path) -> None:
    found = run(compile_checkpoint(case.folder, work, mesh, exchange), case.folder, work, case.prompts)
    assert worst(found.logits, case.wanted.logits) < 1e-4
    assert found.tokens == case.wanted.tokens
    alone = _one_rank(case.folder, tuple(map(tuple, case.prompts)), root)
    assert worst(found.logits, alone.logits) < 5e-5


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_random_checkpoint(family: str, mesh: str | None, exchange: str, folders: Path, tmp_path: Path) -> None:
    _check(_random_case(family, folders), mesh, exchange, folders, tmp_path)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", TRAINED)
def test_trained_model(name: str, mesh: str | None, exchange: str, shared: Path, folders: Path, tmp_path: Path) -> None:
    _check(_trained_case(shared / "models" / name), mesh, exchange, folders, tmp_path)


#: One family on every mesh; the others on uneven experts over nodes, and on tp and etp beside ep.
LOWERED = [("mixtral", *at) for at in NODE_MESHES] + [
    (family, *at) for family in ("qwen3_moe", "deepseek_v3") for at in (("ep=3", 3), ("dp=2,tp=2", 2))
]


@pytest.mark.parametrize(("family", "mesh", "nodes"), LOWERED)
@pytest.mark.parametrize(("exchange", "combine"), LOWERINGS)
def test_every_lowering(
    family: str, exchange: str, combine: str, mesh: str, nodes: int, folders: Path, tmp_path: Path
) -> None:
    """All lowerings of the exchange, over one node and several: uneven experts, ep x tp, copies of the group."""
    case = _random_case(family, folders)
    settings = f"plan.combine={combine}"
    artifact = compile_checkpoint(case.folder, tmp_path, mesh, exchange, "torch", settings, nodes=nodes)
    found = run(artifact, case.folder, tmp_path, case.prompts)
    assert worst(found.logits, case.wanted.logits) < 1e-4
    assert found.tokens == case.wanted.tokens
    alone = _one_rank(case.folder, tuple(map(tuple, case.prompts)), folders)
    assert worst(found.logits, alone.logits) < 5e-5


@pytest.mark.parametrize("mesh", ("pp=2", "ep=2,pp=2", "dp=2,tp=2,pp=2"))
@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_pipeline_stages(family: str, mesh: str, folders: Path, tmp_path: Path) -> None:
    """Layers split over stages, alone and composed with the other axes."""
    _check(_random_case(family, folders), mesh, "flat", folders, tmp_path)


#: Family, mesh, nodes, exchange and chunks: uneven experts, attention over tp, etp wider than tp, stages, two hops.
CHUNKED = (
    ("mixtral", "ep=3", 1, "flat", "2:layer"),
    ("mixtral", "tp=2", 1, "flat", "2:layer"),
    ("qwen3_moe", "dp=2,tp=2", 1, "gather", "2:layer"),
    ("qwen3_moe", "dp=2,tp=2", 2, "two_hop", "3:layer"),
    ("qwen3_moe", "dp=4,ep=2,etp=2", 1, "flat", "2:layer"),
    ("deepseek_v3", "ep=4", 2, "aggregate", "3:layer"),
    ("deepseek_v3", "dp=2,tp=2", 1, "flat", "2:layer"),
    ("deepseek_v3", "tp=2,etp=2", 1, "flat", "3:layer"),
    ("deepseek_v3", "ep=2,pp=2", 1, "flat", "2:layer"),
)


@pytest.mark.parametrize(("family", "mesh", "nodes", "exchange", "overlap"), CHUNKED)
def test_a_layer_cut_at_its_entry(
    family: str,
    mesh: str,
    nodes: int,
    exchange: str,
    overlap: str,
    folders: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The whole layer in chunks. Prompts are cut by them, and by steps of 16 tokens; some ranks have no row, or one."""
    case = _random_case(family, folders)
    monkeypatch.setattr(PlanOverlap, "run", lambda self, program: setattr(program, "overlap", overlap))
    settings = ("plan.combine=reduced", "plan.prefill.tokens=16")
    artifact = compile_checkpoint(case.folder, tmp_path, mesh, exchange, "torch", *settings, nodes=nodes)
    chunks = {node.kwargs.get("chunk") for program in artifact.programs for _, node in program.nodes()}
    assert {None, *((index, int(overlap[0])) for index in range(int(overlap[0])))} == chunks
    found = run(artifact, case.folder, tmp_path, case.prompts)
    assert found.tokens == case.wanted.tokens
    alone = _one_rank(case.folder, tuple(map(tuple, case.prompts)), folders)
    assert worst(found.logits, alone.logits) < 5e-5


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_wider_expert_tensor_axis(exchange: str, folders: Path, tmp_path: Path) -> None:
    """etp wider than tp: tokens are gathered before their experts instead of cut."""
    _check(_random_case("qwen3_moe", folders), "dp=4,ep=2,etp=2", exchange, folders, tmp_path)
