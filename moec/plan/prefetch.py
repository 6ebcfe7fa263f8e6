"""Where a layer's prefetch for a later one begins, of how many experts, and whether it pays.

The sooner it begins the more it can hide, and the less its guess is worth. So every place is tried out on a copy of the
layer, with every number of experts, and of times as good as equal (within 1 %) the latest place and the fewest experts
win. With m misses, n experts prefetched of which s spare a miss, and exposed(m) what m copies take beyond the work on
experts that are there:

    layer' = max(layer + guess + exposed(m - s) + late, copies of m - s + n)
    late   = what n copies take beyond the later layer's wait, as often as one of them is waited for

Where no rate is known, there is a prefetch unless a step uses most of the experts anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import fx

from moec.cache_sizes import has_pool, most_pinned, tables_of
from moec.cost.cache import PLACES, copies, missed, precision, share_used, spared
from moec.cost.exchange import copy_body
from moec.cost.operations import node_cost
from moec.cost.sizes import Sizes, sizes_of
from moec.ir.program import Body, Program, is_op, op_of
from moec.ir.slots import most_held
from moec.plan.pairs import Pair, pairs, predictor_of
from moec.schedule import Span, reorder, simulate

#: Gains below this share of a layer's time are within the model's error.
LEAST_GAIN = 0.01
#: Where a step uses a smaller share of the experts, what was used most and has no slot is needed too seldom: of 16
#: experts fetched for steps that used 0.4 of them, one in six.
LEAST_USED = 0.75
#: Of a step that uses a larger share of the experts, what is fetched ahead takes the slots of others that it needs.
MOST_USED = 0.5


@dataclass(frozen=True)
class Option:
    """A prefetch of `most` experts begun at `place`, and the microseconds of a layer with it; None: not known."""

    place: str
    most: int
    us: float | None = None


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


#: Puts the prefetch of an option into the layers of a pair.
Start = Callable[[Program, Pair, Option], None]


def plan_prefetches(program: Program, start: Start) -> dict[Pair, Prefetch]:
    """What is decided for every pair of a program that has passed cache-experts, and not yet place-prefetch."""
    return {pair: plan_prefetch(program, pair, start) for pair in pairs(program) if pair[1]}


def plan_prefetch(program: Program, pair: Pair, start: Start) -> Prefetch:
    """Choose for the layers of one pair."""
    cache, model = program.cache, LayerModel.of(program, program.bodies[pair[1]])
    assert cache is not None and cache.slots is not None
    by = predictor_of(program, pair)
    if by == "frequency" and (used := share_used(model.sizes)) < LEAST_USED:
        few = f"a step uses {used:.0%} of a layer's experts: what was used most is needed too seldom"
        return Prefetch(None, few, model.misses)
    places = {"history": ("ffn",), "frequency": ("exit",)}.get(by, PLACES)
    rooms = {place: min(_free_slots(program, model, place), math.ceil(model.misses)) for place in places}
    if (room := max(rooms.values())) == 0:
        full = "a step takes all slots of the pool: what is fetched ahead has none"
        return Prefetch(None, full if model.misses else "nothing is missed", model.misses)
    trials = {place: _try(program, pair, start, Option(place, room), model) for place in places}
    if model.is_unknown or None in trials.values():
        return _unknown(model, rooms, by)
    known = {place: trial for place, trial in trials.items() if trial is not None}
    options = [
        (Option(place, n), model.layer(n, precision(model.sizes, by, place), place, guess_us, window_us))
        for place, (guess_us, window_us) in known.items()
        for n in range(1, rooms[place] + 1)
    ]
    plain, best = model.layer(), min(us for _, us in options)
    windows = {place: window_us for place, (_, window_us) in known.items()}
    figures = (model.misses, model.layer_us, plain, windows)
    if plain - best < LEAST_GAIN * plain:
        return Prefetch(None, _against(model, by, plain, best), *figures)
    option, us = next((option, us) for option, us in options if us <= best * (1 + LEAST_GAIN))
    short = f"; shortened from {room} experts to {option.most}" if option.most < room else ""
    return Prefetch(replace(option, us=us), f"predicted gain {(plain - us) / plain:.1%}{short}", *figures)


def _free_slots(program: Program, model: LayerModel, place: str) -> int:
    """Slots that what is fetched ahead for a layer may have: its own, or of a pool those that no layer needs then.

    Behind a layer's experts those are all; before that, the layer is still to use its own.
    """
    cache = program.cache
    assert cache is not None and cache.slots is not None
    free = cache.slots - most_pinned(program)
    if not has_pool(program):
        return free
    needed = 0 if place == "exit" else math.ceil(model.sizes.active_experts())
    return max(0, free * len(tables_of(program)) - needed)


def _unknown(model: LayerModel, rooms: Mapping[str, int], by: str) -> Prefetch:
    if by == "frequency":
        return Prefetch(Option("exit", 1), "rates are not known: the one used most", model.misses)
    if displaces := _displaces(model):
        return Prefetch(None, displaces, model.misses)
    if has_pool(model.program) and "exit" in rooms:
        why = "rates are not known: behind the experts, whose slots are free then, as many as fit"
        return Prefetch(Option("exit", rooms["exit"]), why, model.misses)
    return Prefetch(
        Option("ffn", rooms["ffn"]), "rates are not known: before the experts, as many as fit", model.misses
    )


def _try(program: Program, pair: Pair, start: Start, option: Option, model: LayerModel) -> tuple[float, float] | None:
    """Microseconds of the guess, and from its end until the later layer's wait; None where a rate is unknown."""
    name, _, _ = pair
    bare = copy_body(program.bodies[name])
    tried = replace(program, bodies={**program.bodies, name: copy_body(bare)})
    start(tried, pair, option)
    spans, before = (_spans(p, b) for p, b in ((tried, tried.bodies[name]), (program, bare)))
    if spans is None or before is None:
        return None
    begun = next(span.start for span in spans if op_of(span.node).name == "prefetch.start")
    between_us = model.between_us + (_between_steps_us(program) if pair[2] < 0 else 0.0)
    return _end(spans) - _end(before), _end(spans) - begun + between_us


