"""Records which experts a run's tokens chose, and what was guessed for them: `moec run --record`.

1. `Recorder.watch` wraps the kernels `route` and `guess` of a rank: each step keeps what they gave, by layer.
2. `gather_trace` joins the ranks: the tokens of a step in the order of the ranks that routed them, the layers of all
   pipeline stages one after the other. Ranks that only hold a copy of others' tokens (etp) are passed over.

Shapes: N tokens of all steps, S of this rank in one step, k experts a token, L sparse layers.
"""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moec.cache.trace import DECODE, PREFILL, Trace
from moec.diagnostics import fail
from moec.ir.program import Program, op_of, operands, type_of
from moec.runtime.generate import Place, gather_bytes

Array = NDArray[Any]
PHASES = {"prefill": PREFILL, "decode": DECODE}


@dataclass
class StepRecord:
    """One step of this rank: by layer ids [S, k], weights [S, k] and guesses [S, j]; lengths of its sequences' rows.

    Shared experts that a router adds to every token's choices are left out.
    """

    phase: int
    lengths: tuple[int, ...]
    ids: dict[int, Array] = field(default_factory=dict)
    weights: dict[int, Array] = field(default_factory=dict)
    guesses: dict[int, Array] = field(default_factory=dict)


class Recorder:
    """Collects the steps of one rank."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self._latest: object = None

    def watch(self, kernels: SimpleNamespace, program: Program) -> SimpleNamespace:
        """The same kernels, with `route` and `guess` recorded."""
        later = {
            layer: int(str(node.kwargs["ahead"]))
            for body, node in program.nodes()
            if op_of(node).name == "prefetch.start"
            for layer in program.layers_of(body.name)
        }
        phase = PHASES[program.phase]

        def routed(table: SimpleNamespace) -> dict[str, Any]:
            return vars(table) | {"route": self._watched(table.route, phase, self._chosen)}

        guess = self._watched(kernels.guess, phase, functools.partial(self._guessed, later))
        others = {name: SimpleNamespace(**routed(getattr(kernels, name))) for name in ("cpp", "triton")}
        return SimpleNamespace(**routed(kernels) | {"guess": guess} | others)

    def _watched(
        self, kernel: Callable[..., Any], phase: int, keep: Callable[[StepRecord, int, Any, int], None]
    ) -> Callable[..., Any]:
        @functools.wraps(kernel)
        def run(ctx: Any, *args: Any, **attrs: Any) -> Any:
            result = kernel(ctx, *args, **attrs)
            if ctx.step is not self._latest:
                starts = ctx.step.starts
                lengths = tuple(end - start for start, end in itertools.pairwise(starts))
                self.steps.append(StepRecord(phase, lengths))
                self._latest = ctx.step
            keep(self.steps[-1], ctx.layer, result, attrs["top"])
            return result

        return run

    @staticmethod
    def _chosen(step: StepRecord, layer: int, result: Any, top: int) -> None:
        ids_Sk, weights_Sk = result
        _append(step.ids, layer, ids_Sk[:, :top])
        _append(step.weights, layer, weights_Sk[:, :top])

    @staticmethod
    def _guessed(later: Mapping[int, int], step: StepRecord, layer: int, ids_Sj: Any, top: int) -> None:
        _append(step.guesses, layer + later[layer], ids_Sj)


def _append(rows: dict[int, Array], layer: int, more: torch.Tensor) -> None:
    """A layer that goes in chunks routes each by itself."""
    mine: Array = more.cpu().numpy()
    rows[layer] = np.concatenate([rows[layer], mine]) if layer in rows else mine


def check_recordable(programs: Iterable[Program]) -> None:
    """Raises E0647 where the layers of a model do not route alike: a trace has as many experts a token in each."""
    nodes = [node for program in programs for _, node in program.nodes() if op_of(node).name == "route"]
    tops = sorted({int(str(node.kwargs["top"])) for node in nodes})
    if len(tops) != 1:
        few = f"its layers choose {' and '.join(map(str, tops))} experts a token" if tops else "it has no experts"
        raise fail("E0647", f"there is no routing trace of this model: {few}", "leave --record out")


def num_routed(programs: Iterable[Program]) -> int:
    """Experts that a router of the programs chooses among, at most."""
    nodes = [node for program in programs for _, node in program.nodes() if op_of(node).name == "route"]
    return max((int(type_of(operands(node)[0]).shape[1]) for node in nodes), default=0)


def gather_trace(recorder: Recorder, place: Place, num_experts: int) -> Trace | None:
    """On rank 0: the trace of all ranks; None on the others. For programs that `check_recordable` lets pass."""
    parts = [_Part.unpacked(data) for data in gather_bytes(place, _Part.of(recorder.steps).packed(), "record")]
    if place.rank != 0:
        return None
    mesh = place.mesh
    routing = [r for r in range(mesh.world) if mesh.coordinate(r % mesh.size, "etp") == 0]
    holding = [r for r in range(mesh.world) if mesh.coordinate(r, "tp") == 0]
    sparse = [stage for stage in range(mesh.pp) if parts[stage * mesh.size].layers]
    stages = [[parts[r] for r in routing if r // mesh.size == stage] for stage in sparse]
    holders = [parts[r] for r in holding if r // mesh.size == sparse[0]]
    return _joined(stages, holders, num_experts)


@dataclass(frozen=True, eq=False)
class _Part:
    """What one rank recorded: phase and number of tokens of each step, how many sequences it had and their rows, and by
    layer the choices of all its tokens."""

    phase: Array
    counts: Array
    pieces: Array
    lengths: Array
    layers: dict[str, Array]

    @classmethod
    def of(cls, steps: Sequence[StepRecord]) -> _Part:
        numbers = sorted({layer for step in steps for layer in step.ids})
        counts = [len(next(iter(step.ids.values()))) for step in steps]
        layers: dict[str, Array] = {}
        for layer in numbers:
            layers[f"ids.{layer}"] = np.concatenate([step.ids[layer] for step in steps])
            layers[f"weights.{layer}"] = np.concatenate([step.weights[layer] for step in steps])
            width = max((step.guesses[layer].shape[1] for step in steps if layer in step.guesses), default=0)
            none = [np.full((count, width), -1, np.int64) for count in counts]
            found = [step.guesses.get(layer, blank) for step, blank in zip(steps, none, strict=True)]
            layers[f"guesses.{layer}"] = np.concatenate(found)
        return cls(
            np.array([step.phase for step in steps], np.int64),
            np.array(counts, np.int64),
            np.array([len(step.lengths) for step in steps], np.int64),
            np.array([length for step in steps for length in step.lengths], np.int64),
            layers,
        )

    def packed(self) -> bytes:
        content = io.BytesIO()
        plain = {"phase": self.phase, "counts": self.counts, "pieces": self.pieces, "lengths": self.lengths}
        np.savez(content, allow_pickle=False, **plain, **self.layers)
        return content.getvalue()

    @classmethod
    def unpacked(cls, data: bytes) -> _Part:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
        phase, counts, pieces, lengths = (found.pop(name) for name in ("phase", "counts", "pieces", "lengths"))
        return cls(phase, counts, pieces, lengths, found)

    def by_step(self, rows: Array) -> list[Array]:
        """Rows of all tokens, step by step."""
        return np.split(rows, np.cumsum(self.counts)[:-1])

    def lengths_by_step(self) -> list[Array]:
        return np.split(self.lengths, np.cumsum(self.pieces)[:-1])


def _joined(stages: Sequence[Sequence[_Part]], holders: Sequence[_Part], num_experts: int) -> Trace:
    """The parts of all stages (each a list of ranks) as one trace; `holders`: the ranks that count each row once."""
    counts = sum(part.counts for part in stages[0])
    lengths = [length for step in zip(*(part.lengths_by_step() for part in holders), strict=True) for length in step]
    guesses = _stacked(stages, "guesses")
    return Trace(
        expert_ids=_stacked(stages, "ids"),
        num_experts=num_experts,
        seq_lengths=np.concatenate([np.zeros(0, np.int64), *(x[x > 0] for x in lengths)]).astype(np.int32),
        phase=np.repeat(stages[0][0].phase, counts).astype(np.uint8),
        step_starts=np.concatenate([[0], np.cumsum(counts)]),
        gate_weights=_stacked(stages, "weights").astype(np.float32),
        predicted_ids=guesses if guesses.shape[2] else None,
    )


def _stacked(stages: Sequence[Sequence[_Part]], kind: str) -> Array:
    """[L, N, width]: layer by layer, step by step, rank by rank; narrower layers are filled up with -1."""
    layers = []
    for ranks in stages:
        numbers = sorted(int(name.partition(".")[2]) for name in ranks[0].layers if name.startswith("ids."))
        for number in numbers:
            steps = zip(*(part.by_step(part.layers[f"{kind}.{number}"]) for part in ranks), strict=True)
            layers.append(np.concatenate([rows for step in steps for rows in step]))
    width = max(rows.shape[1] for rows in layers)
    filled = [np.pad(rows, ((0, 0), (0, width - rows.shape[1])), constant_values=-1) for rows in layers]
    found: Array = np.stack(filled)
    return found
