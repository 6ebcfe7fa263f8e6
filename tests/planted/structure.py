"""Planted mistakes with what runs and reads what, and those that no type can show."""

from __future__ import annotations

from dataclasses import replace

from moec.ir.program import Program, Run
from tests.planted.tools import BASES, bypass, layer, mistake, ops, put, unseen
from tests.programs import compiled, plan


@mistake("layers", "layers run as [0, 1, 1, 2], not once each")
def _layer_run_twice(program: Program) -> None:
    program.runs.insert(2, Run("sparse", range(1, 2)))


@mistake("layers", "layers run as [0, 2], not once each")
def _layer_left_out(program: Program) -> None:
    program.runs[1] = Run("sparse", range(1))


@mistake("layers", "runs its prologue once")
def _prologue_run_twice(program: Program) -> None:
    program.runs.insert(0, Run("prologue"))


@mistake("layers", "body dense is run but missing")
def _body_missing(program: Program) -> None:
    del program.bodies["dense"]


@mistake("dense", "nobody reads the input positions")
def _rotation_forgotten(program: Program) -> None:
    for rope in ops(layer(program), "rope"):
        bypass(rope)


@mistake("dense", "nobody reads the input select")
def _all_rows_kept_for_logits(program: Program) -> None:
    bypass(ops(program.bodies["epilogue"], "take")[0])


@mistake("dense", "has no place in the source")
def _node_without_a_place(program: Program) -> None:
    del ops(layer(program), "attention")[0].meta["loc"]


@mistake("dense", "which comes later")
def _read_before_made(program: Program) -> None:
    body = layer(program)
    first, last = ops(body, "rms_norm")[0], ops(body, "add")[-1]
    first.replace_input_with(first.args[0], last)


@mistake("stage", "stage 0 of 2 gives logits")
def _stage_that_gives_logits(program: Program) -> None:
    """The head as in a program of one stage, so that nothing reaches the next."""
    whole = compiled(plan(**BASES["stage"] | {"pp": 1}))
    program.bodies["epilogue"] = whole.bodies["epilogue"]


@mistake("stage", "stage 1 of 2 embeds tokens")
def _stage_that_embeds_again(program: Program) -> None:
    program.stage = 1


@mistake("stage", "this is stage 2 of 2")
def _stage_behind_the_last(program: Program) -> None:
    program.stage = 2


@mistake("flat", "the exchange auto is not settled", behind="choose-exchange")
def _exchange_left_open(program: Program) -> None:
    program.exchange = "auto"


@mistake("flat", "overlap auto is not settled", behind="plan-overlap")
def _overlap_left_open(program: Program) -> None:
    program.overlap = "auto"


@unseen("dense")
def _gate_and_up_exchanged(program: Program) -> None:
    param = layer(program).params["ffn.gate_up"]
    layer(program).params["ffn.gate_up"] = replace(param, parts=param.parts[::-1])


@unseen("dense")
def _norms_exchanged(program: Program) -> None:
    first, second = ops(layer(program), "rms_norm")
    (_, a), (_, b) = first.args, second.args
    first.args, second.args = (first.args[0], b), (second.args[0], a)


@unseen("dense")
def _k_and_v_exchanged(program: Program) -> None:
    (node,) = ops(layer(program), "attention")
    q, k, v = node.args
    node.args = (q, v, k)


@unseen("dense")
def _values_read_as_keys_too(program: Program) -> None:
    (node,) = ops(layer(program), "attention")
    q, _, v = node.args
    node.args = (q, v, v)


@unseen("dense")
def _residual_replaced(program: Program) -> None:
    total = ops(layer(program), "add")[-1]
    total.args = (total.args[1], total.args[1])


@unseen("flat")
def _rows_dispatched_before_their_norm(program: Program) -> None:
    body = layer(program)
    there, norm = ops(body, "relayout")[0], ops(body, "rms_norm")[-1]
    attrs = dict(there.kwargs)
    (plain,) = put(program, body, there, "relayout", norm.args[0], **attrs)
    (fan_out,) = ops(body, "fan_out")
    fan_out.replace_input_with(there, plain)
