"""Compiled kernels kept by their content: what compiling one gave is read back instead of made again.

1. A file's name is a digest of the kernel's text, its arguments, how it is launched, the device and Triton's version.
2. Its first line is the digest of the rest, so a file that is cut short or damaged is known and made anew.
3. It is written beside its place and takes its name when it is whole, so processes may compile at once.
4. Where nothing can be kept, the kernel is compiled and that is all.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from moec.codegen.machine_code import MachineCode, read_cubin
from moec.codegen.machine_code_amd import read_amdgcn
from moec.codegen.machine_loops import MatrixLoop, MatrixOp, ReadingLoop
from moec.codegen.offline import FP_FUSION, Launch, Report, Signature, compile_kernel
from moec.codegen.targets import Target
from moec.diagnostics import MoecError
from moec.files import cache_folder, write_whole

#: Raised when what is kept, or how it is read from machine code, changes.
FORMAT = 2


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel and what its machine code costs. `was_kept`: read back, not compiled now."""

    report: Report
    code: MachineCode
    was_kept: bool = False

    def is_fit(self, target: Target) -> bool:
        """Whether it may be used without a word: nothing is spilled, and the device has the shared memory asked for."""
        return self.code.spills == 0 and self.report.shared_bytes <= target.shared_limit


def compiled(source: str, name: str, arguments: Signature, target: Target, launch: Launch) -> Compiled:
    """Machine code of kernel `name` of a rendered text, kept or made. Raises what `compile_kernel` does."""
    place = store_folder() / f"{_key(source, name, arguments, target, launch)}.json"
    if (kept := _read(place)) is not None:
        return kept
    report = compile_kernel(source, name, arguments, target, launch)
    code = read_amdgcn(report.assembly) if target.backend == "hip" else read_cubin(report.binary)
    made = Compiled(report, code)
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(place, _write(made))
    except (MoecError, OSError):
        pass  # a read-only home costs time, nothing else
    return made


def store_folder() -> Path:
    """Where compiled kernels are kept."""
    return cache_folder() / "kernels"


def _key(source: str, name: str, arguments: Signature, target: Target, launch: Launch) -> str:
    made_by = [FORMAT, version("triton"), FP_FUSION]
    how = [target.name, launch.warps, launch.stages, launch.label, name, arguments.types, arguments.constants]
    return hashlib.sha256(json.dumps([*made_by, *how, source]).encode()).hexdigest()[:32]


def _write(kernel: Compiled) -> str:
    report = asdict(kernel.report) | {"binary": base64.b64encode(kernel.report.binary).decode()}
    text = json.dumps({"report": report, "code": asdict(kernel.code)})
    return f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def _read(place: Path) -> Compiled | None:
    """What is kept at `place`, if it is whole."""
    try:
        digest, _, text = place.read_text(encoding="utf-8").partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        return None
    try:
        kept = json.loads(text)
        report = Report(**{**kept["report"], "binary": base64.b64decode(kept["report"]["binary"])})
        return Compiled(report, _code(kept["code"]), was_kept=True)
    except (KeyError, TypeError, ValueError):  # whole, but of another version of moec
        return None


def _code(kept: Mapping[str, Any]) -> MachineCode:
    loops = tuple(_loop(loop) for loop in kept["loops"])
    reading = None if kept["reading"] is None else ReadingLoop(**kept["reading"])
    return MachineCode(**{**kept, "loops": loops, "loads": _pairs(kept["loads"]), "reading": reading})


def _loop(kept: Mapping[str, Any]) -> MatrixLoop:
    shape = kept["op"]["shape"]
    op = MatrixOp(kept["op"]["name"], None if shape is None else (shape[0], shape[1], shape[2]))
    return MatrixLoop(**{**kept, "op": op, "loads": _pairs(kept["loads"])})


def _pairs(kept: list[list[Any]]) -> tuple[tuple[str, int], ...]:
    return tuple((str(kind), int(count)) for kind, count in kept)
