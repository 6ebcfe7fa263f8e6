"""Collectives on gloo: right rows, sums in rank order, empty ranks take part, wrong splits are errors and not hangs."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from moec.diagnostics import MoecError
from moec.mesh import Mesh
from moec.placement import balanced, span
from moec.runtime import collectives, messages
from moec.runtime.groups import Group, make_groups
from moec.runtime.launch.job import Main, run_ranks
from moec.runtime.launch.rank import Rank
from moec.runtime.step import Piece, Step, make_step


@dataclass(frozen=True)
class Ctx:
    groups: Mapping[str, Group]
    step: Step = field(default_factory=lambda: make_step([]))


def ranks(main: Main, world: int) -> list[object]:
    return run_ranks(main, world, threads=1)


@pytest.fixture(params=["in one call", "message by message"])
def each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's pieces count as small, then as large."""
    if request.param == "message by message":
        monkeypatch.setattr(messages, "_SMALL_BYTES", -1)


def ep_context(rank: Rank) -> Ctx:
    return Ctx(make_groups(Mesh(dp=rank.world, ep=rank.world), rank))


EP = {"table": "routed", "group": "experts.ep"}


def round_trip(rank: Rank, counts: list[int], dtype: torch.dtype = torch.float32) -> dict[str, object]:
    """Rows there and back; a row is 100 * sender + its number. `counts`: how many go to each rank."""
    ctx = ep_context(rank)
    counts_t = torch.tensor(counts)
    rows = (torch.arange(sum(counts)) + 100 * rank.rank).unsqueeze(1).expand(-1, 2).to(dtype)
    recv = collectives.exchange_counts(ctx, counts_t, **EP)
    got = collectives.all_to_all_wait(ctx, collectives.all_to_all_start(ctx, rows, counts_t, recv, **EP))
    home = collectives.all_to_all_start(ctx, got, counts_t, recv, **EP, back=True)
    is_same = torch.equal(collectives.all_to_all_wait(ctx, home), rows)
    return {"recv": recv.tolist(), "rows": got[:, 0].int().tolist(), "home": is_same}


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_to_all_moves_uneven_rows_there_and_back(dtype: torch.dtype) -> None:
    sent = [[2, 1, 3], [0, 0, 1], [1, 4, 0]]
    got = ranks(lambda rank: round_trip(rank, sent[rank.rank], dtype), 3)
    assert [r["recv"] for r in got] == [[2, 0, 1], [1, 0, 4], [3, 1, 0]]
    assert [r["rows"] for r in got] == [[0, 1, 200], [2, 201, 202, 203, 204], [3, 4, 5, 100]]
    assert all(r["home"] for r in got)


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize(
    "sent",
    [
        [[1, 1], [0, 0]],  # B33 a
        [[0, 0], [0, 0]],  # b: nobody sends
        [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],  # c: half the ranks idle
        [[1, 0, 0, 0], [0] * 4, [0] * 4, [0] * 4],  # B36: one token, three ranks receive nothing
    ],
)
def test_zero_splits_complete_with_the_right_rows(sent: list[list[int]]) -> None:
    got = ranks(lambda rank: round_trip(rank, sent[rank.rank]), len(sent))
    for here, result in enumerate(got):
        assert len(result["rows"]) == sum(row[here] for row in sent)
        assert result["home"]


def test_receive_list_off_by_one_is_an_error_naming_both_ranks_and_numbers() -> None:
    """B33 d: the launcher's line is the culprit's, and the peer that waits is not left hanging."""

    def main(rank: Rank) -> None:
        ctx = ep_context(rank)
        counts = torch.tensor([2, 3])
        recv = collectives.exchange_counts(ctx, counts, **EP)
        if rank.rank == 1:
            recv[0] += 1
        messages.finish(collectives.all_to_all_start(ctx, torch.zeros(5, 4), counts, recv, **EP))

    with pytest.raises(MoecError) as error:
        ranks(main, 2)
    assert error.value.diagnostics[0].code == "E0610"
    assert "rank 1 expects 4 rows from rank 0, which announced 3" in str(error.value)
    assert error.value.exit_code == 70


@pytest.mark.usefixtures("each_way")
def test_a_peer_that_left_is_an_error_on_the_rank_that_waits() -> None:
    def main(rank: Rank) -> str:
        ctx = ep_context(rank)
        if rank.rank == 1:
            return "left"
        with pytest.raises(MoecError) as error:
            collectives.all_to_all_wait(ctx, collectives.all_to_all_start(ctx, torch.zeros(2, 4), **EP))
        return error.value.diagnostics[0].code

    assert ranks(main, 2) == ["E0602", "left"]


