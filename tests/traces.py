"""Small routing traces for tests, and their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from moec.cache.trace import Array, Trace, write_trace


def trace_of(ids: Any, num_experts: int, **parts: Any) -> Trace:
    """A trace of one sequence, one token a step unless `parts` says else. `ids`: [layers, tokens, k]."""
    chosen = np.asarray(ids)
    tokens = chosen.shape[1]
    settings: dict[str, Any] = {
        "seq_lengths": np.array([tokens], np.int32),
        "phase": np.ones(tokens, np.uint8),
        "step_starts": np.arange(tokens + 1),
    }
    return Trace(chosen, num_experts, **(settings | parts))


def random_ids(layers: int, tokens: int, top: int, num_experts: int, seed: int = 0) -> Array:
    """Uniform choices: [layers, tokens, top], no expert twice for one token."""
    scores = np.random.default_rng(seed).random((layers, tokens, num_experts))
    return np.argsort(scores, axis=2)[:, :, :top]


def written(path: Path, ids: Any, num_experts: int, **parts: Any) -> Path:
    """The file of such a trace."""
    write_trace(path, trace_of(ids, num_experts, **parts))
    return path
