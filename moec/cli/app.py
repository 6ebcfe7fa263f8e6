"""The `moec` command. `check`, `fmt`, `import`, `explain` and `--help` never import torch: it costs seconds."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from moec.cli.cache import cache_command
from moec.cli.calibrate import calibrate_command
from moec.cli.compile import compile_command
from moec.cli.errors import EXIT_CODES, debug, epilog, guarded
from moec.cli.kernels import kernels_command
from moec.cli.run import run_command
from moec.diagnostics import SourceFile, fail
from moec.files import write_whole

app = typer.Typer(
    name="moec",
    help="Compile a Mixture-of-Experts model, declared in a .moe file, for a mesh of ranks, and run it.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
File = Annotated[Path, typer.Argument(metavar="FILE", help="A .moe file.", show_default=False)]


def main() -> None:
    """Entry point of the `moec` script and of `python -m moec`."""
    # Read by libraries when torch is imported. Waiting threads that spin starve each other when ranks share cores: on a
    # busy machine of two cores, decoding with two threads took 50 times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads would not survive the fork of the ranks
    app(prog_name="moec")


def show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"moec {version('moec')}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", is_eager=True, callback=show_version, help="Print the version and exit.")
]


@app.callback()
def options(
    is_debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks (or set MOEC_DEBUG=1).")] = False,
    _version: Version = False,
) -> None:
    debug(is_debug)


def import_command(
    source: Annotated[Path, typer.Argument(metavar="DIR|CONFIG", help="A model folder, or its config.json.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write here.")] = None,
    mesh: Annotated[str | None, typer.Option(metavar="DEGREES", help="dp, tp, edp, ep, etp, pp: `ep=4,pp=2`.")] = None,
    cluster: Annotated[str | None, typer.Option(metavar="NAME[N]", help="Cluster of N nodes: `dgx_h100[4]`.")] = None,
) -> None:
    """Write a readable .moe file for a Hugging Face model."""
    from moec.importer.folder import import_model
    from moec.semantics.checker import check

    text = import_model(source, mesh=mesh, cluster=cluster, output=output)
    check(SourceFile(str(output or "imported.moe"), text), overrides=[])  # a model may not fit its mesh
    if output is None:
        sys.stdout.write(text)
        return
    write_whole(output, text)


def check_command(
    file: File,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value.")] = None,
    is_deep: Annotated[
        bool, typer.Option("--deep", help="Also compile every plan and prove its exchanges over many routing tables.")
    ] = False,
) -> None:
    """Check a .moe file and say what it declares. All errors are shown at once."""
    from moec.grammar.parser import read_source
    from moec.semantics.checker import check

    source = read_source(file)
    spec = check(source, overrides=overrides or [])
    for plan in spec.plans.values():
        size = plan.mesh.dp * plan.mesh.tp * plan.mesh.pp
        if is_deep:
            from moec.compiler import prove_plan  # here, since it imports torch

            typer.echo(f"{file}: plan {plan.name}: {prove_plan(plan, source.name)} exchanges proved")
        typer.echo(f"{file}: plan {plan.name} runs {plan.model.name} on {size} rank{'s' * (size != 1)}")
    if not spec.plans:
        typer.echo(f"{file}: ok")


def fmt_command(
    file: File,
    is_check: Annotated[bool, typer.Option("--check", help="Change nothing; exit 1 if the file would change.")] = False,
) -> None:
    """Lay out a .moe file in the one standard way, in place. Comments stay."""
    from moec.grammar.formatter import format_text
    from moec.grammar.parser import read_source

    text = read_source(file).text
    wanted = format_text(text, str(file))
    if is_check:
        if wanted != text:
            typer.echo(f"{file}: would be formatted", err=True)
            raise typer.Exit(1)
        return
    if wanted != text:
        write_whole(file, wanted)


def explain_command(
    what: Annotated[str, typer.Argument(metavar="DIR|CODE", help="A compiled folder, or an error code.")],
) -> None:
    """Explain a compiled plan or an error code. Of a plan: parameters, memory per rank, what each phase sends."""
    from moec.artifact_files import read_artifact, read_plan
    from moec.explain.page import explain_code, explain_plan

    if Path(what).is_dir():
        files = read_artifact(Path(what))
        try:
            text = explain_plan(read_plan(files.get("plan.json", "")))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:  # digests right, content not
            reason = f"its plan.json lacks {error}" if isinstance(error, KeyError) else str(error)
            message = f"the artifact `{what}` cannot be used: {reason}"
            raise fail("E0771", message, "compile the `.moe` file again") from None
        sys.stdout.write(text)
        return
    sys.stdout.write(explain_code(what).rstrip("\n") + "\n")


def passes_command() -> None:
    """List the passes in the order in which they run."""
    from moec.passes import PASSES

    width = max(len(cls.name) for cls in PASSES)
    for cls in PASSES:
        typer.echo(f"{cls.name:<{width}}  {(cls.__doc__ or '').strip().splitlines()[0]}")


app.command("import", epilog=epilog('moec import mixtral-8x7b --mesh "ep=4" -o mixtral.moe'))(guarded(import_command))
app.command("check", epilog=epilog("moec check mixtral.moe"))(guarded(check_command))
app.command("fmt", epilog=epilog("moec fmt --check mixtral.moe"))(guarded(fmt_command))
app.command("compile", epilog=epilog("moec compile mixtral.moe -o build/mixtral --target cuda:90"))(
    guarded(compile_command)
)
app.command("run", epilog=epilog('moec run mixtral.moe --prompt "In the beginning" --max-new-tokens 32'))(
    guarded(run_command, in_one_line=True)
)
app.command("explain", epilog=epilog("moec explain E0203"))(guarded(explain_command))
app.command("kernels", epilog=epilog("moec kernels build/mixtral"))(guarded(kernels_command))
app.command("cache", epilog=epilog("moec cache law.npz --model mixtral.moe --slots 25%,50%"))(guarded(cache_command))
app.command("calibrate", epilog=epilog("moec calibrate mixtral.moe -o here.moe"))(
    guarded(calibrate_command, in_one_line=True)
)
app.command("passes", epilog=epilog("moec passes"))(guarded(passes_command))
