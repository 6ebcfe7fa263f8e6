"""Planted mistakes with routed rows: counts, weights, order."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from moec.ir import Program, results_of
from moec.layout import Shard
from tests.planted.tools import bypass, lay, layer, mistake, ops, put


def second_dispatch(program: Program) -> tuple[fx.Node, ...]:
    """Another route on the same scores and its dispatch."""
    body = layer(program)
    (route,), (dispatch,) = ops(body, "route"), ops(body, "dispatch")
    ids, weights = put(program, body, route, "route", *route.args, **{**route.kwargs, "scale": 2.0})
    after = put(program, body, dispatch, "dispatch", dispatch.args[0], ids, **dispatch.kwargs)
    return (*after, ids, weights)


@mistake("flat", "another dispatch's counts")
def _counts_of_another_dispatch(program: Program) -> None:
    _, counts, *_ = second_dispatch(program)
    start = ops(layer(program), "all_to_all.start")[0]
    start.replace_input_with(start.args[1], counts)


@mistake("flat", "another dispatch's counts")
def _received_counts_of_another_dispatch(program: Program) -> None:
    _, counts, *_ = second_dispatch(program)
    (exchange,) = ops(layer(program), "exchange_counts")
    exchange.replace_input_with(exchange.args[0], counts)


@mistake("flat", "other weights than those routed with the dispatched ids")
def _weights_of_another_route(program: Program) -> None:
    *_, weights = second_dispatch(program)
    (combine,) = ops(layer(program), "combine")
    combine.replace_input_with(combine.args[2], weights)


@mistake("flat", "operand 2 of combine is i64, not fp32")
def _ids_for_weights(program: Program) -> None:
    body = layer(program)
    (combine,), (route,) = ops(body, "combine"), ops(body, "route")
    combine.replace_input_with(combine.args[2], results_of(route)[0])


@mistake("flat", "operand 1 of moe is fp32, not i64", behind="shard-experts")
def _ids_and_weights_swapped(program: Program) -> None:
    (node,) = ops(layer(program), "moe")
    x, ids, weights, *experts = node.args
    node.args = (x, weights, ids, *experts)


@mistake("flat", "dims differ: P and T")
def _routed_rows_added_to_token_rows(program: Program) -> None:
    body = layer(program)
    (dispatch,) = ops(body, "dispatch")
    rows = results_of(dispatch)[0]
    (total,) = put(program, body, dispatch, "add", rows, dispatch.args[0])
    rows.replace_all_uses_with(total, lambda user: user is not total)


@mistake("flat", "all_to_all.start cannot take")
def _rows_sent_back_in_expert_order(program: Program) -> None:
    bypass(ops(layer(program), "ungroup_rows")[0])


@mistake("flat", "grouped_gate_up cannot take")
def _rows_served_in_order_of_arrival(program: Program) -> None:
    body = layer(program)
    (group,) = ops(body, "group_rows")
    results_of(group)[0].replace_all_uses_with(group.args[0])


@mistake("flat", "rows and rows that travel differ: R and P")
def _sent_on_instead_of_back(program: Program) -> None:
    start = ops(layer(program), "all_to_all.start")[1]
    start.kwargs = {**start.kwargs, "back": False}


@mistake("gather", "combine and its dispatch are of different kinds", behind="place-experts")
def _whole_batch_combined_as_a_part(program: Program) -> None:
    """Before types are known: local rows combined as if all had come home."""
    body = layer(program)
    (node,) = ops(body, "moe")
    x, ids, weights, *_ = node.args
    rows, _, order = put(program, body, node, "dispatch", x, ids, table="routed", local=True)
    (y,) = put(program, body, rows.all_input_nodes[0], "combine", rows, order, weights, table="routed", local=False)
    node.replace_all_uses_with(y)


@mistake("local", "experts routed to and experts placed differ")
def _router_of_other_experts(program: Program) -> None:
    body = layer(program)
    body.params["router.weight"] = replace(body.params["router.weight"], shape=(6, 10))


@mistake("flat", "the parameter must be whole")
def _router_cut_over_ep(program: Program) -> None:
    lay(program, layer(program), "router.weight", "experts", ep=Shard(0))
