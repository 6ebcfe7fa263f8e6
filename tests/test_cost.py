"""Bytes, messages and times of operations, each worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moec.checked import Plan
from moec.cost.operations import NodeCost, node_costs, of_operation
from moec.cost.sizes import sizes_of
from moec.ir.program import Program
from moec.passes import PASSES
from moec.passes.plan_overlap import PlanOverlap
from moec.passes.runner import run_passes
from moec.routing import RoutingTrace
from moec.topology import Cluster, Device, Link
from tests.programs import HIDDEN, gqa, mla, moe, plan, program_of

TOKENS, SEQUENCES = 64, 8
#: 2 nodes of 4: memory 1000 GB/s, 10 TFLOP/s; 100 GB/s and 2 us inside, 10 GB/s and 8 us between, 2 messages at once.
POD = Cluster("pod", 2, 4, Device(None, 1000.0, (("fp32", 10.0),)), Link(100.0, 2.0, 2), Link(10.0, 8.0, 2))
#: A message: a row of 10 fp32, and 2 ids and weights.
MESSAGE, ROW = 40 + 16, 40


def on_pod(exchange: str, combine: str, cluster: Cluster = POD, experts: int = 8, **degrees: int) -> Plan:
    """One sparse layer of 8 experts, 2 chosen, on ep=8 over both nodes, or on `degrees`."""
    chosen = plan([moe(experts)], **(degrees or {"dp": 8, "ep": 8}))
    phases = {
        name: replace(getattr(chosen, name), tokens=tokens, exchange=exchange, combine=combine)
        for name, tokens in (("prefill", TOKENS), ("decode", SEQUENCES))
    }
    return replace(chosen, mesh=replace(chosen.mesh, cluster=cluster), **phases)


def lowered(chosen: Plan, phase: str = "prefill") -> Program:
    program = program_of(chosen, phase)
    run_passes(program, [cls() for cls in PASSES])
    return program


def costs(program: Program, op: str, body: str = "sparse") -> list[NodeCost]:
    return [cost for name, cost in node_costs(program) if name == body and of_operation(cost) == op]


# --- between ranks ------------------------------------------------------------------------------------------------


def test_a_flat_exchange_by_hand() -> None:
    """A token wants each rank's one expert with probability 1/4: 16 of 64 rows to every rank, 3 near and 4 far."""
    out, back = costs(lowered(on_pod("flat", "reduced")), "all_to_all.start")
    assert out.bytes == pytest.approx((2 * 16 * MESSAGE, 3 * 16 * MESSAGE, 4 * 16 * MESSAGE))
    assert back.bytes == pytest.approx((2 * 16 * ROW, 3 * 16 * ROW, 4 * 16 * ROW))
    assert out.messages == back.messages == (0, 3, 4)
    near, far = 2 * 2.0 + 3 * 16 * MESSAGE / 100e3, 2 * 8.0 + 4 * 16 * MESSAGE / 10e3
    assert near < far and out.us == pytest.approx(far)  # both links work at once
    assert dict(out.terms) == pytest.approx({"latency": 16.0, "inter": 4 * 16 * MESSAGE / 10e3})


def test_rows_in_order_come_home_one_by_one() -> None:
    """2 pairs a token over 8 ranks: 16 rows from each rank, as with sums where a rank has one expert; with 2, more."""
    one, two = (costs(lowered(on_pod("flat", "ordered", experts=n)), "all_to_all.start") for n in (8, 16))
    assert one[1].bytes == pytest.approx((2 * 16 * ROW, 3 * 16 * ROW, 4 * 16 * ROW))
    touched = 1 - (14 * 13) / (16 * 15)
    assert two[0].bytes[2] == pytest.approx(4 * 64 * touched * MESSAGE)
    assert two[1].bytes[2] == pytest.approx(4 * 16 * ROW) and 64 * touched < 16


