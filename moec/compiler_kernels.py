"""The GPU kernels of an artifact: rendered for the plan's shapes, compiled offline for its target."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from moec.codegen.grouped_gemm import (
    GroupedGemm,
    Projection,
    compile_grouped_gemm,
    plan_entry,
    render_grouped_gemm,
    specialise,
)
from moec.codegen.renderer import Comment
from moec.codegen.targets import Dtype, find_target
from moec.cost_sizes import routed_tops
from moec.ir import Program, loc_of, op_of, type_of

#: Operations that grouped GEMM kernels serve.
OPERATIONS = {"grouped_gate_up": Projection.GATE_UP, "grouped_linear": Projection.DOWN}


@dataclass(frozen=True)
class _Use:
    """One operation that a Triton kernel serves, and where it comes from."""

    values: GroupedGemm
    comment: str


def compile_kernels(programs: Iterable[Program], target: str) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Kernel sources by file name in the artifact, and what compiling each gave; nothing for the target `cpu`."""
    if target == "cpu":
        return {}, []
    uses: dict[GroupedGemm, list[str]] = {}
    for program in programs:
        for use in _uses(program, target):
            uses.setdefault(use.values, []).append(use.comment)
    sources: dict[str, str] = {}
    reports = []
    for values, comments in uses.items():
        source = render_grouped_gemm(values, [Comment(text) for text in dict.fromkeys(comments)])
        sources[f"kernels/{values.name}.py"] = source
        reports.append(plan_entry(values, compile_grouped_gemm(values, source)))
    return sources, reports


def _uses(program: Program, target: str) -> list[_Use]:
    found = []
    for body, node in program.nodes():
        op = OPERATIONS.get(op_of(node).name)
        if op is None or node.meta.get("kernel") != "triton":
            continue
        _, _, w = (type_of(a) for a in node.all_input_nodes)
        depth, width = int(w.shape[2]), int(w.shape[1]) // op.sides
        for held in _experts_held(program, w.shape[0]):
            values = specialise(
                op,
                hidden=depth if op is Projection.GATE_UP else width,
                inner=width if op is Projection.GATE_UP else depth,
                experts=held,
                dtype=Dtype(program.dtype),
                target=find_target(target),
                rows_per_expert=_rows_per_expert(program),
            )
            found.append(_Use(values, f"{program.phase}, {body.name}, {program.source}:{loc_of(node)}"))
    return found


def _experts_held(program: Program, dim: int | str) -> list[int]:
    """Ranks that hold different numbers of experts run kernels for different numbers."""
    if isinstance(dim, int):
        return [dim]
    return sorted({count for table in program.placements.values() for count in table.counts if count})


def _rows_per_expert(program: Program) -> int:
    """Rows an expert gets in a full step when routing is even."""
    top = max(routed_tops(program).values(), default=1)
    num_experts = max(program.experts.values(), default=1)
    return max(1, program.tokens * program.mesh.dp * top // (num_experts * program.mesh.edp))
