"""Planted mistakes with routed rows: counts, weights, order."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from moec.ir.program import Program, results_of
from moec.layout import Shard
from tests.planted.tools import bypass, lay, layer, mistake, ops, put


def second_route(program: Program) -> tuple[fx.Node, fx.Node]:
    """Ids and weights of another route on the same scores."""
    body = layer(program)
    (route,) = ops(body, "route")
    ids, weights = put(program, body, route, "route", *route.args, **{**route.kwargs, "scale": 2.0})
    return ids, weights


def second_fan_out(program: Program, *ids_and_weights: fx.Node) -> tuple[fx.Node, ...]:
    """Messages, counts and origins of another fan-out of the same rows; by another route where none is given."""
    first = ops(layer(program), "fan_out")[0]
    chosen = ids_and_weights or second_route(program)
    return put(program, layer(program), first, "fan_out", first.args[0], *chosen, **first.kwargs)


def second_arrival(program: Program) -> tuple[fx.Node, ...]:
    """Rows, ids, weights and counts that arrive from another fan-out."""
    body = layer(program)
    messages, counts, _ = second_fan_out(program)
    exchange, start, opening = (ops(body, name)[0] for name in ("exchange_counts", "all_to_all.start", "open_rows"))
    (recv,) = put(program, body, start.args[0].all_input_nodes[0], "exchange_counts", counts, **exchange.kwargs)
    recv.args[0].append(recv)
    (started,) = put(program, body, recv, "all_to_all.start", messages, counts, recv, **start.kwargs)
    (arrived,) = put(program, body, started, "all_to_all.wait", started)
    return (*put(program, body, arrived, "open_rows", arrived, **opening.kwargs), recv)


def second_group(program: Program) -> tuple[fx.Node, ...]:
    """Rows, offsets and pairs of the same rows grouped by what arrived for them second."""
    body = layer(program)
    _, ids, *_ = second_arrival(program)
    (group,) = ops(body, "group_rows")
    return put(program, body, group, "group_rows", group.args[0], ids, **group.kwargs)


@mistake("flat", "an all-to-all takes counts of another fan_out than its rows")
def _counts_of_another_fan_out(program: Program) -> None:
    _, counts, _ = second_fan_out(program)
    start = ops(layer(program), "all_to_all.start")[0]
    start.replace_input_with(start.args[1], counts)


@mistake("flat", "an all-to-all takes counts that were not exchanged for its rows")
def _received_counts_of_another_fan_out(program: Program) -> None:
    _, counts, _ = second_fan_out(program)
    (exchange,) = ops(layer(program), "exchange_counts")
    exchange.replace_input_with(exchange.args[0], counts)


@mistake("reduced", "an all-to-all takes counts of another fan_out than its rows")
def _counts_of_another_fan_out_on_the_way_back(program: Program) -> None:
    _, counts, _ = second_fan_out(program)
    start = ops(layer(program), "all_to_all.start")[-1]
    start.replace_input_with(start.args[1], counts)


@mistake("two_hop", "counts are of another hop")
def _counts_of_another_hop(program: Program) -> None:
    first, second, *_ = ops(layer(program), "all_to_all.start")
    second.args = (second.args[0], *first.args[1:])


@mistake("two_hop", "rows and origins differ: Q and P")
def _hops_closed_in_the_order_they_were_opened(program: Program) -> None:
    body = layer(program)
    first, second = ops(body, "fan_in")
    first.args, second.args = (first.args[0], *second.args[1:]), (second.args[0], *first.args[1:])


@mistake("flat", "an all-to-all of pairs takes counts of other rows")
def _pairs_counted_of_other_rows(program: Program) -> None:
    _, ids, _, recv = second_arrival(program)
    (count,) = ops(layer(program), "count_pairs")
    count.args = (ids, recv)


@mistake("flat", "count_pairs counts ids by the ranks that other rows came from")
def _pairs_counted_by_other_ranks(program: Program) -> None:
    *_, recv = second_arrival(program)
    (count,) = ops(layer(program), "count_pairs")
    count.args = (count.args[0], recv)


@mistake("flat", "group_rows takes rows and ids that did not come together")
def _rows_grouped_by_the_ids_of_others(program: Program) -> None:
    _, ids, *_ = second_arrival(program)
    (group,) = ops(layer(program), "group_rows")
    group.replace_input_with(group.args[1], ids)


@mistake("flat", "grouped_linear takes offsets of other rows")
def _offsets_of_other_rows(program: Program) -> None:
    _, offsets, _ = second_group(program)
    (down,) = ops(layer(program), "grouped_linear")
    down.replace_input_with(down.args[1], offsets)


@mistake("flat", "return_rows takes rows that were grouped by another group_rows")
def _rows_returned_in_the_order_of_others(program: Program) -> None:
    *_, pairs = second_group(program)
    (back,) = ops(layer(program), "return_rows")
    back.replace_input_with(back.args[1], pairs)


@mistake("reduced", "reduce_rows takes rows that were grouped by another group_rows")
def _rows_summed_in_the_order_of_others(program: Program) -> None:
    *_, pairs = second_group(program)
    (reduce,) = ops(layer(program), "reduce_rows")
    reduce.replace_input_with(reduce.args[1], pairs)


@mistake("reduced", "fan_in returns to other rows than those that were fanned out")
def _returned_to_rows_of_another_route(program: Program) -> None:
    ids, _ = second_route(program)
    (back,) = ops(layer(program), "fan_in")
    back.replace_input_with(back.args[2], ids)


@mistake("reduced", "fan_in takes rows that were fanned out by another fan_out")
def _origins_of_another_fan_out(program: Program) -> None:
    (first,) = ops(layer(program), "fan_out")
    *_, origin = second_fan_out(program, *first.args[1:])
    (back,) = ops(layer(program), "fan_in")
    back.replace_input_with(back.args[1], origin)


@mistake("flat", "combine takes rows of other ids than those it orders by")
def _order_of_another_route(program: Program) -> None:
    body = layer(program)
    ids, weights = second_route(program)
    (listed,), (combine,) = ops(body, "pair_order"), ops(body, "combine")
    order, _ = put(program, body, listed, "pair_order", ids, **listed.kwargs)
    combine.args = (combine.args[0], order, weights)


@mistake("flat", "combine weighs with other weights than those routed with its ids")
def _weights_of_another_route(program: Program) -> None:
    _, weights = second_route(program)
    (combine,) = ops(layer(program), "combine")
    combine.replace_input_with(combine.args[2], weights)


@mistake("reduced", "fan_out sends other weights than those routed with its ids")
def _weights_of_another_route_sent(program: Program) -> None:
    _, weights = second_route(program)
    (sent,) = ops(layer(program), "fan_out")
    sent.replace_input_with(sent.args[2], weights)


@mistake("gather", "reduce_rows weighs with other weights than those that came with the ids of its rows")
def _weights_of_another_route_gathered(program: Program) -> None:
    _, weights = second_route(program)
    gathered = ops(layer(program), "all_gather_rows")[2]
    gathered.replace_input_with(gathered.args[0], weights)


@mistake("reduced", "rows of a padded exchange must be a known number, not P")
def _equal_pieces_of_rows_that_are_not_padded(program: Program) -> None:
    for start in ops(layer(program), "all_to_all.start"):
        start.args = start.args[:1]


@mistake("padded", "rows and rows that travel differ: 32 and P")
def _padded_rows_sent_by_their_counts(program: Program) -> None:
    body = layer(program)
    (fan_out,), start = ops(body, "fan_out"), ops(body, "all_to_all.start")[0]
    attrs = {"table": "routed", "group": "experts.ep"}
    counts = results_of(fan_out)[1]
    (recv,) = put(program, body, fan_out, "exchange_counts", counts, **attrs)
    start.args = (*start.args, counts, recv)


@mistake("chunks", "part 0 is ('T.1', 10)")
def _chunks_joined_in_another_order(program: Program) -> None:
    (join,) = ops(layer(program), "join_rows")
    first, second, *rest = join.args
    join.args = (second, first, *rest)


@mistake("chunks", "join_rows joins 3 chunks of 4")
def _chunk_left_out(program: Program) -> None:
    (join,) = ops(layer(program), "join_rows")
    join.args = join.args[:-1]


@mistake("chunks", "rows and rows of ids differ: T.1 and T.0")
def _ids_of_another_chunk(program: Program) -> None:
    first, second, *_ = ops(layer(program), "fan_out")
    second.args = (second.args[0], *first.args[1:])


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


@mistake("reduced", "dims differ: P and T")
def _routed_rows_added_to_token_rows(program: Program) -> None:
    body = layer(program)
    (fan_out,), home = ops(body, "fan_out"), ops(body, "all_to_all.wait")[-1]
    (total,) = put(program, body, home, "add", home, fan_out.args[0])
    home.replace_all_uses_with(total, lambda user: user is not total)


@mistake("flat", "no hop of experts.ep comes back from grouped")
def _rows_sent_back_in_expert_order(program: Program) -> None:
    bypass(ops(layer(program), "return_rows")[0])


@mistake("flat", "grouped_gate_up cannot take")
def _rows_served_in_order_of_arrival(program: Program) -> None:
    body = layer(program)
    (group,) = ops(body, "group_rows")
    results_of(group)[0].replace_all_uses_with(group.args[0])


@mistake("flat", "no hop of experts.ep starts at expert")
def _sent_on_instead_of_back(program: Program) -> None:
    start = ops(layer(program), "all_to_all.start")[1]
    start.kwargs = {**start.kwargs, "back": False}


@mistake("gather", "combine takes rows of other ids than those it orders by", behind="place-experts")
def _whole_batch_combined_as_a_part(program: Program) -> None:
    """Before types are known: the pairs of this rank's experts combined as if all had come home."""
    body = layer(program)
    (node,) = ops(body, "moe")
    x, ids, weights, *_ = node.args
    order, counts = put(
        program, body, weights.all_input_nodes[0], "pair_order", ids, table="routed", group="experts.ep"
    )
    rows, *_ = put(program, body, counts.all_input_nodes[0], "group_rows", x, ids, table="routed")
    (y,) = put(program, body, rows.all_input_nodes[0], "combine", rows, order, weights, table="routed")
    node.replace_all_uses_with(y)


