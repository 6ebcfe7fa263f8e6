"""Make shared experts further experts of the routed ones' products, where both compute the same rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from moec.blocks import BLOCK
from moec.ir.build import drop_unused_params, erase, reinfer
from moec.ir.params import Param, Shared
from moec.ir.program import Body, Program, is_op, op_of, operands, type_of
from moec.passes.base import Pass
from moec.placement import linear

#: Kernels of which a launch costs more than the few rows more that each sorts and sums.
JOINING = ("triton",)
#: Operations that leave every row where it is and what it is.
STAYS = ("relayout", "all_reduce")
OTHER_ROWS = "the routed ones compute other rows"


class Apart(Exception):
    """Why shared experts stay a product of their own."""


@dataclass(frozen=True)
class Sparse:
    """A layer's way through its routed experts, up to `routed`, and through `count` shared ones, the last step first.

    `total` adds what both give.
    """

    route: fx.Node
    group: fx.Node
    gate_up: fx.Node
    down: fx.Node
    reduce: fx.Node
    routed: fx.Node
    shared: tuple[fx.Node, ...]
    total: fx.Node
    count: int


@dataclass(frozen=True)
class JoinShared(Pass):
    """Route every row to the shared experts too, with weight 1: they are the last slots of the experts' parameters.

    Where the shared expert is n times as wide as a routed one, on rows that are sorted by expert on the rank that has
    them and reduced over the same ranks. With an exchange the rows are others, and both phases must hold the weights
    alike; a cache has no slot for shared experts. Beside experts that stay in fp8 the shared ones do too. Sums are
    rounded once instead of twice, and n experts are summed one by one: not the same bits.

    before: %1, %2 = route(%0, top=8, table=routed); ...; %7 = reduce_rows(%6, %5, %2, table=routed)
            %8 = gate_up(%x, @shared.gate_up); %9 = linear(%8, @shared.down); %10 = add(%7, %9)
    after:  %1, %2 = route(%0, top=8, shared=1, table=routed.shared1); ...; %7 = reduce_rows(%6, %5, %2, ...)
            param experts.down = experts.down dim=0 with 1 of shared.down dim=1
    """

    name: ClassVar[str] = "join-shared"
    exact: ClassVar[bool] = False
    prefer: str = "torch"

    def run(self, program: Program) -> None:
        if self.prefer not in JOINING:
            return
        found = {name: _found(program, body) for name, body in program.bodies.items() if "shared.down" in body.params}
        alike = {name: sparse for name, sparse in found.items() if isinstance(sparse, Sparse)}
        for name, sparse in alike.items():
            _join(program, program.bodies[name], sparse)
        if alike:
            _forget_tables(program)

    def outcome(self, program: Program) -> dict[str, str]:
        """Of a program that the pass has run on: by body with shared experts, why they are apart; empty: joined."""
        if self.prefer not in JOINING:
            return {}
        joined = {name: "" for name, body in program.bodies.items() if any(p.shared for p in body.params.values())}
        others = {name: body for name, body in program.bodies.items() if "shared.down" in body.params}
        return joined | {name: str(_found(program, body)) for name, body in others.items()}


def _found(program: Program, body: Body) -> Sparse | str:
    """What can be joined, or why it stays apart."""
    try:
        return _find(program, body)
    except Apart as why:
        return str(why)


def _find(program: Program, body: Body) -> Sparse:
    """The two ways through the experts, from the rows that both read to their sum. Raises Apart."""
    _require(program.cache is None, "a cache has slots for routed experts only")
    second = _only("linear", *(n for n in body.graph.nodes if "shared.down" in [v.target for v in n.all_input_nodes]))
    first = _only("gate_up", operands(second)[0])
    shared, total = _until_add(second)
    routed = next(value for value in operands(total) if value not in shared)
    reduce, moved = _from(routed)
    down = _only("grouped_linear", operands(reduce)[0])
    gate_up = _only("grouped_gate_up", operands(down)[0])
    group = _only("group_rows", *operands(gate_up)[0].all_input_nodes)
    rows, ids = operands(group)
    route = _only("route", *ids.all_input_nodes)
    _require(_source(rows) is operands(first)[0], OTHER_ROWS)
    _require(_reduced(program, moved) == _reduced(program, shared), "they are cut over other ranks")
    inner, width = (int(str(type_of(node).shape[-1])) for node in (gate_up, first))
    _require(width % inner == 0, f"they are {width} wide on a rank, which is no multiple of {inner}")
    if body.params[_weights(down)[0]].is_fp8:
        whole = body.params["shared.down"].shape[1] // (width // inner)
        _require(whole % BLOCK == 0 or width == inner, f"each is {whole} wide, which is not whole blocks of {BLOCK}")
    return Sparse(route, group, gate_up, down, reduce, routed, (*reversed(shared), first), total, width // inner)


def _weights(product: fx.Node) -> list[str]:
    """Parameters of a product of routed experts: weights, and their scales where they have some."""
    return [str(value.target) for value in operands(product)[2:]]


def _require(holds: bool, why: str) -> None:
    if not holds:
        raise Apart(why)


def _only(name: str, *nodes: fx.Node) -> fx.Node:
    """The one node, which must be an operation `name`."""
    found = [node for node in nodes if is_op(node) and op_of(node).name == name]
    _require(len(found) == len(nodes) == 1, f"there is no {name} where it could be")
    return found[0]


def _until_add(node: fx.Node) -> tuple[tuple[fx.Node, ...], fx.Node]:
    """A value and what it becomes on its way to where it is added, and the addition."""
    found = [node]
    while True:
        (user,) = found[-1].users if len(found[-1].users) == 1 else (None,)
        if user is not None and is_op(user) and op_of(user).name == "add":
            return tuple(found), user
        _require(user is not None and is_op(user) and op_of(user).name in STAYS, "nothing adds the two")
        assert user is not None
        found.append(user)


def _from(value: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """The sum over a row's experts that a value is, and what it has become since."""
    found: list[fx.Node] = []
    while is_op(value) and op_of(value).name in STAYS and value.kwargs.get("how", "keep") == "keep":
        found.append(value)
        value = operands(value)[0]
    _require(is_op(value) and op_of(value).name == "reduce_rows", OTHER_ROWS)
    return value, tuple(found)