def test_two_hops_by_hand() -> None:
    """A node is wanted with 1 - C(4,2)/C(8,2) = 11/14; inside it each of 4 ranks with 1/4 of both nodes' rows."""
    far, near, back_near, back_far = costs(lowered(on_pod("two_hop", "reduced")), "all_to_all.start")
    rows = 64 * 11 / 14
    assert far.bytes == pytest.approx((2 * rows * MESSAGE, 0.0, rows * MESSAGE))
    assert near.bytes == pytest.approx((2 * 32 * MESSAGE, 3 * 32 * MESSAGE, 0.0))
    assert (back_near.bytes[1], back_far.bytes[2]) == pytest.approx((3 * 32 * ROW, rows * ROW))
    assert (far.messages, near.messages) == ((0, 0, 1), (0, 3, 0))


def test_aggregate_sends_large_messages_over_the_network() -> None:
    """First to the rank at the place of the experts' ranks: each place has 2 of 8 experts, wanted with 13/28."""
    near, far, *_ = costs(lowered(on_pod("aggregate", "reduced")), "all_to_all.start")
    assert near.bytes == pytest.approx((2 * 64 * 13 / 28 * MESSAGE, 3 * 64 * 13 / 28 * MESSAGE, 0.0))
    assert far.bytes == pytest.approx((2 * 64 * MESSAGE, 0.0, 64 * MESSAGE))  # 4 ranks' rows, each with 1/4
    assert (near.messages, far.messages) == ((0, 3, 0), (0, 0, 1))


@pytest.mark.parametrize(("capacity", "seats"), [(None, 8), (1.0, 2), (1.5, 3), (9.0, 8)])
def test_padded_sends_its_seats_full_or_not(capacity: float | None, seats: int) -> None:
    chosen = on_pod("padded", "reduced")
    program = lowered(replace(chosen, decode=replace(chosen.decode, capacity=capacity)), "decode")
    out, back = costs(program, "all_to_all.start")
    assert (out.bytes[1:], back.bytes[1:]) == (
        (3 * seats * MESSAGE, 4 * seats * MESSAGE),
        (3 * seats * ROW, 4 * seats * ROW),
    )
    assert not costs(program, "exchange_counts")


def test_gather_sends_all_rows_to_all_ranks() -> None:
    program = lowered(on_pod("gather", "reduced"))
    rows, ids, weights = costs(program, "all_gather_rows")
    (summed,) = costs(program, "reduce_scatter_rows")
    assert [c.bytes[2] for c in (rows, ids, weights)] == [4 * 64 * ROW, 4 * 64 * 2 * 8, 4 * 64 * 2 * 4]
    assert summed.bytes == (2 * 64 * ROW + 9 * 64 * ROW, 3 * 64 * ROW, 4 * 64 * ROW)
    assert dict(summed.terms)["memory"] == pytest.approx(9 * 64 * ROW / 1000e3)


def test_an_all_reduce_sums_shares_and_gathers_them() -> None:
    """[64, 10] over 2 ranks of a node: half to the peer, twice."""
    program = lowered(on_pod("flat", "ordered", dp=4, tp=2, ep=4, etp=2))
    reduced = costs(program, "all_reduce")[0]
    assert reduced.bytes[1:] == (2 * 32 * ROW, 0.0) and reduced.messages == (0, 2, 0)
    assert dict(reduced.terms)["latency"] == 2 * 2.0  # two rounds of one message


def test_chunks_share_the_rows_and_repeat_the_messages() -> None:
    whole = lowered(on_pod("two_hop", "reduced"))
    cut = chunked(on_pod("two_hop", "reduced"), "2")
    before, after = (costs(program, "all_to_all.start") for program in (whole, cut))
    assert len(after) == 2 * len(before)
    for index in range(3):
        assert sum(c.bytes[index] for c in after) == pytest.approx(sum(c.bytes[index] for c in before))
        assert sum(c.messages[index] for c in after) == 2 * sum(c.messages[index] for c in before)


# --- on a rank ----------------------------------------------------------------------------------------------------


