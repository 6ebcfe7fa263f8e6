"""Every exchange of routed tokens, all ranks in one process, on the torch kernels; and experts to exchange with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moec.placement import Placement
from moec.runtime.context import DROPPED, Context
from moec.runtime.kernels import torch_exchange as x
from moec.runtime.kernels import torch_moe as k
from moec.runtime.kernels import torch_pairs as pairing
from tests.contexts import context

#: One rank's tokens [S, D], ids [S, k] and weights [S, k].
Batch = tuple[Tensor, Tensor, Tensor]
#: Rows of one rank's experts, end of each one's rows, slot -> expert id: the rows they give.
Experts = Callable[[Tensor, Tensor, tuple[int, ...]], Tensor]
#: Each rank's result, and how many pairs each rank's experts served.
Exchange = Callable[[list[Batch], Placement, Experts], tuple[list[Tensor], list[int]]]

EP, NODE, LOCAL = "experts.ep", "links.node", "links.local"
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def swap(ctxs: list[Context], group: str, rows: list[Tensor], sizes: list[list[int]]) -> tuple[list[Tensor], list]:
    """The first sizes[r][0] rows of rank r go to its group's rank 0, and so on. Also gives the sizes to go back."""
    mesh = ctxs[0].mesh
    pieces = [part.split(size) for part, size in zip(rows, sizes, strict=True)]
    members = [mesh.group_of(group, rank) for rank in range(mesh.size)]
    found = [[pieces[peer][ranks.index(rank)] for peer in ranks] for rank, ranks in enumerate(members)]
    return [torch.cat(parts) for parts in found], [[part.shape[0] for part in parts] for parts in found]


@dataclass(frozen=True)
class Way:
    """The hops of a lowering (`passes/insert_exchange.py`); the ranks are spread over two nodes where they can be."""

    hops: tuple[str, ...]
    bound: Callable[[int], int] | None = None  # rows of a rank -> room for each destination
    drop: bool = False

    def __call__(self, batches: list[Batch], placement: Placement, experts: Experts) -> tuple[list[Tensor], list[int]]:
        results, served, _ = self.run(batches, placement, experts)
        return results, served

    def run(
        self, batches: list[Batch], placement: Placement, experts: Experts
    ) -> tuple[list[Tensor], list[int], list[int]]:
        """Also gives how many rows each rank left out."""
        ctxs = contexts(placement)
        served = [0] * len(ctxs)
        groups = ctxs[0].mesh.groups()
        hops = self.hops if all(group in groups for group in self.hops) else (EP,) if EP in groups else ()
        results = self._travel(ctxs, batches, hops, experts, served)
        return results, served, [int(ctx.memo.get(DROPPED, {}).get(3, 0)) for ctx in ctxs]

    def _travel(
        self, ctxs: list[Context], batches: list[Batch], hops: tuple[str, ...], experts: Experts, served: list[int]
    ) -> list[Tensor]:
        if not hops:
            return [serve(ctx, batch, experts, served) for ctx, batch in zip(ctxs, batches, strict=True)]
        group, *rest = hops
        most = max(batch[0].shape[0] for batch in batches)
        bound = self.bound(most) if self.bound else None
        sent = [
            x.fan_out(ctx, *batch, table="routed", group=group, bound=bound, drop=self.drop)
            for ctx, batch in zip(ctxs, batches, strict=True)
        ]
        sizes = [[bound] * len(counts) if bound is not None else counts.tolist() for _, counts, _ in sent]
        arrived, back = swap(ctxs, group, [message for message, _, _ in sent], sizes)
        opened = [open_rows(ctx, message, batches[0]) for ctx, message in zip(ctxs, arrived, strict=True)]
        given = self._travel(ctxs, opened, tuple(rest), experts, served)
        returned, _ = swap(ctxs, group, given, back)
        return [
            x.fan_in(ctx, rows, origin, ids, table="routed")
            for ctx, rows, (_, _, origin), (_, ids, _) in zip(ctxs, returned, sent, batches, strict=True)
        ]


def contexts(placement: Placement) -> list[Context]:
    num_ranks = len(placement.slots)
    nodes = 2 if num_ranks % 2 == 0 else 1
    return [context(placement=placement, rank=rank, nodes=nodes) for rank in range(num_ranks)]


def open_rows(ctx: Context, message: Tensor, like: Batch) -> Batch:
    return x.open_rows(ctx, message, hidden=like[0].shape[1], top=like[1].shape[1], dtype=DTYPES[like[0].dtype])


