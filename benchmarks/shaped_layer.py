"""One sparse layer, compiled by moec as any other, whose exchange runs on given tokens and given choices.

The layer is a `.moe` text, compiled by the whole pipeline for a cluster of nodes; the operations between its router and
its residual are run by moec's kernels, in the compiled order. The router itself is left out: choices come from the
benchmark, so that every way to exchange gets the same ones and the fewest bytes possible are known.

Shapes: T tokens of a rank, D hidden, E experts, M of them on this rank, I inner width of an expert, k experts a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from moec.compiler import compile_phase
from moec.cost.exchange import OPERATIONS
from moec.cost.operations import node_costs
from moec.diagnostics import SourceFile
from moec.ir.program import Body, Program, is_op, op_of, operands, results_of
from moec.runtime.context import DTYPES, Context
from moec.runtime.groups import Group
from moec.runtime.kernels.table import kernels_for
from moec.runtime.launch.rank import Rank
from moec.runtime.step import make_step
from moec.semantics.checker import check

TOKENS = {"decode": 64, "prefill": 1024}
#: Narrow experts: what is timed is the exchange.
INNER = 8
#: Links as `--mbit` shapes them by default; what is chosen by hand does not depend on them.
LINKS = "intra = link(2 GB/s, latency = 30 us)  inter = link(0.025 GB/s, latency = 100 us)"
_LAYER = """
{cluster}
model layer {{
  hidden = {hidden}  vocab = 8  norm = rms(eps = 1e-6)  dtype = {dtype}
  attention one = gqa(heads = 1, head_dim = 2)
  router uniform {{ score = softmax  top = {top} }}
  experts routed = {num_experts} * swiglu({inner})
  layers 0 {{ one  moe(uniform, routed) }}
}}
mesh ranks on {name}[{nodes}] {{ experts = ep({world}) }}
plan exchange {{
  run layer on ranks
  context = 1024
  prefill {{ tokens = {prefill}  exchange = {exchange}  combine = {combine}  overlap = {overlap} }}
  decode  {{ batch = {decode}  exchange = {exchange}  combine = {combine}  overlap = {overlap} }}
}}
"""
#: Operations of an exchange and of its experts.
_OPERATIONS = OPERATIONS | {"grouped_linear", "grouped_gate_up", "silu_mul", "chunk_rows", "join_rows"}


@dataclass(frozen=True)
class Cell:
    """One column of the table. Expert e lives on rank e // (num_experts / world)."""

    nodes: int
    ranks_per_node: int
    num_experts: int
    top: int
    phase: str
    hidden: int = 2048
    dtype: str = "fp32"
    seed: int = 0

    @property
    def world(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def experts_per_rank(self) -> int:
        return self.num_experts // self.world

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node} E={self.num_experts} k={self.top} {self.phase} {self.dtype}"


def compile_layer(
    cell: Cell, exchange: str, combine: str = "auto", overlap: str = "off", cluster: str | None = None
) -> Program:
    """The Program of a cell's layer. `cluster`: the text of a declaration, whose first name is taken."""
    if cluster is None:
        cluster = f"cluster shaped {{ devices = {cell.ranks_per_node}  {LINKS} }}"
    text = _LAYER.format(
        cluster=cluster,
        name=cluster.split("cluster ", 1)[1].split()[0],
        hidden=cell.hidden,
        dtype=cell.dtype,
        top=cell.top,
        num_experts=cell.num_experts,
        inner=INNER,
        nodes=cell.nodes,
        world=cell.world,
        exchange=exchange,
        combine=combine,
        overlap=overlap,
        **TOKENS,
    )
    return compile_phase(check(SourceFile("layer.moe", text)).plan(), cell.phase, "layer.moe")


