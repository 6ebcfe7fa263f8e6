"""plan.json: what was decided and what it costs, in numbers a program can read and `moec explain` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from moec.checked import Plan
from moec.checkpoint.folder import Fingerprint
from moec.cost.flow import CLASSES
from moec.cost.operations import NodeCost, node_costs
from moec.declared import declared
from moec.ir.fp8_notes import notes as fp8_notes
from moec.ir.program import Body, Program, op_of
from moec.parameters import count
from moec.plan.cache import phase_name
from moec.plan.trace import PlanTrace
from moec.schedule import makespan


def plan_document(
    plan: Plan,
    stages: Sequence[Mapping[str, Program]],
    exchanges: Mapping[tuple[str, int], Any],
    shared: Mapping[tuple[str, int], dict[str, str]],
    target: str,
    kernels: list[dict[str, Any]],
    fingerprint: Fingerprint | None,
    trace: PlanTrace | None = None,
    cache: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The document: names, degrees, mathematics, parameters, memory per rank and, by phase, exchange, time and traffic.

    `stages`: the programs of each pipeline stage by phase. `exchanges`: tables of `moec.plan.exchange` by phase
    and stage; `shared`: what `moec.plan.shared` found, likewise. `trace`: whose routing the costs are counted over,
    None: random routing. `cache`: the section that `moec.plan.cache` makes.
    """
    first = stages[0]["prefill"]
    programs = [program for stage in stages for program in stage.values()]
    placements = {table: placed for program in programs for table, placed in program.placements.items()}
    model = plan.model
    return {
        "plan": plan.name,
        "source": first.source,
        "model": {"name": model.name, "layers": len(model.layers), "hidden": model.hidden, "vocab": model.vocab},
        "declared": declared(model),
        "weights": {"path": model.weights, "fingerprint": fingerprint and fingerprint.to_json()},
        "trace": trace and trace.to_json(),
        "cache": cache,
        "compute": plan.compute,
        "expert_dtype": model.expert_dtype,
        "left_to_torch": fp8_notes(programs),
        "context": plan.context,
        "parameters": asdict(count(model)),
        "mesh": {**asdict(first.mesh), "name": plan.mesh.name, "ranks": first.mesh.world},
        "cluster": {
            "name": first.cluster.name,
            "nodes": first.cluster.num_nodes,
            "devices_per_node": first.cluster.devices_per_node,
            "memory_bytes": first.cluster.device.memory_bytes,
        },
        "placement": {table: [list(held) for held in p.slots] for table, p in placements.items()},
        "target": target,
        "kernels": kernels,
        "phases": {phase_name(program): _phase(program, exchanges, shared, plan) for program in programs},
        "memory": [entry for stage in stages for entry in _memory(stage)],
    }


def _phase(
    program: Program,
    exchanges: Mapping[tuple[str, int], Any],
    shared: Mapping[tuple[str, int], dict[str, str]],
    plan: Plan,
) -> dict[str, Any]:
    costs = list(node_costs(program))
    is_exchanging = program.mesh.ep > 1 and bool(program.experts)
    asked = (plan.prefill if program.phase == "prefill" else plan.decode).overlap
    return {
        "name": program.phase,
        "tokens": program.tokens,
        "slots": program.slots,
        "overlap": program.overlap,
        "overlap_asked": asked,
        "exchange": program.exchange if is_exchanging else "none",
        "combine": program.combine if is_exchanging else "none",
        "sums": program.sums,
        "shared": shared[program.phase, program.stage],
        "exchanges": exchanges.get((program.phase, program.stage)) if is_exchanging else None,
        "runs": [
            {"body": run.body, "layers": [run.layers.start, run.layers.stop - 1] if run.layers else None}
            for run in program.runs
        ],
        "us": {
            body.name: _time(program, body, [cost for name, cost in costs if name == body.name])
            for body in program.bodies.values()
        },
        "traffic": [_traffic(program, body, cost) for body, cost in costs if cost.messages != (0, 0, 0)],
    }


def _time(program: Program, body: Body, costs: list[NodeCost]) -> float | None:
    """Microseconds of one run of a body; None where a rate is not known.

    With overlap what transfers overlap counts once, else operations follow one another. Copies for a later layer are
    not waited for here, and left out.
    """
    needed = [cost for cost in costs if op_of(cost.node).name != "prefetch.start"]
    if any(cost.us is None for cost in needed):
        return None
    times = {cost.node: cost.us or 0.0 for cost in costs}
    is_overlapped = program.overlap != "off"
    return round(makespan(body, times.__getitem__) if is_overlapped else sum(times[c.node] for c in needed), 3)


def _traffic(program: Program, body: str, cost: NodeCost) -> dict[str, Any]:
    group = str(cost.node.kwargs.get("group", "stages"))
    return {
        "body": body,
        "op": op_of(cost.node).name,
        "group": group,
        "num_ranks": len(program.mesh.groups()[group][0]),
        "link": cost.node.meta["stream"],
        "bytes": dict(zip(CLASSES, map(round, cost.bytes), strict=True)),
        "times": len(program.layers_of(body)) or 1,
        "us": None if cost.us is None else round(cost.us, 3),
    }


def _memory(programs: Mapping[str, Program]) -> list[dict[str, int]]:
    """Per rank: both phases share weights, KV memory and expert slots, and the larger one's buffers count."""
    out = []
    for parts in zip(*(program.memory for program in programs.values()), strict=True):
        shared = replace(parts[0], buffers=max(part.buffers for part in parts))
        out.append({**asdict(shared), "total": shared.total})
    return out
