"""Keep one pipeline stage of the layers, with what the first embeds and the last one's head replaced by messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moec.ir.build import Builder
from moec.ir.program import Body, Program, Run, loc_of, op_of
from moec.passes.base import Pass
from moec.placement import balanced


@dataclass(frozen=True)
class SplitStages(Pass):
    """Cut the layers in `mesh.pp` runs of balanced length, and make this the program of run `stage`.

    before: run prologue; run sparse 0..7; run epilogue                             (pp=2)
    after:  run prologue; run sparse 4..7; run epilogue                             (stage 1)
            prologue: %0 = receive(%positions, hidden=64); epilogue of stage 0: %0 = send(%x)
    """

    name: ClassVar[str] = "split-stages"
    stage: int = 0

    def run(self, program: Program) -> None:
        if program.mesh.pp == 1:
            return
        num_layers = sum(len(run.layers) for run in program.runs)
        sizes = balanced(num_layers, program.mesh.pp)
        first = sum(sizes[: self.stage])
        program.stage = self.stage
        _keep_layers(program, range(first, first + sizes[self.stage]))
        if self.stage > 0:
            _receive(program)
        if self.stage < program.mesh.pp - 1:
            _send(program)


def _keep_layers(program: Program, kept: range) -> None:
    if program.routing is not None:  # a trace is of all sparse layers
        own = [place for place, layer in enumerate(program.sparse_layers) if layer in kept]
        program.routing = program.routing.part(own)
    runs = []
    for run in program.runs:
        layers = range(max(run.layers.start, kept.start), min(run.layers.stop, kept.stop))
        if not run.layers or layers:
            runs.append(Run(run.body, layers if run.layers else run.layers))
    program.runs = runs
    used = {run.body for run in runs}
    program.bodies = {name: body for name, body in program.bodies.items() if name in used}
    tables = {str(node.kwargs["table"]) for _, node in program.nodes() if op_of(node).name == "moe"}
    program.experts = {table: count for table, count in program.experts.items() if table in tables}
    program.placements = {table: placed for table, placed in program.placements.items() if table in tables}


def _receive(program: Program) -> None:
    hidden, loc = program.hidden, loc_of(next(node for _, node in program.nodes()))
    body = program.bodies["prologue"] = Body("prologue")
    build = Builder(program, body)
    positions = build.input("positions")
    body.graph.output(build.emit("receive", positions, at=loc, hidden=hidden, dtype=program.dtype))


def _send(program: Program) -> None:
    loc = loc_of(next(node for body, node in program.nodes() if body.name == "epilogue"))
    body = program.bodies["epilogue"] = Body("epilogue")
    build = Builder(program, body)
    body.graph.output(build.emit("send", build.input("x"), at=loc))
