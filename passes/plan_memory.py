"""Add up what each rank holds, and refuse what a device cannot hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moec.cost.memory import memory_by_rank
from moec.diagnostics import CompileError, Diagnostic
from moec.ir.program import Program
from moec.passes.base import Pass


@dataclass(frozen=True)
class PlanMemory(Pass):
    """Write the bytes per rank (`moec.cost.memory`), and refuse a plan that a device of the cluster cannot hold.

    before: (no memory lines)
    after:  memory 0 weights=16777216 kv=4194304 buffers=1048576        (and, of an expert cache, slots=4194304)
    """

    name: ClassVar[str] = "plan-memory"

    def run(self, program: Program) -> None:
        program.memory = memory_by_rank(program)
        limit = program.cluster.device.memory_bytes
        worst = max(range(program.mesh.size), key=lambda rank: program.memory[rank].total)
        if limit is not None and program.memory[worst].total > limit:
            raise CompileError(_too_large(program, worst, limit))


def _too_large(program: Program, rank: int, limit: int) -> Diagnostic:
    need = program.memory[rank]
    parts = {"weights": need.weights, "kv": need.kv, "buffers": need.buffers}
    parts |= {"expert slots": need.slots} if need.slots else {}
    shown = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in parts.items())
    return Diagnostic(
        "E0330",
        f"{program.phase} needs {need.total / 2**30:.1f} GiB on rank {rank}, a device of {program.cluster.name} has"
        f" {limit / 2**30:.1f} GiB ({shown} GiB)",
        help=f"use {', '.join(_remedies(program, need.total - need.buffers < limit))}, "
        + ("or a wider `ep`" if need.slots or not program.experts else "a wider `ep`, or a `cache` of some experts"),
    )


def _remedies(program: Program, is_of_buffers: bool) -> list[str]:
    """What makes a plan smaller; first what alone is enough, where buffers are what does not fit."""
    found = []
    if is_of_buffers and program.fitting:
        found.append(" or ".join(f"`exchange = {name}`" for name in program.fitting))
    if is_of_buffers and program.phase == "prefill":
        found.append("a smaller `prefill { tokens }`")
    return [*found, "more devices", "a smaller `context` or `batch`"]
