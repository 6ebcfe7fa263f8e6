"""Run passes in order; the verifier holds the program after each, observers may look at it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from moec.diagnostics import CompileError, Diagnostic
from moec.ir.ops.table import OpError
from moec.ir.program import Program
from moec.ir.verifier.program import verify
from moec.passes.base import Pass

Observer = Callable[[Pass, Program], None]


def run_passes(
    program: Program, passes: Iterable[Pass], observers: Iterable[Observer] = (), stop_after: str | None = None
) -> None:
    """Rewrite `program` by each pass. A failing pass is named with its predecessors (CompileError E0404)."""
    verify(program)
    for step in passes:
        try:
            step.run(program)
        except (OpError, ValueError) as error:
            before = ", ".join(program.done) or "nothing"
            raise CompileError(Diagnostic("E0404", f"pass {step} failed (after {before}): {error}")) from error
        program.done += (step.name,)
        verify(program, str(step))
        for observe in observers:
            observe(step, program)
        if step.name == stop_after:
            return
