"""The part of plan.json that says which experts are resident, where the others wait, and what their copies cost."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moec.cache.trace import read_trace
from moec.cache_sizes import DEVICE_PIECE_BYTES, arena_bytes, host_experts, layer_bytes
from moec.checked import Plan
from moec.cost.cache import copies, demanded, hit_rate, prefetched, recall
from moec.cost.exchange import copy_body
from moec.cost.sizes import sizes_of
from moec.ir.program import Body, Program, op_of
from moec.ir.slots import is_cached, most_held
from moec.plan.pairs import Pair, pairs
from moec.plan.prefetch import LayerModel, Prefetch
from moec.plan.trace import PlanTrace, open_trace

Place = tuple[str, int]


class CacheTables:
    """An observer of the passes: keeps what was decided about prefetch, and on what grounds.

    `found`: (phase, pipeline stage) -> the decisions and the layers they are for. A program whose experts all have a
    slot has none.
    """

    def __init__(self) -> None:
        self.found: dict[Place, dict[str, Any]] = {}
        self._before: dict[Place, Program] = {}

    def __call__(self, step: Any, program: Program) -> None:
        place = program.phase, program.stage
        if step.name == "cache-experts" and is_cached(program):
            bodies = {name: copy_body(body) for name, body in program.bodies.items()}
            self._before[place] = replace(program, bodies=bodies)
        if step.name == "place-prefetch" and place in self._before:
            before = self._before[place]
            layers = pairs(before)
            decided = [_decision(pair, found, layers[pair]) for pair, found in step.compare(before).items()]
            predictor = _predictor(before) if decided else None
            self.found[place] = {"predictor": predictor, "on_demand": _on_demand(before), "prefetch": decided}


def cache_document(
    plan: Plan, stages: Sequence[Mapping[str, Program]], found: Mapping[Place, Any], target: str, folder: Path
) -> dict[str, Any] | None:
    """The section `cache` of plan.json, None for a plan without. Bytes are those of the rank that has most.

    `folder`: of the `.moe` file. Paths of traces are told from there, so that both may move together. Raises E0780 and
    E0781 where a trace that the cache goes by is damaged, or of another model.
    """
    cache = plan.cache
    if cache is None:
        return None
    programs = [stage["prefill"] for stage in stages if stage["prefill"].cache is not None]
    settled = programs[0].cache
    assert settled is not None and settled.slots is not None
    sizes = [size for program in programs for size in layer_bytes(program).values()]
    return {
        "name": cache.name,
        "evict": cache.evict,
        "prefetch": {"asked": cache.prefetch, "ahead": cache.ahead},
        "slots": settled.slots,
        "held": max(map(most_held, programs)),
        "expert_bytes": sorted(set(sizes)),
        "arena_bytes": max(arena_bytes(p, settled.slots) if is_cached(p) else 0 for p in programs),
        "pinned": list(cache.pinned),
        "pin_shared": cache.pin_shared,
        "tiers": _tiers(programs),
        "staging_bytes": min(DEVICE_PIECE_BYTES, max(sizes)) if cache.nvme is not None and target != "cpu" else 0,
        "nvme": cache.nvme.path if cache.nvme is not None else None,
        "evict_trace": _trace(plan, cache.evict_trace, folder),
        "prefetch_trace": _trace(plan, cache.prefetch_trace, folder),
        "phases": {
            phase_name(program): _phase(program, found[program.phase, program.stage])
            for stage in stages
            for program in stage.values()
            if (program.phase, program.stage) in found
        },
    }


def with_learned(traced: PlanTrace, plan: Plan) -> PlanTrace:
    """A trace to count costs over, with the one that the plan's cache evicts by, if it does. Raises E0780, E0781."""
    if plan.cache is None or plan.cache.evict_trace is None:
        return traced
    path = Path(plan.cache.evict_trace)
    open_trace(path, plan.model)  # refuses one of another model
    learned = read_trace(path).expert_ids
    routing = {phase: replace(own, learned=learned) for phase, own in traced.routing.items()}
    return replace(traced, routing=routing)


