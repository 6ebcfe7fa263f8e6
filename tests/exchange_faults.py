"""Faults planted in exchanges: lowered programs that lose, double or mix up rows, or wait for what is not there.

Each is what a careless lowering or a careless schedule would do. `typed`: the verifier refuses it as well.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from moec.ir.program import Program, is_op, op_of, results_of
from moec.layout import Placed, layout
from tests.exchange_fault_tools import fault, layer, ops, other_table, put, set_args, set_attrs

# --- hops --------------------------------------------------------------------------------------------------------


@fault("two_hop", "computed never", typed=True)
def _rows_of_one_hop_sent_over_the_other(program: Program) -> None:
    out, *_, back = ops(program, "all_to_all.start")
    set_attrs(out, group="links.local")
    set_attrs(back, group="links.local")


@fault("aggregate", "computed never", typed=True)
def _fan_out_for_the_other_hop(program: Program) -> None:
    set_attrs(ops(program, "fan_out")[0], group="links.node")


@fault("two_hop", "computed never", typed=True)
def _hops_in_the_order_of_aggregate_with_half_of_the_groups(program: Program) -> None:
    """Both hops go inside the node."""
    for name in ("fan_out", "exchange_counts", "all_to_all.start"):
        for node in ops(program, name):
            set_attrs(node, group="links.local")


@fault("reduced", "rank 0 has 2 counts to send on experts.ep", typed=True)
def _counts_of_a_part_of_the_group(program: Program) -> None:
    for name in ("fan_out", "exchange_counts"):
        set_attrs(ops(program, name)[0], group="links.local")


@fault("two_hop", "rank 0 has 8 rows and counts 6 to send", typed=True)
def _counts_of_the_first_hop_in_the_second(program: Program) -> None:
    first, second, *_ = ops(program, "all_to_all.start")
    set_args(second, second.args[0], *first.args[1:])


@fault("reduced", "and counts 8 to send", typed=True)
def _sent_on_instead_of_back(program: Program) -> None:
    set_attrs(ops(program, "all_to_all.start")[1], back=False)


@fault("reduced", "rows to rank 2, which expects", typed=True)
def _counts_that_were_never_exchanged(program: Program) -> None:
    for start in ops(program, "all_to_all.start"):
        set_args(start, *start.args[:2], start.args[1])


@fault("two_hop", "rank 0 has 8 rows and counts 6 to send", typed=True)
def _no_fan_in_inside_the_node(program: Program) -> None:
    inner, _ = ops(program, "fan_in")
    inner.replace_all_uses_with(inner.args[0])


@fault("two_hop", "rows and origins differ in number", typed=True)
def _origins_of_the_other_hop(program: Program) -> None:
    inner, outer = ops(program, "fan_in")
    set_args(outer, outer.args[0], inner.args[1], outer.args[2])


@fault("padded", "has no room in", typed=False)
def _too_little_room_without_a_capacity(program: Program) -> None:
    set_attrs(ops(program, "fan_out")[0], bound=4)


# --- at the experts ----------------------------------------------------------------------------------------------


@fault("reduced", "computed twice, by rank", typed=False)
def _experts_served_twice(program: Program) -> None:
    (grouped,), (reduced,) = ops(program, "group_rows"), ops(program, "reduce_rows")
    rows, offsets, pairs = put(program, reduced, "group_rows", *grouped.args, **grouped.kwargs)
    products = [node for node in layer(program).graph.nodes if is_op(node) and op_of(node).name in _PRODUCTS]
    moved: dict[fx.Node, fx.Node] = dict(zip(results_of(grouped), (rows, offsets, pairs), strict=True))
    last = pairs.all_input_nodes[0]
    for node in [*(n for n in products if n.users and n.args[0] in (*moved, *products)), reduced]:
        args = [moved.get(arg, arg) for arg in node.args]  # type: ignore[call-overload]
        (moved[node],) = put(program, last, op_of(node).name, *args, **node.kwargs)
        last = moved[node]
    (total,) = put(program, last, "add", reduced, last)
    reduced.replace_all_uses_with(total, lambda user: user not in (total, *moved.values()))


_PRODUCTS = ("grouped_linear", "silu_mul")


@fault("reduced", "by expert", typed=True)
def _weights_by_another_table_than_the_router(program: Program) -> None:
    other_table(program)
    body = layer(program)
    for name in ("gate", "up", "down"):
        param = body.params[f"experts.{name}"]
        body.params[f"experts.{name}"] = replace(param, layout=layout(program.mesh, "experts", ep=Placed("other")))


@fault("reduced", "computed on rank 3 by expert 12", typed=True)
def _rows_grouped_by_another_table(program: Program) -> None:
    other_table(program)
    set_attrs(ops(program, "group_rows")[0], table="other")


@fault("reduced", "meets gate of", typed=False)
def _gate_for_up(program: Program) -> None:
    gate, up, _ = ops(program, "grouped_linear")
    up.replace_all_uses_with(gate)


@fault("ordered", "rank 0 has 7 rows and counts 8 to send", typed=True)
def _summed_where_a_row_per_pair_is_wanted(program: Program) -> None:
    (returned,), (opened,) = ops(program, "return_rows"), ops(program, "open_rows")
    rows, pairs = returned.args
    (reduced,) = put(program, returned, "reduce_rows", rows, pairs, results_of(opened)[2], table="routed")
    returned.replace_all_uses_with(reduced)


@fault("ordered", "summed and weighed as", typed=True)
def _sent_back_in_the_order_of_the_experts(program: Program) -> None:
    (returned,) = ops(program, "return_rows")
    returned.replace_all_uses_with(returned.args[0])


# --- home --------------------------------------------------------------------------------------------------------


@fault("ordered", "expects", typed=True)
def _pairs_ordered_by_another_table(program: Program) -> None:
    other_table(program)
    set_attrs(ops(program, "pair_order")[0], table="other")


@fault("gather", "its share never comes home", typed=True)
def _own_slice_taken_without_the_sum(program: Program) -> None:
    (scatter,) = ops(program, "reduce_scatter_rows")
    attrs = {"to": "experts", "how": "slice", "parts": 4, "group": "experts.ep"}
    (piece,) = put(program, scatter, "relayout", scatter.args[0], **attrs)
    scatter.replace_all_uses_with(piece)


@fault("groups", "rows and ids", typed=True)
def _ids_gathered_over_another_group(program: Program) -> None:
    set_attrs(ops(program, "all_gather_rows")[1], group="experts.edp")


@fault("parts", "its share comes home 4 times, from ranks 0 and 1", typed=True)
def _summed_over_etp_twice(program: Program) -> None:
    (total,) = (n for n in ops(program, "all_reduce") if n.kwargs["group"] == "experts.etp")
    (again,) = put(program, total, "all_reduce", total, group="experts.etp")
    total.replace_all_uses_with(again, lambda user: user is not again)


@fault("parts", "only 1 of 2 pieces of its share are summed, from rank 0", typed=True)
def _never_summed_over_etp(program: Program) -> None:
    (total,) = (n for n in ops(program, "all_reduce") if n.kwargs["group"] == "experts.etp")
    total.replace_all_uses_with(total.args[0])


@fault("chunks", "rows added are of", typed=True)
def _chunks_joined_in_the_wrong_order(program: Program) -> None:
    (join,) = ops(program, "join_rows")
    set_args(join, *reversed(join.args))


@fault("layer", "it attends rows of others than chunk 0 of 2", typed=True)
def _a_chunk_attended_as_another(program: Program) -> None:
    set_attrs(ops(program, "attention")[1], chunk=(0, 2))


@fault("layer", "rows added differ in number: 1 and 2", typed=True)
def _own_rows_taken_back_as_of_another_chunk(program: Program) -> None:
    back = [node for node in ops(program, "relayout") if node.kwargs["to"] == "attention"]
    set_attrs(back[0], chunk=(1, 2))


@fault("local", "its share never comes home", typed=False)
def _experts_left_out_of_the_sum(program: Program) -> None:
    """The layer returns its shared experts alone."""
    (served,) = ops(program, "reduce_rows")
    (total,) = served.users
    total.replace_all_uses_with(total.args[1])


# --- waits -------------------------------------------------------------------------------------------------------


@fault("reduced", "waits for all_to_all_start, which has not been started", typed=True)
def _wait_before_its_start(program: Program) -> None:
    start, wait = ops(program, "all_to_all.start")[0], ops(program, "all_to_all.wait")[0]
    start.args[0].prepend(wait)  # type: ignore[union-attr]


@fault("two_hop", "it reads what is still on its way", typed=True)
def _read_before_it_is_waited_for(program: Program) -> None:
    wait = ops(program, "all_to_all.wait")[0]
    wait.replace_all_uses_with(wait.args[0])
