"""Which products with experts in fp8 torch's kernels serve in a program that prefers others, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from moec.ir.ops.scales import has_fp8
from moec.ir.program import Program, op_of

CPP = "experts in fp8 have no C++ kernels"
CACHED = "cached experts in fp8 have no Triton kernel"
TRITON = "Triton's kernels multiply experts in fp8 with rows in bf16 or fp16, of whole blocks of 128 columns"


def notes(programs: Iterable[Program]) -> list[str]:
    """Why a preferred kernel does without experts in fp8, once each; nothing where torch's is what is preferred."""
    return list(dict.fromkeys(why for program in programs for why in _left_to_torch(program)))


def _left_to_torch(program: Program) -> Iterator[str]:
    nodes = [node for _, node in program.nodes()]
    left = {op_of(node).name for node in nodes if has_fp8(node) and node.meta["kernel"] == "torch"}
    used = {node.meta["kernel"] for node in nodes} if left else set()
    if "cpp" in used:
        yield CPP
    if "triton" in used:
        yield CACHED if left == {"cached_experts"} else TRITON
