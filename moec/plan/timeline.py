"""What the cost model predicts of one step: when each operation runs, on which stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from moec.cost.operations import NodeCost, body_costs, node_costs
from moec.cost.sizes import sizes_of, with_tokens
from moec.ir.ops.exchange import Hops
from moec.ir.program import Body, Program, op_of, operands, results_of
from moec.schedule import simulate


@dataclass(frozen=True)
class Predicted:
    """One operation, in microseconds from the beginning of the step. `hop`: of an exchange, that it begins or ends."""

    name: str
    stream: str
    start: float
    end: float
    layer: int | None
    hop: int | None


def unknown_rates(programs: Iterable[Program]) -> list[str]:
    """Rates that the programs' operations need and the cluster does not give: without them nothing is predicted."""
    return sorted({term for program in programs for _, cost in node_costs(program) for term in cost.unknown})


def predict_step(program: Program, tokens: int) -> list[Predicted]:
    """A step of `tokens` rows on each dp rank, in order. Needs a Program without unknown rates.

    Decoding sequences have half of the context behind them. Layers follow one another, each in the order it is run in.
    """
    spans = {body.name: _spans(body, _costs(program, body, tokens)) for body in program.bodies.values()}
    return list(_behind_each_other(program, spans))


def _costs(program: Program, body: Body, tokens: int) -> Sequence[NodeCost]:
    return list(body_costs(with_tokens(sizes_of(program, body), tokens)))


def _spans(body: Body, costs: Sequence[NodeCost]) -> list[Predicted]:
    times = {cost.node: cost.us or 0.0 for cost in costs}
    hops, found = Hops(), list[Predicted]()
    for span in simulate(body, times.__getitem__):
        name = op_of(span.node).name
        hop = hops.number(name, operands(span.node), results_of(span.node))
        found.append(Predicted(name, span.stream, span.start, span.end, None, hop))
    return found


def _behind_each_other(program: Program, spans: dict[str, list[Predicted]]) -> Iterator[Predicted]:
    zero = 0.0
    for run in program.runs:
        for layer in run.layers or (None,):
            for op in spans[run.body]:
                yield Predicted(op.name, op.stream, zero + op.start, zero + op.end, layer, op.hop)
            zero += max((op.end for op in spans[run.body]), default=0.0)