@pytest.mark.parametrize(
    ("rows", "counts", "words"),
    [
        (5, [2, 2], "announced|has 5 rows"),  # B33 e: more rows than the lists say
        (5, [1, 2, 2], "3 rows for exchange_counts"),
    ],
)
def test_splits_that_do_not_fit_the_rows_are_refused_before_data_moves(
    rows: int, counts: list[int], words: str
) -> None:
    def main(rank: Rank) -> None:
        ctx = ep_context(rank)
        recv = collectives.exchange_counts(ctx, torch.tensor(counts), **EP)
        collectives.all_to_all_start(ctx, torch.zeros(rows, 4), torch.tensor(counts), recv, **EP)

    with pytest.raises(MoecError, match=words) as error:
        ranks(main, 2)
    assert error.value.diagnostics[0].code == "E0610"


def test_exchanges_under_way_at_once_do_not_mix() -> None:
    """Large ones and small ones, finished in another order than they were started, both ways between two ranks."""
    sizes = [1, 100_000, 3, 200_000]

    def main(rank: Rank) -> list[object]:
        ctx = ep_context(rank)
        sent = [torch.full((2, size), 10.0 * rank.rank + i) for i, size in enumerate(sizes)]
        pending = [collectives.all_to_all_start(ctx, x, **EP) for x in sent]
        return [collectives.all_to_all_wait(ctx, pending[i]).unique(dim=1).tolist() for i in (3, 0, 2, 1)]

    assert ranks(main, 2) == [[[[i], [10.0 + i]] for i in (3, 0, 2, 1)]] * 2


def test_how_rows_go_depends_on_what_all_ranks_know() -> None:
    """Rank 0 sends one large piece, the others small ones; all of them take the way of large pieces, there and back."""
    rows = [[0, 300, 1], [1, 0, 1], [0, 0, 0]]

    def main(rank: Rank) -> list[int]:
        ctx, counts = ep_context(rank), torch.tensor(rows[rank.rank])
        recv = collectives.exchange_counts(ctx, counts, **EP)
        there = collectives.all_to_all_start(ctx, torch.zeros(int(counts.sum()), 64), counts, recv, **EP)
        back = collectives.all_to_all_start(ctx, collectives.all_to_all_wait(ctx, there), counts, recv, **EP, back=True)
        counts = [len(pending.works) for pending in (there, back)]
        collectives.all_to_all_wait(ctx, back)
        return counts

    assert ranks(main, 3) == [[3, 3], [3, 3], [2, 2]]


def test_unequal_batches_finish_and_agree() -> None:
    """B32: 12 and 16 tokens, 4 experts, top 1: the exact splits come from the exchange, not from a local maximum."""

    def main(rank: Rank) -> int:
        return len(round_trip(rank, [12, 0] if rank.rank == 0 else [8, 8])["rows"])

    assert ranks(main, 2) == [20, 8]


def test_counts_of_other_rows_lead_back_only() -> None:
    """Rows of pairs come home by counts that both sides know; nothing leaves by counts that were not exchanged."""
    pairs = [[3, 0], [1, 2]]  # pairs[r][i] of rank r are served by rank i

    def main(rank: Rank) -> dict[str, object]:
        ctx = ep_context(rank)
        wanted, served = torch.tensor(pairs[rank.rank]), torch.tensor([mine[rank.rank] for mine in pairs])
        rows = torch.full((int(served.sum()), 1), float(rank.rank))
        home = collectives.all_to_all_start(ctx, rows, wanted, served, **EP, back=True)
        found = collectives.all_to_all_wait(ctx, home).flatten().tolist()
        assert home.sent is None, "what has left is kept"
        with pytest.raises(MoecError, match="uses counts that were not exchanged in this group") as error:
            collectives.all_to_all_start(ctx, rows, wanted, served, **EP)
        return {"rows": found, "code": error.value.diagnostics[0].code}

    assert ranks(main, 2) == [{"rows": [0, 0, 0], "code": "E0610"}, {"rows": [0, 1, 1], "code": "E0610"}]


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("rows", [0, 2, 6])
def test_without_counts_every_rank_gets_an_equal_piece(rows: int) -> None:
    def main(rank: Rank) -> list[int]:
        ctx = ep_context(rank)
        x = torch.arange(rows, dtype=torch.uint8).unsqueeze(1) + 10 * rank.rank
        return collectives.all_to_all_wait(ctx, collectives.all_to_all_start(ctx, x, **EP)).flatten().tolist()

    half = rows // 2
    assert ranks(main, 2) == [[*range(half), *range(10, 10 + half)], [*range(half, rows), *range(10 + half, 10 + rows)]]


