"""How far prefetching by the next layer's router closes the gap from LRU to the best that any policy can do (Belady).

Two trained models on text of four languages that neither has seen, one token a step; the guesses are those that a run
recorded, made before the experts of the layer in front have run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from moec.cache.predictors import NextRouter
from moec.cache.simulate import Prefetch, policy_for, simulate
from moec.cache.trace import Trace
from moec.runtime.text import Text
from tests.cached import compile_cached, run_cached

NUM_TOKENS = 256
LEAST = 0.8


def recorded(folder: Path, text: Path, work: Path) -> Trace:
    """The routing of a prompt that goes one token a step."""
    one = ("plan.decode.batch=1", "plan.prefill.tokens=1", "plan.context=512")
    artifact = compile_cached(folder, work, None, *one, hbm="slots(8)", prefetch="next_router(ahead = 1)")
    tokens = Text(folder).encode(text.read_text())[:NUM_TOKENS]
    return run_cached(artifact, folder, work, [tokens], 0).trace


@pytest.mark.parametrize("language", ["kjv", "py", "fr", "de"])
@pytest.mark.parametrize("model", ["small-qwen3-moe", "tiny-deepseek-v3"])
def test_next_router_closes_the_gap(model: str, language: str, shared: Path, tmp_path: Path) -> None:
    trace = recorded(shared / "models" / model, shared / "data" / "text" / f"{language}.txt", tmp_path)
    assert trace.num_tokens == NUM_TOKENS and trace.predicted_ids is not None
    router = NextRouter(trace.predicted_ids, trace.step_starts, trace.num_experts)
    for share in (0.12, 0.25, 0.5):
        slots = int(share * trace.num_experts)
        lru, best = (simulate(trace, policy_for(name, trace), slots).hit_rate for name in ("layer_lru", "belady"))
        prefetch = Prefetch(router, 1, trace.top, is_early=True)
        found = simulate(trace, policy_for("lfu", trace), slots, prefetch=prefetch).hit_rate
        assert best > lru
        assert (found - lru) / (best - lru) >= LEAST
