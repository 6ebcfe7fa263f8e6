"""Read what a kernel costs from AMD's assembly (the text that LLVM writes for amdgcn, with its metadata)."""

from __future__ import annotations

import re

from moec.codegen.machine_code import MachineCode, machine_code
from moec.codegen.machine_loops import Instruction, MatrixOp
from moec.diagnostics import fail

#: `.LBB0_5:`, a place that jumps go to, or the kernel's own name.
LABEL = re.compile(r"^(\.?[A-Za-z_]\w*):")
#: `v_mfma_f32_32x32x8_bf16 v[0:15], ...` (name, arguments).
LINE = re.compile(r"^\s+([a-z]+_\w+)\s*([^;]*)")
MATRIX_OP = re.compile(r"v_mfma_\w+?_(\d+)x(\d+)x(\d+)")
#: Loads from global memory. One with `lds` among its arguments goes straight to shared memory.
LOADS = ("buffer_load", "global_load", "flat_load")


def read_amdgcn(assembly: str) -> MachineCode:
    """Figures of one kernel. Raises E0532 for what is no such assembly.

    Registers are vector registers, accumulation registers among them; spills are vector registers spilled to memory
    (scalar ones are kept in lanes of vector registers).
    """
    code = parse_amdgcn(assembly)
    fields = {key: int(value) for key, value in re.findall(r"^\s+(?:- )?\.(\w+):\s+(\d+)$", assembly, re.MULTILINE)}
    try:
        spills = fields["vgpr_spill_count"]
        registers, shared = fields["vgpr_count"], fields["group_segment_fixed_size"]
    except KeyError as error:
        what = f"the machine code of a kernel cannot be read: its assembly has no {error}"
        raise fail("E0532", what, "compile the kernel again") from None
    return machine_code(code, registers, spills, shared, fields.get("agpr_count", 0))


def parse_amdgcn(assembly: str) -> list[Instruction]:
    """Instructions, numbered in order: labels are jumped to, so addresses need not be the real ones."""
    lines: list[tuple[str, str]] = []
    places: dict[str, int] = {}
    for line in assembly.partition(".end_amdhsa_kernel")[0].splitlines():
        if found := LABEL.match(line):
            places[found[1]] = len(lines)
        elif found := LINE.match(line):
            lines.append((found[1], found[2]))
    return [_instruction(i, name, arguments, places) for i, (name, arguments) in enumerate(lines)]


def _instruction(address: int, name: str, arguments: str, places: dict[str, int]) -> Instruction:
    # A jump that is taken when no lane is active (execz) skips what the lanes do: the path is theirs.
    jumps = name.startswith(("s_branch", "s_cbranch")) and name != "s_cbranch_execz"
    target = places.get(arguments.strip()) if jumps else None
    falls = name not in ("s_branch", "s_endpgm")
    load = ("cp_async" if "lds" in arguments.split() else "global") if name.startswith(LOADS) else None
    matrix = MATRIX_OP.match(name)
    op = MatrixOp("MFMA", (int(matrix[1]), int(matrix[2]), int(matrix[3]))) if matrix else None
    return Instruction(address, name, target, falls, op, load)
