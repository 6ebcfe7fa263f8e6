"""Say which kernel serves each operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moec.diagnostics import CompileError, Diagnostic
from moec.ir.ops.table import OPS
from moec.ir.program import Program, op_of
from moec.passes.base import Pass


@dataclass(frozen=True)
class ChooseKernels(Pass):
    """Write the kernel of every operation: `prefer` where the operation table has it, else its first.

    C++ kernels take fp32 and bf16; a program in fp16 keeps the first.

    before: %4 = grouped_gate_up(%1, %2, @experts.gate_up)
    after:  %4 = grouped_gate_up(%1, %2, @experts.gate_up) by triton
    """

    name: ClassVar[str] = "choose-kernels"
    prefer: str = "torch"

    def run(self, program: Program) -> None:
        known = sorted({kernel for op in OPS.values() for kernel in op.kernels})
        if self.prefer not in known:
            help = f"kernels are {', '.join(known)}"
            raise CompileError(Diagnostic("E0402", f"choose-kernels cannot take prefer={self.prefer}", help=help))
        prefer = None if self.prefer == "cpp" and program.dtype == "fp16" else self.prefer
        for _, node in program.nodes():
            kernels = op_of(node).kernels
            node.meta["kernel"] = prefer if prefer in kernels else kernels[0]
