"""Planted mistakes with cached experts and what is fetched ahead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from moec.ir.program import Program, operands, results_of
from tests.planted.routing import second_group
from tests.planted.tools import bypass, layer, mistake, ops, put


def start_of(program: Program) -> fx.Node:
    return ops(layer(program), "prefetch.start")[0]


@mistake("cached", "cached_experts takes slots of other experts than those of its rows")
def _slots_of_other_offsets(program: Program) -> None:
    body = layer(program)
    _, offsets, _ = second_group(program)
    (wait,) = ops(body, "prefetch.wait")
    wait.replace_input_with(wait.args[0], offsets)


@mistake("cached", "cached_experts takes offsets of other rows")
def _experts_served_by_other_offsets(program: Program) -> None:
    body = layer(program)
    _, offsets, _ = second_group(program)
    (wait,), (served,) = ops(body, "prefetch.wait"), ops(body, "cached_experts")
    wait.replace_input_with(wait.args[0], offsets)
    served.replace_input_with(served.args[1], offsets)


@mistake("cached", "a layer looks up its experts of routed twice")
def _experts_looked_up_twice(program: Program) -> None:
    body = layer(program)
    (wait,), (served,) = ops(body, "prefetch.wait"), ops(body, "cached_experts")
    (again,) = put(program, body, wait, "prefetch.wait", *wait.args, **wait.kwargs)
    (twice,) = put(program, body, served, "cached_experts", *served.args[:2], again, *served.args[3:], **served.kwargs)
    (total,) = put(program, body, twice, "add", served, twice)
    served.replace_all_uses_with(total, lambda user: user is not total)


@mistake("cached", "grouped_gate_up wants all experts, the cache has 1 slots")
def _some_experts_read_where_all_should_be(program: Program) -> None:
    body = layer(program)
    (served,) = ops(body, "cached_experts")
    rows, offsets, _, gate_up, down = served.args
    (act,) = put(program, body, served, "grouped_gate_up", rows, offsets, gate_up)
    (out,) = put(program, body, act, "grouped_linear", act, offsets, down)
    served.replace_all_uses_with(out)


@mistake("cached", "a whole value would be summed once per rank")
def _guesses_added_up_twice(program: Program) -> None:
    body = layer(program)
    (summed,) = ops(body, "sum_counts")
    (again,) = put(program, body, summed, "sum_counts", summed, **summed.kwargs)
    summed.replace_all_uses_with(again, lambda user: user is not again)


@mistake("cached", "a rank must know what all ranks of its ep group will send it")
def _guesses_not_added_up(program: Program) -> None:
    bypass(ops(layer(program), "sum_counts")[0])


@mistake("cached", "prefetch.start of routed takes counts of other")
def _guesses_counted_for_another_table(program: Program) -> None:
    program.experts["other"], program.placements["other"] = program.experts["routed"], program.placements["routed"]
    (count,) = ops(layer(program), "count_experts")
    count.kwargs = {**count.kwargs, "table": "other"}


@mistake("pair", "prefetch.start takes numbers that count no experts")
def _rows_of_ranks_taken_for_rows_of_experts(program: Program) -> None:
    """Two ranks, two experts: nothing but where the numbers come from tells them apart."""
    (sizes,) = ops(layer(program), "exchange_sizes")
    put(program, layer(program), sizes, "prefetch.start", sizes, table="routed", ahead=1, most=1, by="next_router")


@mistake("cached", "prefetch.start by history goes by what guess gives")
def _guesses_taken_for_this_layers_choice(program: Program) -> None:
    start = start_of(program)
    start.kwargs = {**start.kwargs, "by": "history"}


@mistake("cached", "prefetch.start by next_router goes by what route gives")
def _this_layers_choice_taken_for_guesses(program: Program) -> None:
    body = layer(program)
    (route,), (counted,) = ops(body, "route"), ops(body, "count_experts")
    for node in (start_of(program), *ops(body, "sum_counts"), counted):
        results_of(route)[-1].append(node)
    counted.replace_input_with(operands(counted)[0], results_of(route)[0])


@mistake("cached", "prefetch.start by next_router is for -1 layers later")
def _guessed_for_a_layer_that_the_step_has_passed(program: Program) -> None:
    start = start_of(program)
    start.kwargs = {**start.kwargs, "ahead": -1}


@mistake("cached", "prefetch.start by frequency is for 1 layers later")
def _what_is_used_most_fetched_for_a_layer_to_come(program: Program) -> None:
    start = start_of(program)
    start.kwargs = {**start.kwargs, "by": "frequency"}


@mistake("cached", "prefetch.start by frequency goes by what its layer does not give")
def _what_is_used_most_fetched_before_the_layer_is_through(program: Program) -> None:
    start = start_of(program)
    start.kwargs = {**start.kwargs, "by": "frequency", "ahead": -1}


@mistake("cached", "layer 0 prefetches for layer 2, which does not wait for it")
def _copies_that_no_layer_waits_for(program: Program) -> None:
    body, start = layer(program), start_of(program)
    start.kwargs = {**start.kwargs, "ahead": 2}
    for name, param in body.params.items():
        if param.is_borrowed:
            body.params[name] = replace(param, parts=(param.parts[0].replace("next1.", "next2."),))


@mistake("cached", "a prefetch for 1 layers later is guessed with next2.router.weight")
def _router_of_the_layer_after_the_next(program: Program) -> None:
    params = layer(program).params
    params["next.router.weight"] = replace(params["next.router.weight"], parts=("next2.router.weight",))


@mistake("cached", "a prefetch for 1 layers later is guessed with router.weight")
def _own_router_guesses(program: Program) -> None:
    body = layer(program)
    (guess,), (logits,) = ops(body, "guess"), ops(body, "router_logits")
    guess.replace_input_with(guess.args[2], logits.args[1])


@mistake("cached", "router_logits reads next1.router.weight, which only a guess may")
def _routed_by_the_later_layers_router(program: Program) -> None:
    body = layer(program)
    (guess,), (logits,) = ops(body, "guess"), ops(body, "router_logits")
    logits.replace_input_with(logits.args[1], guess.args[2])


@mistake("cached", "layer 0 reads next1.shared.down, such a shared.down that layer has not")
def _borrowed_what_the_later_layer_lacks(program: Program) -> None:
    params = layer(program).params
    params["next.ffn_norm"] = replace(params["next.ffn_norm"], parts=("next1.shared.down",))


@mistake("cached", "experts (32, 10, 2), (32, 4, 10) on rows of 10")
def _gate_and_up_taken_for_down(program: Program) -> None:
    (served,) = ops(layer(program), "cached_experts")
    *first, gate_up, down = served.args
    served.args = (*first, down, gate_up)


def _change(program: Program, **settings: Any) -> None:
    assert program.cache is not None
    program.cache = replace(program.cache, **settings)


@mistake("cached", "the expert cache evicts by chance")
def _unknown_policy(program: Program) -> None:
    _change(program, evict="chance")


@mistake("cached", "the expert cache fetches ahead by luck")
def _unknown_predictor(program: Program) -> None:
    _change(program, prefetch="luck")


@mistake("cached", "the expert cache looks 0 layers ahead")
def _prefetched_for_the_same_layer(program: Program) -> None:
    _change(program, ahead=0)


@mistake("cached", "the tiers of the expert cache are []")
def _experts_that_wait_nowhere(program: Program) -> None:
    _change(program, tiers=())


@mistake("cached", "experts [3, 64] cannot be pinned, there are 64")
def _pinned_expert_that_is_not_there(program: Program) -> None:
    _change(program, pinned=(3, 64))


@mistake("cached", "the slots of the expert cache are not settled")
def _slots_never_counted(program: Program) -> None:
    _change(program, slots=None, share=0.5)
