"""The slow reference: a Program evaluated in fp64 with all its ranks in one process.

Every operation is written as its definition says, without regard for speed, and for all ranks at once: the value of a
node is a list with one tensor a rank. Ranks that hold the very same tensors share what is computed from them. It checks
as it goes that a value said to be whole is the same on all ranks and that a symbol means one size per rank. Reference
for the passes (same logits before and after) and for the kernels.

Legend: T rows, D hidden, E experts, k top-k, M experts held, I inner, H heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from moec.ir.evaluator import local as reference
from moec.ir.evaluator.cache import CACHE
from moec.ir.evaluator.comm import COLLECTIVES
from moec.ir.evaluator.exchange import EXCHANGE
from moec.ir.evaluator.fused import FUSED
from moec.ir.params import Param, full_name
from moec.ir.program import Body, Program, Run, is_op, op_of, results_of, type_of
from moec.layout import Placed, Replicate, Shard
from moec.placement import balanced

Ranks = list[Tensor]
LOCAL = reference.LOCAL | EXCHANGE | CACHE | FUSED
T = TypeVar("T")


@dataclass(frozen=True)
class Sequence:
    """Rows of one sequence in a step: token ids, the KV slot, and how many tokens the slot holds already."""

    tokens: tuple[int, ...]
    slot: int
    cached: int = 0

    @property
    def positions(self) -> range:
        return range(self.cached, self.cached + len(self.tokens))


@dataclass
class Reference:
    """Evaluates `program` on logical parameters `weights` (full name -> whole tensor), keeping KV states."""

    program: Program
    weights: dict[str, Tensor]
    states: dict[tuple[int, int, int, str], Tensor] = field(default_factory=dict)
    local: dict[tuple[Param, int | None, tuple[int, ...]], Tensor] = field(default_factory=dict)

    def step(self, sequences: list[Sequence], received: Tensor | None = None) -> Tensor:
        """Logits [rows, V] of all rows, sequence after sequence (prefill selects every row).

        Of a pipeline stage: `received` [rows, D] is what the stage before gave; all but the last give rows [rows, D].
        """
        self.batches = self._deal(sequences)
        self.received = self._deal_rows(sequences, received) if received is not None else None
        values: dict[str, Ranks] = {}
        for run in self.program.runs:
            for layer in run.layers or (None,):
                values["x"] = self._body(run, layer, values)
        return self._whole(values["x"])

    # --- inputs and outputs ---

    def _deal(self, sequences: list[Sequence]) -> list[list[Sequence]]:
        """Sequences of each rank: a balanced run of them per dp index once the inputs are split over dp."""
        mesh = self.program.mesh
        if mesh.dp == 1 or not self._is_split():
            return [sequences] * mesh.size
        ends = [sum(balanced(len(sequences), mesh.dp)[: i + 1]) for i in range(mesh.dp)]
        parts = [sequences[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        return [parts[mesh.coordinate(rank, "dp")] for rank in range(mesh.size)]

    def _deal_rows(self, sequences: list[Sequence], rows: Tensor) -> Ranks:
        """Each rank's rows of what the stage before gave."""
        parts = torch.split(rows, [len(sequence.tokens) for sequence in sequences]) if sequences else (rows,)
        by_slot = dict(zip((sequence.slot for sequence in sequences), parts, strict=False))
        return self.once(
            lambda rank: id(self.batches[rank]),
            lambda rank: torch.cat([rows[:0], *(by_slot[sequence.slot] for sequence in self.batches[rank])]),
        )

    def _is_split(self) -> bool:
        first = next(iter(self.program.bodies["prologue"].graph.nodes))
        return "type" in first.meta and type_of(first).layout.on("dp") == Shard(0)

    def _input(self, name: str) -> Ranks:
        rows = [[(t, p) for s in batch for t, p in zip(s.tokens, s.positions, strict=True)] for batch in self.batches]
        pick: dict[str, Callable[[list[tuple[int, int]]], list[int]]] = {
            "tokens": lambda r: [t for t, _ in r],
            "positions": lambda r: [p for _, p in r],
            "select": lambda r: list(range(len(r))),
        }
        return self.once(
            lambda rank: id(self.batches[rank]), lambda rank: torch.tensor(pick[name](rows[rank]), dtype=torch.int64)
        )

    def _whole(self, logits: Ranks) -> Tensor:
        """One copy of the logits: dp parts joined where the batch is split."""
        mesh = self.program.mesh
        if not self._is_split() or mesh.dp == 1:
            return logits[0]
        return torch.cat([logits[dp * mesh.tp] for dp in range(mesh.dp)])

    # --- one body ---

    def _body(self, run: Run, layer: int | None, values: dict[str, Ranks]) -> Ranks:
        body = self.program.bodies[run.body]
        env: dict[fx.Node, Any] = {}
        symbols: dict[str, list[int]] = {}
        for node in body.graph.nodes:
            if node.op == "placeholder":
                env[node] = values["x"] if node.target == "x" else self._input(str(node.target))
            elif node.op == "get_attr":
                env[node] = [self._param(body.params[str(node.target)], layer, r) for r in self.ranks()]
            elif node.op == "output":
                return list(env[node.args[0]])
            elif is_op(node):
                results = self._operation(body, layer, node, [env[a] for a in node.args])
                for value, result in zip(results_of(node), results, strict=True):
                    env[value] = result
                    self._check(value, result, symbols)
        raise AssertionError("a body returns")

    def ranks(self) -> range:
        return range(self.program.mesh.size)

    def once(self, key: Callable[[int], Any], give: Callable[[int], T]) -> list[T]:
        """`give(rank)` for every rank, computed once for all ranks of one key."""
        found: dict[Any, T] = {}
        keys = [key(rank) for rank in self.ranks()]
        for rank, known in enumerate(keys):
            if known not in found:
                found[known] = give(rank)
        return [found[known] for known in keys]

    def _param(self, param: Param, layer: int | None, rank: int) -> Tensor:
        where = tuple(self.program.mesh.coordinate(rank, axis) for axis, _ in param.layout.places)
        key = (param, layer, where)
        if key not in self.local:
            parts = [self._part(param, index, layer, rank) for index in range(len(param.parts))]
            self.local[key] = torch.cat(parts, dim=param.dim)
        return self.local[key]

    def _part(self, param: Param, part: int, layer: int | None, rank: int) -> Tensor:
        def whole(name: str) -> Tensor:
            return self.weights[name if layer is None else full_name(name, layer)].double()

        mesh, shared = self.program.mesh, param.shared
        value = whole(param.parts[part])
        if shared is not None:
            value = torch.cat([value, torch.stack(whole(shared.parts[part]).chunk(shared.count, shared.dim))])
        for axis, place in param.layout.places:
            index = mesh.coordinate(rank, axis)
            if isinstance(place, Shard):
                pieces = mesh.axis_size(axis) // place.copies
                value = value.chunk(pieces, place.dim)[index // place.copies]
            elif isinstance(place, Placed):
                value = value[list(self.program.placements[place.table].slots[index])]
        return value

    def _operation(self, body: Body, layer: int | None, node: fx.Node, args: list[Any]) -> list[Ranks]:
        op, attrs = op_of(node), dict(node.kwargs)
        if op.name in COLLECTIVES:
            return [COLLECTIVES[op.name](self, args, attrs)]

        def give(rank: int) -> tuple[Tensor, ...]:
            context = reference.Context(self.program, rank, layer, self.batches[rank], self.states)
            result = LOCAL[op.name](context, *(a[rank] for a in args), **attrs)
            return result if isinstance(result, tuple) else (result,)

        own_rank = op.name in ("group_rows", "group_pairs", "paired_experts")  # what asks where it is
        per_rank = self.once(lambda rank: rank if own_rank else tuple(id(a[rank]) for a in args), give)
        return [list(column) for column in zip(*per_rank, strict=True)]

    def _check(self, node: fx.Node, value: Ranks, symbols: dict[str, list[int]]) -> None:
        """Shapes are as typed, symbols mean one size per rank, whole values are equal along their axis."""
        if "type" not in node.meta:
            return
        type, mesh = type_of(node), self.program.mesh
        for rank, tensor in enumerate(value):
            assert len(tensor.shape) == len(type.shape), (node, tensor.shape, type)
            shape = type.shape if type.dtype != "bytes" else type.shape[:1]  # a message is a row of numbers here
            for dim, size in zip(shape, tensor.shape, strict=type.dtype != "bytes"):
                known = dim if isinstance(dim, int) else symbols.setdefault(dim, [-1] * mesh.size)[rank]
                if known == -1:
                    symbols[str(dim)][rank] = size
                else:
                    assert known == size, f"{node} on rank {rank}: {dim} is {size}, not {known}"
        for axis, place in type.layout.places:
            if place == Replicate():
                for ranks in mesh.groups()[f"{type.layout.view}.{axis}"]:
                    for rank in ranks[1:] if ranks[0] in self.ranks() else ():  # other stages are not here
                        if value[rank] is value[ranks[0]]:
                            continue
                        assert torch.allclose(value[rank], value[ranks[0]], rtol=1e-12, atol=1e-12), (
                            f"{node} is said to be whole on {axis}, ranks {ranks[0]} and {rank} differ"
                        )