def test_rows_that_do_not_divide_are_refused() -> None:
    def main(rank: Rank) -> str:
        with pytest.raises(MoecError, match="has 5 rows for all_to_all") as error:
            collectives.all_to_all_start(ep_context(rank), torch.zeros(5, 1), **EP)
        return error.value.diagnostics[0].code

    assert ranks(main, 2) == ["E0610", "E0610"]


def gather_group(rank: Rank) -> Ctx:
    return Ctx(make_groups(Mesh(dp=rank.world, ep=rank.world), rank))


@pytest.mark.usefixtures("each_way")
def test_gather_and_reduce_scatter_of_uneven_rows_round_the_rank_order() -> None:
    sizes = [3, 0, 2]

    def main(rank: Rank) -> dict[str, object]:
        ctx = gather_group(rank)
        x = torch.full((sizes[rank.rank], 2), float(rank.rank))
        told = collectives.exchange_sizes(ctx, x, group="experts.ep")
        whole = collectives.all_gather_rows(ctx, x, told, group="experts.ep")
        summed = collectives.reduce_scatter_rows(ctx, whole * (rank.rank + 1), told, group="experts.ep")
        return {"sizes": told.tolist(), "whole": whole[:, 0].tolist(), "summed": summed[:, 1].tolist()}

    for here, result in enumerate(ranks(main, 3)):
        assert result["sizes"] == sizes
        assert result["whole"] == [0, 0, 0, 2, 2]
        assert result["summed"] == [6.0 * here] * sizes[here]


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("numel", [3, 7, 40_001])
def test_all_reduce_adds_in_rank_order_in_fp32(numel: int) -> None:
    """1e8 + 1 - 1e8 is 0 in rank order in fp32 and 1 in another; bf16 inputs are not rounded in between."""

    def main(rank: Rank) -> dict[str, object]:
        ctx = gather_group(rank)
        fp32 = torch.full((numel,), (1e8, 1.0, -1e8)[rank.rank])
        bf16 = torch.full((numel,), (256.0, 1.0, 1.0)[rank.rank], dtype=torch.bfloat16)
        sums = [collectives.all_reduce(ctx, x, group="experts.ep") for x in (fp32, bf16)]
        return {"fp32": sums[0].unique().tolist(), "bf16": sums[1].unique().tolist(), "shape": sums[0].shape[0]}

    for result in ranks(main, 3):
        assert result == {"fp32": [0.0], "bf16": [258.0], "shape": numel}


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_all_gather_joins_shards_along_a_dim(dim: int) -> None:
    whole = torch.arange(4 * 6 * 2).view(4, 6, 2).float()

    def main(rank: Rank) -> bool:
        ctx = Ctx(make_groups(Mesh(tp=2, ep=2), rank))
        shard = whole.chunk(2, dim)[rank.rank]
        return torch.equal(collectives.all_gather(ctx, shard, dim=dim, group="attention.tp"), whole)

    assert ranks(main, 2) == [True, True]


@pytest.mark.parametrize("tokens", [0, 1, 2, 5])
@pytest.mark.parametrize("chunk", [(0, 1), (1, 2)])
def test_relayout_slices_over_tp_and_gathers_back(tokens: int, chunk: tuple[int, int]) -> None:
    """B36: one token over two ranks leaves the second one without rows, in every collective."""

    def main(rank: Rank) -> dict[str, object]:
        step = make_step([Piece(range(tokens), slot=0)])
        ctx = Ctx(make_groups(Mesh(tp=3, ep=3), rank), step=step)
        x = torch.arange(float(tokens)).unsqueeze(1)[span(tokens, *chunk)]
        way = {"parts": 3, "group": "split", "chunk": chunk}
        piece = collectives.relayout(ctx, x, to="experts", how="slice", **way)  # type: ignore[arg-type]
        back = collectives.relayout(ctx, piece, to="attention", how="gather", **way)  # type: ignore[arg-type]
        return {"rows": len(piece), "back": back.flatten().tolist()}

    got, rows = ranks(main, 3), range(tokens)[span(tokens, *chunk)]
    assert tuple(result["rows"] for result in got) == balanced(len(rows), 3)
    assert all(result["back"] == list(rows) for result in got)


