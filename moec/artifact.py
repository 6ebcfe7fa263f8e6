"""The compiled result: the Program of each phase, the plan in numbers, and the source texts that go with them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moec.artifact_files import canonical_json, read_artifact, read_binaries, read_plan, write_artifact
from moec.diagnostics import CompileError, MoecError, fail
from moec.ir.parse import parse
from moec.ir.program import Program
from moec.ir.text import print_program
from moec.ir.verifier.program import verify


@dataclass(frozen=True)
class Artifact:
    """`stages`: the prefill and the decode Program of each pipeline stage; one stage where there is no pipeline.

    `document` is plan.json; `sources` are texts for reading (rendered modules and kernels) by file name, `binaries`
    the machine code that kernels were compiled to, for tools to read. Neither is ever run.
    `source_folder` is that of the `.moe` file, where this is known: relative paths in the file start there.
    """

    stages: tuple[tuple[Program, Program], ...]
    document: Mapping[str, Any]
    sources: Mapping[str, str]
    source_folder: Path | None = field(default=None, compare=False)
    binaries: Mapping[str, bytes] = field(default_factory=dict)

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
        """Every text of the artifact but its manifest, by file name."""
        texts = {f"{name_of(program)}.ir": print_program(program) for program in self.programs}
        return {**texts, "plan.json": canonical_json(self.document), **self.sources}

    def bases(self, folder: Path) -> list[Path]:
        """Folders where a relative path may start, for the artifact in `folder`: beside it, then beside its source."""
        beside = parent_of(folder)
        return [beside, self.source_folder if self.source_folder is not None else beside]

    def save(self, folder: Path) -> None:
        """Write the artifact as `folder`, whole or not at all. Raises E0770, E0681.

        Where `folder` is not beside the `.moe` file, plan.json tells the way from the one to the other's folder. It is
        a relative one, so that both may move together, and no file depends on where on the machine they lie.
        """
        document = dict(self.document)
        if self.source_folder is not None:
            way = os.path.relpath(self.source_folder.resolve(), parent_of(folder).resolve())
            document |= {"source_folder": way} if way != "." else {}
        write_artifact(folder, {**self.files(), **self.binaries, "plan.json": canonical_json(document)})


def load(folder: Path) -> Artifact:
    """Read an artifact back. Its programs pass through the verifier; nothing in it is executed.

    Raises E0771 where it is damaged, E0772 where another version wrote it.
    """
    files = read_artifact(folder)
    try:
        document = read_plan(files["plan.json"])
        source_folder = parent_of(folder) / str(document.pop("source_folder", "."))
        stages = tuple(_stage(files, index, document["mesh"]["pp"]) for index in range(document["mesh"]["pp"]))
    except (KeyError, TypeError, ValueError, MoecError) as error:
        reason = error.diagnostics[0].message if isinstance(error, CompileError | MoecError) else str(error)
        message = f"the artifact `{folder}` cannot be used: {reason}"
        raise fail("E0771", message, "compile the `.moe` file again") from None
    sources = {name: text for name, text in files.items() if not name.endswith((".ir", ".json"))}
    return Artifact(stages, document, sources, source_folder, read_binaries(folder))


def parent_of(folder: Path) -> Path:
    """The folder that holds `folder`, also of `.` and `made/..`."""
    return Path(os.path.normpath(folder / ".."))


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
        if program.phase != ("prefill" if program is prefill else "decode"):
            raise ValueError(f"a program of the phase {program.phase} stands in the other's place")
        if (program.stage, program.mesh.pp) != (index, num_stages):
            raise ValueError(f"{program.phase} of stage {index} is of stage {program.stage} of {program.mesh.pp}")
    return prefill, decode
