"""What carries rows to their experts and back, on torch: the messages that the collectives move.

A message is one row for one destination: the row's bytes padded to 8, its k expert ids (i32, -1 where another
destination serves it) and its k weights (fp32). Hidden states are copied once by each operation that moves them,
straight to their place. What happens to rows between two messages is in `torch_pairs`.

Shapes: N rows, P messages that leave, n ranks of the group, D hidden, W bytes of a message, k choices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moec.diagnostics import fail
from moec.ir.ops.exchange import message_bytes
from moec.placement import span
from moec.runtime.context import DTYPES, Context
from moec.runtime.kernels.torch_moe import lost_rows
from moec.runtime.kernels.torch_pairs import destinations, group_size, look_up, sums

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
    num_ranks = group_size(ctx, group)
    there_Nk = look_up(ctx, ids_Nk, table, ("there", group), destinations)
    wanted_nN = there_Nk.new_zeros(there_Nk.shape[0], num_ranks + 1, dtype=torch.bool)
    wanted_nN = wanted_nN.scatter_(1, there_Nk, True)[:, :num_ranks].t()
    counts_n = wanted_nN.sum(1)
    if bound is None:
        there_P, origin_P = wanted_nN.nonzero(as_tuple=True)
    else:
        _check_room(ctx, counts_n, ids_Nk.shape[0], group, bound, drop)
        there_P = torch.arange(num_ranks * bound, device=x_ND.device) // bound
        origin_P = _seats(wanted_nN, bound)
    message_PW = _write(x_ND, ids_Nk, weights_Nk, there_Nk, there_P, origin_P)
    return message_PW, counts_n, origin_P


def _seats(wanted_nN: Tensor, bound: int) -> Tensor:
    """The row in each of a destination's `bound` seats, in row order: i64 [n * bound], -1 for an empty seat.

    Rows without a seat go to one behind the last: to pick out the others would wait for a GPU.
    """
    num_ranks, num_rows = wanted_nN.shape
    place_nN = wanted_nN.cumsum(1) - 1
    first_n1 = torch.arange(0, num_ranks * bound, bound, device=wanted_nN.device)[:, None]
    seat_nN = torch.where(wanted_nN & (place_nN < bound), first_n1 + place_nN, num_ranks * bound)
    origin_P = torch.full((num_ranks * bound + 1,), -1, device=wanted_nN.device)
    row_nN = torch.arange(num_rows, device=wanted_nN.device).expand(num_ranks, -1)
    return origin_P.scatter_(0, seat_nN.flatten(), row_nN.flatten())[:-1]


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


# --- back ---------------------------------------------------------------------------------------------------------


def fan_in(ctx: Context, rows_PD: Tensor, origin_P: Tensor, ids_Nk: Tensor, *, table: str) -> Tensor:
    """Per row that was fanned out the sum of what came back for it, in order of the destinations: [N, D].

    Raises E0508 where there is not one row back for each message.
    """
    if rows_PD.shape[0] != origin_P.shape[0]:
        raise lost_rows(ctx, f"{rows_PD.shape[0]} rows of `{table}` came back for {origin_P.shape[0]} messages")
    num_rows = ids_Nk.shape[0]
    home_P = torch.where(origin_P >= 0, origin_P, num_rows)  # empty seats last, in a sum of their own
    home_P, order_P = home_P.sort(stable=True)
    ends = torch.searchsorted(home_P, torch.arange(num_rows + 1, device=home_P.device), right=True)
    return sums(rows_PD, order_P, ends)[:num_rows]


# --- chunks of tokens ---------------------------------------------------------------------------------------------


def chunk_rows(ctx: Context, x: Tensor, *, parts: int, index: int) -> Tensor:
    """Piece `index` of `parts` balanced pieces of the rows, the first ones one longer."""
    return x[span(x.shape[0], index, parts)]


def join_rows(ctx: Context, *parts: Tensor) -> Tensor:
    """The chunks of the rows, one behind the other."""
    return torch.cat(parts)
