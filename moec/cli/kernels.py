"""`moec kernels`: what the GPU kernels of a compiled folder use, move and should take. No torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from moec.diagnostics import fail


def kernels_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder compiled for a GPU.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a compiled folder's GPU kernels cost: registers, spills, issue slots, bytes, predicted time."""
    from moec.artifact_files import read_artifact, read_plan
    from moec.explain.kernels import check_has_kernels, kernels_json, kernels_text

    files = read_artifact(folder)
    try:
        document = read_plan(files.get("plan.json", ""))
        check_has_kernels(document, str(folder))
        as_text = json.dumps(kernels_json(document), sort_keys=True) + "\n" if as_json else kernels_text(document)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:  # digests right, content not
        reason = f"its plan.json lacks {error}" if isinstance(error, KeyError) else str(error)
        message = f"the artifact `{folder}` cannot be used: {reason}"
        raise fail("E0771", message, "compile the `.moe` file again") from None
    sys.stdout.write(as_text)
