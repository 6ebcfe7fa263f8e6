"""The GPU kernels of an artifact: rendered for the plan's shapes, compiled offline for its target."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from moec.codegen.kernels import GateUp, render_gate_up, specialise_gate_up
from moec.codegen.offline import compile_gate_up, plan_entry
from moec.codegen.renderer import Comment
from moec.codegen.targets import Dtype, find_target
from moec.cost_sizes import routed_tops
from moec.ir import Program, loc_of, op_of, type_of


@dataclass(frozen=True)
class _Use:
    """One operation that a Triton kernel serves, and where it comes from."""

    values: GateUp
    comment: str


def compile_kernels(programs: Iterable[Program], target: str) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Kernel sources by file name in the artifact, and what compiling each gave; nothing for the target `cpu`."""
    if target == "cpu":
        return {}, []
    uses: dict[GateUp, list[str]] = {}
    for program in programs:
        for use in _uses(program, target):
            uses.setdefault(use.values, []).append(use.comment)
    sources: dict[str, str] = {}
    reports = []
    for values, comments in uses.items():
        source = render_gate_up(values, [Comment(text) for text in dict.fromkeys(comments)])
        sources[f"kernels/{values.name}.py"] = source
        reports.append(plan_entry(values, compile_gate_up(values, source)))
    return sources, reports


def _uses(program: Program, target: str) -> list[_Use]:
    found = []
    for body, node in program.nodes():
        if op_of(node).name != "grouped_gate_up" or node.meta.get("kernel") != "triton":
            continue
        rows, _, w = (type_of(a) for a in node.all_input_nodes)
        for held in _experts_held(program, w.shape[0]):
            values = specialise_gate_up(
                hidden=int(rows.shape[1]),
                inner=int(w.shape[1]) // 2,
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
