"""What each way to bring rows to their experts would cost, and which is cheapest of those that fit.

Every candidate is lowered for real, on a copy of the bodies, and the operations of its exchange are added up. The
experts' own products are the same in all of them and left out. What a device must hold is counted on the whole copy, as
pass plan-memory counts it in the end, but for chunks of an overlap.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from moec.cache_sizes import count_slots
from moec.cost.flow import CLASSES
from moec.cost.memory import most_memory
from moec.cost.operations import TERMS, node_cost
from moec.cost.sizes import Sizes, sizes_of, token_rows, with_tokens
from moec.ir.program import Body, Program, is_op, op_of
from moec.ir.slots import most_held

Candidate = tuple[str, str]

#: (exchange, combine), the simplest first: of times as good as equal the first wins.
CANDIDATES: tuple[Candidate, ...] = (
    ("flat", "ordered"),
    ("flat", "reduced"),
    ("padded", "reduced"),
    ("gather", "reduced"),
    ("two_hop", "reduced"),
    ("aggregate", "reduced"),
)
#: A time longer by this part is as good as equal: the model is no more exact than that.
TIE = 0.01
#: Numbers of tokens that `ranges` looks at.
MOST_TOKENS = 1 << 16
#: What an exchange is made of.
OPERATIONS = {
    *("fan_out", "exchange_counts", "all_to_all.start", "all_to_all.wait", "open_rows", "fan_in"),
    *("group_rows", "reduce_rows", "return_rows", "count_pairs", "pair_order", "combine"),
    *("exchange_sizes", "all_gather_rows", "reduce_scatter_rows"),
}
#: Rewrites the `moe` nodes of a program by its `exchange` and `combine`.
Lower = Callable[[Program], None]


@dataclass(frozen=True)
class Estimate:
    """One candidate in one sparse layer, on the busiest rank.

    `bytes` and `messages`: by class (memory, intra, inter). `terms`: microseconds by what they are spent on, see
    `operations.TERMS`. `unknown`: links whose rate the cluster does not give. `memory`: bytes of the whole plan on the
    fullest rank, None where devices have no limit. `note`: what stands against the candidate; unless `is_eligible`,
    `auto` leaves it out, and where it is not possible at all the rest is empty.
    """

    exchange: str
    combine: str
    bytes: tuple[float, ...] = (0.0, 0.0, 0.0)
    messages: tuple[float, ...] = (0.0, 0.0, 0.0)
    terms: dict[str, float] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    memory: int | None = None
    note: str = ""
    is_eligible: bool = True

    @property
    def us(self) -> float | None:
        """Microseconds of one layer, None where they are not known."""
        return None if self.unknown or not self.terms else sum(self.terms.values())

    def amount(self, measure: str) -> float:
        """What candidates are compared by: see `measure_of`."""
        return (self.us or 0.0) if measure == "us" else self.bytes[CLASSES.index(measure)]


def measure_of(found: Sequence[Estimate]) -> str:
    """What tells candidates apart: `us`, or where a time is not known the slowest class of link that they send over."""
    if all(estimate.us is not None for estimate in found):
        return "us"
    return "inter" if any(estimate.bytes[CLASSES.index("inter")] for estimate in found) else "intra"


@dataclass(frozen=True)
class _Lowered:
    """The exchange of one body that stands for `share` of the sparse layers."""

    sizes: Sizes
    nodes: list[fx.Node]
    share: float


class Comparison:
    """All candidates of one typed Program whose `moe` nodes are not lowered yet, for any number of tokens.

    `lower` lowers them. Device memory of unknown rate costs nothing here, so that the links decide.
    """

    def __init__(self, program: Program, lower: Lower) -> None:
        self.program, self.lower = program, lower
        self._lowered: dict[tuple[str, str, int], tuple[Program, list[_Lowered]]] = {}
        self._estimates: dict[tuple[str, str, int], Estimate] = {}

    def open_candidates(self) -> Sequence[Candidate]:
        """What the program leaves to choose: everything, or only how rows come back."""
        program = self.program
        if program.exchange == "auto":
            return CANDIDATES
        return [c for c in CANDIDATES if c[0] == program.exchange and program.combine in ("auto", c[1])]

    def estimate(self, candidate: Candidate, tokens: int | None = None) -> Estimate:
        """One candidate at `tokens` rows per dp rank and step, or at the program's."""
        program = self.program if tokens is None else _in_steps_of(self.program, tokens)
        key = *candidate, program.tokens
        if key not in self._estimates:
            note, is_eligible, is_possible = _standing(program, candidate)
            bare = Estimate(*candidate, note=note, is_eligible=is_eligible)
            self._estimates[key] = self._fit(self._total(bare, program), program) if is_possible else bare
        return self._estimates[key]

    def cheapest(self, among: Sequence[Candidate], tokens: int | None = None) -> Candidate:
        """The cheapest of `among` that a device has room for, where none has the one that needs least.

        By time, or where a link's rate is not known by bytes over the slowest class of links.
        """
        if (best := self._best(among, tokens)) is not None:
            return best
        allowed = [c for c in among if _standing(self.program, c)[1]] or among
        return min(allowed, key=lambda c: self.estimate(c, tokens).memory or 0)

    def _best(self, among: Sequence[Candidate], tokens: int | None) -> Candidate | None:
        eligible = [found for c in among if (found := self.estimate(c, tokens)).is_eligible]
        if not eligible:
            return None
        measure = measure_of(eligible)
        least = min(found.amount(measure) for found in eligible)
        return next((f.exchange, f.combine) for f in eligible if f.amount(measure) <= least * (1 + TIE))

    def fitting(self, chosen: Candidate) -> tuple[str, ...]:
        """Exchanges that a device has room for, where it has none for the one chosen."""
        limit = self.program.cluster.device.memory_bytes
        if limit is None or (self.estimate(chosen).memory or 0) <= limit:
            return ()
        return tuple(dict.fromkeys(exchange for exchange, c in CANDIDATES if self.estimate((exchange, c)).is_eligible))

    def ranges(self, among: Sequence[Candidate]) -> list[tuple[int, int, Candidate | None]]:
        """(first, last, cheapest) of the runs of token counts from 1 to 65,536 with the same cheapest candidate.

        None where no candidate fits. Each change between two powers of two is found by bisection; a run that lies
        between them unseen is not.
        """
        marks = [1 << i for i in range(MOST_TOKENS.bit_length())]
        starts = [1]
        for low, high in itertools.pairwise(marks):
            starts += self._changes(among, low, high)
        ends = [start - 1 for start in starts[1:]] + [MOST_TOKENS]
        return [(first, last, self._best(among, first)) for first, last in zip(starts, ends, strict=True)]

    def _changes(self, among: Sequence[Candidate], low: int, high: int) -> list[int]:
        """Token counts in (low, high] whose cheapest is not that of one token less."""
        if self._best(among, low) == self._best(among, high):
            return []
        if high == low + 1:
            return [high]
        middle = (low + high) // 2
        return self._changes(among, low, middle) + self._changes(among, middle, high)

    def _total(self, bare: Estimate, program: Program) -> Estimate:
        """The exchange's operations added up, the mean over the sparse layers where they are not alike."""
        moved, messages = [0.0] * len(CLASSES), [0.0] * len(CLASSES)
        terms: dict[str, float] = dict.fromkeys(TERMS, 0.0)
        unknown: set[str] = set()
        for lowered in self._lower(bare, program)[1]:
            sizes = with_tokens(lowered.sizes, program.tokens)
            for cost in (node_cost(sizes, node) for node in lowered.nodes):
                for i in range(len(CLASSES)):
                    moved[i] += lowered.share * cost.bytes[i]
                    messages[i] += lowered.share * cost.messages[i]
                for term, us in cost.terms:
                    terms[term] += lowered.share * us
                unknown |= set(cost.unknown) - {"memory"}
        terms = {term: us for term, us in terms.items() if us}
        return replace(bare, bytes=tuple(moved), messages=tuple(messages), terms=terms, unknown=tuple(sorted(unknown)))

    def _fit(self, found: Estimate, program: Program) -> Estimate:
        """With the memory that the whole program takes, and a note where a device has less."""
        limit = program.cluster.device.memory_bytes
        if limit is None:
            return found
        lowered, _ = self._lower(found, program)
        memory = planned_memory(replace(lowered, tokens=program.tokens, slots=program.slots))
        if memory <= limit:
            return replace(found, memory=memory)
        note = found.note or f"does not fit: {memory / 2**30:.1f} GiB of {limit / 2**30:.1f}"
        return replace(found, memory=memory, note=note, is_eligible=False)

    def _lower(self, bare: Estimate, program: Program) -> tuple[Program, list[_Lowered]]:
        """A lowered copy, and its bodies that route. Only a padded exchange has its number of tokens built in."""
        key = bare.exchange, bare.combine, token_rows(program) if bare.exchange == "padded" else 0
        if key not in self._lowered:
            bodies = {name: copy_body(body) for name, body in program.bodies.items()}
            copied = replace(program, exchange=bare.exchange, combine=bare.combine, bodies=bodies)
            self.lower(copied)
            layers = {name: len(program.layers_of(name)) for name in bodies if is_sparse(program.bodies[name])}
            routing = [
                _Lowered(sizes_of(copied, bodies[name]), _exchange(bodies[name]), n / sum(layers.values()))
                for name, n in layers.items()
            ]
            self._lowered[key] = copied, routing
        return self._lowered[key]


