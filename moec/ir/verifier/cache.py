"""The part of the verifier that follows what a prefetch goes by, and holds a layer to one look-up of its experts."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from moec.cache.policies import POLICIES
from moec.ir.params import NEXT
from moec.ir.program import Body, Program, is_op, op_of, operands, output_of

Faults = Iterator[str]


def check_settings(program: Program) -> Faults:
    """The cache is one that a run knows, and its experts wait somewhere."""
    cache = program.cache
    if cache is None:
        return
    if cache.evict not in POLICIES:
        yield f"the expert cache evicts by {cache.evict}"
    if cache.prefetch not in ("none", "next_router", "history"):
        yield f"the expert cache fetches ahead by {cache.prefetch}"
    if cache.ahead < 1:
        yield f"the expert cache looks {cache.ahead} layers ahead"
    if [tier.name for tier in cache.tiers] not in (["host"], ["nvme"], ["host", "nvme"]):
        yield f"the tiers of the expert cache are {[tier.name for tier in cache.tiers]}"
    known = range(min(program.experts.values(), default=0))
    if program.experts and list(cache.pinned) != sorted(set(cache.pinned) & set(known)):
        yield f"experts {list(cache.pinned)} cannot be pinned, there are {len(known)}"


def check_cache(program: Program, body: Body) -> Faults:
    """Guesses are those of the layer that they are fetched for, and nothing else reads what belongs to it."""
    waits: list[object] = []
    for node in filter(is_op, body.graph.nodes):
        name = op_of(node).name
        if name == "prefetch.wait":
            waits.append(node.kwargs["table"])
        if name == "prefetch.start":
            yield from _start_faults(body, node)
        if name != "guess":
            borrowed = [part for operand in operands(node) for part in _parts(body, operand) if NEXT.match(part)]
            yield from (f"{name} reads {part}, which only a guess may" for part in borrowed)
    yield from (f"a layer looks up its experts of {table} twice" for table in set(waits) if waits.count(table) > 1)


def _start_faults(body: Body, start: fx.Node) -> Faults:
    """Copies are of what a router one guesses with would choose, of what used to follow this layer's choice, or, once
    this layer is through, of what an earlier one has used most.
    """
    by, ahead = start.kwargs["by"], start.kwargs["ahead"]
    if (by == "frequency") != (int(str(ahead)) < 0):
        yield f"prefetch.start by {by} is for {ahead} layers later"
        return
    counted = operands(start)[0]
    if by == "frequency":
        if counted is not output_of(body):
            yield "prefetch.start by frequency goes by what its layer does not give"
        return
    while is_op(counted) and op_of(counted).name == "sum_counts":
        counted = operands(counted)[0]
    if not is_op(counted) or op_of(counted).name != "count_experts":
        yield "prefetch.start takes numbers that count no experts"
        return
    if counted.kwargs["table"] != start.kwargs["table"]:
        yield f"prefetch.start of {start.kwargs['table']} takes counts of {counted.kwargs['table']}"
    (ids,) = operands(counted)
    made = ids if is_op(ids) else ids.all_input_nodes[0] if ids.op == "call_function" else None
    source = op_of(made).name if made is not None else "an input"
    if source != {"next_router": "guess", "history": "route"}[str(by)]:
        yield f"prefetch.start by {by} goes by what {source} gives"
    elif source == "guess" and made is not None:
        parts = [part for operand in operands(made)[1:] for part in _parts(body, operand)]
        others = [part for part in parts if not part.startswith(f"next{ahead}.")]
        yield from (f"a prefetch for {ahead} layers later is guessed with {part}" for part in others)


def _parts(body: Body, value: fx.Node) -> tuple[str, ...]:
    param = body.params.get(str(value.target)) if value.op == "get_attr" else None
    return param.parts if param is not None else ()
