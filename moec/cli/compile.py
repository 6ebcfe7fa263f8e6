"""`moec compile`: a .moe file to an artifact folder, or the Programs after a pass."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moec.diagnostics import did_you_mean, fail

if TYPE_CHECKING:
    from moec.ir.program import Program
    from moec.passes import Pass
    from moec.runtime.tune import Measure


def compile_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .moe file.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Default: FILE's .build.")
    ] = None,
    plan: Annotated[str | None, typer.Option(metavar="NAME", help="Which plan, where the file has several.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value.")] = None,
    target: Annotated[
        str, typer.Option(metavar="TARGET", help="cpu, or a GPU such as cuda:90, cuda:100, hip:gfx942.")
    ] = "cpu",
    weights: Annotated[Path | None, typer.Option(metavar="DIR", help="Model folder, in place of the file's.")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="Count costs over its routing, not random routing.")
    ] = None,
    stop_after: Annotated[str | None, typer.Option(metavar="PASS", help="Print the Programs after this pass.")] = None,
    print_after: Annotated[
        str | None, typer.Option(metavar="PASS|all", help="Print the Programs after it too.")
    ] = None,
    is_tuned: Annotated[
        bool, typer.Option("--tune", help="Choose GPU kernels by timing them on the GPU here.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as one JSON object.")] = False,
) -> None:
    """Compile a .moe file to a folder. Both phases' Programs, modules and kernels, and the plan."""
    from moec.compiler import compile

    if print_after not in (None, "all"):
        _check_pass(print_after)
    observers = [_Printer(print_after, to_stderr=as_json)] if print_after else []
    if stop_after is not None:
        _print_stopped(file, plan, overrides or [], target, stop_after, observers, trace)
        return
    measure = _measurer(target) if is_tuned else None
    artifact = compile(
        file, plan, overrides or [], target, observers=observers, weights=weights, trace=trace, measure=measure
    )
    folder = output if output is not None else file.with_suffix(".build")
    artifact.save(folder)
    if as_json:
        sys.stdout.write(json.dumps(dict(artifact.document), sort_keys=True) + "\n")
    else:
        _summarise(folder, artifact.document)


def _measurer(target: str) -> Measure:
    """Times kernels on the GPU that is there. Raises E0535, E0536."""
    if target == "cpu":
        raise typer.BadParameter("--tune: give --target the GPU that is here, such as cuda:90")
    from moec.runtime.tune import measurer

    return measurer(target)


def _summarise(folder: Path, document: Mapping[str, Any]) -> None:
    """What was made, on standard error; for GPU kernels the registers and spills that compiling them offline gave."""
    ranks = document["mesh"]["ranks"]
    typer.echo(f"{folder}: plan {document['plan']} for {ranks} rank{'s' * (ranks != 1)}", err=True)
    for why in document["left_to_torch"]:
        typer.echo(f"  fallback: {why}; torch's kernels serve", err=True)
    for kernel in document["kernels"]:
        usage = (
            f"{kernel['registers']} registers, {kernel['spills']} spilled, {kernel['us']['predicted']:.1f} us predicted"
        )
        typer.echo(f"  {kernel['phase']} {kernel['name']} for {kernel['target']}: {usage}", err=True)
        if kernel["fallback"]:
            typer.echo(f"    fallback: {kernel['fallback']}", err=True)


def _print_stopped(
    file: Path,
    plan: str | None,
    overrides: list[str],
    target: str,
    stop_after: str,
    observers: list[_Printer],
    trace: Path | None,
) -> None:
    from moec.compiler import PHASES, checked_plan, compile_phase, routing_of
    from moec.ir.text import print_program

    _check_pass(stop_after)
    chosen, source = checked_plan(file, plan, overrides)
    traced = routing_of(chosen, trace)
    kernels = "torch" if target == "cpu" else "triton"
    for phase in PHASES:
        program = compile_phase(chosen, phase, source.name, kernels, observers, stop_after, trace=traced)
        sys.stdout.write(print_program(program))


class _Printer:
    """An observer that prints the Program after a pass."""

    def __init__(self, name: str, to_stderr: bool) -> None:
        self.name, self.to_stderr = name, to_stderr

    def __call__(self, step: Pass, program: Program) -> None:
        from moec.ir.text import print_program

        if self.name in ("all", step.name):
            typer.echo(f"// {program.phase} after {step}\n{print_program(program)}", err=self.to_stderr)


def _check_pass(name: str | None) -> None:
    from moec.passes import PASSES

    known = [cls.name for cls in PASSES]
    if name not in known:
        raise fail("E0402", f"there is no pass `{name}`", did_you_mean(str(name), known) or "`moec passes` lists them")
