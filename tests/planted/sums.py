"""Planted mistakes with partial sums, views, groups and collectives."""

from __future__ import annotations

from dataclasses import replace

from moec.ir.program import Program, results_of
from moec.layout import Shard
from tests.planted.tools import bypass, lay, layer, mistake, ops, put


@mistake("flat", "a whole value added to a partial sum is counted once per rank")
def _shared_expert_added_before_its_sum(program: Program) -> None:
    """The shared expert is cut over tp; its part is added and the total summed: the routed part counts tp times."""
    body = layer(program)
    down = next(n for n in ops(body, "linear") if n.args[1].target == "shared.down")
    (summed,) = down.users
    (total,) = summed.users
    total.replace_input_with(summed, down)
    after = put(program, body, total, "all_reduce", total, group="attention.tp")
    total.replace_all_uses_with(after[0], lambda user: user is not after[0])


@mistake("flat", "a whole value would be summed once per rank")
def _whole_value_summed(program: Program) -> None:
    body = layer(program)
    summed = ops(body, "all_reduce")[-1]
    (again,) = put(program, body, summed, "all_reduce", summed, group=summed.kwargs["group"])
    summed.replace_all_uses_with(again, lambda user: user is not again)


@mistake("dense", "a whole value added to a partial sum is counted once per rank")
def _attention_not_summed(program: Program) -> None:
    bypass(ops(layer(program), "all_reduce")[0])


@mistake("flat", "add_bias cannot take")
def _bias_added_to_a_partial_sum(program: Program) -> None:
    body = layer(program)
    summed, bias = ops(body, "all_reduce")[0], ops(body, "add_bias")[-1]
    bias.replace_input_with(summed, summed.args[0])
    bias.replace_all_uses_with(summed)
    summed.replace_input_with(summed.args[0], bias)
    bias.append(summed)


@mistake("dense", "the activation of a part of a sum")
def _activation_of_a_partial_sum(program: Program) -> None:
    """Gate and up cut by columns, on rows cut alike."""
    body = layer(program)
    lay(program, body, "ffn.gate_up", "attention", tp=Shard(1))
    gate_up = ops(body, "gate_up")[0]
    merged = ops(body, "merge_heads")[0]
    gate_up.replace_input_with(gate_up.args[0], merged)
    body.params["ffn.gate_up"] = replace(body.params["ffn.gate_up"], shape=(8, 16))


@mistake("dense", "epilogue: returns")
def _logits_not_gathered(program: Program) -> None:
    program.bodies["epilogue"].params["head"] = replace(program.bodies["epilogue"].params["head"], shape=(12, 10))
    lay(program, program.bodies["epilogue"], "head", "attention", tp=Shard(0))


@mistake("gather", "a whole value added to a partial sum is counted once per rank")
def _tokens_added_before_the_reduce_scatter(program: Program) -> None:
    body = layer(program)
    (reduced,), gathered = ops(body, "reduce_rows"), ops(body, "all_gather_rows")[0]
    (total,) = put(program, body, reduced, "add", reduced, gathered)
    reduced.replace_all_uses_with(total, lambda user: user is not total)


@mistake("gather", "reduce_scatter_rows")
def _reduce_scatter_forgotten(program: Program) -> None:
    (scatter,) = ops(layer(program), "reduce_scatter_rows")
    again = put(program, layer(program), scatter, "reduce_scatter_rows", scatter, scatter.args[1], group="experts.ep")
    scatter.replace_all_uses_with(again[0], lambda user: user is not again[0])


@mistake("split", "exchange_counts on experts.ep of a value on attention")
def _relayout_forgotten(program: Program) -> None:
    bypass(ops(layer(program), "relayout")[0])


@mistake("flat", "add mixes the views attention and experts")
def _relayout_back_forgotten(program: Program) -> None:
    bypass(ops(layer(program), "relayout")[1])


@mistake("split", "relayout to experts on this mesh is slice")
def _tokens_not_split(program: Program) -> None:
    """Every tp rank would route all tokens, and each would be served tp times."""
    there = ops(layer(program), "relayout")[0]
    there.kwargs = {**there.kwargs, "how": "keep"}


@mistake("flat", "exchange_counts cannot take")
def _exchange_over_etp(program: Program) -> None:
    """Both axes have two ranks, so every size fits."""
    for name in ("exchange_counts", "all_to_all.start"):
        for node in ops(layer(program), name):
            node.kwargs = {**node.kwargs, "group": "experts.etp"}


@mistake("flat", "all_reduce on attention.tp of a value on experts")
def _experts_summed_over_the_attention_group(program: Program) -> None:
    """The group has the very same ranks on this mesh, and other ones on the next."""
    node = next(n for n in ops(layer(program), "all_reduce") if n.kwargs["group"] == "experts.etp")
    node.kwargs = {**node.kwargs, "group": "attention.tp"}


@mistake("flat", "all_reduce on experts.etp of a value on attention")
def _attention_summed_over_the_experts_group(program: Program) -> None:
    node = ops(layer(program), "all_reduce")[0]
    node.kwargs = {**node.kwargs, "group": "experts.etp"}


@mistake("flat", "only a wait reads a start")
def _missing_wait(program: Program) -> None:
    bypass(ops(layer(program), "all_to_all.wait")[0])


@mistake("flat", "has 2 waits")
def _two_waits(program: Program) -> None:
    body = layer(program)
    wait = ops(body, "all_to_all.wait")[1]
    (again,) = put(program, body, wait, "all_to_all.wait", wait.args[0])
    (total,) = put(program, body, again, "add", wait, again)
    wait.replace_all_uses_with(total, lambda user: user is not total)


@mistake("flat", "nobody reads the result of all_gather_rows")
def _received_for_nobody(program: Program) -> None:
    body = layer(program)
    (fan_out,) = ops(body, "fan_out")
    (sizes,) = put(program, body, fan_out, "exchange_sizes", fan_out.args[0], group="experts.ep")
    (rows,) = put(program, body, sizes, "all_gather_rows", fan_out.args[0], sizes, group="experts.ep")
    rows.meta["keep"] = True


@mistake("local", "which this mesh does not have")
def _exchange_without_an_ep_axis(program: Program) -> None:
    body = layer(program)
    (group,), (route,) = ops(body, "group_rows"), ops(body, "route")
    attrs = {"table": "routed", "group": "experts.ep", "bound": 16, "drop": False}
    messages, *_ = put(program, body, route, "fan_out", group.args[0], *results_of(route), **attrs)
    fan_out = messages.all_input_nodes[0]
    opened = put(program, body, fan_out, "open_rows", messages, hidden=10, top=2, dtype="fp32")
    group.args = opened[:2]


@mistake("flat", "is on stream inter, not intra")
def _wrong_stream(program: Program) -> None:
    ops(layer(program), "exchange_counts")[0].meta["stream"] = "inter"
