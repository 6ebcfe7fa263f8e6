"""The simulator against the run time: what it predicts from a run's recorded routing is what the ranks counted.

Look-ups, hits, misses, evictions, prefetches and those in vain, by rank and layer, exactly: all follow from the order
in which a Program asks, none from when a copy arrives.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from moec.artifact import Artifact
from moec.cache.predictors import History, NextRouter, Predictor
from moec.cache.simulate import Prefetch, policy_for, simulate
from moec.cache.trace import DECODE, PREFILL, Trace, read_trace
from moec.cache_sizes import held_experts, pinned_keys
from moec.ir.program import Program, is_op, op_of
from moec.runtime.experts.session import fill_order
from tests import checkpoints
from tests.cached import Run, compile_cached, run_cached

PHASES = {"prefill": PREFILL, "decode": DECODE}
#: (mesh, slots, policy, prefetch, overrides); rows of a step few enough for a prefetch to pay.
FEW = ("plan.decode.batch=1", "plan.prefill.tokens=3")
CASES = (
    (None, 5, "layer_lru", "next_router(ahead = 1)", FEW),
    (None, 5, "lfu", "history", FEW),
    ("ep=2", 3, "lru", "next_router(ahead = 2)", FEW),
    ("ep=3", 2, "trace", "next_router(ahead = 1)", FEW),
    ("ep=3", 3, "least_stale", "history", FEW),
    (None, 4, "sweep_lfu", "next_router(ahead = 1)", FEW),
    ("ep=2", 2, "sweep_lfu", "history", FEW),
    ("ep=2", 2, "lfu", "none", ()),  # steps that want more experts than there are slots
    ("ep=4", 1, "layer_lru", "none", ()),
)


def prefetch_of(program: Program, trace: Trace, past: Trace) -> Prefetch | None:
    """What the simulator has to do where the program has a `prefetch.start`."""
    found = [(body, node) for body, node in program.nodes() if op_of(node).name == "prefetch.start"]
    starts = [(body, node) for body, node in found if node.kwargs["by"] != "frequency"]
    coming_back = {int(str(node.kwargs["most"])) for _, node in found if node.kwargs["by"] == "frequency"}
    if not starts:
        return None
    sparse = program.sparse_layers
    later = [layer + int(str(node.kwargs["ahead"])) for body, node in starts for layer in program.layers_of(body.name)]
    targets = [sparse.index(layer) for layer in later]
    body, start = next((body, node) for body, node in starts if set(program.layers_of(body.name)) & set(sparse))
    order = [op_of(node).name for node in body.graph.nodes if is_op(node)]
    assert program.cache is not None
    ahead = program.cache.ahead
    predictor: Predictor = History(past.expert_ids, past.num_experts, ahead)
    if start.kwargs["by"] == "next_router":
        assert trace.predicted_ids is not None
        predictor = NextRouter(trace.predicted_ids, trace.step_starts, trace.num_experts)
    is_early = order.index("prefetch.start") < order.index("prefetch.wait")
    return Prefetch(predictor, ahead, int(str(start.kwargs["most"])), targets, is_early, max(coming_back, default=0))


def predicted(artifact: Artifact, trace: Trace, past: Trace, rank: int) -> list[dict[str, int]]:
    program = artifact.prefill
    cache = program.cache
    assert cache is not None and cache.slots is not None
    held = held_experts(program, rank)
    popularity = past if cache.evict == "trace" else None
    policy = policy_for(cache.evict, trace, held, popularity)
    found = {PHASES[p.phase]: prefetch_of(p, trace, past) for p in artifact.programs}
    prefetch = {phase: made for phase, made in found.items() if made is not None}
    order = fill_order(held, popularity)
    outcome = simulate(trace, policy, cache.slots, held, pinned_keys(cache, held), order, prefetch)
    return [asdict(layer) for layer in outcome.counters]


@pytest.mark.parametrize(("mesh", "slots", "policy", "prefetch", "overrides"), CASES, ids=lambda value: str(value))
def test_as_counted(
    mesh: str | None, slots: int, policy: str, prefetch: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    as_counted("deepseek_v3", mesh, slots, policy, prefetch, overrides, tmp_path)


@pytest.mark.parametrize("mesh", [None, "ep=2"])
def test_what_comes_back_for_the_next_step_as_counted(mesh: str | None, tmp_path: Path) -> None:
    """A model without dense layers in front."""
    artifact, run = as_counted("mixtral", mesh, 2, "sweep_lfu", "next_router(ahead = 1)", (), tmp_path)
    starts = [node for _, node in artifact.decode.nodes() if op_of(node).name == "prefetch.start"]
    assert "frequency" in {node.kwargs["by"] for node in starts}
    assert all(layers[0]["prefetches"] > 0 for layers in run.counters)


@pytest.mark.parametrize("policy", ["layer_lru", "sweep_lfu"])
def test_dense_layers_between_as_counted(policy: str, tmp_path: Path) -> None:
    """The next sparse layer is one, two or three layers later, and each has a body of its own."""
    config = {
        "decoder_sparse_step": 1,
        "num_hidden_layers": 9,
        "mlp_only_layers": [2, 5, 6],
        "num_experts": 12,
        "num_experts_per_tok": 3,
    }
    how = "next_router(ahead = 1)"
    artifact, _ = as_counted("qwen3_moe", None, 3, policy, how, FEW, tmp_path, **config)
    found = {
        layer: layer + int(str(node.kwargs["ahead"]))
        for body, node in artifact.decode.nodes()
        if op_of(node).name == "prefetch.start"
        for layer in artifact.decode.layers_of(body.name)
    }
    assert found == {0: 1, 1: 3, 3: 4, 4: 7, 7: 8}


def test_several_layers_that_nobody_looks_ahead_for_as_counted(tmp_path: Path) -> None:
    """Two layers bring back what the first ones use most, from different distances."""
    config = {
        "decoder_sparse_step": 1,
        "num_hidden_layers": 4,
        "mlp_only_layers": [1],
        "num_experts": 6,
        "num_experts_per_tok": 4,
    }
    batch = ("plan.decode.batch=6",)
    how = "next_router(ahead = 2)"
    artifact, _ = as_counted("qwen3_moe", None, 2, "sweep_lfu", how, batch, tmp_path, **config)
    starts = [node.kwargs for _, node in artifact.decode.nodes() if op_of(node).name == "prefetch.start"]
    assert sorted((str(start["by"]), int(str(start["ahead"]))) for start in starts) == [
        ("frequency", -2), ("frequency", -1), ("next_router", 3),
    ]  # fmt: skip


def as_counted(
    family: str,
    mesh: str | None,
    slots: int,
    policy: str,
    prefetch: str,
    overrides: tuple[str, ...],
    tmp_path: Path,
    **config: Any,
) -> tuple[Artifact, Run]:
    """Run a model of a family, with such a config, and hold what its cache counted against the simulator."""
    model = checkpoints.make(family, tmp_path / "model", **config)
    prompts = checkpoints.prompts(model.config.vocab_size, (9, 4, 14))
    settings = {"hbm": f"slots({slots})", "evict": "layer_lru"}
    if family == "deepseek_v3":
        settings["pin"] = "[2, 7]" if slots > 3 else "shared"
    for name, wanted in (("past", "none"), ("now", prefetch)):
        work = tmp_path / name
        work.mkdir()
        if name == "now":
            settings["evict"] = f'trace("{tmp_path}/past/run.npz")' if policy == "trace" else policy
        how = f'history("{tmp_path}/past/run.npz", ahead = 1)' if wanted == "history" else wanted
        artifact = compile_cached(tmp_path / "model", work, mesh, *overrides, prefetch=how, **settings)
        run = run_cached(artifact, tmp_path / "model", work, prompts)
    past = read_trace(tmp_path / "past" / "run.npz")
    assert run.total("misses") > 0 and (run.total("prefetches") > 0) == (prefetch != "none")
    for rank, counted in enumerate(run.counters):
        assert predicted(artifact, run.trace, past, rank) == counted
    return artifact, run
