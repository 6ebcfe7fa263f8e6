"""Say which kernel serves each operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from moec.blocks import BLOCK
from moec.diagnostics import CompileError, Diagnostic
from moec.ir.ops.scales import SCALES_AT, has_fp8
from moec.ir.ops.table import OPS
from moec.ir.program import Program, op_of, operands, type_of
from moec.passes.base import Pass


@dataclass(frozen=True)
class ChooseKernels(Pass):
    """Write the kernel of every operation: `prefer` where the operation table has it, else its first.

    C++ kernels take fp32 and bf16; a program in fp16 keeps the first. So do products with experts in fp8, but for
    Triton's, which take rows in bf16 and fp16, and whole blocks of columns.

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
            is_served = prefer in kernels and (not has_fp8(node) or (prefer == "triton" and _is_for_triton(node)))
            node.meta["kernel"] = prefer if is_served else kernels[0]


def _is_for_triton(product: fx.Node) -> bool:
    """Whether Triton's kernels multiply these rows with these experts in fp8."""
    values = [type_of(value) for value in operands(product)]
    ((weights, _),) = SCALES_AT[op_of(product).name]
    columns = values[weights].shape[-1]
    return values[0].dtype in ("bf16", "fp16") and isinstance(columns, int) and columns % BLOCK == 0
