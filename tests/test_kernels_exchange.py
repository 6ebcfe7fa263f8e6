"""Each kernel of the exchange against the reference, pair by pair; padding and what it drops; what is refused.

Legend: N rows, R rows at their experts, D hidden, k choices, n ranks of a group, W bytes of a message.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moec.checked import Phase
from moec.diagnostics import MoecError
from moec.ir.evaluator import exchange as reference
from moec.ir.evaluator.local import Context as ReferenceContext
from moec.ir.evaluator.program import Reference
from moec.ir.program import op_of
from moec.passes import PASSES
from moec.passes.runner import run_passes
from moec.placement import Placement, linear
from moec.runtime.context import DROPPED, DTYPES, Context
from moec.runtime.executor import Executor
from moec.runtime.groups import make_groups
from moec.runtime.kernels import torch_exchange as x
from moec.runtime.kernels import torch_pairs as pairing
from moec.runtime.kv import allocate_kv
from moec.runtime.launch.job import run_ranks
from moec.runtime.launch.rank import Rank
from moec.runtime.step import Piece, make_step
from tests.contexts import context, poisoned_memory
from tests.exchanges import EP, LOCAL, NODE, Way, constants, random_batches
from tests.known_experts import known_program, known_weights
from tests.programs import SPAN, compiled, moe, plan

SEEDS = range(30)


@dataclass(frozen=True)
class Case:
    """Rows of one rank on a random mesh, some ids -1, some twice in a row, some ranks without experts."""

    ctx: Context
    exact: ReferenceContext
    dtype: str
    rows_ND: Tensor
    ids_Nk: Tensor
    weights_Nk: Tensor

    @property
    def top(self) -> int:
        return self.ids_Nk.shape[1]

    @property
    def groups(self) -> list[str]:
        return [group for group in (EP, NODE, LOCAL) if group in self.ctx.mesh.groups()]


def case(seed: int, with_holes: bool = True) -> Case:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    ep, nodes = rng.choice(((2, 1), (3, 1), (3, 3), (4, 2), (6, 2), (6, 3), (8, 2), (8, 4)))
    num_experts, rows, hidden, top = rng.randint(1, 12), rng.choice((0, 1, 5, 14)), rng.randint(1, 9), rng.randint(1, 4)
    experts = rng.sample(range(num_experts), num_experts)
    ends = [0, *sorted(rng.randint(0, num_experts) for _ in range(ep - 1)), num_experts]
    placement = Placement(tuple(tuple(experts[a:b]) for a, b in itertools.pairwise(ends)))
    ctx = context(placement=placement, rank=rng.randrange(ep), nodes=nodes)
    program: Any = SimpleNamespace(mesh=ctx.mesh, placements=ctx.placements)
    dtype = rng.choice(("fp32", "bf16", "fp16"))
    return Case(
        ctx,
        ReferenceContext(program, ctx.rank, 3, [], {}),
        dtype,
        torch.randn(rows, hidden, generator=generator).to(DTYPES[dtype]),
        torch.randint(-1 if with_holes else 0, num_experts, (rows, top), generator=generator),
        torch.rand(rows, top, generator=generator),
    )


def close(found: Tensor, wanted: Tensor, dtype: str) -> None:
    assert found.dtype == DTYPES[dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=torch.finfo(found.dtype).eps, atol=1e-5)


# --- against the reference ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_fan_out_and_open_rows(seed: int, bounded: bool) -> None:
    c = case(seed)
    for group in c.groups:
        settings: dict[str, Any] = {"table": "routed", "group": group, "bound": 3 if bounded else None, "drop": bounded}
        with poisoned_memory():
            message, counts, origin = x.fan_out(c.ctx, c.rows_ND, c.ids_Nk, c.weights_Nk, **settings)
        opened = x.open_rows(c.ctx, message, hidden=c.rows_ND.shape[1], top=c.top, dtype=c.dtype)
        exact, *told = reference.fan_out(c.exact, c.rows_ND.double(), c.ids_Nk, c.weights_Nk, **settings)
        wanted = reference.open_rows(c.exact, exact, c.rows_ND.shape[1], c.top, c.dtype)
        assert [counts.tolist(), origin.tolist()] == [value.tolist() for value in told]
        assert torch.equal(opened[1], wanted[1])
        is_used = origin >= 0
        for found, value in zip(opened, wanted, strict=True):
            assert torch.equal(found[is_used].double(), value[is_used].double())


@pytest.mark.parametrize("seed", SEEDS)
def test_group_reduce_and_return_rows(seed: int) -> None:
    c = case(seed)
    with poisoned_memory():
        rows, offsets, pairs = pairing.group_rows(c.ctx, c.rows_ND, c.ids_Nk, table="routed")
        reduced = pairing.reduce_rows(c.ctx, rows, pairs, c.weights_Nk, table="routed")
        returned = pairing.return_rows(c.ctx, rows, pairs)
    exact, ends, order = reference.group_rows(c.exact, c.rows_ND.double(), c.ids_Nk, "routed")
    assert rows.dtype == c.rows_ND.dtype and torch.equal(rows.double(), exact)
    assert offsets.dtype == torch.int32 and offsets.tolist() == ends.tolist()
    assert pairs.tolist() == order.tolist()
    close(reduced, reference.reduce_rows(c.exact, exact, order, c.weights_Nk.double(), "routed"), c.dtype)
    assert torch.equal(returned.double(), reference.return_rows(c.exact, exact, order))


@pytest.mark.parametrize("seed", SEEDS)
def test_fan_in(seed: int) -> None:
    c = case(seed)
    for group in c.groups:
        for bound in (None, 3):
            _, _, origin = x.fan_out(
                c.ctx, c.rows_ND, c.ids_Nk, c.weights_Nk, table="routed", group=group, bound=bound, drop=True
            )
            rows = torch.randn(len(origin), c.rows_ND.shape[1]).to(c.rows_ND.dtype)
            with poisoned_memory():
                found = x.fan_in(c.ctx, rows, origin, c.ids_Nk, table="routed")
            close(found, reference.fan_in(c.exact, rows.double(), origin, c.ids_Nk, "routed"), c.dtype)


@pytest.mark.parametrize("seed", SEEDS)
def test_pairs_are_ordered_counted_and_combined(seed: int) -> None:
    c = case(seed, with_holes=False)
    with poisoned_memory():
        order, counts = pairing.pair_order(c.ctx, c.ids_Nk, table="routed", group=EP)
        rows = torch.randn(len(order), c.rows_ND.shape[1]).to(c.rows_ND.dtype)
        combined = pairing.combine(c.ctx, rows, order, c.weights_Nk, table="routed")
    exact_order, exact_counts = reference.pair_order(c.exact, c.ids_Nk, "routed", EP)
    assert (order.tolist(), counts.tolist()) == (exact_order.tolist(), exact_counts.tolist())
    close(combined, reference.combine(c.exact, rows.double(), order, c.weights_Nk.double(), "routed"), c.dtype)
    ids, recv = case(seed).ids_Nk, torch.tensor([c.ids_Nk.shape[0] // 2, 0, -(-c.ids_Nk.shape[0] // 2)])
    assert torch.equal(pairing.count_pairs(c.ctx, ids, recv), reference.count_pairs(c.exact, ids, recv))


def test_the_cases_reach_what_is_rare() -> None:
    cases = [case(seed) for seed in SEEDS]
    assert any(not c.ctx.held("routed") for c in cases), "a rank without experts"
    assert any(c.rows_ND.shape[0] == 0 for c in cases), "no rows"
    assert any((c.ids_Nk < 0).all(1).any() for c in cases if len(c.rows_ND)), "a row for nobody"
    assert any(len(set(ids)) < len(ids) for c in cases for ids in c.ids_Nk.clamp(min=0).tolist()), "an expert twice"
    assert {len(c.groups) for c in cases} == {1, 2, 3}, "one node, one rank a node, several of several"
    assert {c.dtype for c in cases} == set(DTYPES)


# --- sums ---------------------------------------------------------------------------------------------------------


def test_b27_weighted_sums_are_in_fp32() -> None:
    """40000 * 2 passes fp16's largest number, the sum does not; nor is a weight rounded to the rows' dtype."""
    rows = torch.tensor([[40000.0], [-39968.0]], dtype=torch.float16)
    total = pairing.reduce_rows(context(), rows, torch.tensor([0, 1]), torch.tensor([[2.0, 2.0]]), table="routed")
    assert total.dtype == torch.float16 and total.item() == 64.0
    rows = torch.tensor([[256.0], [-256.0]], dtype=torch.bfloat16)
    weights = torch.tensor([[1 + 2.0**-12, 1.0]])
    assert pairing.reduce_rows(context(), rows, torch.tensor([0, 1]), weights, table="routed").item() == 2.0**-4


def test_b27_sums_of_what_comes_back_are_in_fp32() -> None:
    """256 + 1 + 1 in bf16 is 256, one after the other."""
    rows, ids = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16).expand(3, 40), torch.zeros(1, 1).long()
    origin = torch.tensor([0, 0, 0])
    assert x.fan_in(context(), rows, origin, ids, table="routed").unique().tolist() == [258.0]
    rows = torch.tensor([[60000.0], [60000.0], [-60000.0]], dtype=torch.float16).expand(3, 40)
    assert x.fan_in(context(), rows, origin, ids, table="routed").unique().tolist() == [60000.0]


def test_b27_what_exceeds_fp16_saturates() -> None:
    rows = torch.tensor([[60000.0, -60000.0]], dtype=torch.float16)
    total = pairing.reduce_rows(context(), rows, torch.tensor([0]), torch.tensor([[4.0]]), table="routed")
    assert total.tolist() == [[65504.0, -65504.0]]
    twice = x.fan_in(context(), rows.expand(2, 2), torch.tensor([0, 0]), torch.zeros(1, 1).long(), table="routed")
    assert twice.tolist() == [[65504.0, -65504.0]]


@pytest.mark.parametrize("width", [1, 40])
def test_sums_are_in_the_order_of_choices_and_of_destinations(width: int) -> None:
    """1e8 - 1e8 + 1 is 1 in fp32, and 0 where the 1 is not added last."""
    ctx, ids = context(placement=linear(3, 3)), torch.tensor([[2, 1, 0]])
    value = torch.tensor([[1.0], [-1e8], [1e8]]).expand(3, width)  # by expert, which is also the order of arrival
    order, _ = pairing.pair_order(ctx, ids, table="routed", group=EP)
    assert order.tolist() == [2, 1, 0]
    for kernel in (pairing.combine, pairing.reduce_rows):
        assert kernel(ctx, value, order, torch.ones(1, 3), table="routed").unique().tolist() == [1.0]
    origin = torch.tensor([0, 0, 0])
    assert x.fan_in(ctx, value, origin, ids, table="routed").unique().tolist() == [0.0]
    assert x.fan_in(ctx, value.flip(0), origin, ids, table="routed").unique().tolist() == [1.0]


def test_threads_change_no_bit() -> None:
    """Each count in a process of its own: one that forks ranks later must not have started threads of torch."""
    ids, weights = torch.stack([torch.randperm(8)[:4] for _ in range(600)]), torch.rand(600, 4)
    rows = torch.randn(2400, 64)

    def main(rank: Rank) -> object:
        order, _ = pairing.pair_order(context(placement=linear(8, 4)), ids, table="routed", group=EP)
        found = pairing.combine(context(), rows, order, weights, table="routed")
        return torch.get_num_threads(), hashlib.sha256(found.numpy().tobytes()).hexdigest()

    found = dict(run_ranks(main, 1, threads=number)[0] for number in (1, 2, 3))  # type: ignore[misc]
    assert list(found) == [1, 2, 3] and len(set(found.values())) == 1


# --- padding ------------------------------------------------------------------------------------------------------


def bound_of(tokens: int, count: int, top: int, ep: int, capacity: float) -> int:
    """Rows per destination of the padded exchange that such a plan compiles to."""
    phase = Phase("prefill", tokens, "padded", SPAN, "reduced", capacity, True)
    spec = plan([moe(count=count, top=top)], dp=ep, ep=ep)
    program = compiled(type(spec)(**{**vars(spec), "prefill": phase}))
    found = next(node for _, node in program.nodes() if op_of(node).name == "fan_out").kwargs["bound"]
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize("capacity", [1.0, 4.0])
def test_b38_room_is_at_most_for_every_token(capacity: float) -> None:
    """3 tokens, 2 experts, top 2: every rank gets every token, none is dropped."""
    bound = bound_of(tokens=3, count=2, top=2, ep=2, capacity=capacity)
    assert bound == 3
    batches = random_batches([3, 3], num_experts=2, top=2, hidden=4)
    way = Way((EP,), bound=lambda rows: bound, drop=True)
    results, served, dropped = way.run(batches, linear(2, 2), constants([1.0, 2.0]))
    assert (served, dropped) == ([6, 6], [0, 0])
    for (_, ids, weights), found in zip(batches, results, strict=True):
        torch.testing.assert_close(found[:, 0], ((ids + 1) * weights).sum(1))


def test_b38_what_does_not_fit_gives_zero_and_is_counted() -> None:
    """5 tokens for expert 0 of 4, top 1, capacity 1: the first 2 are served."""
    bound = bound_of(tokens=5, count=4, top=1, ep=4, capacity=1.0)
    assert bound == 2
    ids = torch.zeros(5, 1, dtype=torch.int64)
    batch = (torch.randn(5, 4), ids, torch.ones(5, 1))
    none = (torch.empty(0, 4), ids[:0], torch.empty(0, 1))
    with poisoned_memory():
        results, served, dropped = Way((EP,), bound=lambda rows: bound, drop=True).run(
            [none, batch, none, none], linear(4, 4), constants([3.0, 5.0, 5.0, 5.0])
        )
    assert results[1].tolist() == [[3.0] * 4] * 2 + [[0.0] * 4] * 3
    assert (served, dropped) == ([2, 0, 0, 0], [0, 3, 0, 0])


def test_dropped_rows_add_up_by_layer() -> None:
    ctx, ids = context(placement=linear(4, 4)), torch.ones(5, 1, dtype=torch.int64)
    for layer in (3, 3, 4):
        settings: dict[str, Any] = {"table": "routed", "group": EP, "bound": 2, "drop": True}
        x.fan_out(ctx.at(layer), torch.zeros(5, 4), ids, torch.ones(5, 1), **settings)
    assert {layer: int(rows) for layer, rows in ctx.memo[DROPPED].items()} == {3: 6, 4: 3}


def test_on_ranks_dropped_tokens_pass_by_their_experts_and_are_counted() -> None:
    """12 tokens of rank 0 for expert 0 on rank 1, room for 8 (an even share of 16): 4 keep their embedding."""
    program = known_program(2, 1, 0, "padded", dp=2, ep=2)
    program.combine, program.capacity, program.drop = "reduced", 1.0, True
    weights = known_weights(program, [(1,)] * 12, lambda expert: 3.0 + expert, 0.0)
    run_passes(program, [cls() for cls in PASSES])
    source = Reference(program, weights)

    def main(rank: Rank) -> dict[str, object]:
        tensors = {
            name if layer is None else f"layers.{layer}.{name}": source._param(param, layer, rank.rank).float()
            for run in program.runs
            for layer in run.layers or (None,)
            for name, param in program.bodies[run.body].params.items()
        }
        groups = make_groups(program.mesh, rank)
        executor = Executor(program, tensors, allocate_kv(program), rank=rank.rank, groups=groups, status=rank.status)
        rows = 0 if rank.rank else 12
        sums = executor.run(make_step([Piece(range(rows), 0, 0, "all")])) - weights["embed"][:rows].float()
        return {"sums": sums[:, 0].tolist(), "dropped": list(executor.dropped.items())}

    home, other = run_ranks(main, 2, threads=1)
    assert home == {"sums": [4.0] * 8 + [0.0] * 4, "dropped": [[0, 4]]}
    assert other == {"sums": [], "dropped": []}


@pytest.mark.parametrize("hidden", [3, 5, 8])
@pytest.mark.parametrize("dtype", DTYPES.values())
def test_a_message_holds_the_row_its_ids_and_its_weights_and_nothing_else(hidden: int, dtype: torch.dtype) -> None:
    """All bytes are written, those that fill the row up to 8 too."""
    rows = torch.randn(1, hidden).to(dtype)
    with poisoned_memory():
        message, _, _ = x.fan_out(
            context(placement=linear(4, 2)),
            rows,
            torch.tensor([[0, 3]]),
            torch.tensor([[0.5, 0.25]]),
            table="routed",
            group=EP,
            bound=None,
            drop=False,
        )
    raw = rows.view(torch.uint8)[0].tolist()
    raw += [0] * (-len(raw) % 8)
    numbers = [torch.tensor([[0, -1], [-1, 3]], dtype=torch.int32), torch.tensor([[0.5, 0.25]] * 2)]
    ids, weights = (part.view(torch.uint8).tolist() for part in numbers)
    assert message.tolist() == [raw + ids[i] + weights[i] for i in range(2)]


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [-2, 8, 300])
def test_an_expert_that_does_not_exist_is_refused(wrong: int) -> None:
    ctx, rows, ids = context(placement=linear(8, 2)), torch.zeros(2, 3), torch.tensor([[0, 1], [2, wrong]])
    settings: dict[str, Any] = {"table": "routed", "group": EP, "bound": None, "drop": False}
    calls = [
        lambda: x.fan_out(ctx, rows, ids, torch.ones(2, 2), **settings),
        lambda: pairing.group_rows(ctx, rows, ids, table="routed"),
        lambda: pairing.pair_order(ctx, ids, table="routed", group=EP),
    ]
    for call in calls:
        with pytest.raises(MoecError, match=f"layer 3: expert {wrong} of `routed` does not exist, it has 8") as error:
            call()
        assert error.value.diagnostics[0].code == "E0507"


def test_pairs_of_no_expert_have_no_place_at_home() -> None:
    with pytest.raises(MoecError, match="expert -1 of `routed` does not exist"):
        pairing.pair_order(context(placement=linear(8, 2)), torch.tensor([[0, -1]]), table="routed", group=EP)


def test_more_rows_than_room_is_refused_unless_the_plan_drops_them() -> None:
    ctx, ids = context(placement=linear(4, 4), rank=2), torch.tensor([[3], [1], [3], [0], [3]])
    with pytest.raises(MoecError) as error:
        x.fan_out(ctx, torch.zeros(5, 4), ids, torch.ones(5, 1), table="routed", group=EP, bound=2, drop=False)
    assert error.value.diagnostics[0].code == "E0511"
    assert str(error.value) == (
        "layer 3: 3 of the 5 rows of rank 2 go to rank 3 of experts.ep, the padded exchange has room for 2"
    )
    assert "raise the phase's `capacity`" in error.value.diagnostics[0].help


def test_room_for_all_but_one_row_is_too_little_and_for_all_is_enough() -> None:
    ctx, ids = context(placement=linear(4, 4)), torch.ones(5, 1, dtype=torch.int64)
    settings: dict[str, Any] = {"table": "routed", "group": EP, "drop": False}
    with pytest.raises(MoecError, match="room for 4"):
        x.fan_out(ctx, torch.zeros(5, 4), ids, torch.ones(5, 1), bound=4, **settings)
    _, counts, origin = x.fan_out(ctx, torch.zeros(5, 4), ids, torch.ones(5, 1), bound=5, **settings)
    assert counts.tolist() == [0, 5, 0, 0] and origin.tolist() == [-1] * 5 + [0, 1, 2, 3, 4] + [-1] * 10


@pytest.mark.parametrize("given", [5, 7])
def test_lost_rows_are_refused(given: int) -> None:
    rows, order, ids = torch.zeros(given, 2), torch.arange(6), torch.zeros(3, 2, dtype=torch.int64)
    calls = {
        f"`routed` gave {given} rows for 6 pairs": lambda: pairing.reduce_rows(
            context(), rows, order, torch.ones(3, 2), table="routed"
        ),
        f"`routed` gave {given} rows for 6 pairs of": lambda: pairing.combine(
            context(), rows, order, torch.ones(3, 2), table="routed"
        ),
        f"experts gave {given} rows for 6 pairs": lambda: pairing.return_rows(context(), rows, order),
        f"{given} rows of `routed` came back for 6 messages": lambda: x.fan_in(
            context(), rows, order, ids, table="routed"
        ),
        "3 rows arrived, 4 were announced": lambda: pairing.count_pairs(context(), ids, torch.tensor([1, 3])),
    }
    for words, call in calls.items():
        with pytest.raises(MoecError, match=f"layer 3: {words}") as error:
            call()
        assert error.value.diagnostics[0].code == "E0508"


def test_combine_wants_a_row_for_every_pair() -> None:
    with pytest.raises(MoecError, match="gave 5 rows for 6 pairs"):
        pairing.combine(context(), torch.zeros(5, 2), torch.arange(5), torch.ones(3, 2), table="routed")
