"""What brings rows to their experts and back, on torch: everything of an exchange but the collectives.

A message is one row for one destination: the row's bytes padded to 8, its k expert ids (i32, -1 where another
destination serves it) and its k weights (fp32). A pair is one of a row's k choices: pair r * k + j is choice j of row
r. Sums are in fp32, choice after choice and destination after destination, so that no result depends on how threads
are scheduled; fp16 saturates. Hidden states are copied once by each operation that moves them, straight to their place.

Shapes: N rows, P messages that leave, R rows that arrived, X pairs served here, K pairs of this rank's rows, n ranks of
the group, D hidden, W bytes of a message, k choices, E experts, M experts held here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moec.diagnostics import MoecError, fail
from moec.ops_exchange import message_bytes
from moec.placement import balanced
from moec.runtime.context import DTYPES, Context
from moec.runtime.kernels_torch_moe import BUG

#: Name of each dtype in a Program.
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Message(NamedTuple):
    """Views into the bytes of messages [P, W]: rows [P, D], ids i32 [P, k], weights fp32 [P, k]."""

    rows: Tensor
    ids: Tensor
    weights: Tensor


def read(message_PW: Tensor, hidden: int, top: int, dtype: torch.dtype) -> Message:
    """The parts of messages, without a copy."""
    numbers = message_PW.shape[1] - 8 * top
    rows = message_PW[:, : hidden * dtype.itemsize].view(dtype)
    ids = message_PW[:, numbers : numbers + 4 * top].view(torch.int32)
    return Message(rows, ids, message_PW[:, numbers + 4 * top :].view(torch.float32))


# --- out ----------------------------------------------------------------------------------------------------------


def fan_out(
    ctx: Context,
    x_ND: Tensor,
    ids_Nk: Tensor,
    weights_Nk: Tensor,
    *,
    table: str,
    group: str,
    bound: int | None,
    drop: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """A message per row and destination, in order of destination and row: bytes [P, W], counts i64 [n], origin i64 [P].

    With `bound` there are as many messages for each destination; those with origin -1 are empty, and counts are of the
    rows that should go there. `drop`: the first rows up to the bound go, the others are counted in the context.

    Raises:
        MoecError: E0507, an id that is no expert; E0511, more rows for a rank than there is room.
    """
    num_ranks = _size(ctx, group)
    there_Nk = _look_up(ctx, ids_Nk, table, ("there", group), _destinations)
    wanted_nN = there_Nk.new_zeros(there_Nk.shape[0], num_ranks + 1, dtype=torch.bool)
    wanted_nN = wanted_nN.scatter_(1, there_Nk, True)[:, :num_ranks].t()
    counts_n = wanted_nN.sum(1)
    if bound is None:
        there_P, origin_P = wanted_nN.nonzero(as_tuple=True)
    else:
        _check_room(ctx, counts_n, ids_Nk.shape[0], group, bound, drop)
        there_P = torch.arange(num_ranks, device=x_ND.device).repeat_interleave(bound)
        origin_P = _seats(wanted_nN, bound)
    message_PW = _write(x_ND, ids_Nk, weights_Nk, there_Nk, there_P, origin_P)
    return message_PW, counts_n, origin_P


def _seats(wanted_nN: Tensor, bound: int) -> Tensor:
    """The row in each of a destination's `bound` seats, in row order: i64 [n * bound], -1 for an empty seat."""
    num_ranks = wanted_nN.shape[0]
    place_nN = wanted_nN.cumsum(1) - 1
    there, row = (wanted_nN & (place_nN < bound)).nonzero(as_tuple=True)
    origin_P = torch.full((num_ranks * bound,), -1, device=row.device)
    origin_P[there * bound + place_nN[there, row]] = row
    return origin_P


def _check_room(ctx: Context, counts_n: Tensor, num_rows: int, group: str, bound: int, drop: bool) -> None:
    """Refuse or count rows beyond the bound. Nothing is read where all rows would fit."""
    if num_rows <= bound:
        return
    if drop:
        ctx.count_dropped((counts_n - bound).clamp_(min=0).sum())
        return
    most, there = (int(found) for found in counts_n.max(0))
    if most > bound:
        raise fail(
            "E0511",
            f"layer {ctx.layer}: {most} of the {num_rows} rows of rank {ctx.rank} go to rank {there} of {group}, the "
            f"padded exchange has room for {bound}",
            "raise the phase's `capacity` or leave it out; `capacity = N drop` leaves out what does not fit",
        )


