"""What `moec run --timeline` writes: what all ranks ran, and what was predicted of the run's first steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moec.artifact import Artifact
from moec.cli.errors import say
from moec.plan.timeline import predict_step, unknown_rates
from moec.runtime.generate import Request
from moec.runtime.schedule import first_steps
from moec.runtime.session import read_limits
from moec.runtime.timeline import Event, trace, write_trace


def write_timeline(path: Path, ranks: Sequence[Sequence[Event]], artifact: Artifact, request: Request) -> None:
    """Write the trace of a request's run, with the prediction of its first step of each phase.

    Where the cluster gives no rates to predict with, that is said on standard error. Raises E0618.
    """
    unknown, predicted = unknown_rates(artifact.programs), dict[str, list[Event]]()
    if unknown:
        named = f"cluster `{artifact.prefill.cluster.name}` gives no rate for {', '.join(unknown)}"
        say(f"moec: note: the timeline has no prediction: {named}; `moec calibrate` measures rates")
    else:
        predicted = predictions(artifact, request)
    write_trace(path, trace(ranks, predicted))


def predictions(artifact: Artifact, request: Request) -> dict[str, list[Event]]:
    """By pipeline stage, named with what they are of: the request's first step of each phase, behind each other."""
    lengths = [len(prompt) for prompt in request.prompts]
    sizes = first_steps(lengths, request.max_new_tokens, artifact.prefill.mesh, read_limits(artifact))
    steps = ", ".join(f"{phase} of {rows} token{'s' * (rows != 1)}" for phase, rows in sizes.items())
    found: dict[str, list[Event]] = {}
    for stage, programs in enumerate(artifact.stages):
        events: list[Event] = []
        for program in programs:
            if program.phase not in sizes:
                continue
            zero = max((event.end for event in events), default=0.0)
            events += [
                Event(op.name, op.stream, zero + op.start, zero + op.end, program.phase, op.layer, op.hop)
                for op in predict_step(program, sizes[program.phase])
            ]
        where = f" stage {stage}" if len(artifact.stages) > 1 else ""
        found[f"predicted{where}: {steps} a dp rank"] = events
    return found
