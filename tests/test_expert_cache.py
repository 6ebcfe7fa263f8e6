"""The expert cache on real ranks: the same bits as with every expert in device memory, whatever is cached and guessed.

Each case is held against the resident run on the same mesh: logits and tokens equal bit for bit.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from moec.artifact import Artifact
from moec.cache.trace import write_trace
from moec.ir.program import op_of
from tests import checkpoints
from tests.cached import Run, compile_cached, run_cached, same_bits
from tests.parity import Outcome, compile_checkpoint, run

LENGTHS = (9, 4, 14)
#: Steps of few rows, which need few experts: else no prefetch would pay.
STEPS = ("plan.decode.batch=1", "plan.prefill.tokens=3")
#: (family, mesh, slots, policy, prefetch): each policy, predictor, ep degree and number of slots with several others.
CASES = (
    ("deepseek_v3", None, 1, "layer_lru", "none"),
    ("deepseek_v3", None, 2, "least_stale", "none"),
    ("deepseek_v3", None, 7, "trace", "history"),
    ("deepseek_v3", "ep=2", 1, "lfu", "next_router(ahead = 1)"),
    ("deepseek_v3", "ep=2", 3, "lru", "next_router(ahead = 2)"),
    ("deepseek_v3", "ep=3", 1, "trace", "none"),
    ("deepseek_v3", "ep=3", 4, "least_stale", "history"),
    ("deepseek_v3", "ep=4", 2, "layer_lru", "next_router(ahead = 1)"),
    ("deepseek_v3", "ep=2", 4, "sweep_lfu", "next_router(ahead = 1)"),
    ("deepseek_v3", "ep=3", 1, "sweep_lfu", "next_router(ahead = 1)"),
    ("deepseek_v3", "ep=4", 2, "sweep_lfu", "history"),
    ("deepseek_v3", "ep=4", 1, "lru", "history"),
    ("deepseek_v3", "tp=2", 3, "lfu", "next_router(ahead = 1)"),
    ("deepseek_v3", "ep=2,etp=2", 2, "layer_lru", "next_router(ahead = 1)"),
    ("deepseek_v3", "dp=2,edp=2,ep=1", 4, "lfu", "next_router(ahead = 2)"),
    ("qwen3_moe", None, 2, "lfu", "next_router(ahead = 1)"),
    ("qwen3_moe", None, 1, "sweep_lfu", "none"),
    ("qwen3_moe", "ep=2", 2, "layer_lru", "history"),
    ("mixtral", "ep=3", 1, "lfu", "next_router(ahead = 1)"),
    ("mixtral", "dp=2,tp=2", 2, "lru", "next_router(ahead = 1)"),
    ("mixtral", "ep=2", 2, "sweep_lfu", "next_router(ahead = 1)"),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@cache
def _model(family: str, root: Path) -> tuple[Path, list[list[int]]]:
    """A model folder with a trace of it beside, and prompts."""
    model = checkpoints.make(family, root / family)
    prompts = checkpoints.prompts(model.config.vocab_size, LENGTHS)
    work = root / f"trace-{family}"
    work.mkdir()
    write_trace(root / "past.npz", _run(family, root, prompts, work).trace)
    return root / family, prompts


def _run(family: str, root: Path, prompts: list[list[int]], work: Path) -> Run:
    return run_cached(compile_cached(root / family, work, None), root / family, work, prompts)


@cache
def _resident(family: str, mesh: str | None, root: Path) -> Outcome:
    folder, prompts = _model(family, root)
    work = root / f"resident-{family}-{mesh}"
    work.mkdir(exist_ok=True)
    return run(compile_checkpoint(folder, work, mesh, "flat", "torch", *STEPS), folder, work, prompts, 16)


def has_prefetch(artifact: Artifact) -> bool:
    """A plan may decline: with one slot a wrong guess costs as much as a right one spares."""
    return any(op_of(node).name == "prefetch.start" for program in artifact.programs for _, node in program.nodes())


def test_experts_of_odd_sizes(tmp_path: Path) -> None:
    """Matrices that are no multiples of 16 bytes long begin elsewhere in a slot than in a stack of experts."""
    model = checkpoints.make("deepseek_v3", tmp_path / "odd", hidden_size=50, moe_intermediate_size=21)
    prompts = checkpoints.prompts(model.config.vocab_size, LENGTHS)
    resident = run(compile_checkpoint(tmp_path / "odd", tmp_path, None), tmp_path / "odd", tmp_path, prompts, 8)
    found = run_cached(compile_cached(tmp_path / "odd", tmp_path, None), tmp_path / "odd", tmp_path, prompts, 8)
    assert same_bits(found.outcome, resident)


@pytest.mark.parametrize(("family", "mesh", "slots", "policy", "prefetch"), CASES, ids=lambda value: str(value))
def test_same_bits_as_resident(
    family: str, mesh: str | None, slots: int, policy: str, prefetch: str, folders: Path, tmp_path: Path
) -> None:
    folder, prompts = _model(family, folders)
    evict = f'trace("{folders}/past.npz")' if policy == "trace" else policy
    ahead = f'history("{folders}/past.npz", ahead = 1)' if prefetch == "history" else prefetch
    artifact = compile_cached(folder, tmp_path, mesh, *STEPS, hbm=f"slots({slots})", evict=evict, prefetch=ahead)
    found = run_cached(artifact, folder, tmp_path, prompts)
    assert same_bits(found.outcome, _resident(family, mesh, folders))
    assert found.total("hits") + found.total("misses") == found.total("lookups") > 0
    assert found.total("misses") > 0, "everything was resident: this case shows nothing"
    assert (found.total("prefetches") > 0) == has_prefetch(artifact)
    if mesh == "ep=2" and slots == 3:
        assert found.total("prefetch_hits") > 0
