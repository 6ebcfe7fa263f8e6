"""Compile a rendered kernel for a device that is not there, and read what the machine code costs.

Needs Triton (on Linux) but no GPU: Triton ships its assemblers and NVIDIA's `cuobjdump`.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moec.codegen.kernel_module import load_kernel
from moec.codegen.renderer import BUG
from moec.codegen.targets import Target
from moec.diagnostics import MoecError, fail, printable

#: Multiply-adds are fused, as on every GPU by default; said because Triton's default is about to change.
FP_FUSION = True


@dataclass(frozen=True)
class Report:
    """What a compiled kernel costs. `spills` is in bytes per thread (NVIDIA) or registers (AMD); 0 is the aim."""

    name: str
    target: str
    registers: int
    spills: int
    shared_bytes: int
    assembly: str = field(repr=False)
    binary: bytes = field(repr=False)
    ir: str = field(repr=False)


@dataclass(frozen=True)
class Signature:
    """A kernel's arguments as Triton's compiler wants them: types by name, and constants by name."""

    types: dict[str, str]
    constants: dict[str, object]


@dataclass(frozen=True)
class Launch:
    """How a kernel is compiled: `label` names it in reports and errors."""

    label: str
    warps: int
    stages: int


def compile_kernel(source: str, name: str, arguments: Signature, target: Target, launch: Launch) -> Report:
    """Machine code of kernel `name` of a rendered module, with its registers and spills.

    Raises E0520 without Triton and E0524 where Triton cannot compile the kernel.
    """
    kernel = load_kernel(source, name, interpret=False)
    try:
        compiled = _compile(kernel, arguments, target, launch)
    except MoecError:
        raise
    except Exception as error:  # Triton's errors have no common class
        reason = _last_word(error)
        raise fail("E0524", f"kernel `{launch.label}` does not compile for {target.name}: {reason}", BUG) from error
    binary = compiled.asm["hsaco" if target.backend == "hip" else "cubin"]
    assembly = compiled.asm["amdgcn" if target.backend == "hip" else "ptx"]
    registers, spills = _amd_usage(assembly) if target.backend == "hip" else _nvidia_usage(binary)
    return Report(
        launch.label, target.name, registers, spills, compiled.metadata.shared, assembly, binary, compiled.asm["ttir"]
    )


def _last_word(error: BaseException) -> str:
    """What is wrong: the last line of the innermost error; the lines before, and the errors around it, say where."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return printable(lines[-1])


def _compile(kernel: Any, arguments: Signature, target: Target, launch: Launch) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    # Torch allocates on 16-byte boundaries and the launcher checks it.
    aligned = [["tt.divisibility", 16]]
    names = list(arguments.types)
    attrs = {(names.index(n),): aligned for n, kind in arguments.types.items() if kind.startswith("*")}
    source = ASTSource(kernel, arguments.types, arguments.constants, attrs)
    options = {"num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": FP_FUSION}
    return triton.compile(source, GPUTarget(target.backend, target.arch, target.warp_size), options)


def _nvidia_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes per thread, as the `cuobjdump` that Triton ships reads them from a cubin."""
    import triton

    tool = next(Path(triton.__file__).parent.glob("backends/nvidia/**/cuobjdump*"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert usage is not None, text
    return int(usage[1]), int(usage[2])


def _amd_usage(assembly: str) -> tuple[int, int]:
    """Vector registers (with accumulation registers) and spilled registers, from the metadata at the assembly's end."""

    def value(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", assembly)
        assert found is not None, key
        return int(found[1])

    return value("vgpr_count"), value("vgpr_spill_count") + value("sgpr_spill_count")