def _write(
    x_ND: Tensor, ids_Nk: Tensor, weights_Nk: Tensor, there_Nk: Tensor, there_P: Tensor, origin_P: Tensor
) -> Tensor:
    """The bytes of all messages; rows go straight to their place. An empty seat holds some row without an expert."""
    (num_rows, hidden), top = x_ND.shape, ids_Nk.shape[1]
    width = message_bytes(hidden, NAMES[x_ND.dtype], top)
    shape = origin_P.shape[0], width
    if num_rows == 0:
        message_PW = torch.zeros(shape, dtype=torch.uint8, device=x_ND.device)
        read(message_PW, hidden, top, x_ND.dtype).ids.fill_(-1)
        return message_PW
    message_PW = torch.empty(shape, dtype=torch.uint8, device=x_ND.device)
    rows_PD, ids_Pk, weights_Pk = read(message_PW, hidden, top, x_ND.dtype)
    padding = hidden * x_ND.dtype.itemsize
    message_PW[:, padding : width - 8 * top] = 0  # what leaves this rank is what was written
    source_P = origin_P.clamp(min=0)
    torch.index_select(x_ND, 0, source_P, out=rows_PD)
    is_there = (there_Nk[source_P] == there_P[:, None]) & (origin_P >= 0)[:, None]
    ids_Pk.copy_(ids_Nk[source_P].masked_fill_(~is_there, -1))
    weights_Pk.copy_(weights_Nk[source_P])
    return message_PW


