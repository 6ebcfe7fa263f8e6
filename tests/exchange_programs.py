"""Programs with every lowering of an exchange, on meshes of 1 to 8 ranks and 1 to 4 nodes."""

from __future__ import annotations

from dataclasses import replace

from moec.checked import Phase, Plan
from moec.ir.program import Program
from moec.passes import PASSES
from moec.passes.plan_overlap import PlanOverlap
from moec.passes.runner import run_passes
from moec.topology import Cluster
from tests.programs import SPAN, moe, plan, program_of

#: Degrees and nodes: one rank, one node, one rank a node, uneven experts, ep beside tp and etp, several ep groups.
MESHES: tuple[dict[str, int], ...] = (
    {},
    {"dp": 2, "ep": 2},
    {"dp": 3, "ep": 3, "nodes": 3},
    {"dp": 4, "ep": 4, "nodes": 2},
    {"tp": 2, "ep": 2},
    {"tp": 2, "etp": 2},
    {"dp": 2, "tp": 2, "ep": 2, "etp": 2, "nodes": 2},
    {"dp": 2, "tp": 2, "ep": 4, "nodes": 2},
    {"dp": 2, "edp": 2},
    {"dp": 4, "edp": 2, "ep": 2},
    {"dp": 4, "ep": 2, "etp": 2},
    {"dp": 2, "tp": 4, "ep": 4, "etp": 2, "nodes": 2},
    {"dp": 8, "ep": 8, "nodes": 4},
)


def exchange_plan(
    exchange: str,
    combine: str = "reduced",
    nodes: int = 1,
    capacity: float | None = None,
    drop: bool = False,
    placement: str = "linear",
    top: int = 3,
    **degrees: int,
) -> Plan:
    """One sparse layer of 13 experts, `top` a token. Degrees as for `moec.mesh.Mesh`."""
    made = plan([moe(13, 4, shared=4, top=top)], placement=placement, **degrees)
    ranks = degrees.get("dp", 1) * degrees.get("tp", 1)
    mesh = replace(made.mesh, cluster=Cluster("cluster", nodes, ranks // nodes))
    phases = [
        Phase(name, rows, exchange, SPAN, combine, capacity, drop) for name, rows in (("prefill", 16), ("decode", 8))
    ]
    return replace(made, mesh=mesh, prefill=phases[0], decode=phases[1])


def exchanged(
    plan: Plan, phase: str = "prefill", stop_after: str | None = "insert-exchange", overlap: str = "off"
) -> Program:
    """The plan's program with its exchange lowered, its tokens cut as `overlap` says, planned or not."""
    program = program_of(plan, phase)
    program.overlap = overlap
    run_passes(program, [cls() for cls in PASSES if cls is not PlanOverlap], stop_after=stop_after)
    return program