def test_products_take_the_longer_of_arithmetic_and_memory() -> None:
    program = lowered(on_pod("flat", "ordered"))
    (router,) = costs(program, "router_logits")
    assert router.flops == 2 * 64 * 8 * HIDDEN
    assert router.bytes == (4 * (64 * HIDDEN + 8 * HIDDEN + 64 * 8), 0.0, 0.0)
    assert router.us == pytest.approx(max(router.flops / 10e6, router.bytes[0] / 1000e3))
    assert router.terms[0][0] == ("compute" if router.flops / 10e6 > router.bytes[0] / 1000e3 else "memory")


def test_only_experts_in_use_are_read() -> None:
    """4 of 8 experts on a rank, 2 chosen: with one token of each of 2 ranks an expert is used with 1 - (3/4)^2."""
    chosen = on_pod("flat", "ordered", dp=2, ep=2, cluster=replace(POD, num_nodes=1, devices_per_node=2))
    one = replace(chosen, decode=replace(chosen.decode, tokens=1))
    few, many = (costs(lowered(p, "decode"), "grouped_gate_up")[0] for p in (one, chosen))
    expert, used = 2 * 6 * HIDDEN * 4, 4 * (1 - 0.75**2)
    assert few.bytes[0] == pytest.approx(used * expert + 2 * (HIDDEN + 6) * 4 + 4 * 4, abs=4 * 4)
    assert few.flops == pytest.approx(2 * 2 * HIDDEN * 12)
    assert many.bytes[0] > 4 * (1 - 0.75**16) * expert


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_attention_reads_what_is_cached(kind: str) -> None:
    """A decode step reads half of `context` for each of 8 sequences; flops are of the products per key."""
    attention = gqa(4, 2) if kind == "gqa" else mla(4)
    program = lowered(plan([moe()], attention), "decode")
    name = "attention" if kind == "gqa" else "mla_attention"
    (cost,) = costs(program, name)
    half, width = 8, 4
    if kind == "gqa":  # 2 KV heads of 4; q and o of 4 heads
        assert cost.bytes[0] == width * 8 * (2 * 16 + 2 * 8 + half * 2 * 8)
        assert cost.flops == 4 * 8 * 16 * half
    else:  # latent 5 and rope 2; absorbed: scores over 5 + 2, values over 5
        assert cost.flops == 2 * 8 * 4 * (half * (2 * 5 + 2) + 5 * (3 + 4))
        assert cost.bytes[0] > width * 8 * half * (5 + 2)


def chunked(chosen: Plan, overlap: str, phase: str = "prefill") -> Program:
    program = program_of(chosen, phase)
    program.overlap = overlap
    run_passes(program, [cls() for cls in PASSES if cls is not PlanOverlap])
    return program


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_chunks_of_attention_share_its_work(phase: str) -> None:
    """Of a prompt of 16 the first half looks at 4 keys a row, the second at 12, which reads the first half again."""
    chosen = plan([moe()], gqa(4, 2), dp=2, ep=2)
    (whole,) = costs(lowered(chosen, phase), "attention")
    first, second = costs(chunked(chosen, "2:layer", phase), "attention")
    assert first.flops + second.flops == pytest.approx(whole.flops)
    if phase == "prefill":
        assert (first.flops, second.flops) == (4 * 8 * 16 * 4, 4 * 8 * 16 * 12)
        assert second.bytes[0] - first.bytes[0] == 4 * 8 * 2 * 8  # keys and values of 8 rows, 2 heads of 4
    else:
        assert first.flops == second.flops
        assert first.bytes[0] + second.bytes[0] == pytest.approx(whole.bytes[0])


def test_latents_of_the_chunks_before_are_expanded_again() -> None:
    """kv_b makes 7 numbers of each of 5 latents for 4 heads: of 16 rows at once, or of 8 and then of 16."""
    chosen = plan([moe()], mla(4), dp=2, ep=2)
    (whole,) = costs(lowered(chosen), "mla_attention")
    halves = costs(chunked(chosen, "2:layer"), "mla_attention")
    assert sum(half.flops for half in halves) - whole.flops == pytest.approx(2 * 8 * 4 * 5 * 7)


