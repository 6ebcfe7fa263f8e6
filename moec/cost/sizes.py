"""How large the values of a body are in a step: at the worst, for memory, and as expected, for time.

Symbols of a shape: see `moec.ir.program` and `moec.ir.ops.exchange`. A step is the phase's largest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from moec.cost.flow import Flow, Route, active_experts, hop, served_pairs
from moec.ir.ops.exchange import HOPS, at
from moec.ir.ops.table import WIDTH
from moec.ir.program import Body, Dim, Program, Type, is_op, op_of, operands, type_of
from moec.routing import RandomRouting, TracedRouting, WithShared

#: Share of `context` that a decoding sequence has behind it, on average over its life.
MEAN_FILL = 0.5


def token_rows(program: Program) -> int:
    """Most token rows that one rank routes in a step: its piece of a dp rank's rows, or those of several dp ranks."""
    mesh = program.mesh
    return -(-program.tokens // mesh.split_parts) if mesh.tp > mesh.etp else program.tokens * mesh.split_parts


def bounds(program: Program, body: Body, top: int, held: int) -> dict[str, int]:
    """The largest value of each run-time symbol in `body`: `top` experts a token, `held` on this rank.

    A row goes once to each rank that a hop can take it to. So half-way, a rank has at most every row of those ranks
    from which the first hop leads to it, and sends each of them on to at most `top` others.
    """
    mesh, tokens = program.mesh, program.tokens
    piece = token_rows(program)
    gathered = piece * mesh.ep
    reach = {start: len(mesh.groups()[group][0]) for group, start in hops_of(body)}
    first = reach.get("home", 1)
    second = reach.get("node", reach.get("local", 1))
    return {
        "T": tokens,
        "S": piece,
        "L": min(tokens, program.slots),
        "P": piece * min(top, first),
        "K": piece * top,
        "H": piece * first,
        "Q": piece * first * min(top, second),
        "R": gathered,
        "X": gathered * min(top, held),
        "G": gathered,
        "M": held,
    }


def hops_of(body: Body) -> list[tuple[str, str]]:
    """(group, start) of the hops out; those of each chunk where there are several."""
    return [
        (str(node.kwargs["group"]), at(type_of(operands(node)[0]).layout.on("ep")))
        for node in body.graph.nodes
        if is_op(node) and op_of(node).name == "fan_out"
    ]


def num_chunks(body: Body) -> int:
    """In how many chunks the rows of a body are cut, 1 where they are not."""
    cut = [n for n in body.graph.nodes if is_op(n) and op_of(n).name == "chunk_rows"]
    return int(str(cut[0].kwargs["parts"])) if cut else 1


def choices_of(route: fx.Node) -> int:
    """Experts of a token: those that it chooses, and the shared ones that a router adds."""
    return int(str(route.kwargs["top"])) + shared_of(route)


def shared_of(route: fx.Node) -> int:
    """Shared experts that a router adds to the choices of every token."""
    return int(str(route.kwargs.get("shared", 0)))


@dataclass(frozen=True)
class Sizes:
    """Expected sizes of one body's values on the busiest rank. `route` is None where the body routes nothing.

    `top`: experts of a token, shared ones that the router adds among them.
    """

    program: Program
    body: Body
    route: Route | None
    top: int = 0

    @cached_property
    def rows(self) -> float:
        """Rows that each rank of an ep group starts with."""
        return float(token_rows(self.program))

    def dim(self, dim: Dim) -> float:
        """A dimension; that of a chunk is its share of the whole."""
        if isinstance(dim, int):
            return float(dim)
        name, _, chunk = dim.partition(".")
        return self._symbols[name] / (num_chunks(self.body) if chunk else 1)

    def bytes(self, type: Type) -> float:
        """Bytes of one rank's part of a value."""
        return WIDTH[type.dtype] * math.prod(map(self.dim, type.shape))

    def flow(self, group: str, start: str) -> Flow:
        """The hop over `group` from `start`, per row that a rank starts with."""
        assert self.route is not None
        return hop(self.route, group, start)

    def active_experts(self, share: float = 1.0) -> float:
        """Experts of the busiest rank that this share of a step uses."""
        assert self.route is not None
        return active_experts(self.route, self.rows * share * self.program.mesh.ep)

    def cached_tokens(self, chunk: tuple[int, int] = (0, 1)) -> float:
        """Tokens in KV memory before a chunk of the step, of all its sequences.

        A decoding sequence has `MEAN_FILL` of the context there. A prefill has what the chunks before have put there of
        the sequence that is cut: it takes prompts as long as a step or the context allows.
        """
        index, parts = chunk
        program = self.program
        if program.phase == "decode":
            return program.tokens / parts * program.context * MEAN_FILL
        return index * program.tokens / parts % min(program.tokens, program.context)

    def attended(self, chunk: tuple[int, int] = (0, 1)) -> float:
        """Keys that one token of a chunk looks at, on average."""
        (index, parts), program = chunk, self.program
        if program.phase == "decode":
            return program.context * MEAN_FILL
        length = min(program.tokens, program.context)

        def before(row: float) -> float:
            """Keys that the step's rows before this one look at, in all."""
            prompts, place = divmod(row, length)
            return prompts * length**2 / 2 + place**2 / 2

        first, stop = (i * program.tokens / parts for i in (index, index + 1))
        return (before(stop) - before(first)) / (stop - first)

    @cached_property
    def _symbols(self) -> dict[str, float]:
        program, rows = self.program, self.rows
        found = {"T": float(program.tokens), "S": rows, "L": float(min(program.tokens, program.slots))}
        if self.route is None:
            return found
        found |= {"G": rows * program.mesh.ep, "K": rows * self.top, "X": rows * served_pairs(self.route)}
        found["M"] = float(max(self.route.placement.counts))
        for group, start in hops_of(self.body):
            flow, end = self.flow(group, start), HOPS[group, start]
            found["P" if start == "home" else "Q"] = rows * flow.sent
            found["R" if end == "expert" else "H"] = rows * flow.arrived
        return found


def sizes_of(program: Program, body: Body) -> Sizes:
    """Sizes with the choices of the program's trace, or with random routing where it has none."""
    router = next((n for n in body.graph.nodes if is_op(n) and op_of(n).name == "route"), None)
    if router is None:
        return Sizes(program, body, None)
    placement, shared = program.placements[str(router.kwargs["table"])], shared_of(router)
    num_routed = placement.num_experts - shared
    routing: RandomRouting | TracedRouting = _random(router, num_routed)
    if program.routing is not None:
        sparse = program.sparse_layers
        layers = [sparse.index(layer) for layer in program.layers_of(body.name)]
        routing = program.routing.of_layers(layers, num_routed)
    both = WithShared(routing, shared) if shared else routing
    return Sizes(program, body, Route(program.mesh, program.cluster, placement, both), choices_of(router))


def with_tokens(sizes: Sizes, tokens: int) -> Sizes:
    """The same body in steps of another size."""
    return replace(sizes, program=replace(sizes.program, tokens=tokens))


def _random(router: fx.Node, num_experts: int) -> RandomRouting:
    top, groups, keep = (int(str(router.kwargs[name])) for name in ("top", "groups", "keep"))
    return RandomRouting(num_experts, top, groups, keep)