def open_rows(ctx: Context, message_PW: Tensor, *, hidden: int, top: int, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [P, D], ids i64 [P, k] and weights fp32 [P, k] of messages; rows and weights are views."""
    rows_PD, ids_Pk, weights_Pk = read(message_PW, hidden, top, DTYPES[dtype])
    return rows_PD, ids_Pk.long(), weights_Pk


# --- at the experts -----------------------------------------------------------------------------------------------


def group_rows(ctx: Context, rows_RD: Tensor, ids_Rk: Tensor, *, table: str) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of this rank's experts, expert by expert in order of arrival: rows [X, D], offsets i32 [M], pairs i64 [X].

    offsets: end of each expert's rows. Ids of other ranks' experts and -1 are passed over; an id that a row names twice
    makes two pairs. Raises E0507 for an id that is no expert.
    """
    num_held = len(ctx.held(table))
    slots_P = _look_up(ctx, ids_Rk, table, ("slot here",), _slots_here).flatten()
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
        raise _lost_rows(ctx, f"`{table}` gave {rows_XD.shape[0]} rows for {pairs_X.shape[0]} pairs")
    where_P = torch.full((num_rows * top,), -1, device=pairs_X.device)
    where_P[pairs_X] = torch.arange(pairs_X.shape[0], device=pairs_X.device)
    is_served = where_P >= 0
    ends_R = is_served.view(num_rows, top).sum(1).cumsum(0)
    return _sums(rows_XD, where_P[is_served], ends_R, weights_Rk.flatten()[is_served])


def return_rows(ctx: Context, rows_XD: Tensor, pairs_X: Tensor) -> Tensor:
    """Rows in the order of their pairs, as the rows arrived that made them: [X, D]."""
    if rows_XD.shape[0] != pairs_X.shape[0]:
        raise _lost_rows(ctx, f"experts gave {rows_XD.shape[0]} rows for {pairs_X.shape[0]} pairs")
    return rows_XD.index_select(0, pairs_X.argsort())


def count_pairs(ctx: Context, ids_Rk: Tensor, recv_n: Tensor) -> Tensor:
    """Pairs among the rows that came from each rank: i64 [n]. Raises E0508 where they are not the rows announced."""
    ends_n = recv_n.cumsum(0)
    announced = int(ends_n[-1])
    if announced != ids_Rk.shape[0]:
        raise _lost_rows(ctx, f"{ids_Rk.shape[0]} rows arrived, {announced} were announced")
    before = F.pad((ids_Rk >= 0).sum(1).cumsum(0), (1, 0))
    return before[ends_n] - before[ends_n - recv_n]


# --- back ---------------------------------------------------------------------------------------------------------


def fan_in(ctx: Context, rows_PD: Tensor, origin_P: Tensor, ids_Nk: Tensor, *, table: str) -> Tensor:
    """Per row that was fanned out the sum of what came back for it, in order of the destinations: [N, D].

    Raises E0508 where there is not one row back for each message.
    """
    if rows_PD.shape[0] != origin_P.shape[0]:
        raise _lost_rows(ctx, f"{rows_PD.shape[0]} rows of `{table}` came back for {origin_P.shape[0]} messages")
    (held_P,) = (origin_P >= 0).nonzero(as_tuple=True)
    origin, order = origin_P[held_P].sort(stable=True)
    ends_N = torch.bincount(origin, minlength=ids_Nk.shape[0]).cumsum(0)
    return _sums(rows_PD, held_P[order], ends_N)


def pair_order(ctx: Context, ids_Nk: Tensor, *, table: str, group: str) -> tuple[Tensor, Tensor]:
    """Pairs as they come home, by rank, row and choice: i64 [K]; and how many from each rank: i64 [n].

    Raises E0507 for an id that is no expert.
    """
    ranks_K = _look_up(ctx, ids_Nk, table, ("there", group), _destinations, lowest=0).flatten()
    counts_n = torch.bincount(ranks_K, minlength=_size(ctx, group))
    return ranks_K.argsort(stable=True), counts_n


def combine(ctx: Context, rows_KD: Tensor, order_K: Tensor, weights_Nk: Tensor, *, table: str) -> Tensor:
    """Each row times its pair's weight, summed into its token in the order of the choices: [N, D].

    Raises E0508 where rows are missing.
    """
    num_pairs = weights_Nk.numel()
    if not rows_KD.shape[0] == order_K.shape[0] == num_pairs:
        raise _lost_rows(ctx, f"`{table}` gave {rows_KD.shape[0]} rows for {num_pairs} pairs of tokens and experts")
    return reduce_rows(ctx, rows_KD, order_K, weights_Nk, table=table)


# --- chunks of tokens ---------------------------------------------------------------------------------------------


def chunk_rows(ctx: Context, x: Tensor, *, parts: int, index: int) -> Tensor:
    """Piece `index` of `parts` balanced pieces of the rows, the first ones one longer."""
    sizes = balanced(x.shape[0], parts)
    first = sum(sizes[:index])
    return x[first : first + sizes[index]]


def join_rows(ctx: Context, *parts: Tensor) -> Tensor:
    """The chunks of the rows, one behind the other."""
    return torch.cat(parts)


# --- inside -------------------------------------------------------------------------------------------------------


def _sums(rows_XD: Tensor, order_Y: Tensor, ends_R: Tensor, weights_Y: Tensor | None = None) -> Tensor:
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


def _look_up(
    ctx: Context,
    ids_Nk: Tensor,
    table: str,
    key: tuple[Hashable, ...],
    make: Callable[..., list[int]],
    lowest: int = -1,
) -> Tensor:
    """`make(ctx, table, *key[1:])` gives a number per expert and, last, one for no expert; the numbers of `ids`."""
    num_experts = ctx.placements[table].num_experts
    outside = (ids_Nk < lowest) | (ids_Nk >= num_experts)
    if outside.any():
        wrong = int(ids_Nk[outside][0])
        raise fail("E0507", f"layer {ctx.layer}: expert {wrong} of `{table}` does not exist, it has {num_experts}", BUG)
    place = (*key, table, ids_Nk.device)
    if place not in ctx.memo:
        ctx.memo[place] = torch.tensor(make(ctx, table, *key[1:]), device=ids_Nk.device)
    found: Tensor = ctx.memo[place][ids_Nk]  # id -1 is the last number
    return found


def _destinations(ctx: Context, table: str, group: str) -> list[int]:
    """Index in `group` of the rank that a row for each expert goes to next; the group's size for no expert."""
    owners = [(owner, e) for owner, held in enumerate(ctx.placements[table].slots) for e in held]
    there = dict.fromkeys(range(len(owners)), 0)
    for owner, expert in owners:
        node, local = ctx.mesh.ep_position(owner)
        there[expert] = {"experts.ep": owner, "links.node": node, "links.local": local}[group]
    return [*there.values(), _size(ctx, group)]


def _slots_here(ctx: Context, table: str) -> list[int]:
    """Place of each expert among those of this rank; their number for experts of other ranks and for no expert."""
    held, slot_of = ctx.held(table), ctx.placements[table].slot_of
    return [*(slot - held.start if slot in held else len(held) for slot in slot_of), len(held)]


def _size(ctx: Context, group: str) -> int:
    return len(ctx.mesh.groups()[group][0])


def _lost_rows(ctx: Context, what: str) -> MoecError:
    return fail("E0508", f"layer {ctx.layer}: {what}", BUG)