def _in_steps_of(program: Program, tokens: int) -> Program:
    """A row of a decode step is a sequence, which has its KV memory."""
    slots = tokens if program.phase == "decode" else program.slots
    return replace(program, tokens=tokens, slots=slots)


def planned_memory(program: Program) -> int:
    """Bytes on the fullest rank once pass cache-experts has settled the slots of a program's cache."""
    if (cache := program.cache) is not None and cache.slots is None:
        slots = min(count_slots(program), most_held(program))
        program = replace(program, cache=replace(cache, slots=slots, hbm=None, share=None))
    return most_memory(program)


def _standing(program: Program, candidate: Candidate) -> tuple[str, bool, bool]:
    """(what stands against a candidate, whether `auto` may take it, whether it is possible)."""
    exchange, mesh = candidate[0], program.mesh
    if exchange in ("two_hop", "aggregate"):
        if mesh.nodes == 0:
            return "expert groups do not lie on their nodes in equal parts", False, False
        if mesh.nodes == 1 or mesh.local == 1:
            where = "inside one node" if mesh.nodes == 1 else "with one rank in a node"
            return f"{where} the same as flat reduced", False, True
    if exchange == "padded" and program.phase != "decode":
        return "left to decode, whose steps keep their shape", False, True
    return "", True, True


def is_sparse(body: Body) -> bool:
    """Whether a body has experts that are not lowered yet."""
    return any(is_op(node) and op_of(node).name == "moe" for node in body.graph.nodes)


def copy_body(body: Body) -> Body:
    """A body to lower for trial: its own graph, parameters and states."""
    return Body(body.name, copy.deepcopy(body.graph), dict(body.params), dict(body.states))


def _exchange(body: Body) -> list[fx.Node]:
    return [node for node in body.graph.nodes if is_op(node) and op_of(node).name in OPERATIONS]