def test_a_chunk_uses_fewer_experts() -> None:
    """One token of each of 2 ranks in each half: of 4 experts on a rank 4 * (1 - (3/4)^2) are read."""
    chosen = on_pod("flat", "reduced", dp=2, ep=2, cluster=replace(POD, num_nodes=1, devices_per_node=2))
    two = replace(chosen, decode=replace(chosen.decode, tokens=2))
    halves = costs(chunked(two, "2", "decode"), "grouped_gate_up")
    expert, used = 2 * 6 * HIDDEN * 4, 4 * (1 - 0.75**2)
    assert [half.bytes[0] for half in halves] == pytest.approx([used * expert + 2 * (HIDDEN + 6) * 4] * 2, abs=4 * 4)


def test_views_cost_nothing_and_every_operation_has_a_time() -> None:
    found = list(node_costs(lowered(on_pod("two_hop", "reduced"))))
    assert all(cost.us is not None and cost.us >= 0 for _, cost in found)
    assert {cost.us for _, cost in found if of_operation(cost) in ("split_heads", "all_to_all.wait")} == {0.0}
    assert all(cost.us for _, cost in found if of_operation(cost) in ("fan_out", "group_rows", "linear", "add"))


def test_what_the_cluster_does_not_say_is_unknown() -> None:
    bare = replace(POD, device=Device(), inter=None)
    program = lowered(on_pod("flat", "reduced", cluster=bare))
    (router,), (out, _) = costs(program, "router_logits"), costs(program, "all_to_all.start")
    assert (router.us, router.unknown, router.flops) == (None, ("memory", "compute"), 2 * 64 * 8 * HIDDEN)
    assert (out.us, out.unknown) == (None, ("inter",)) and out.bytes[2] > 0


def test_devices_of_many_nodes_are_not_looked_at_in_pairs() -> None:
    """1,024 ranks, an expert group of 256 over 32 nodes, four times: closed forms, in the time of a small one."""
    wide = Cluster("wide", 128, 8, POD.device, POD.intra, POD.inter)
    program = lowered(on_pod("flat", "reduced", wide, 256, dp=1024, edp=4, ep=256))
    out, _ = costs(program, "all_to_all.start")
    assert out.messages == (0, 7, 248)
    assert out.bytes[2] == pytest.approx(248 * 64 * 2 / 256 * MESSAGE)


# --- with a trace -------------------------------------------------------------------------------------------------


def test_a_trace_makes_the_rank_of_popular_experts_the_busiest() -> None:
    """All tokens choose experts 0 and 1: 64 rows from each of 8 ranks to ranks 0 and 1, none elsewhere."""
    program = lowered(on_pod("flat", "reduced"))
    assert sizes_of(program, program.bodies["sparse"]).dim("X") == 128
    program.routing = RoutingTrace(np.tile(np.array([0, 1]), (1, 100, 1)))
    out, _ = costs(program, "all_to_all.start")
    assert out.bytes == pytest.approx((2 * 64 * MESSAGE, 3 * 64 * MESSAGE, 4 * 64 * MESSAGE))
    sizes = sizes_of(program, program.bodies["sparse"])
    assert (sizes.dim("P"), sizes.dim("R"), sizes.dim("X")) == (128, 512, 512)


def test_layers_of_a_trace_go_to_their_bodies() -> None:
    """Two kinds of sparse layer, at depths 0 and 1: each reads its own layer of the trace."""
    chosen = on_pod("flat", "reduced")
    layers = plan([moe(8), moe(8, 4)], dp=8, ep=8)
    program = lowered(replace(chosen, model=layers.model))
    program.routing = RoutingTrace(np.array([[[0, 1]], [[2, 7]]]))
    first, second = (sizes_of(program, program.bodies[name]).route for name in ("sparse", "sparse_2"))
    assert first is not None and second is not None
    held = list(range(8))
    assert first.routing.pairs(held, 8).tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    assert second.routing.pairs(held, 8).tolist() == [0, 0, 1, 0, 0, 0, 0, 1]
