"""Split the batch over dp, and heads and inner dims over tp."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from moec.ir.build import Builder, reinfer
from moec.ir.params import Param, State
from moec.ir.program import Body, Program, Type, is_op, output_of, type_of
from moec.layout import Partial, Place, Shard, layout
from moec.passes.base import Pass

#: Parameters cut by their output rows (column parallel) and those cut by their input columns (row parallel).
BY_ROWS = {
    *(f"attention.{name}" for name in ("q", "k", "v", "q_bias", "k_bias", "v_bias", "q_b", "kv_b")),
    *(f"{mlp}.{name}" for mlp in ("ffn", "shared") for name in ("gate", "up")),
}
BY_COLUMNS = {"attention.o", "ffn.down", "shared.down"}
TP = "attention.tp"


@dataclass(frozen=True)
class ShardAttention(Pass):
    """Seed the parameters, let the operations' rules carry the layouts on, and reduce each partial sum where it arises.

    An MLP whose inner dim does not divide by tp, a head whose vocabulary does not, and a tied head stay whole.

    before: %4 = linear(%3, @attention.o) : fp32[T, 64]<attention dp=R tp=R>
    after:  %4 = linear(%3, @attention.o) : fp32[T, 64]<attention dp=S0 tp=P>
            %5 = all_reduce(%4, group=attention.tp) : fp32[T, 64]<attention dp=S0 tp=R>
    """

    name: ClassVar[str] = "shard-attention"
    exact: ClassVar[bool] = False

    def run(self, program: Program) -> None:
        for body in program.bodies.values():
            if program.mesh.tp > 1:
                _seed(program, body)
            for node in body.graph.nodes:
                if node.op == "placeholder":
                    old = type_of(node)
                    node.meta["type"] = Type(old.shape, old.dtype, old.layout.with_place("dp", Shard(0)))
            _reduce_partials(program, body)
            _gather_logits(program, body)


def _seed(program: Program, body: Body) -> None:
    whole_mlps = {
        mlp
        for mlp in ("ffn", "shared")
        if f"{mlp}.gate" in body.params and body.params[f"{mlp}.gate"].shape[0] % program.mesh.tp
    }
    for name, param in body.params.items():
        if name.partition(".")[0] not in whole_mlps and (place := _place(program, body, name, param)):
            body.params[name] = replace(param, layout=layout(program.mesh, "attention", tp=place))
    for name in ("k", "v"):
        if name in body.states:
            state = body.states[name]
            place = Shard(0, _kv_copies(program, state))
            body.states[name] = replace(state, layout=layout(program.mesh, "attention", tp=place))


def _place(program: Program, body: Body, name: str, param: Param) -> Place | None:
    if name in BY_COLUMNS:
        return Shard(1)
    if name == "head" and param.parts == ("head",) and param.shape[0] % program.mesh.tp == 0:
        return Shard(0)
    if name not in BY_ROWS:
        return None
    is_kv = name.startswith(("attention.k", "attention.v")) and "k" in body.states
    return Shard(0, _kv_copies(program, body.states["k"]) if is_kv else 1)


def _kv_copies(program: Program, state: State) -> int:
    """Ranks that share one KV head: more than one where there are fewer heads than ranks."""
    return max(1, program.mesh.tp // state.shape[0])


def _reduce_partials(program: Program, body: Body) -> None:
    """Infer node by node, and put an all_reduce behind each value that came out partial."""
    build = Builder(program, body)
    for node in list(body.graph.nodes):
        if not is_op(node):
            continue
        reinfer(program, body, until=node)
        if isinstance(node.meta["type"], Type) and type_of(node).layout.on("tp") == Partial():
            with build.after(node):
                whole = build.emit("all_reduce", node, at=node, group=TP)
            node.replace_all_uses_with(whole, lambda user, whole=whole: user is not whole)


def _gather_logits(program: Program, body: Body) -> None:
    value = output_of(body)
    if type_of(value).layout.on("tp") == Shard(1):
        build = Builder(program, body)
        with build.after(value):
            whole = build.emit("all_gather", value, at=value, dim=1, group=TP)
        value.replace_all_uses_with(whole, lambda user: user is not whole)
