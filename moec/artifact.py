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
    """`stages`: the prefill and the decode Program of each pipeline stage; one stage where there is no pipeline.

    `document` is plan.json; `sources` are texts for reading (rendered modules and kernels) by file name.
    """

    stages: tuple[tuple[Program, Program], ...]
    document: Mapping[str, Any]
    sources: Mapping[str, str]

    @property
    def prefill(self) -> Program:
        """Of the first stage; mesh and limits are the same in all."""
        return self.stages[0][0]

    @property
    def decode(self) -> Program:
        return self.stages[0][1]

    @property
    def programs(self) -> tuple[Program, ...]:
        return tuple(program for stage in self.stages for program in stage)

    @property
    def num_ranks(self) -> int:
        return self.prefill.mesh.world

    def files(self) -> dict[str, str]:
        """Every file of the artifact but its manifest: name -> text."""
        texts = {f"{name_of(program)}.ir": print_program(program) for program in self.programs}
        return {**texts, "plan.json": canonical_json(self.document), **self.sources}

    def save(self, folder: Path) -> None:
        """Write the artifact as `folder`, whole or not at all. Raises E0770, E0681."""
        write_artifact(folder, self.files())


def load(folder: Path) -> Artifact:
    """Read an artifact back. Its programs pass through the verifier; nothing in it is executed.

    Raises E0771 where it is damaged, E0772 where another version wrote it.
    """
    files = read_artifact(folder)
    try:
        document = json.loads(files["plan.json"])
        stages = tuple(_stage(files, index, document["mesh"]["pp"]) for index in range(document["mesh"]["pp"]))
    except (KeyError, TypeError, ValueError, MoecError) as error:
        reason = error.diagnostics[0].message if isinstance(error, CompileError | MoecError) else str(error)
        message = f"the artifact `{folder}` cannot be used: {reason}"
        raise fail("E0771", message, "compile the `.moe` file again") from None
    sources = {name: text for name, text in files.items() if not name.endswith((".ir", ".json"))}
    return Artifact(stages, document, sources)


def name_of(program: Program) -> str:
    """File name of a Program without its ending: `decode`, or `decode_1` of the second of several stages."""
    return program.phase if program.mesh.pp == 1 else f"{program.phase}_{program.stage}"


def _stage(files: Mapping[str, str], index: int, num_stages: int) -> tuple[Program, Program]:
    """Both programs of a stage, verified. Raises KeyError for one that is not there."""
    prefill, decode = (
        parse(files[f"{phase}.ir" if num_stages == 1 else f"{phase}_{index}.ir"]) for phase in ("prefill", "decode")
    )
    for program in (prefill, decode):
        verify(program)
        if (program.stage, program.mesh.pp) != (index, num_stages):
            raise ValueError(f"{program.phase} of stage {index} is of stage {program.stage} of {program.mesh.pp}")
    return prefill, decode
