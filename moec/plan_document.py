"""plan.json: what was decided and what it costs, in numbers a program can read and `moec explain` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from moec.checked import Plan
from moec.checkpoint import Fingerprint
from moec.cost import traffic
from moec.ir import Program
from moec.parameters import count


def plan_document(
    plan: Plan,
    programs: Mapping[str, Program],
    target: str,
    kernels: list[dict[str, Any]],
    fingerprint: Fingerprint | None,
) -> dict[str, Any]:
    """The document: names, degrees, parameters, memory per rank and, by phase, exchange and traffic."""
    first = next(iter(programs.values()))
    model = plan.model
    return {
        "plan": plan.name,
        "source": first.source,
        "model": {"name": model.name, "layers": len(model.layers), "hidden": model.hidden, "vocab": model.vocab},
        "weights": {"path": model.weights, "fingerprint": fingerprint and fingerprint.to_json()},
        "compute": plan.compute,
        "context": plan.context,
        "parameters": asdict(count(model)),
        "mesh": {**asdict(first.mesh), "name": plan.mesh.name, "ranks": first.mesh.size},
        "cluster": {
            "name": first.cluster.name,
            "nodes": first.cluster.num_nodes,
            "devices_per_node": first.cluster.devices_per_node,
            "memory_bytes": first.cluster.device.memory_bytes,
        },
        "placement": {table: [list(held) for held in p.slots] for table, p in first.placements.items()},
        "target": target,
        "kernels": kernels,
        "phases": {name: _phase(program) for name, program in programs.items()},
        "memory": _memory(programs),
    }


def _phase(program: Program) -> dict[str, Any]:
    return {
        "tokens": program.tokens,
        "slots": program.slots,
        "exchange": program.exchange if program.mesh.ep > 1 else "none",
        "runs": [
            {"body": run.body, "layers": [run.layers.start, run.layers.stop - 1] if run.layers else None}
            for run in program.runs
        ],
        "traffic": [asdict(item) for item in traffic(program)],
    }


def _memory(programs: Mapping[str, Program]) -> list[dict[str, int]]:
    """Per rank: both phases share weights and KV memory, and the larger one's buffers count."""
    out = []
    for parts in zip(*(program.memory for program in programs.values()), strict=True):
        weights, kv = parts[0].weights, parts[0].kv
        buffers = max(part.buffers for part in parts)
        out.append({"weights": weights, "kv": kv, "buffers": buffers, "total": weights + kv + buffers})
    return out
