"""Read what compiled kernels cost from their machine code, without a GPU: NVIDIA cubins and AMD assembly.

Registers, spills and shared memory; for every innermost loop with matrix instructions their shape, the issue slots
each takes, and how operands are loaded (`moec.codegen.machine_loops`). Needs the `cuobjdump` that Triton ships.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from moec.codegen.machine_loops import LOADS, Instruction, MatrixLoop, MatrixOp, ReadingLoop, matrix_loops, reading_loop
from moec.diagnostics import fail

#: Matrix instructions of SASS: of warps, of warp groups (sm_90) and of a block's tensor memory (sm_100).
MATRIX_OPS = ("HGMMA", "QGMMA", "IGMMA", "HMMA", "IMMA", "QMMA", "UTCHMMA", "UTCQMMA", "UTCOMMA")
#: How a load's name begins.
LOAD_OPS = {"tma": ("UTMALDG", "UBLKCP"), "cp_async": ("LDGSTS",), "global": ("LDG.", "LD.")}
#: `/*0a10*/  @!P0 BRA 0x2310 ;` (address, predicate, name, arguments).
LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")


@dataclass(frozen=True)
class MachineCode:
    """What a compiled kernel uses. `spills` counts instructions that store or load spilled registers, per thread.

    `static_shared` bytes come on top of what a launch asks for. `loads` are all loads of the text by kind.
    `accumulators` are AMD's accumulation registers, part of `registers`. `reading` is the loop of a kernel that
    multiplies no matrices.
    """

    registers: int
    spills: int
    static_shared: int
    instructions: int
    loads: tuple[tuple[str, int], ...]
    loops: tuple[MatrixLoop, ...]
    accumulators: int = 0
    reading: ReadingLoop | None = None

    def loads_by(self, kind: str) -> int:
        return dict(self.loads).get(kind, 0)


def read_cubin(cubin: bytes) -> MachineCode:
    """Raises E0532 for what is no cubin, and where there is no cuobjdump."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = re.search(r"REG:(\d+) STACK:\d+ SHARED:(\d+)", _dump("--dump-resource-usage", file.name))
        code = parse_sass(_dump("-sass", file.name))
    if usage is None or not code:
        raise fail("E0532", "the machine code of a kernel cannot be read: it is no cubin", "compile the kernel again")
    spills = sum(one.name.startswith(("LDL", "STL")) for one in code)
    return machine_code(code, int(usage[1]), spills, int(usage[2]))


def machine_code(
    code: Sequence[Instruction], registers: int, spills: int, static_shared: int, accumulators: int = 0
) -> MachineCode:
    """The figures of a list of instructions, and what else is known of it."""
    counts = Counter(one.load for one in code if one.load is not None)
    loads = tuple((kind, counts[kind]) for kind in LOADS if counts[kind])
    loops = matrix_loops(code)
    reading = None if loops else reading_loop(code)
    return MachineCode(registers, spills, static_shared, len(code), loads, loops, accumulators, reading)


def parse_sass(text: str) -> list[Instruction]:
    """Instructions of a listing of cuobjdump or nvdisasm."""
    return [_instruction(*found.groups(default="")) for line in text.splitlines() if (found := LINE.match(line))]


def _instruction(address: str, predicate: str, name: str, arguments: str) -> Instruction:
    target = re.search(r"0x([0-9a-f]+)", arguments) if name.startswith("BRA") else None
    is_conditional = bool(predicate) or re.match(r"\s*!?U?P", arguments) is not None
    falls = is_conditional if target is not None else bool(predicate) or not name.startswith("EXIT")
    load = next((kind for kind, names in LOAD_OPS.items() if f"{name}.".startswith(names)), None)
    return Instruction(int(address, 16), name, target and int(target[1], 16), falls, matrix_op(name), load)


def matrix_op(name: str) -> MatrixOp | None:
    """The matrix instruction that a name of SASS says: `HGMMA.64x256x16.F32.BF16`, `HMMA.16816.F32`."""
    kind, _, rest = name.partition(".")
    if kind not in MATRIX_OPS:
        return None
    if found := re.match(r"(\d+)x(\d+)x(\d+)", rest):
        return MatrixOp(kind, (int(found[1]), int(found[2]), int(found[3])))
    if found := re.match(r"16(8)(\d+)\b", rest):
        return MatrixOp(kind, (16, int(found[1]), int(found[2])))
    return MatrixOp(kind)


def _dump(option: str, name: str) -> str:
    done = subprocess.run([_cuobjdump(), option, name], capture_output=True, text=True, errors="replace")
    return done.stdout if done.returncode == 0 else ""


@cache
def _cuobjdump() -> str:
    """Triton's cuobjdump, else one on the PATH."""
    try:
        import triton

        for path in Path(triton.__file__).parent.glob("backends/nvidia/**/cuobjdump*"):
            return str(path)
    except ImportError:
        pass
    if (found := shutil.which("cuobjdump")) is None:
        raise fail("E0532", "the machine code of a kernel cannot be read: there is no cuobjdump", "install triton")
    return found