def predicted_s(program: Program) -> float | None:
    """What the cost model says of what `Exchange` runs, in seconds; None where the cluster lacks a rate."""
    costs = [cost for _, cost in node_costs(program) if op_of(cost.node).name in _OPERATIONS]
    times = [cost.us for cost in costs if cost.us is not None]
    return sum(times) / 1e6 if len(times) == len(costs) else None


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """All experts' weights, the same on every rank: gate and up [E, I, D], down [E, D, I]."""

    gate: Tensor
    up: Tensor
    down: Tensor

    @staticmethod
    def of(cell: Cell) -> ExpertWeights:
        generator = torch.Generator().manual_seed(cell.num_experts)
        size = cell.num_experts, INNER, cell.hidden
        gate, up = (torch.randn(size, generator=generator) * cell.hidden**-0.5 for _ in range(2))
        down = torch.randn(cell.num_experts, cell.hidden, INNER, generator=generator) * INNER**-0.5
        dtype = DTYPES[cell.dtype]
        return ExpertWeights(gate.to(dtype), up.to(dtype), down.to(dtype))

    def part(self, held: range) -> dict[str, Tensor]:
        """Parameters of the layer's body that the exchange reads, those of one rank's experts."""
        here = slice(held.start, held.stop)
        gate, up = self.gate[here], self.up[here]
        gate_up = torch.cat([gate, up], 1)
        return {"experts.gate": gate, "experts.up": up, "experts.gate_up": gate_up, "experts.down": self.down[here]}

    def reference(self, x_TD: Tensor, ids_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        """What the layer must give, in fp32 and without an exchange: every expert runs on every token."""
        x_TD = x_TD.float()
        gate, up = (torch.einsum("td,eid->tei", x_TD, w.float()) for w in (self.gate, self.up))
        share_TE = torch.zeros(len(x_TD), len(self.gate)).scatter_add_(1, ids_Tk, weights_Tk)
        return torch.einsum("tei,edi->td", F.silu(gate) * up * share_TE.unsqueeze(2), self.down.float())


class Exchange:
    """The exchange of a compiled layer on one rank."""

    def __init__(self, program: Program, groups: Mapping[str, Group], rank: Rank, weights: ExpertWeights) -> None:
        self.program, self.groups, self.rank = program, groups, rank
        self._kernels = kernels_for(program)
        self._memo: dict[Any, Any] = {}
        self._params = weights.part(self._context().held("routed"))

    def run(self, x_TD: Tensor, ids_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        """What the experts give for this rank's tokens [T, D]. A value is dropped when it was last read."""
        ctx = self._context()
        values: dict[fx.Node, Any] = dict(zip(self._inputs, (x_TD, ids_Tk, weights_Tk), strict=True))
        result = None
        for node in self._nodes:
            args = [values[n] if n in values else self._params[str(n.target)] for n in operands(node)]
            for old in [n for n in operands(node) if self._last_use.get(n) is node]:
                del values[old]
            result = self.call(op_of(node).__name__, ctx, *args, **node.kwargs)
            del args
            results = results_of(node)
            values |= zip(results, result if len(results) > 1 else (result,), strict=True)
        assert isinstance(result, Tensor)
        return result

    def call(self, operation: str, ctx: Context, *args: Any, **attributes: Any) -> Any:
        return getattr(self._kernels, operation)(ctx, *args, **attributes)

    def _context(self) -> Context:
        return Context(
            step=make_step([]),
            mesh=self.program.mesh,
            rank=self.rank.rank,
            placements=self.program.placements,
            groups=self.groups,
            states={},
            status=self.rank.status,
            memo=self._memo,
            layer=0,
        )

    @cached_property
    def _nodes(self) -> list[fx.Node]:
        return [node for node in self._body.graph.nodes if is_op(node) and op_of(node).name in _OPERATIONS]

    @cached_property
    def _body(self) -> Body:
        (body,) = {body.name: body for body, node in self.program.nodes() if op_of(node).name == "route"}.values()
        return body

    @cached_property
    def _inputs(self) -> tuple[fx.Node, ...]:
        """The values from outside: tokens, and what the router gives."""
        ids, weights = next(results_of(n) for n in self._body.graph.nodes if is_op(n) and op_of(n).name == "route")
        made = {value for node in self._nodes for value in results_of(node)} | {ids, weights}
        read = [value for node in self._nodes for value in operands(node) if value.op != "get_attr"]
        (tokens,) = {value for value in read if value not in made}
        return tokens, ids, weights

    @cached_property
    def _last_use(self) -> dict[fx.Node, fx.Node]:
        return {value: node for node in self._nodes for value in operands(node) if value.op != "get_attr"}
