"""The Program: one phase of one model as a short list of runs over bodies, each body one `torch.fx.Graph`.

Alike layers share one body. Every node is an operation of `moec.ir.ops.table`, and carries in `node.meta`

- `loc`, the place in the `.moe` file it stands for, and `stream`: compute, intra, inter or copy;
- `type`, once inferred: shape, dtype and layout of its value (a tuple of them where it has several results);
- `kernel`, once chosen: the kernel that serves it.

Shapes are those of one rank's part. A dimension is an integer, or a symbol known only at run time:
T tokens of this rank, S after they are split over tp, G rows gathered, L rows selected; P H Q R X K along an exchange,
M experts held where ranks hold different numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import fx

from moec.ir.equality import program_key
from moec.ir.params import Param, State
from moec.layout import Layout
from moec.mesh import Mesh
from moec.placement import Placement
from moec.routing import RoutingTrace
from moec.topology import Cluster, Link

if TYPE_CHECKING:
    from moec.ir.ops.table import Op
Dim = int | str


@dataclass(frozen=True)
class Type:
    """Shape of one rank's part, dtype (bf16 fp16 fp32 fp8 i64 i32), layout. `pending`: a started collective."""

    shape: tuple[Dim, ...]
    dtype: str
    layout: Layout
    pending: bool = False


@dataclass(frozen=True)
class Loc:
    """Line and column (from 1) in the `.moe` file; `file` only where it is not the program's own source."""

    line: int
    column: int
    file: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.file else f"{self.line}:{self.column}"


@dataclass
class Body:
    """One graph and what it reads: parameters by name, KV states by name."""

    name: str
    graph: fx.Graph = field(default_factory=fx.Graph)
    params: dict[str, Param] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """`body` once (prologue, epilogue: `layers` empty), or for each layer of the range."""

    body: str
    layers: range = range(0)


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, as sums over all layers."""

    weights: int
    kv: int
    buffers: int
    slots: int = 0  # of cached experts

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.buffers + self.slots


@dataclass(frozen=True)
class Tier:
    """Where experts wait that are in no slot: `host` or `nvme`. `bytes` on one rank, None: no limit.

    `link` brings them from there to device memory; None where no rate is known.
    """

    name: str
    bytes: int | None = None
    link: Link | None = None


@dataclass(frozen=True)
class Cache:
    """Experts in slots of device memory: so many `slots` of each sparse layer on each rank.

    Before cache-experts has run, `hbm` (bytes of all slots of a rank) or `share` (of a layer's experts on a rank) may
    say it instead. `hit_rate`: share of look-ups that a plan counts on finding in a slot, without prefetch.
    """

    evict: str
    tiers: tuple[Tier, ...]
    slots: int | None = None
    hbm: int | None = None
    share: float | None = None
    prefetch: str = "none"  # or next_router, history
    ahead: int = 1  # sparse layers
    pinned: tuple[int, ...] = ()  # expert ids that keep their slot in every layer
    hit_rate: float | None = None


@dataclass
class Program:
    """One phase, complete: `run(program)` needs nothing else. Every rank runs it with its own part.

    `tokens`: rows per step and dp rank at most. `slots`: sequences per dp rank at most. `context`: longest sequence.
    `done`: names of the passes that ran; the verifier holds what each of them promises.
    `routing`: the trace of this program's sparse layers that costs are counted over, None: random routing. `fitting`:
    exchanges that the devices have room for, where they have none for this one. Both are known while a program is
    compiled, and no part of what the program says: neither printed nor compared.
    """

    name: str
    phase: str  # prefill | decode
    source: str
    mesh: Mesh
    cluster: Cluster
    tokens: int
    slots: int
    context: int
    dtype: str
    exchange: str
    strategy: str  # of expert placement
    combine: str = "ordered"  # what comes back: a row per choice, or reduced: sums
    capacity: float | None = None  # of a padded exchange, in even shares; None: room for every token
    drop: bool = False  # what does not fit a padded exchange is left out and counted, else it is an error
    stage: int = 0  # of mesh.pp pipeline stages
    overlap: str = "off"  # or auto; once planned, chunks of a sparse layer's experts, or `2:layer`; "1" reorders only
    sums: str = "fixed"  # or any: ranks may add what their experts give in whatever order it comes
    placements: dict[str, Placement] = field(default_factory=dict)
    cache: Cache | None = None  # None: all experts are in device memory
    experts: dict[str, int] = field(default_factory=dict)  # table -> number of experts; shared ones that joined it too
    bodies: dict[str, Body] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    memory: tuple[Memory, ...] = ()  # by rank, once planned
    done: tuple[str, ...] = ()
    routing: RoutingTrace | None = None
    fitting: tuple[str, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and program_key(self) == program_key(other)

    __hash__ = None  # type: ignore[assignment]  # mutable

    @property
    def is_typed(self) -> bool:
        return "infer-shapes" in self.done

    @property
    def hidden(self) -> int:
        """Width of the hidden state."""
        prologue = self.bodies["prologue"]
        received = [node for node in prologue.graph.nodes if is_op(node) and op_of(node).name == "receive"]
        return int(str(received[0].kwargs["hidden"])) if received else prologue.params["embed"].shape[1]

    @property
    def sparse_layers(self) -> list[int]:
        """Numbers of the layers that route, in order."""
        routing = {body.name for body, node in self.nodes() if op_of(node).name == "route"}
        return sorted(layer for name in routing for layer in self.layers_of(name))

    def nodes(self) -> Iterator[tuple[Body, fx.Node]]:
        """Every operation of every body, in order."""
        for body in self.bodies.values():
            for node in body.graph.nodes:
                if is_op(node):
                    yield body, node

    def layers_of(self, body: str) -> list[int]:
        """Layer numbers that run `body`, in order."""
        return [layer for run in self.runs if run.body == body for layer in run.layers]


def is_op(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not operator.getitem


def op_of(node: fx.Node) -> Op:
    """The table entry of an operation node."""
    return node.target  # type: ignore[return-value]


def operands(node: fx.Node) -> tuple[fx.Node, ...]:
    """The values an operation reads, in order."""
    found = tuple(arg for arg in node.args if isinstance(arg, fx.Node))
    assert len(found) == len(node.args), node
    return found


def output_of(body: Body) -> fx.Node:
    """The value a body returns."""
    (value,) = next(node for node in body.graph.nodes if node.op == "output").args
    assert isinstance(value, fx.Node)
    return value


def results_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """The values of a node: itself, or its numbered results in order."""
    count = op_of(node).count(node.kwargs)
    if count == 1:
        return (node,)
    found = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    return tuple(found[i] for i in range(count))


def type_of(value: fx.Node) -> Type:
    """Type of a value node (parameter, input, single result or numbered result)."""
    found = value.meta["type"]
    assert isinstance(found, Type), value
    return found


def loc_of(node: fx.Node) -> Loc:
    found = node.meta["loc"]
    assert isinstance(found, Loc)
    return found
