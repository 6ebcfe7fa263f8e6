"""Lowered exchanges are proved, and each planted fault is found and told in words a person can follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moec.diagnostics import CompileError
from moec.ir.program import Program
from moec.ir.proof.local import LOCAL
from moec.ir.proof.order import Event, events, prove_order
from moec.ir.proof.program import Execution, prove
from moec.ir.proof.rank import Here
from moec.ir.proof.rows import Column, Fault, Ids, Message, Row
from moec.ir.proof.tables import Tables
from moec.ir.verifier.program import verify
from moec.placement import linear
from tests import exchange_faults  # noqa: F401  (importing it fills FAULTS)
from tests.exchange_fault_tools import BASES, FAULTS, Planted, base_program, layer, tidy
from tests.exchange_programs import MESHES, exchange_plan, exchanged
from tests.programs import LOWERINGS

# --- what is right -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: " ".join(f"{k}={v}" for k, v in mesh.items()) or "one rank")
def test_every_lowering_is_proved_on_every_mesh(mesh: dict[str, int]) -> None:
    for exchange, combine in LOWERINGS:
        prove(exchanged(exchange_plan(exchange, combine, **mesh)))
        prove(exchanged(exchange_plan(exchange, combine, placement="round_robin", **mesh), "decode", stop_after=None))


@pytest.mark.parametrize("overlap", ["3", "3:layer"])
@pytest.mark.parametrize("exchange", ["flat", "padded", "gather", "two_hop", "aggregate"])
def test_chunks_of_a_layer_are_proved(exchange: str, overlap: str) -> None:
    prove(exchanged(exchange_plan(exchange, dp=2, tp=2, ep=4, nodes=2), stop_after=None, overlap=overlap))
    prove(exchanged(exchange_plan(exchange, dp=4, ep=2, etp=2), "decode", stop_after=None, overlap=overlap))


@pytest.mark.parametrize("drop", [False, True])
def test_what_a_full_buffer_leaves_out_is_excused_where_there_is_a_capacity(drop: bool) -> None:
    """At capacity 0.5 most tables overflow; nothing but what they name may be missing."""
    program = exchanged(exchange_plan("padded", capacity=0.5, drop=drop, dp=4, ep=4))
    prove(program)
    runs = [
        Execution(program, layer(program), table) for table in Tables(program.mesh, program.placements["routed"], 3)
    ]
    for run in runs:
        run.prove()
    assert [len(run.log.dropped) for run in runs if run.table.name == "no token"] == [0]
    assert sum(len(run.log.dropped) > 0 for run in runs) > len(runs) / 2


def test_tables_hurt_as_they_say() -> None:
    mesh, placement = base_program("two_hop").mesh, linear(13, 4)
    tables = {table.name: table for table in Tables(mesh, placement, 3)}
    assert {chosen[0] for chosen in tables["all to one expert"].ids.values()} == {6}
    last = set(placement.slots[3])
    assert all(set(chosen) == last for chosen in tables["all to the last rank"].ids.values())
    far = tables["all to the last rank of the next node"].ids
    assert all(placement.rank_of[e] == (3 if token.rank < 2 else 1) for token, ids in far.items() for e in ids)
    assert {len(set(chosen)) for chosen in tables["one expert in all choices"].ids.values()} == {1}
    assert {e for chosen in tables["every expert once"].ids.values() for e in chosen} == set(range(13))
    assert [sum(tables[name].sizes) for name in ("one token in all", "no token")] == [1, 0]
    assert 0 in tables["every second rank has no token"].sizes and len(set(tables["ragged"].sizes)) > 1


# --- faults of a program -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", BASES)
def test_the_programs_that_are_spoiled_below_are_right(base: str) -> None:
    program = base_program(base)
    tidy(program)
    verify(program)
    prove(program)


@pytest.mark.parametrize("planted", FAULTS.values(), ids=FAULTS)
def test_each_planted_fault_is_found(planted: Planted) -> None:
    program = planted.program()
    with pytest.raises(CompileError) as found:
        prove(program)
    text = found.value.render()
    assert planted.words in text
    assert "error[E0405]: the exchange is wrong in body sparse, " in text
    assert " at toy.moe:1:1: " in text


@pytest.mark.parametrize("planted", FAULTS.values(), ids=FAULTS)
def test_which_faults_the_verifier_sees_by_itself(planted: Planted) -> None:
    """Those that it does not see are why the proof exists."""
    program = planted.program()
    tidy(program)
    if planted.typed:
        with pytest.raises(CompileError, match="the program is wrong"):
            verify(program)
    else:
        verify(program)


def test_the_fault_names_token_choice_ranks_operation_and_place() -> None:
    with pytest.raises(CompileError) as found:
        prove(FAULTS["experts_served_twice"].program())
    assert found.value.exit_code == 70
    assert found.value.render() == (
        "error[E0405]: the exchange is wrong in body sparse, group_rows at toy.moe:1:1: token 0 of rank 0, choice 0 "
        "(expert 6): computed twice, by rank 1 (routing table: random 0)\n"
        "  = help: this is a bug in moec: please report it with the `.moe` file"
    )


def test_a_program_whose_exchange_is_not_lowered_is_refused() -> None:
    program = exchanged(exchange_plan("flat", dp=2, ep=2), stop_after="shard-experts")
    with pytest.raises(CompileError, match=r"moe at toy\.moe:1:1: moe is not lowered yet"):
        prove(program)


# --- faults of a kernel ------------------------------------------------------------------------------------------


def _own_part_forgotten(here: Here, rows: Column, ids: Column, weights: Column, **attrs: Any) -> tuple[Column, ...]:
    """Nothing is sent to the part of the group that this rank is in."""
    table, group = attrs["table"], attrs["group"]
    own = here.destination(table, group, here.program.placements[table].slots[here.ep_index][0])
    kept = [
        Ids(chosen.token, tuple(-1 if here.destination(table, group, e) == own else e for e in chosen.experts))
        for chosen in ids
    ]
    return LOCAL_BEFORE["fan_out"].run(here, rows, kept, weights, **attrs)


def _ids_of_other_ranks_sent_along(here: Here, rows: Column, ids: Column, weights: Column, **a: Any) -> Any:
    messages, counts, origin = LOCAL_BEFORE["fan_out"].run(here, rows, ids, weights, **a)
    return [m._replace(ids=ids[index]) for m, index in zip(messages, origin, strict=True)], counts, origin


def _room_filled_with_the_row_before(here: Here, rows: Column, ids: Column, weights: Column, **a: Any) -> Any:
    messages, counts, origin = LOCAL_BEFORE["fan_out"].run(here, rows, ids, weights, **a)
    for index in range(1, len(messages)):
        if messages[index].row.token is None:
            messages[index] = messages[index - 1]
    return messages, counts, origin


def _empty_room_with_ids(here: Here, rows: Column, ids: Column, weights: Column, **a: Any) -> Any:
    messages, counts, origin = LOCAL_BEFORE["fan_out"].run(here, rows, ids, weights, **a)
    zeros = Ids(None, (0,) * here.table.top)
    return [Message(m.row, zeros, m.weights) if m.row.token is None else m for m in messages], counts, origin


def _weight_applied_twice(here: Here, *operands: Column, **attrs: Any) -> tuple[Column]:
    (rows,) = LOCAL_BEFORE["reduce_rows"].run(here, *operands, **attrs)
    return ([Row(row.token, tuple(t._replace(weights=t.weights * 2) for t in row.terms)) for row in rows],)


def _weight_never_applied(here: Here, *operands: Column, **attrs: Any) -> tuple[Column]:
    (rows,) = LOCAL_BEFORE["reduce_rows"].run(here, *operands, **attrs)
    return ([Row(row.token, tuple(t._replace(weights=()) for t in row.terms)) for row in rows],)


def _last_row_lost(here: Here, rows: Column, origin: Column, ids: Column, **attrs: Any) -> tuple[Column]:
    return LOCAL_BEFORE["fan_in"].run(here, rows[:-1], origin[:-1], ids, **attrs)  # type: ignore[return-value]


LOCAL_BEFORE = dict(LOCAL)
KERNELS: list[tuple[str, str, Callable[..., Any], str]] = [
    ("two_hop", "fan_out", _own_part_forgotten, "computed never"),
    ("aggregate", "fan_out", _own_part_forgotten, "computed never"),
    ("ordered", "fan_out", _ids_of_other_ranks_sent_along, "rank 0 has 8 rows and counts 21 to send"),
    ("padded", "fan_out", _room_filled_with_the_row_before, "comes back to empty room"),
    ("padded", "fan_out", _empty_room_with_ids, "takes empty room for a row of expert 0"),
    ("reduced", "reduce_rows", _weight_applied_twice, "its weight is applied 2 times"),
    ("gather", "reduce_rows", _weight_never_applied, "its weight is applied 0 times"),
    ("two_hop", "fan_in", _last_row_lost, "its share never comes home"),
]


@pytest.mark.parametrize(("base", "op", "wrong", "words"), KERNELS)
def test_each_wrong_kernel_is_found(
    base: str, op: str, wrong: Callable[..., Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = base_program(base)
    monkeypatch.setitem(LOCAL, op, LOCAL[op]._replace(run=wrong))
    with pytest.raises(CompileError, match=words):
        prove(program)


# --- waits -------------------------------------------------------------------------------------------------------

Trace = list[Event]


def traces(base: str) -> tuple[Program, list[Trace]]:
    program = base_program(base)
    return program, [list(events(layer(program))) for _ in range(program.mesh.size)]


def swap(trace: Trace, a: int, b: int) -> None:
    trace[a], trace[b] = trace[b], trace[a]


def test_two_collectives_of_one_group_in_another_order_on_one_rank() -> None:
    program, issued = traces("gather")
    swap(issued[2], 0, 1)
    with pytest.raises(
        Fault, match=r"collective 0 on experts\.ep is exchange_sizes .* on rank 0, all_gather_rows .* 2"
    ):
        prove_order(program, issued)


def test_a_collective_that_one_rank_leaves_out() -> None:
    program, issued = traces("gather")
    del issued[1][-1]
    with pytest.raises(Fault, match=r"rank 0 runs 5 collectives on experts\.ep, rank 1 4"):
        prove_order(program, issued)


def test_a_wait_before_its_start_on_one_rank() -> None:
    program, issued = traces("two_hop")
    assert [event.op for event in issued[3][1:3]] == ["all_to_all.start", "all_to_all.wait"]
    swap(issued[3], 1, 2)
    with pytest.raises(Fault, match="rank 3 waits for what it has not started"):
        prove_order(program, issued)


def test_groups_that_wait_for_each_other_in_a_circle() -> None:
    """Each group sees one collective, so no order differs; yet ranks 0, 2, 3 and 1 each wait for the next."""
    program, _ = traces("two_hop")
    node, local = (
        next(e for e in events(layer(program)) if e.op == "exchange_counts" and e.group == group)
        for group in ("links.node", "links.local")
    )
    with pytest.raises(Fault, match=r"ranks wait for each other: rank"):
        prove_order(program, [[node, local], [local, node], [local, node], [node, local]])
    prove_order(program, [[node, local], [local, node], [node, local], [node, local]])


def test_what_is_only_started_holds_no_rank() -> None:
    """The same circle of all-to-alls on two streams: each is under way while the rank goes on."""
    program, issued = traces("two_hop")
    starts = [e for e in issued[0] if e.op == "all_to_all.start"][:2]
    first, second = (start._replace(stream=stream) for start, stream in zip(starts, ("inter", "intra"), strict=True))
    waits = [e._replace(op="all_to_all.wait") for e in (first, second)]
    there, back = [first, second, *waits], [second, first, *waits]
    prove_order(program, [there, back, back, there])
    one = [[e._replace(stream="inter") for e in trace] for trace in (there, back, back, there)]
    with pytest.raises(Fault, match="ranks wait for each other"):
        prove_order(program, one)
