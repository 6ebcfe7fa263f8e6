"""What copies of experts cost: how many a step needs, bytes and microseconds by tier, and what a prefetch would hide.

h: share of look-ups that find their expert in a slot; A: experts of a layer that a step uses on the busiest rank; so
(1 - h) A experts are missed. Two tiers copy at the same time, the copies of one follow one another.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from moec.cache_sizes import expert_bytes, has_pool, host_experts, tables_of
from moec.cost.sizes import Sizes
from moec.ir.program import Body, Program, is_op, op_of, operands, output_of
from moec.ir.slots import most_held

#: Places in a layer where a prefetch may begin, from late to early: behind its experts, before them, before attention.
PLACES = ("exit", "ffn", "entry")
#: Share of the experts a layer needs that its router names from a place in the layer before; as many of its guesses are
#: wrong. The middle of what one small trained model showed, 0.78 to 0.90 at the exit and 0.66 to 0.88 before the
#: experts, 0.65 to 0.70 before attention. A second one, whose experts are in more even use, showed 0.66 to 0.69,
#: 0.61 to 0.67 and 0.47 to 0.52.
ROUTER_RECALL = {"exit": 0.84, "ffn": 0.77, "entry": 0.68}
#: What each further layer takes from that: 0.84, 0.73 and 0.65 at the exit of the first model, one to three ahead.
RECALL_LOST_AHEAD, LEAST_RECALL = 0.1, 0.1
#: The same of what used to follow a layer's choice; the layer's four most popular experts alone cover 0.39 to 0.51 of
#: the choices in the first of these models, 0.16 to 0.27 in the second.
HISTORY_RECALL = 0.45
#: What a layer has used most of late and what is in no slot is needed so many times as often as any of its experts: in
#: the first model 14 experts in 0.78 and 20 in 0.66 of all cases, where costs count that a step uses 0.95 and all.
FREQUENCY_PRECISION = 0.75


@dataclass(frozen=True)
class Copies:
    """Copies of `experts` experts: bytes and microseconds by tier; `unknown` tiers have no rate."""

    experts: float
    bytes: dict[str, float]
    us_by_tier: dict[str, float]
    unknown: tuple[str, ...] = ()

    @property
    def us(self) -> float:
        """Microseconds until all are there, as far as rates are known."""
        return max(self.us_by_tier.values(), default=0.0)


def copies(program: Program, body: Body, experts: float) -> Copies:
    """What it takes to bring `experts` of a layer's experts to their slots."""
    cache, size = program.cache, expert_bytes(program, body)
    assert cache is not None
    in_host = host_experts(program) / most_held(program)
    moved, times, unknown = {}, {}, []
    for tier in cache.tiers:
        share = in_host if tier.name == "host" else 1.0 - in_host
        if share == 0.0 or experts == 0.0:
            continue
        moved[tier.name] = experts * share * size
        if tier.link is None:
            unknown.append(tier.name)
        else:
            times[tier.name] = experts * share * tier.link.time_us(size, 1)
    return Copies(experts, moved, times, tuple(unknown))


def hit_rate(program: Program) -> float:
    """Share of look-ups that find their expert in a slot: by the plan's trace, or with random routing its share."""
    cache = program.cache
    assert cache is not None and cache.slots is not None
    return cache.slots / most_held(program) if cache.hit_rate is None else cache.hit_rate


def missed(sizes: Sizes) -> float:
    """Experts of a layer that a step needs and finds in no slot, without prefetch."""
    return (1.0 - hit_rate(sizes.program)) * sizes.active_experts()


