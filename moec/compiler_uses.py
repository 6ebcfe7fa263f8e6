"""Which operations of a Program Triton kernels serve, and what a step brings them on the busiest rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from torch import fx

from moec.codegen.devices import Device, device_for
from moec.codegen.expected_rows import Rows, random_rows, spread
from moec.codegen.targets import Dtype, Target
from moec.cost.sizes import Sizes, sizes_of, with_tokens
from moec.ir.program import Body, Program, is_op, loc_of, op_of, operands, type_of
from moec.routing import TracedRouting, WithShared


@dataclass(frozen=True, eq=False)
class Load:
    """What a step of a phase brings to the experts of one body, on the rank with most rows.

    `rows`: of each expert held there. `tokens`: rows of tokens that those come from. `routed`: tokens that one rank
    routes. `routing` says what they are counted over.
    """

    rows: Rows
    tokens: int
    routed: int
    top: int
    experts: int
    routing: str


@dataclass(frozen=True, eq=False)
class Use:
    """One operation that a Triton kernel serves, or with `part` one of those that it stands for.

    `is_few`: of a step of so few rows that its pairs are multiplied one by one, where a full step has more.
    """

    program: Program
    body: Body
    node: fx.Node
    load: Load
    part: str = ""
    is_few: bool = False

    @property
    def op(self) -> str:
        return self.part or op_of(self.node).name

    @property
    def phase(self) -> str:
        """`decode`; `decode_1` of a stage, `decode_few` of steps of few rows."""
        stage = f"_{self.program.stage}" if self.program.mesh.pp > 1 else ""
        return f"{self.program.phase}{stage}{'_few' if self.is_few else ''}"

    @property
    def dtype(self) -> Dtype:
        return Dtype(self.program.dtype)

    @property
    def comment(self) -> str:
        """Where it comes from, for the kernel's docstring."""
        program = self.program
        return f"{program.phase}, {self.body.name}, {program.source}:{loc_of(self.node)}"

    def shape(self, index: int) -> tuple[int | str, ...]:
        """Shape of an operand: numbers, and symbols of what is known at run time."""
        return type_of(operands(self.node)[index]).shape


def uses(program: Program) -> Iterator[Use]:
    """Every operation of a Program that was given to Triton, in order."""
    loads: dict[str, Load] = {}
    for body, node in program.nodes():
        if node.meta.get("kernel") != "triton":
            continue
        if body.name not in loads:
            loads[body.name] = load_of(sizes_of(program, body))
        use = Use(program, body, node, loads[body.name])
        yield from [use] if use.op != "paired_experts" else _parts(use)


#: What `paired_experts` launches for few rows; for more, by how sums may be added.
PAIRS = ("pair_gate_up", "pair_down")
SORTED = {
    "fixed": ("group_pairs", "gathered_gate_up", "grouped_linear", "reduce_rows"),
    "any": ("group_pairs", "gathered_gate_up", "reduced_linear"),
}


def _parts(use: Use) -> Iterator[Use]:
    """What a full step launches, and where that sorts, what the largest step does that has few rows, routing too."""
    few = int(str(use.node.kwargs["rows"]))
    if use.load.tokens <= few:
        yield from (replace(use, part=part) for part in PAIRS)
        return
    yield from (replace(use, part=part) for part in SORTED[str(use.node.kwargs["sums"])])
    tokens = max(1, few * use.program.tokens // use.load.tokens)
    load = load_of(with_tokens(sizes_of(use.program, use.body), tokens))
    routes = [n for n in use.body.graph.nodes if is_op(n) and op_of(n).name == "route"]
    yield from (replace(use, node=node, load=load, is_few=True) for node in routes)
    yield from (replace(use, load=load, part=part, is_few=True) for part in PAIRS)


def load_of(sizes: Sizes) -> Load:
    """Rows of a full step, drawn at random or in the proportions of the program's trace."""
    route, mesh = sizes.route, sizes.program.mesh
    if route is None:
        return Load(np.zeros(0, dtype=np.int64), 0, round(sizes.rows), 1, 0, "no")
    experts, tokens = route.placement.num_experts, round(sizes.rows * mesh.ep)
    routed, shared = (x.routed, x.count) if isinstance(x := route.routing, WithShared) else (x, 0)
    num_routed, top = experts - shared, sizes.top - shared
    if isinstance(routed, TracedRouting):
        chosen = np.bincount(routed.expert_ids.ravel(), minlength=num_routed).astype(np.float64)
        counts, routing = spread(chosen, tokens * top, tokens), "traced"
    else:
        counts, routing = random_rows(num_routed, top, tokens), "random"
    counts = np.append(counts, [tokens] * shared)
    copies = np.bincount([e for held in route.placement.slots for e in held], minlength=experts)
    ranks = [-(-counts[list(held)] // copies[list(held)]) for held in route.placement.slots]
    rows = max(ranks, key=lambda own: int(own.sum()))
    entering = next((sizes.dim(type_of(operands(n)[0]).shape[0]) for n in _sorting(sizes.body)), float(tokens))
    return Load(rows, round(entering), round(sizes.rows), sizes.top, experts, routing)


def _sorting(body: Body) -> list[fx.Node]:
    """Operations that bring rows to their experts."""
    names = ("group_rows", "group_pairs", "paired_experts")
    return [n for n in body.graph.nodes if n.op == "call_function" and getattr(n.target, "name", "") in names]


def device_of(program: Program, target: Target) -> Device:
    """The device that times are predicted for: the target's, with the rates of the program's cluster."""
    device = program.cluster.device
    return device_for(target, device.memory_gbps, device.tflops)
