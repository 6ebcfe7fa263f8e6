"""Where a layer's prefetch for a later one begins, of how many experts, and whether it pays.

The sooner it begins the more it can hide, and the less its guess is worth. So every place and every number of experts
is tried, and of times as good as equal (within 1 %) the latest place and the fewest experts win:

    exposed(m) = what m copies take beyond the work on experts that are there
    with n prefetched of m missed, r of them rightly:
        layer' = max(layer + exposed(m - r n) + what does not fit before the later layer's wait,  all copies of a layer)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from moec.cache_sizes import most_pinned
from moec.cost import node_cost
from moec.cost_cache import copies, missed, recall
from moec.cost_sizes import Sizes, sizes_of
from moec.ir import Body, Program, is_op, op_of
from moec.ir_slots import is_cached
from moec.schedule import Span, simulate

#: A body, the body of a later layer for which its layers prefetch, and how many layers later that is.
Pair = tuple[str, str, int]
#: From late to early: behind the layer's experts, before them, before its attention.
PLACES = ("exit", "ffn", "entry")
#: Gains below this share of a layer's time are within the model's error.
LEAST_GAIN = 0.01


@dataclass(frozen=True)
class Option:
    """A prefetch of `most` experts begun at `place`, and the microseconds of a layer with it."""

    place: str
    most: int
    us: float


@dataclass(frozen=True)
class Prefetch:
    """What was decided for the layers of one body, and why.

    `misses`: experts that a step misses in a layer. `layer_us`: a layer whose experts are all there; `plain_us`: one
    that fetches on demand; `window_us`: from each place to the later layer's wait. None where a rate is unknown.
    """

    chosen: Option | None
    reason: str
    misses: float
    layer_us: float | None = None
    plain_us: float | None = None
    window_us: dict[str, float] | None = None


def plan_prefetches(program: Program) -> dict[Pair, Prefetch]:
    """What is decided for every pair of a program that has passed cache-experts, and not yet place-prefetch."""
    found = {}
    for pair in pairs(program):
        if pair[1]:
            bodies = program.bodies[pair[0]], program.bodies[pair[1]]
            costs, unknown = zip(*(_costs(program, body) for body in bodies), strict=True)
            found[pair] = plan_prefetch(program, bodies, costs, any(unknown))
    return found


def pairs(program: Program) -> dict[Pair, list[int]]:
    """Layers by the pair they are of; no later body where nothing is cached there, or nothing can be guessed here."""
    cache = program.cache
    assert cache is not None
    cached = _having(program, "cached_experts") if is_cached(program) else {}
    routed = _having(program, "route")
    sources = {_source(sorted(cached), index, cache.ahead): layer for index, layer in enumerate(sorted(cached))}
    found: dict[Pair, list[int]] = {}
    for run in program.runs:
        for layer in run.layers:
            later = sources.get(layer) if cache.prefetch == "next_router" or layer in routed else None
            pair = (run.body, "", 0) if later is None else (run.body, cached[later], later - layer)
            found.setdefault(pair, []).append(layer)
    return found


def _source(sparse: list[int], index: int, ahead: int) -> int:
    """The layer that prefetches for sparse layer `index`: the sparse one `ahead` before, else one before them all."""
    return sparse[index - ahead] if index >= ahead else sparse[0] + index - ahead


def _having(program: Program, name: str) -> dict[int, str]:
    """Layers whose body has an operation `name`, and that body."""
    bodies = {body.name for body, node in program.nodes() if op_of(node).name == name}
    return {layer: body for body in sorted(bodies) for layer in program.layers_of(body)}


def _costs(program: Program, body: Body) -> tuple[dict[fx.Node, float], bool]:
    """Microseconds of a body's operations where every expert is in a slot, and whether some are unknown."""
    sizes = sizes_of(program, body)
    nodes = [node for node in body.graph.nodes if is_op(node)]
    costs = {node: 0.0 if "cache" in op_of(node).effects else node_cost(sizes, node).us for node in nodes}
    return {node: us or 0.0 for node, us in costs.items()}, None in costs.values()