def precision(sizes: Sizes, by: str, place: str) -> float:
    """Share of what a prefetch begun at `place` fetches that its layer needs.

    That is less than `recall`: slots hold the popular experts, which are guessed best. What is named rightly has no
    slot as often as a look-up misses; what is named wrongly is popular too, but less. In one small trained model it had
    none in 0.78, 0.5 and 0.2 of all cases, where 1/8, 1/4 and 1/2 of the experts had slots and 0.46, 0.21 and 0.045 of
    the look-ups missed: between that and chance, a third of the way to it. Of what was used most, it goes by the share
    of the layer's experts that a step uses.
    """
    if by == "frequency":
        return FREQUENCY_PRECISION * share_used(sizes)
    program = sizes.program
    assert program.cache is not None and program.cache.slots is not None
    right, missing = recall(program, by, place), 1.0 - hit_rate(program)
    by_chance = 1.0 - program.cache.slots / most_held(program)
    wanted, wrong = right * missing, (1.0 - right) * by_chance ** (2 / 3) * missing ** (1 / 3)
    return wanted / (wanted + wrong) if wanted else 0.0


def share_used(sizes: Sizes) -> float:
    """Of the experts that a rank holds of a layer, the share that a step uses."""
    return sizes.active_experts() / most_held(sizes.program)


def recall(program: Program, by: str, place: str) -> float:
    """Share of the experts a layer needs that are named for it from `place`.

    A trace with guesses says how often routers are right in this model, not from where they were asked: that is taken
    to have been before the experts.
    """
    if by == "history":
        return HISTORY_RECALL
    traced = program.routing.recall if program.routing is not None else None
    if traced is not None:
        return min(1.0, traced * ROUTER_RECALL[place] / ROUTER_RECALL["ffn"])
    assert program.cache is not None
    return max(LEAST_RECALL, ROUTER_RECALL[place] - RECALL_LOST_AHEAD * (program.cache.ahead - 1))


def spared(sizes: Sizes, most: int, share: float, place: str) -> float:
    """Misses of a step that a prefetch of `most` experts begun at `place` spares, `share` of which its layer needs.

    Each takes the slot of another. Where a layer's slots are its own, the layer would have needed that one as often as
    it needs any: what a step that uses every expert gains is nothing. In a pool of all layers others do without those
    slots: behind its experts a layer needs their slots no longer; before that, what hit there is missed.
    """
    program = sizes.program
    cache, used = program.cache, sizes.active_experts()
    assert cache is not None and cache.slots is not None
    gained = share * min(float(most), missed(sizes))
    if not has_pool(program):
        return gained * (1.0 - used / most_held(program))
    lost = 0.0 if place == "exit" else most * hit_rate(program) * used / (cache.slots * len(tables_of(program)))
    return max(0.0, gained - lost)


def prefetched(sizes: Sizes) -> tuple[int, float, str]:
    """Experts that are prefetched for a layer at most, the share of them that it needs, and from where."""
    program, body = sizes.program, sizes.body
    for other in program.bodies.values():
        for node in other.graph.nodes:
            if is_op(node) and op_of(node).name == "prefetch.start":
                ahead = int(str(node.kwargs["ahead"]))
                if any(layer + ahead in program.layers_of(body.name) for layer in program.layers_of(other.name)):
                    place = place_of(other, node)
                    return int(str(node.kwargs["most"])), precision(sizes, str(node.kwargs["by"]), place), place
    return 0, 0.0, "exit"


def place_of(body: Body, start: fx.Node) -> str:
    """Where a prefetch begins, by the rows that it guesses from: those that a layer gives, those it was given, others.

    Routing itself, which `history` goes by, stands before the experts.
    """
    node = start
    while is_op(node) and op_of(node).name in ("prefetch.start", "sum_counts", "count_experts", "guess", "relayout"):
        node = operands(node)[0]
    return "exit" if node is output_of(body) else "entry" if node.op == "placeholder" else "ffn"


def demanded(sizes: Sizes) -> float:
    """Experts that a step has to wait for: those missed and not spared by a prefetch."""
    return missed(sizes) - spared(sizes, *prefetched(sizes))


def copied_by(sizes: Sizes, node: fx.Node) -> Copies:
    """What a `prefetch.start` or a `prefetch.wait` of the body copies in a step."""
    if op_of(node).name == "prefetch.wait":
        return copies(sizes.program, sizes.body, demanded(sizes))
    return copies(sizes.program, sizes.body, float(str(node.kwargs["most"])))