def phase_name(program: Program) -> str:
    """What plan.json calls a phase, or one of its pipeline stages."""
    return program.phase if program.mesh.pp == 1 else f"{program.phase}, stage {program.stage}"


def _trace(plan: Plan, resolved: str | None, folder: Path) -> dict[str, str] | None:
    """Where a trace lies from the `.moe` file, and its digest."""
    if resolved is None:
        return None
    found = open_trace(Path(resolved), plan.model)
    return {"path": os.path.relpath(resolved, folder), "sha256": found.sha256}


def _tiers(programs: Sequence[Program]) -> list[dict[str, Any]]:
    """What of each layer waits in a tier; the file of the nvme tier has every expert."""
    first = programs[0]
    assert first.cache is not None
    held, in_host = max(map(most_held, programs)), min(map(host_experts, programs))
    size = max(sum(layer_bytes(program).values()) for program in programs)
    waiting = {"host": (in_host, in_host), "nvme": (held - in_host, held)}
    return [
        {
            "name": tier.name,
            "experts": waiting[tier.name][0],
            "bytes": waiting[tier.name][1] * size,
            "gbps": tier.link.gbps if tier.link is not None else None,
            "latency_us": tier.link.latency_us if tier.link is not None else None,
        }
        for tier in first.cache.tiers
    ]


def _predictor(program: Program) -> dict[str, Any]:
    """How often what is fetched ahead is counted on to be needed, if it begins before the experts."""
    assert program.cache is not None
    by, routing = program.cache.prefetch, program.routing
    is_traced = by == "next_router" and routing is not None and routing.recall is not None
    return {"by": by, "recall": round(recall(program, by, "ffn"), 4), "is_traced": is_traced}


def _on_demand(program: Program) -> list[dict[str, Any]]:
    """By kind of layer, what happens without a prefetch: experts used and missed, and the time that copies add."""
    found = []
    for body in cached_bodies(program):
        model = LayerModel.of(program, body)
        known = not model.is_unknown
        found.append(
            {
                "body": body.name,
                "layers": program.layers_of(body.name),
                "active": round(model.sizes.active_experts(), 3),
                "missed": round(model.misses, 3),
                "layer_us": round(model.layer_us, 3) if known else None,
                "exposed_us": round(model.layer() - model.layer_us, 3) if known else None,
            }
        )
    return found


def _decision(pair: Pair, found: Prefetch, layers: list[int]) -> dict[str, Any]:
    body, later, distance = pair
    chosen, layer_us = found.chosen, found.layer_us
    us = chosen.us if chosen is not None else found.plain_us
    return {
        "body": body,
        "layers": layers,
        "later": {"body": later, "distance": distance},
        "chosen": None if chosen is None else {"place": chosen.place, "most": chosen.most},
        "reason": found.reason,
        "exposed_us": round(us - layer_us, 3) if us is not None and layer_us is not None else None,
        "window_us": found.window_us and {place: round(us, 3) for place, us in found.window_us.items()},
    }


def _phase(program: Program, found: Mapping[str, Any]) -> dict[str, Any]:
    """What a step of a compiled phase copies, on the busiest rank; `bytes_per_token` is by tokens of its dp rank."""
    total: dict[str, float] = {}
    for body in cached_bodies(program):
        sizes = sizes_of(program, body)
        most, *_ = prefetched(sizes)
        moved = copies(program, body, demanded(sizes) + most).bytes
        for tier, size in moved.items():
            total[tier] = total.get(tier, 0.0) + size * len(program.layers_of(body.name))
    return {
        "hit_rate": round(hit_rate(program), 4),
        "is_traced": program.cache is not None and program.cache.hit_rate is not None,
        "bytes_per_step": {tier: round(size) for tier, size in total.items()},
        "bytes_per_token": {tier: round(size / program.tokens) for tier, size in total.items()},
        **found,
    }


def cached_bodies(program: Program) -> list[Body]:
    """Bodies whose experts are in a cache."""
    names = {body.name for body, node in program.nodes() if op_of(node).name == "cached_experts"}
    return [body for name, body in program.bodies.items() if name in names]