def plan_prefetch(
    program: Program, bodies: Sequence[Body], costs: Sequence[Mapping[fx.Node, float]], is_unknown: bool
) -> Prefetch:
    """Choose for layers of the first body, which prefetch for those of the second.

    `costs`: microseconds of the operations of each where every expert is in a slot; `is_unknown`: some are not known.
    """
    cache, (body, target) = program.cache, bodies
    assert cache is not None and cache.slots is not None
    sizes = sizes_of(program, target)
    misses = missed(sizes)
    room = min(cache.slots - most_pinned(program), math.ceil(misses))
    if is_unknown or copies(program, target, 1.0).unknown:
        return Prefetch(
            Option("ffn", room, math.nan), "rates are not known: before the experts, as many as fit", misses
        )
    model = _Model(program, target, sizes, misses, simulate(target, costs[1].__getitem__))
    windows = model.windows(simulate(body, costs[0].__getitem__))
    options = [
        Option(place, n, model.layer(windows[place], n, recall(cache.prefetch, place)))
        for place in (("ffn",) if cache.prefetch == "history" else PLACES)
        for n in range(1, room + 1)
    ]
    plain, best = model.layer(0.0, 0, 0.0), min((option.us for option in options), default=math.inf)
    figures = (misses, model.layer_us, plain, windows)
    if plain - best < LEAST_GAIN * plain:
        return Prefetch(None, model.against(cache.prefetch, plain, best), *figures)
    chosen = next(option for option in options if option.us <= best * (1 + LEAST_GAIN))
    short = f"; shortened from {room} to {chosen.most} experts" if chosen.most < room else ""
    return Prefetch(chosen, f"predicted gain {(plain - chosen.us) / plain:.1%}{short}", *figures)


@dataclass(frozen=True)
class _Model:
    """One sparse layer that prefetches for one like it."""

    program: Program
    target: Body
    sizes: Sizes
    misses: float
    spans: list[Span]

    @property
    def layer_us(self) -> float:
        return max(span.end for span in self.spans)

    def windows(self, spans: list[Span]) -> dict[str, float]:
        """Microseconds from each place in a layer until the wait of the layer `ahead`."""
        assert self.program.cache is not None
        end = max(span.end for span in spans)
        ffn = next((span.start for span in spans if reads_ffn_norm(span.node)), end)
        wait = next(span.start for span in self.spans if op_of(span.node).name == "prefetch.wait")
        between = (self.program.cache.ahead - 1) * self.layer_us + wait
        return {"exit": between, "ffn": end - ffn + between, "entry": end + between}

    def layer(self, window: float, most: int, share: float) -> float:
        """Microseconds of a layer in the long run."""
        demanded = self.misses - share * min(most, self.misses)
        late = max(0.0, self._copy(most) - window)
        copying = self._copy(demanded + most)
        return max(self.layer_us + self._exposed(demanded) + late, copying)

    def _exposed(self, demanded: float) -> float:
        """What copies take beyond the work on the experts that are there."""
        served = next(span for span in self.spans if op_of(span.node).name == "cached_experts")
        there = (served.end - served.start) * (1.0 - min(1.0, demanded / self.sizes.active_experts()))
        return max(0.0, self._copy(demanded) - there)

    def _copy(self, experts: float) -> float:
        return copies(self.program, self.target, experts).us

    def against(self, by: str, plain: float, best: float) -> str:
        """Why there is no prefetch."""
        if self._exposed(self.misses) == 0.0 and plain <= self.layer_us:
            return f"copies on demand are hidden as it is: {self.misses:.1f} experts a layer and step"
        if self._copy(self.misses) >= plain:
            return (
                f"the copies themselves take the time: {self.misses:.1f} experts a layer and step are missed, and of"
                f" those {by} names, {1 - recall(by, 'ffn'):.0%} would be fetched for nothing"
            )
        return f"the best prefetch gains {max(1 - best / plain, 0.0):.1%}, less than {LEAST_GAIN:.0%}"


def reads_ffn_norm(node: fx.Node) -> bool:
    """The norm before the layer's router: what it reads is the hidden state between attention and experts."""
    return is_op(node) and any(
        value.op == "get_attr" and str(value.target) == "ffn_norm" for value in node.all_input_nodes
    )
