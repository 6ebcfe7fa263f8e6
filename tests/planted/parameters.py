"""Planted mistakes with parameters, placements and KV states."""

from __future__ import annotations

from dataclasses import replace

from moec.ir.program import Program
from moec.layout import Layout, Placed, Shard, layout
from moec.placement import Placement
from tests.planted.tools import bypass, lay, layer, mistake, ops, put


@mistake("copies", "2 does not divide into heads of 4", behind="fuse-gate-up")
def _kv_heads_fewer_than_tp(program: Program) -> None:
    for name in ("attention.k", "attention.v"):
        lay(program, layer(program), name, "attention", tp=Shard(0))


@mistake("dense", "copied KV heads must be one per rank", behind="fuse-gate-up")
def _copies_of_several_kv_heads(program: Program) -> None:
    for name in ("attention.k", "attention.v"):
        lay(program, layer(program), name, "attention", tp=Shard(0, 2))


@mistake("copies", "state k lies S0 on tp")
def _state_cut_otherwise_than_its_heads(program: Program) -> None:
    body = layer(program)
    body.states["k"] = replace(body.states["k"], layout=layout(program.mesh, "attention", tp=Shard(0)))


@mistake("dense", "state k keeps fp32[1, 5] per token")
def _state_of_another_width(program: Program) -> None:
    body = layer(program)
    body.states["k"] = replace(body.states["k"], shape=(2, 5))


@mistake("dense", "2 operations write the states")
def _state_written_twice(program: Program) -> None:
    body = layer(program)
    (attention,) = ops(body, "attention")
    (again,) = put(program, body, attention, "attention", *attention.args, **attention.kwargs)
    (total,) = put(program, body, again, "add", attention, again)
    attention.replace_all_uses_with(total, lambda user: user not in (again, total))


@mistake("entry", "write the states ['k', 'v'], as chunks [(1, 2), (0, 2)]")
def _a_chunk_attends_before_the_one_it_follows(program: Program) -> None:
    """The second one of a sequence that is cut in the middle would look at what is not in KV memory yet."""
    first, second = ops(layer(program), "attention")
    late, behind = [first], second
    for node in list(layer(program).graph.nodes):
        if node is second:
            break
        late += [node] if set(node.all_input_nodes) & set(late) else []
    for node in late:
        behind.append(node)
        behind = node


@mistake("entry", "rows and rows of the chunk differ: T.0 and T")
def _attention_not_told_of_its_chunk(program: Program) -> None:
    node = ops(layer(program), "attention")[0]
    node.kwargs = {"scale": node.kwargs["scale"]}


@mistake("entry", "join_rows joins 2 chunks of 3")
def _relayout_told_of_a_smaller_chunk(program: Program) -> None:
    node = ops(layer(program), "relayout")[0]
    node.kwargs = {**node.kwargs, "chunk": (0, 3)}


@mistake("local", "the parameter must be whole")
def _embedding_cut_over_the_batch_axis(program: Program) -> None:
    body = program.bodies["prologue"]
    body.params["embed"] = replace(body.params["embed"], shape=(12, 10))
    lay(program, body, "embed", "attention", dp=Shard(0))


@mistake("flat", "grouped_gate_up cannot take")
def _experts_cut_evenly_instead_of_placed(program: Program) -> None:
    for name, dim in (("experts.gate_up", 1), ("experts.down", 2)):
        lay(program, layer(program), name, "experts", ep=Shard(0), etp=Shard(dim))


@mistake("flat", "placed(routed) on axis etp")
def _experts_placed_over_etp(program: Program) -> None:
    lay(program, layer(program), "experts.down", "experts", ep=Shard(2), etp=Placed("routed"))


@mistake("flat", "lies whole on every rank", behind="shard-experts")
def _experts_not_sharded(program: Program) -> None:
    body = layer(program)
    for name in ("experts.gate", "experts.up", "experts.down"):
        body.params[name] = replace(body.params[name], layout=Layout())
    bypass(next(n for n in ops(body, "all_reduce") if n.kwargs["group"] == "experts.etp"))


@mistake("dense", "a parameter that does not join the two")
def _gate_alone_taken_for_gate_and_up(program: Program) -> None:
    body = layer(program)
    body.params["ffn.gate_up"] = replace(body.params["ffn.gate_up"], parts=("ffn.gate",))


@mistake("split", "linear reads shared.gate and shared.up as one parameter", behind="fuse-gate-up")
def _gate_and_up_taken_for_one_weight(program: Program) -> None:
    body = layer(program)
    value, joined = ops(body, "linear")[2], ops(body, "gate_up")[0].args[1]
    value.args = (value.args[0], joined)


@mistake("dense", "attention.k is a part of two parameters")
def _one_weight_loaded_twice(program: Program) -> None:
    body = layer(program)
    parts = ("attention.q", "attention.k", "attention.k")
    body.params["attention.q_k_v"] = replace(body.params["attention.q_k_v"], parts=parts)


@mistake("dense", "merged_linear gives (8, 4, 4), the parts of what it reads are (8, 16, 8)")
def _products_cut_between_other_rows(program: Program) -> None:
    """All types are as they were: each rank's heads would be some of the query's and some of the key's."""
    body = layer(program)
    body.params["attention.q_k_v"] = replace(body.params["attention.q_k_v"], sizes=(8, 16, 8))


@mistake("copies", "merged_linear gives (4, 4), the parts of what it reads are ()")
def _one_weight_taken_for_two(program: Program) -> None:
    body = layer(program)
    joined = body.params["attention.k_v"]
    body.params["attention.k_v"] = replace(joined, parts=("attention.k",), sizes=())


@mistake("dense", "parameter attention.extra is never read")
def _parameter_for_nobody(program: Program) -> None:
    body = layer(program)
    body.params["attention.extra"] = body.params["attention.o"]


@mistake("flat", "experts without a slot: [7]")
def _expert_without_a_slot(program: Program) -> None:
    program.placements["routed"] = Placement(((0, 1, 2, 3), (4, 5, 6)))


@mistake("flat", "an expert has two slots")
def _expert_in_two_slots(program: Program) -> None:
    program.placements["routed"] = Placement(((0, 1, 2, 3), (4, 5, 6, 7, 7)))
