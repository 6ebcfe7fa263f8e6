"""What each way to bring rows to their experts would cost, and which is cheapest.

Every candidate is lowered for real, on a copy of the bodies that route, and the operations of its exchange are added
up. The experts' own products are the same in all of them and left out.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from moec.cost import TERMS, node_cost
from moec.cost_flow import CLASSES
from moec.cost_sizes import Sizes, sizes_of, token_rows, with_tokens
from moec.ir import Body, Program, is_op, op_of

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
    `moec.cost.TERMS`. `unknown`: links whose rate the cluster does not give. `note`: what stands against the candidate;
    unless `is_eligible`, `auto` leaves it out, and where it is not possible at all the rest is empty.
    """

    exchange: str
    combine: str
    bytes: tuple[float, ...] = (0.0, 0.0, 0.0)
    messages: tuple[float, ...] = (0.0, 0.0, 0.0)
    terms: dict[str, float] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    note: str = ""
    is_eligible: bool = True

    @property
    def us(self) -> float | None:
        """Microseconds of one layer, None where they are not known."""
        return None if self.unknown or not self.terms else sum(self.terms.values())


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
        self._lowered: dict[tuple[str, str, int], list[_Lowered]] = {}
        self._estimates: dict[tuple[str, str, int], Estimate] = {}

    def open_candidates(self) -> Sequence[Candidate]:
        """What the program leaves to choose: everything, or only how rows come back."""
        program = self.program
        if program.exchange == "auto":
            return CANDIDATES
        return [c for c in CANDIDATES if c[0] == program.exchange and program.combine in ("auto", c[1])]

    def estimate(self, candidate: Candidate, tokens: int | None = None) -> Estimate:
        """One candidate at `tokens` rows per dp rank and step, or at the program's."""
        program = self.program if tokens is None else replace(self.program, tokens=tokens)
        key = *candidate, token_rows(program)
        if key not in self._estimates:
            note, is_eligible, is_possible = _standing(program, candidate)
            bare = Estimate(*candidate, note=note, is_eligible=is_eligible)
            self._estimates[key] = self._total(bare, program) if is_possible else bare
        return self._estimates[key]

    def cheapest(self, among: Sequence[Candidate], tokens: int | None = None) -> Candidate:
        """The cheapest of `among`; the first of them where a link's rate is not known."""
        eligible = [self.estimate(c, tokens) for c in among if _standing(self.program, c)[1]]
        times = [found.us for found in eligible if found.us is not None]
        if not times or len(times) < len(eligible):
            return among[0]
        return next(
            (f.exchange, f.combine) for f, us in zip(eligible, times, strict=True) if us <= min(times) * (1 + TIE)
        )

    def ranges(self, among: Sequence[Candidate]) -> list[tuple[int, int, Candidate]]:
        """(first, last, cheapest) of the runs of token counts from 1 to 65,536 with the same cheapest candidate.

        Each change between two powers of two is found by bisection; a run that lies between them unseen is not.
        """
        marks = [1 << i for i in range(MOST_TOKENS.bit_length())]
        starts = [1]
        for low, high in itertools.pairwise(marks):
            starts += self._changes(among, low, high)
        ends = [start - 1 for start in starts[1:]] + [MOST_TOKENS]
        return [(first, last, self.cheapest(among, first)) for first, last in zip(starts, ends, strict=True)]

    def _changes(self, among: Sequence[Candidate], low: int, high: int) -> list[int]:
        """Token counts in (low, high] whose cheapest is not that of one token less."""
        if self.cheapest(among, low) == self.cheapest(among, high):
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
        for lowered in self._lower(bare, program):
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

    def _lower(self, bare: Estimate, program: Program) -> list[_Lowered]:
        """The bodies that route, lowered. Only a padded exchange has its number of tokens built in."""
        key = bare.exchange, bare.combine, token_rows(program) if bare.exchange == "padded" else 0
        if key not in self._lowered:
            bodies = {name: copy_body(body) if is_sparse(body) else body for name, body in program.bodies.items()}
            copied = replace(program, exchange=bare.exchange, combine=bare.combine, bodies=bodies)
            self.lower(copied)
            layers = {name: len(program.layers_of(name)) for name in bodies if is_sparse(program.bodies[name])}
            self._lowered[key] = [
                _Lowered(sizes_of(copied, bodies[name]), _exchange(bodies[name]), n / sum(layers.values()))
                for name, n in layers.items()
            ]
        return self._lowered[key]


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