def _between_steps_us(program: Program) -> float:
    """From the last layer of a step to the first one of the next, as far as it is known."""
    ends = (_spans(program, copy_body(program.bodies[name])) for name in ("epilogue", "prologue"))
    return sum(_end(spans) for spans in ends if spans)


def _spans(program: Program, body: Body) -> list[Span] | None:
    """When the operations of a layer run where no copy takes time; None where a rate is unknown."""
    sizes = sizes_of(program, body)
    nodes = [node for node in body.graph.nodes if is_op(node)]
    costs = {node: node_cost(sizes, node).us for node in nodes}
    if None in costs.values():
        return None
    known = {node: us or 0.0 for node, us in costs.items()}
    if program.overlap != "off":
        reorder(body, known.__getitem__)
    return simulate(body, lambda node: 0.0 if "cache" in op_of(node).effects else known[node])


def _end(spans: list[Span]) -> float:
    return max(span.end for span in spans)


@dataclass(frozen=True)
class LayerModel:
    """One sparse layer among others like it. `spans`: where all its experts are there, None: some rate is unknown."""

    program: Program
    body: Body
    sizes: Sizes
    misses: float
    spans: list[Span] | None

    @classmethod
    def of(cls, program: Program, body: Body) -> LayerModel:
        sizes = sizes_of(program, body)
        return cls(program, body, sizes, missed(sizes), _spans(program, copy_body(body)))

    @property
    def is_unknown(self) -> bool:
        return self.spans is None or bool(copies(self.program, self.body, 1.0).unknown)

    @property
    def layer_us(self) -> float:
        """Where all experts are there."""
        assert self.spans is not None
        return _end(self.spans)

    @property
    def between_us(self) -> float:
        """From the end of the layer that prefetches until the wait of the one it does so for."""
        if self.spans is None or self.program.cache is None:
            return 0.0
        wait = next(span.start for span in self.spans if op_of(span.node).name == "prefetch.wait")
        return (self.program.cache.ahead - 1) * self.layer_us + wait

    def layer(
        self, most: int = 0, share: float = 0.0, place: str = "exit", guess_us: float = 0.0, window_us: float = 0.0
    ) -> float:
        """Microseconds of a layer in the long run, where `most` are prefetched and `share` of these are needed."""
        right = spared(self.sizes, most, share, place)
        demanded = self.misses - right
        late = min(1.0, right) * max(0.0, self.copy_us(most) - window_us)
        return max(self.layer_us + guess_us + self.exposed_us(demanded) + late, self.copy_us(demanded + most))

    def exposed_us(self, demanded: float) -> float:
        """What copies take beyond the work on the experts that are there."""
        assert self.spans is not None
        served = next(span for span in self.spans if op_of(span.node).name == "cached_experts")
        there = (served.end - served.start) * (1.0 - min(1.0, demanded / self.sizes.active_experts()))
        return max(0.0, self.copy_us(demanded) - there)

    def copy_us(self, experts: float) -> float:
        return copies(self.program, self.body, experts).us


def _against(model: LayerModel, by: str, plain: float, best: float) -> str:
    """Why there is no prefetch."""
    many = f"{model.misses:.1f} experts a layer and step"
    if plain <= model.layer_us:
        return f"copies on demand are hidden as it is: {many}"
    if displaces := _displaces(model):
        return displaces
    share = precision(model.sizes, by, "ffn")
    if model.copy_us(model.misses - spared(model.sizes, 1, share, "ffn") + 1) > plain * (1 - LEAST_GAIN):
        wrong = f"{1 - share:.0%} of what {by} has fetched is not needed"
        return f"the copies themselves take the time: {many} are missed, and {wrong}"
    return f"the best prefetch gains {max(1 - best / plain, 0.0):.1%}, less than {LEAST_GAIN:.0%}"


def _displaces(model: LayerModel) -> str:
    """Why no prefetch can spare much, where none can."""
    used, held = model.sizes.active_experts(), most_held(model.program)
    if used <= MOST_USED * held or has_pool(model.program):
        return ""
    return f"a step uses {used:.1f} of {held} experts: what is fetched ahead takes the slots of others that it needs"


def reads_ffn_norm(node: fx.Node) -> bool:
    """The norm before the layer's router: what it reads is the hidden state between attention and experts."""
    return is_op(node) and any(
        value.op == "get_attr" and str(value.target) == "ffn_norm" for value in node.all_input_nodes
    )
