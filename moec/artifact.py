"""The compiled result: the Program of each phase, the plan in numbers, and the source texts that go with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moec.artifact_files import canonical_json, read_artifact, write_artifact
from moec.diagnostics import CompileError, MoecError, fail
from moec.ir import Program
from moec.ir_parse import parse
from moec.ir_text import print_program
from moec.ir_verifier import verify


@dataclass(frozen=True)
class Artifact:
    """`document` is plan.json; `sources` are texts for reading (rendered modules and kernels) by file name."""

    prefill: Program
    decode: Program
    document: Mapping[str, Any]
    sources: Mapping[str, str]

    @property
    def num_ranks(self) -> int:
        return self.prefill.mesh.size

    def files(self) -> dict[str, str]:
        """Every file of the artifact but its manifest: name -> text."""
        return {
            "prefill.ir": print_program(self.prefill),
            "decode.ir": print_program(self.decode),
            "plan.json": canonical_json(self.document),
            **self.sources,
        }

    def save(self, folder: Path) -> None:
        """Write the artifact as `folder`, whole or not at all. Raises E0770, E0681."""
        write_artifact(folder, self.files())


def load(folder: Path) -> Artifact:
    """Read an artifact back. Its programs pass through the verifier; nothing in it is executed.

    Raises E0771 where it is damaged, E0772 where another version wrote it.
    """
    files = read_artifact(folder)
    try:
        programs = [parse(files[f"{phase}.ir"]) for phase in ("prefill", "decode")]
        for program in programs:
            verify(program)
        document = json.loads(files["plan.json"])
    except (KeyError, ValueError, MoecError) as error:
        reason = error.diagnostics[0].message if isinstance(error, CompileError | MoecError) else str(error)
        message = f"the artifact `{folder}` cannot be used: {reason}"
        raise fail("E0771", message, "compile the `.moe` file again") from None
    sources = {name: text for name, text in files.items() if not name.endswith((".ir", ".json"))}
    return Artifact(programs[0], programs[1], document, sources)
