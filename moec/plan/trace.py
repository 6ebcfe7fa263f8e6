"""The routing trace that a plan is costed with: read, held against the model, and told in the plan document."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moec.cache.trace import DECODE, PREFILL, Trace, read_trace
from moec.checked import Model, Moe
from moec.diagnostics import fail
from moec.routing import RoutingTrace

PHASES = {"prefill": PREFILL, "decode": DECODE}


@dataclass(frozen=True)
class PlanTrace:
    """A trace that fits the model. `file` is its plain name and `sha256` its digest, so that a plan says which it was.

    `routing`: by phase, what its Program is costed with. A phase of which the trace has no tokens takes all of them.
    `tokens`: by phase, how many tokens of its own the trace has.
    """

    file: str
    sha256: str
    routing: dict[str, RoutingTrace]
    tokens: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """As plan.json has it: names and numbers of tokens, no choices."""
        return {"file": self.file, "sha256": self.sha256, "tokens": self.tokens}


def open_trace(path: Path, model: Model) -> PlanTrace:
    """The trace of a file. Raises E0780 where it is damaged, E0781 where it is of another model."""
    trace = check_fit(read_trace(path), path, model)
    own = {phase: trace.of_phase(number) for phase, number in PHASES.items()}
    recall = _recall(trace)
    routing = {
        phase: RoutingTrace(ids if ids.shape[1] else trace.expert_ids, recall=recall) for phase, ids in own.items()
    }
    tokens = {phase: int(ids.shape[1]) for phase, ids in own.items()}
    return PlanTrace(path.name, hashlib.sha256(path.read_bytes()).hexdigest(), routing, tokens)


def _recall(trace: Trace) -> float | None:
    """Share of the experts guessed for a token that it chose; None where nothing was guessed."""
    guessed = trace.predicted_ids
    if guessed is None or not (guessed >= 0).any():
        return None
    right = (guessed[:, :, :, None] == trace.expert_ids[:, :, None, :]).any(axis=3)
    return float(right[guessed >= 0].mean())


def check_fit(trace: Trace, path: Path, model: Model) -> Trace:
    """The trace of `path` as one of the model, with as many experts as that has. Raises E0781."""
    if reason := _misfit(trace, model):
        help = "record one with this model: `moec run --record FILE.npz`"
        raise fail("E0781", f"the trace `{path}` does not fit `{model.name}`: {reason}", help)
    counts = [layer.ffn.routed.count for layer in model.layers if isinstance(layer.ffn, Moe)]
    return replace(trace, num_experts=max(counts), is_counted=True)


def _misfit(trace: Trace, model: Model) -> str:
    """In what a trace and a model differ, empty where they do not."""
    sparse = [(depth, layer.ffn) for depth, layer in enumerate(model.layers) if isinstance(layer.ffn, Moe)]
    if trace.num_layers != len(sparse):
        return f"it has {trace.num_layers} sparse layers, the model {len(sparse)}"
    for (depth, ffn), ids in zip(sparse, trace.expert_ids, strict=True):
        if trace.top != ffn.router.top:
            return f"it has {trace.top} experts per token, layer {depth} of the model {ffn.router.top}"
        if ids.max() >= ffn.routed.count:
            return f"it has expert {ids.max()} in layer {depth}, whose experts are 0..{ffn.routed.count - 1}"
    most = max(ffn.routed.count for _, ffn in sparse)
    if trace.is_counted and trace.num_experts != most:
        return f"it is of a model with {trace.num_experts} experts, this one has {most}"
    return ""