def serve(ctx: Context, batch: Batch, experts: Experts, served: list[int]) -> Tensor:
    """What this rank's experts give for each row; adds to the pairs it has served."""
    held = ctx.placements["routed"].slots[ctx.rank]
    rows, offsets, pairs = pairing.group_rows(ctx, *batch[:2], table="routed")
    served[ctx.rank] += pairs.shape[0]
    return pairing.reduce_rows(ctx, experts(rows, offsets, held), pairs, batch[2], table="routed")


def ordered(batches: list[Batch], placement: Placement, experts: Experts) -> tuple[list[Tensor], list[int]]:
    """`flat` with a row per pair on the way back; on one rank nothing travels."""
    ctxs = contexts(placement)
    if len(ctxs) == 1:
        return Way(())(batches, placement, experts)
    sent = [
        x.fan_out(ctx, *batch, table="routed", group=EP, bound=None, drop=False)
        for ctx, batch in zip(ctxs, batches, strict=True)
    ]
    arrived, came = swap(ctxs, EP, [rows for rows, _, _ in sent], [counts.tolist() for _, counts, _ in sent])
    given, sizes, served = [], [], []
    for ctx, message, recv in zip(ctxs, arrived, came, strict=True):
        rows, ids, _ = open_rows(ctx, message, batches[0])
        grouped, offsets, pairs = pairing.group_rows(ctx, rows, ids, table="routed")
        given.append(pairing.return_rows(ctx, experts(grouped, offsets, placement.slots[ctx.rank]), pairs))
        sizes.append(pairing.count_pairs(ctx, ids, torch.tensor(recv)).tolist())
        served.append(len(pairs))
    home, came = swap(ctxs, EP, given, sizes)
    results = []
    for ctx, rows, told, (_, ids, weights) in zip(ctxs, home, came, batches, strict=True):
        order, wanted = pairing.pair_order(ctx, ids, table="routed", group=EP)
        assert wanted.tolist() == told
        results.append(pairing.combine(ctx, rows, order, weights, table="routed"))
    return results, served


def gather(batches: list[Batch], placement: Placement, experts: Experts) -> tuple[list[Tensor], list[int]]:
    """Every rank sees all tokens, serves its own experts, and the parts are summed."""
    whole = tuple(torch.cat(column) for column in zip(*batches, strict=True))
    served = [0] * len(placement.slots)
    parts = [serve(ctx, whole, experts, served) for ctx in contexts(placement)]  # type: ignore[arg-type]
    total = torch.stack(parts).float().sum(0).to(whole[0].dtype)
    return list(total.split([batch[0].shape[0] for batch in batches])), served


EXCHANGES: dict[str, Exchange] = {
    "ordered": ordered,
    "reduced": Way((EP,)),
    "padded": Way((EP,), bound=lambda rows: max(rows, 1)),
    "gather": gather,
    "two_hop": Way((NODE, LOCAL)),
    "aggregate": Way((LOCAL, NODE)),
}


def constants(values: list[float]) -> Experts:
    """Expert e turns a row into values[e] everywhere, whatever the row holds."""

    def experts(rows: Tensor, offsets: Tensor, held: tuple[int, ...]) -> Tensor:
        width = rows.shape[1]
        w = torch.stack([torch.full((width, width), values[e] / width) for e in held])
        return k.grouped_linear(context(), torch.ones_like(rows), offsets, w)

    return experts


def gated(num_experts: int, hidden: int, inner: int) -> tuple[Experts, Tensor, Tensor]:
    """Random gated experts, and their weights gate_up [E, 2 I, D] and down [E, D, I]."""
    generator = torch.Generator().manual_seed(num_experts)
    gate_up = torch.randn(num_experts, 2 * inner, hidden, generator=generator) * hidden**-0.5
    down = torch.randn(num_experts, hidden, inner, generator=generator)

    def experts(rows: Tensor, offsets: Tensor, held: tuple[int, ...]) -> Tensor:
        act = k.grouped_gate_up(context(), rows, offsets, gate_up[list(held)].to(rows.dtype))
        return k.grouped_linear(context(), act, offsets, down[list(held)].to(rows.dtype))

    return experts, gate_up, down


def exact(batch: Batch, gate_up: Tensor, down: Tensor) -> Tensor:
    """The same in fp64, token by token and choice by choice."""
    x, ids, weights = batch
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for expert, weight in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ x[t].double()).chunk(2)
            out[t] += weight * (down[expert].double() @ (gate * gate.sigmoid() * up))
    return out


def random_batches(sizes: list[int], num_experts: int, top: int, hidden: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(sum(sizes))
    batches = []
    for size in sizes:
        order = [torch.randperm(num_experts, generator=generator)[:top] for _ in range(size)]
        ids = torch.stack(order) if order else torch.empty(0, top, dtype=torch.int64)
        batches.append(
            (torch.randn(size, hidden, generator=generator), ids, torch.rand(size, top, generator=generator))
        )
    return batches
