"""What the experts' rank does with pairs of rows and experts, on torch: sorting them by expert, weighing, summing.

A pair is one of a row's k choices: pair r * k + j is choice j of row r. Sums are in fp32, choice after choice, so that
no result depends on how threads are scheduled; fp16 saturates. Here too is what every kernel of an exchange reads:
where each expert is. The messages that carry rows from rank to rank are in `torch_exchange`.

Shapes: N rows of this rank, R rows that arrived, X pairs served here, K pairs of this rank's rows, n ranks of the
group, D hidden, k choices, M experts held here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
import torch.nn.functional as F
from torch import Tensor

from moec.diagnostics import MoecError, fail
from moec.runtime.context import Context
from moec.runtime.device_flags import is_deferred
from moec.runtime.kernels.torch_moe import BUG, lost_rows


def group_rows(ctx: Context, rows_RD: Tensor, ids_Rk: Tensor, *, table: str) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of this rank's experts, expert by expert in order of arrival: rows [X, D], offsets i32 [M], pairs i64 [X].

    offsets: end of each expert's rows. Ids of other ranks' experts and -1 are passed over; an id that a row names twice
    makes two pairs. Raises E0507 for an id that is no expert.
    """
    num_held = len(ctx.held(table))
    slots_P = look_up(ctx, ids_Rk, table, ("slot here",), _slots_here).flatten()
    (here_X,) = (slots_P < num_held).nonzero(as_tuple=True)
    slots_X, order_X = slots_P[here_X].sort(stable=True)
    pairs_X = here_X[order_X]
    offsets_M = torch.bincount(slots_X, minlength=num_held).cumsum(0).to(torch.int32)
    return rows_RD.index_select(0, pairs_X // ids_Rk.shape[1]), offsets_M, pairs_X


def reduce_rows(ctx: Context, rows_XD: Tensor, pairs_X: Tensor, weights_Rk: Tensor, *, table: str) -> Tensor:
    """Per row the sum over its pairs, in the order of its choices, of weight times row: [R, D]; zero without pairs.

    Raises E0508 where there is not one row for each pair.
    """
    num_rows, top = weights_Rk.shape
    if rows_XD.shape[0] != pairs_X.shape[0]:
        raise lost_rows(ctx, f"`{table}` gave {rows_XD.shape[0]} rows for {pairs_X.shape[0]} pairs")
    where_P = torch.full((num_rows * top,), -1, device=pairs_X.device)
    where_P[pairs_X] = torch.arange(pairs_X.shape[0], device=pairs_X.device)
    is_served = where_P >= 0
    ends_R = is_served.view(num_rows, top).sum(1).cumsum(0)
    return sums(rows_XD, where_P[is_served], ends_R, weights_Rk.flatten()[is_served])


def return_rows(ctx: Context, rows_XD: Tensor, pairs_X: Tensor) -> Tensor:
    """Rows in the order of their pairs, as the rows arrived that made them: [X, D]."""
    if rows_XD.shape[0] != pairs_X.shape[0]:
        raise lost_rows(ctx, f"experts gave {rows_XD.shape[0]} rows for {pairs_X.shape[0]} pairs")
    return rows_XD.index_select(0, pairs_X.argsort())


def count_pairs(ctx: Context, ids_Rk: Tensor, recv_n: Tensor) -> Tensor:
    """Pairs among the rows that came from each rank: i64 [n]. Raises E0508 where they are not the rows announced."""
    ends_n = recv_n.cumsum(0)
    announced = int(ends_n[-1])
    if announced != ids_Rk.shape[0]:
        raise lost_rows(ctx, f"{ids_Rk.shape[0]} rows arrived, {announced} were announced")
    before = F.pad((ids_Rk >= 0).sum(1).cumsum(0), (1, 0))
    return before[ends_n] - before[ends_n - recv_n]


def pair_order(ctx: Context, ids_Nk: Tensor, *, table: str, group: str) -> tuple[Tensor, Tensor]:
    """Pairs as they come home, by rank, row and choice: i64 [K]; and how many from each rank: i64 [n].

    Raises E0507 for an id that is no expert.
    """
    ranks_K = look_up(ctx, ids_Nk, table, ("there", group), destinations, lowest=0).flatten()
    counts_n = torch.bincount(ranks_K, minlength=group_size(ctx, group))
    return ranks_K.argsort(stable=True), counts_n


def combine(ctx: Context, rows_KD: Tensor, order_K: Tensor, weights_Nk: Tensor, *, table: str) -> Tensor:
    """Each row times its pair's weight, summed into its token in the order of the choices: [N, D].

    Raises E0508 where rows are missing.
    """
    num_pairs = weights_Nk.numel()
    if not rows_KD.shape[0] == order_K.shape[0] == num_pairs:
        raise lost_rows(ctx, f"`{table}` gave {rows_KD.shape[0]} rows for {num_pairs} pairs of tokens and experts")
    return reduce_rows(ctx, rows_KD, order_K, weights_Nk, table=table)


# --- inside -------------------------------------------------------------------------------------------------------


def sums(rows_XD: Tensor, order_Y: Tensor, ends_R: Tensor, weights_Y: Tensor | None = None) -> Tensor:
    """Row r is the sum of rows[order[y]] * weights[y] for y from ends[r-1] up to ends[r]: [R, D].

    An embedding bag reads each row once, adds in fp32 in the order given, and needs no atomics. What exceeds fp16's
    largest number becomes that number.
    """
    dtype = rows_XD.dtype
    if weights_Y is not None:
        rows_XD = rows_XD.float()  # a bag takes weights in the dtype of its rows, and these must not be rounded
    starts = F.pad(ends_R, (1, 0))
    sums_RD = F.embedding_bag(
        order_Y, rows_XD, starts, mode="sum", per_sample_weights=weights_Y, include_last_offset=True
    )
    if dtype is torch.float16:
        largest = torch.finfo(torch.float16).max
        sums_RD.clamp_(-largest, largest)
    return sums_RD.to(dtype)


def look_up(
    ctx: Context,
    ids_Nk: Tensor,
    table: str,
    key: tuple[Hashable, ...],
    make: Callable[..., list[int]],
    lowest: int = -1,
) -> Tensor:
    """`make(ctx, table, *key[1:])` gives a number per expert and, last, one for no expert; the numbers of `ids`."""
    if not is_deferred(ctx):  # what a graph routes is held against the experts by the kernels that route in it
        outside = (ids_Nk < lowest) | (ids_Nk >= ctx.placements[table].num_experts)
        if outside.any():
            raise expert_fault(ctx, table, int(ids_Nk[outside][0]))
    return numbers(ctx, ids_Nk.device, table, key, make)[ids_Nk]  # id -1 is the last number


def expert_fault(ctx: Context, table: str, expert: int) -> MoecError:
    """The error for an id that is no expert."""
    return _no_expert(ctx.layer, f"expert {expert}", table, ctx.placements[table].num_experts)


def pair_fault(layer: int | None, table: str, num_experts: int, pair: int) -> MoecError:
    """The same where the id is no longer there to be read, only which pair of a row and a choice it was."""
    return _no_expert(layer, f"the expert of pair {pair}", table, num_experts)


def _no_expert(layer: int | None, which: str, table: str, num_experts: int) -> MoecError:
    return fail("E0507", f"layer {layer}: {which} of `{table}` does not exist, it has {num_experts}", BUG)


def numbers(
    ctx: Context, device: torch.device, table: str, key: tuple[Hashable, ...], make: Callable[..., list[int]]
) -> Tensor:
    """What `make` gives, as `look_up` says, kept for the program: i64 [E + 1]."""
    place = (*key, table, device)
    if place not in ctx.memo:
        ctx.memo[place] = torch.tensor(make(ctx, table, *key[1:]), device=device)
    found: Tensor = ctx.memo[place]
    return found


def slots_here(ctx: Context, table: str, device: torch.device) -> Tensor:
    """Place of each expert among those of this rank, as `group_rows` orders them: i64 [E + 1]."""
    return numbers(ctx, device, table, ("slot here",), _slots_here)


def destinations(ctx: Context, table: str, group: str) -> list[int]:
    """Index in `group` of the rank that a row for each expert goes to next; the group's size for no expert."""
    owners = [(owner, e) for owner, held in enumerate(ctx.placements[table].slots) for e in held]
    there = dict.fromkeys(range(len(owners)), 0)
    for owner, expert in owners:
        node, local = ctx.mesh.ep_position(owner)
        there[expert] = {"experts.ep": owner, "links.node": node, "links.local": local}[group]
    return [*there.values(), group_size(ctx, group)]


def _slots_here(ctx: Context, table: str) -> list[int]:
    """Place of each expert among those of this rank; their number for experts of other ranks and for no expert."""
    held, slot_of = ctx.held(table), ctx.placements[table].slot_of
    return [*(slot - held.start if slot in held else len(held) for slot in slot_of), len(held)]


def group_size(ctx: Context, group: str) -> int:
    return len(ctx.mesh.groups()[group][0])