@mistake("gather", "reduce_rows weighs with other weights", behind="place-experts")
def _whole_batch_weighed_as_a_part(program: Program) -> None:
    """Before types are known: rows of all ranks summed by the weights of this rank's."""
    body = layer(program)
    (node,) = ops(body, "moe")
    x, ids, weights, *_ = node.args
    (sizes,) = put(program, body, weights.all_input_nodes[0], "exchange_sizes", x, group="experts.ep")
    (all_x,) = put(program, body, sizes, "all_gather_rows", x, sizes, group="experts.ep")
    (all_ids,) = put(program, body, all_x, "all_gather_rows", ids, sizes, group="experts.ep")
    rows, _, pairs = put(program, body, all_ids, "group_rows", all_x, all_ids, table="routed")
    (y,) = put(program, body, pairs.all_input_nodes[0], "reduce_rows", rows, pairs, weights, table="routed")
    node.replace_all_uses_with(y)


@mistake("local", "experts routed to and experts placed differ")
def _router_of_other_experts(program: Program) -> None:
    body = layer(program)
    body.params["router.weight"] = replace(body.params["router.weight"], shape=(6, 10))


@mistake("flat", "the parameter must be whole")
def _router_cut_over_ep(program: Program) -> None:
    lay(program, layer(program), "router.weight", "experts", ep=Shard(0))