def _source(rows: fx.Node) -> fx.Node:
    """The rows before they were looked at in another view."""
    is_kept = is_op(rows) and op_of(rows).name == "relayout" and rows.kwargs["how"] == "keep"
    return operands(rows)[0] if is_kept else rows


def _reduced(program: Program, nodes: tuple[fx.Node, ...]) -> list[tuple[tuple[int, ...], ...]]:
    """Ranks over which a value is summed."""
    summed = [node for node in nodes if op_of(node).name == "all_reduce"]
    return [program.mesh.groups()[str(node.kwargs["group"])] for node in summed]


def _join(program: Program, body: Body, found: Sparse) -> None:
    table = f"{found.route.kwargs['table']}.shared{found.count}"  # layers may differ in how many they have
    num_experts = program.experts[str(found.route.kwargs["table"])] + found.count
    program.experts[table], program.placements[table] = num_experts, linear(num_experts, 1)
    for node in (found.route, found.group, found.reduce):
        node.kwargs = {**node.kwargs, "table": table}
    found.route.kwargs = {**found.route.kwargs, "shared": found.count}
    for product, dim in ((found.gate_up, 0), (found.down, 1)):
        for name in _weights(product):
            body.params[name] = _with_shared(body.params[name], found.count, dim)
    found.total.replace_all_uses_with(found.routed)
    for node in (found.total, *found.shared):
        erase(body, node)
    drop_unused_params(body)
    reinfer(program, body)


def _with_shared(experts: Param, count: int, dim: int) -> Param:
    parts = tuple(part.replace("experts.", "shared.") for part in experts.parts)
    shape = (experts.shape[0] + count, *experts.shape[1:])
    return replace(experts, shape=shape, shared=Shared(parts, count, dim))


def _forget_tables(program: Program) -> None:
    """Tables that no layer routes by any more."""
    used = {str(node.kwargs["table"]) for _, node in program.nodes() if op_of(node).name == "route"}
    program.experts = {table: count for table, count in program.experts.items() if table in used}
    program.placements = {table: placed for table, placed in program.placements.items() if table in used}
