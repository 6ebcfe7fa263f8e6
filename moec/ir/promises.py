"""What each pass promises. The verifier holds a promise from the moment its pass is in `program.done`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from moec.ir.params import NEXT
from moec.ir.program import Program, op_of
from moec.ir.slots import is_cached
from moec.ir.verifier.flow import returned_type
from moec.layout import Shard, layout

Faults = Iterator[str]

#: Operations that read any of a rank's experts from the one parameter that holds all of them.
WANTS_ALL = ("grouped_linear", "grouped_gate_up", "gathered_gate_up", "reduced_linear", "paired_experts")


def _stage_ends(program: Program) -> Faults:
    """The first stage embeds and the last one gives logits; what lies between is received and sent."""
    found = {op_of(node).name for _, node in program.nodes()}
    where, last = f"stage {program.stage} of {program.mesh.pp}", program.mesh.pp - 1
    if ("receive" in found) != (program.stage > 0):
        yield f"{where} {'receives its rows' if 'receive' in found else 'embeds tokens'}"
    if ("send" in found) != (program.stage < last):
        yield f"{where} {'sends its rows on' if 'send' in found else 'gives logits'}"


def _all_placed(program: Program) -> Faults:
    yield from (f"experts {table} are not placed" for table in program.experts if table not in program.placements)


def _batch_split(program: Program) -> Faults:
    """What a body returns lies as its inputs do: each dp rank has its own rows, whole on tp."""
    if not program.is_typed:
        yield "shard-attention has run before infer-shapes"
        return
    for body in program.bodies.values():
        if returned_type(body).layout != layout(program.mesh, "attention", dp=Shard(0)):
            yield f"{body.name}: returns {returned_type(body)}, which is not whole on tp"


def _experts_split(program: Program) -> Faults:
    if program.mesh.ep * program.mesh.etp == 1:
        return
    for body in program.bodies.values():
        for name, param in body.params.items():
            if name.startswith("experts.") and param.layout.view != "experts":
                yield f"{body.name}: {name} lies whole on every rank"


def _exchange_settled(program: Program) -> Faults:
    for name, value in (("exchange", program.exchange), ("combine", program.combine)):
        if value == "auto":
            yield f"the {name} auto is not settled"


def _overlap_settled(program: Program) -> Faults:
    if program.overlap == "auto":
        yield "overlap auto is not settled"


def _no_coarse(program: Program) -> Faults:
    yield from (f"{body.name}: moe is left" for body, node in program.nodes() if op_of(node).name == "moe")


def _slots_settled(program: Program) -> Faults:
    cache = program.cache
    if cache is not None and (cache.slots is None or cache.slots < 1):
        yield "the slots of the expert cache are not settled"
    if cache is not None and is_cached(program):
        for body, node in program.nodes():
            if op_of(node).name in WANTS_ALL:
                yield f"{body.name}: {op_of(node).name} wants all experts, the cache has {cache.slots} slots"


def _prefetch_paired(program: Program) -> Faults:
    """What a layer prefetches for is a layer that waits for it, and what it guesses with is that layer's."""
    yield from _borrowed_faults(program)
    waiting = {
        (layer, node.kwargs["table"])
        for body, node in program.nodes()
        if op_of(node).name == "prefetch.wait"
        for layer in program.layers_of(body.name)
    }
    for body, node in program.nodes():
        if op_of(node).name == "prefetch.start":
            ahead = int(str(node.kwargs["ahead"]))
            for layer in program.layers_of(body.name):
                if (layer + ahead, node.kwargs["table"]) not in waiting:
                    yield f"{body.name}: layer {layer} prefetches for layer {layer + ahead}, which does not wait for it"


def _borrowed_faults(program: Program) -> Faults:
    bodies = {layer: body for body in program.bodies.values() for layer in program.layers_of(body.name)}
    for layer, body in bodies.items():
        for param in body.params.values():
            if (later := NEXT.match(param.parts[0])) is not None:
                own, owner = param.parts[0][later.end() :], bodies.get(layer + int(later[1]))
                lent = [p for p in owner.params.values() if p.parts == (own,)] if owner is not None else []
                if [(p.shape, p.dtype, p.layout) for p in lent] != [(param.shape, param.dtype, param.layout)]:
                    yield f"{body.name}: layer {layer} reads {param.parts[0]}, such a {own} that layer has not"


def _memory_known(program: Program) -> Faults:
    if len(program.memory) != program.mesh.size:
        yield f"memory is planned for {len(program.memory)} of {program.mesh.size} ranks"


def _all_served(program: Program) -> Faults:
    for body, node in program.nodes():
        if node.meta.get("kernel") not in op_of(node).kernels:
            yield f"{body.name}: no kernel {node.meta.get('kernel')} serves {op_of(node).name}"


PROMISES: dict[str, Callable[[Program], Faults]] = {
    "split-stages": _stage_ends,
    "place-experts": _all_placed,
    "shard-attention": _batch_split,
    "shard-experts": _experts_split,
    "choose-exchange": _exchange_settled,
    "plan-overlap": _overlap_settled,
    "insert-exchange": _no_coarse,
    "cache-experts": _slots_settled,
    "place-prefetch": _prefetch_paired,
    "plan-memory": _memory_known,
    "choose-kernels": _all_served,
}