@pytest.mark.parametrize(("chunk", "held"), [((0, 1), [0, 0, 0, 0, 1]), ((0, 2), [0, 0, 1]), ((1, 2), [0, 0])])
def test_relayout_gathers_over_dp_and_slices_back(chunk: tuple[int, int], held: list[int]) -> None:
    """Experts cut over etp want the rows of both dp ranks, whose steps differ in length."""
    tokens = [4, 1]

    def main(rank: Rank) -> dict[str, object]:
        step = make_step([Piece(range(tokens[rank.rank]), slot=0)])
        ctx = Ctx(make_groups(Mesh(dp=2, etp=2), rank), step=step)
        x = torch.full((tokens[rank.rank], 1), float(rank.rank))[span(tokens[rank.rank], *chunk)]
        way = {"parts": 2, "group": "split", "chunk": chunk}
        whole = collectives.relayout(ctx, x, to="experts", how="gather", **way)  # type: ignore[arg-type]
        back = collectives.relayout(ctx, whole, to="attention", how="slice", **way)  # type: ignore[arg-type]
        return {"whole": whole.flatten().tolist(), "same": torch.equal(back, x)}

    assert ranks(main, 2) == [{"whole": held, "same": True}] * 2


@pytest.mark.parametrize(
    ("mesh", "wanted"),
    [
        (Mesh(dp=2, tp=2, edp=2, ep=2), {"attention.tp": [[0, 1], [0, 1], [2, 3], [2, 3]]}),
        (Mesh(dp=2, tp=2, edp=2, ep=2), {"experts.ep": [[0, 1], [0, 1], [2, 3], [2, 3]]}),
        (Mesh(dp=4, edp=2, ep=2), {"experts.edp": [[0, 2], [1, 3], [0, 2], [1, 3]]}),
        (
            Mesh(dp=2, tp=3, edp=1, ep=6),
            {"attention.dp": [[0, 3], [1, 4], [2, 5]] * 2, "split": [[0, 1, 2]] * 3 + [[3, 4, 5]] * 3},
        ),
    ],
)
def test_groups_are_the_declared_ones_on_every_rank(mesh: Mesh, wanted: dict[str, list[list[int]]]) -> None:
    """B34, B45: every rank makes every group in one order; members and indices come from the mesh."""

    def main(rank: Rank) -> dict[str, object]:
        groups = make_groups(mesh, rank)
        assert all(group.ranks[group.index] == rank.rank for group in groups.values())
        sums = {
            name: int(
                collectives.all_reduce(SimpleNamespace(groups=groups), torch.tensor([float(rank.rank)]), group=name)
            )
            for name in groups
        }
        return {name: [list(groups[name].ranks), sums[name]] for name in wanted}

    for rank, result in enumerate(ranks(main, mesh.size)):
        for name, lists in wanted.items():
            assert result[name] == [lists[rank], sum(lists[rank])]


def test_groups_initialise_every_time() -> None:
    """B34: overlapping groups over two axes, made twenty times in one world."""
    mesh = Mesh(dp=2, tp=2, edp=2, ep=2)
    names = ["attention.dp", "attention.tp", "experts.edp", "experts.ep", "split", "world"]
    assert ranks(lambda rank: [sorted(make_groups(mesh, rank)) for _ in range(20)], 4) == [[names] * 20] * 4


def test_no_group_of_one_rank_is_made() -> None:
    """B18: group membership comes from the declared mesh only, never from the size of the world."""
    names = ranks(lambda rank: sorted(make_groups(Mesh(dp=2, edp=2, ep=1), rank)), 2)
    assert names == [["attention.dp", "experts.edp", "world"]] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_memory_of_large_tensors_is_used_again() -> None:
    """Tensors of 64 MiB do not always take 16 Ki new pages from the system: those cost more than writing the tensor.

    The first few do: what aligning a tensor leaves over keeps freed ones apart, until malloc has enough such pieces.
    """

    def new_pages() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.zeros(1 << 24)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    assert ranks(lambda rank: min(new_pages() for _ in range(12)), 1)[0] < 1000
