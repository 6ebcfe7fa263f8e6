"""Rows to their experts and back, from Triton templates: the signatures and results of torch's kernels.

How many pairs are served is known on the device alone. `sort_pairs` returns tensors with room for all and waits for
nothing, as a captured graph needs it; `group_rows` reads the number and returns as many rows. Both compute the place
of each pair in the sorted rows, with which `sum_rows` adds them in one launch.

Shapes: R rows, X pairs served here (room for R * k), M experts held here, D hidden, k choices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moec.codegen.kernel_module import load_kernel
from moec.codegen.kernel_rows import (
    GroupRows,
    ReduceRows,
    chunk_rows,
    render_group,
    render_reduce,
    specialise_group,
    specialise_reduce,
)
from moec.codegen.offline import FP_FUSION
from moec.runtime.context import Context
from moec.runtime.device_flags import flags_on, is_deferred
from moec.runtime.kernels.torch_moe import lost_rows
from moec.runtime.kernels.torch_pairs import expert_fault, pair_fault, slots_here
from moec.runtime.kernels.triton_products import DTYPES
from moec.runtime.kernels.triton_route import check_tensor

#: Where `Context.step_memo` keeps the places of pairs from the kernel that sorts them to the one that sums them.
PLACES = "places"
#: Rows that chunks, and programs that sum, are made for in Triton's interpreter: one takes as long whatever its rows.
INTERPRETED_ROWS, INTERPRETED_SUMS = 2**16, 64


@dataclass(frozen=True, eq=False)
class Sorted:
    """Pairs by expert: rows [R * k, D] (or None where they stay where they are), offsets i32 [M], pairs i64 [R * k].

    The first `offsets[M - 1]` rows and pairs are written. places, i32 [R, k], is the inverse of pairs, -1 for a pair
    not served here.
    """

    rows: Tensor | None
    offsets: Tensor
    pairs: Tensor
    places: Tensor


def sort_pairs(ctx: Context, rows_RD: Tensor, ids_Rk: Tensor, *, table: str, copies: bool = True) -> Sorted:
    """Sort the pairs of this rank's experts, in order of arrival within each.

    Two launches, or one where there are few pairs and no rows are copied. `rows_RD` may be a view with gaps between
    rows. Raises E0526 for tensors that do not fit. Of an id that is no expert only a flag tells, which
    `device_flags.raise_faults` reads; its pair is passed over.
    """
    device = rows_RD.device
    check_tensor("ids", ids_Rk, torch.int64, (None, None), device)
    num_rows, top = ids_Rk.shape
    dtype = rows_RD.dtype if rows_RD.dtype in DTYPES else torch.float32
    rows_RD = rows_RD if rows_RD.dim() == 2 and rows_RD.stride(1) == 1 else rows_RD.contiguous()
    check_tensor("rows", rows_RD, dtype, (num_rows, None), device)
    held, hidden, num_pairs = len(ctx.held(table)), rows_RD.shape[1], num_rows * top
    found = Sorted(
        rows=torch.empty((num_pairs, hidden), dtype=rows_RD.dtype, device=device) if copies else None,
        offsets=torch.empty(held, dtype=torch.int32, device=device),
        pairs=torch.empty(num_pairs, dtype=torch.int64, device=device),
        places=torch.empty((num_rows, top), dtype=torch.int32, device=device),
    )
    if not num_rows or not held:
        found.offsets.zero_()
        found.places.fill_(-1)
        return found
    values = specialise_group(
        ctx.placements[table].num_experts, held, top, hidden, DTYPES[dtype], num_rows,
        stride=rows_RD.stride(0), copies=copies,
    )  # fmt: skip
    if not rows_RD.is_cuda and not values.alone:
        values = replace(values, rows=chunk_rows(INTERPRETED_ROWS, top))
    ids_Rk = ids_Rk.contiguous()
    flag = sorting_flag(ctx, table, ids_Rk)
    launch_group(values, rows_RD, ids_Rk, slots_here(ctx, table, device), found, flag)
    return found


def sorting_flag(ctx: Context, table: str, ids_Rk: Tensor) -> Tensor:
    """The flag, i32 [1], that kernels lower to the first pair of `ids` whose expert does not exist (E0507)."""
    flags = flags_on(ctx, ids_Rk.device)
    if is_deferred(ctx):  # the flag is of all graphs, and keeps nothing alive that belongs to this one
        fault = functools.partial(pair_fault, ctx.layer, table, ctx.placements[table].num_experts)
        return flags.flag(("graphs", ctx.layer, table), fault)
    return flags.flag(("experts", ctx.layer, table), lambda pair: expert_fault(ctx, table, int(ids_Rk.flatten()[pair])))


def launch_group(
    values: GroupRows, rows_RD: Tensor, ids_Rk: Tensor, slots: Tensor, found: Sorted, flag: Tensor
) -> None:
    """Launch the sorting kernels into `found`; the tensors fit together and hold at least one row.

    Kernels made to sort `alone` take one chunk of rows at most.
    """
    num_rows = ids_Rk.shape[0]
    num_programs, parts = values.num_programs(num_rows), values.parts(num_rows)
    if values.alone:
        assert num_programs == parts == 1 and found.rows is None
        sort = _launcher(render_group, values, "sort_pairs", ids_Rk)
        sort(1, ids_Rk, slots, flag, found.offsets, found.pairs, found.places, num_rows)
        return
    counts = torch.empty((num_programs, values.held), dtype=torch.int32, device=ids_Rk.device)
    count, place = (_launcher(render_group, values, name, ids_Rk) for name in ("count_pairs", "place_pairs"))
    sizes = (num_rows, parts) if values.is_several else (num_rows,)
    count(num_programs, ids_Rk, slots, counts, flag, *sizes)
    rows, out = ((), ()) if found.rows is None else ((rows_RD,), (found.rows,))
    place(num_programs, *rows, ids_Rk, slots, counts, *out, found.offsets, found.pairs, found.places, *sizes)


def group_rows(ctx: Context, rows_RD: Tensor, ids_Rk: Tensor, *, table: str) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of this rank's experts, expert by expert in order of arrival: rows [X, D], offsets i32 [M], pairs i64 [X].

    Raises E0507 for an id that is no expert. In a step of fixed shape the rows and pairs have room for all pairs, and
    the fault is left to `device_flags.raise_faults`.
    """
    found = sort_pairs(ctx, rows_RD, ids_Rk, table=table)
    rows, pairs = found.rows, found.pairs
    assert rows is not None
    if not is_deferred(ctx):
        flags_on(ctx, rows.device).raise_lowered()
        num_served = int(found.offsets[-1]) if found.offsets.numel() else 0
        rows, pairs = rows[:num_served], pairs[:num_served]
    ctx.step_memo[PLACES, id(pairs)] = pairs, found.places  # the pairs are kept, so that no other tensor is at their id
    return rows, found.offsets, pairs


def reduce_rows(ctx: Context, rows_XD: Tensor, pairs_X: Tensor, weights_Rk: Tensor, *, table: str) -> Tensor:
    """Per row the sum over its pairs, in the order of its choices, of weight times row: [R, D]; zero without pairs.

    One launch for pairs that come from `group_rows`, else two more that find each pair's place. Raises E0508 where
    there is not one row for each pair.
    """
    if rows_XD.shape[0] != pairs_X.shape[0]:
        raise lost_rows(ctx, f"`{table}` gave {rows_XD.shape[0]} rows for {pairs_X.shape[0]} pairs")
    _, places_Rk = ctx.step_memo.pop((PLACES, id(pairs_X)), (None, None))
    if places_Rk is None:
        places_Rk = invert_pairs(pairs_X, tuple(weights_Rk.shape))
    return sum_rows(rows_XD, places_Rk, weights_Rk)


def combine(ctx: Context, rows_KD: Tensor, order_K: Tensor, weights_Nk: Tensor, *, table: str) -> Tensor:
    """Each row times its pair's weight, summed into its token in the order of the choices: [N, D].

    Raises E0508 where rows are missing.
    """
    num_pairs = weights_Nk.numel()
    if not rows_KD.shape[0] == order_K.shape[0] == num_pairs:
        raise lost_rows(ctx, f"`{table}` gave {rows_KD.shape[0]} rows for {num_pairs} pairs of tokens and experts")
    return reduce_rows(ctx, rows_KD, order_K, weights_Nk, table=table)


def sum_rows(rows_XD: Tensor, places_Rk: Tensor, weights_Rk: Tensor | None = None) -> Tensor:
    """Per row the sum of its rows at `places` (-1 for none), times `weights` where given, in one launch: [R, D].

    Without weights they are in the rows already. Raises E0526 for tensors that do not fit.
    """
    rows_XD = rows_XD.contiguous()
    device = rows_XD.device
    dtype = rows_XD.dtype if rows_XD.dtype in DTYPES else torch.float32
    check_tensor("rows", rows_XD, dtype, (None, None), device)
    check_tensor("places", places_Rk, torch.int32, (None, None), device)
    (num_rows, top), hidden = places_Rk.shape, rows_XD.shape[1]
    out_RD = torch.empty((num_rows, hidden), dtype=dtype, device=device)
    stride = None
    weights = []
    if weights_Rk is not None:
        check_tensor("weights", weights_Rk, torch.float32, (num_rows, top), device)
        weights, stride = [weights_Rk], weights_Rk.stride(0)
    if num_rows:
        values = specialise_reduce(top, hidden, DTYPES[dtype], is_weighted=weights_Rk is not None, stride=stride)
        if not rows_XD.is_cuda:
            values = replace(values, rows=INTERPRETED_SUMS)
        run = _launcher(render_reduce, values, "reduce_rows", rows_XD)
        run(values.num_programs(num_rows), rows_XD, places_Rk.contiguous(), *weights, out_RD, num_rows)
    return out_RD


def invert_pairs(pairs_X: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Place in `pairs_X` of each of R rows' k choices: i32 [R, k], -1 for one that is not there."""
    check_tensor("pairs", pairs_X, torch.int64, (None,), pairs_X.device)
    places_Rk = torch.full(shape, -1, dtype=torch.int32, device=pairs_X.device)
    if pairs_X.numel() and places_Rk.numel():
        values = specialise_reduce(shape[1], 1, DTYPES[torch.float32])
        run = _launcher(render_reduce, values, "invert_pairs", pairs_X)
        run(-(-pairs_X.numel() // values.block_pairs), pairs_X, places_Rk, pairs_X.numel(), places_Rk.numel())
    return places_Rk


def _launcher(
    render: Callable[[Any], str], values: GroupRows | ReduceRows, name: str, tensor: Tensor
) -> Callable[..., None]:
    """Launches a kernel of a rendered module where `tensor` is, over so many programs."""
    is_interpreted = tensor.device.type == "cpu"
    kernel = _kernel(render, values, name, is_interpreted)

    def launch(num_programs: int, *arguments: object) -> None:
        kernel[(num_programs,)](
            *arguments, INTERPRET=is_interpreted, num_warps=values.warps, enable_fp_fusion=FP_FUSION
        )

    return launch


@functools.cache
def _kernel(render: Callable[[Any], str], values: GroupRows | ReduceRows, name: str, is_interpreted: bool) -> Any:
    return load_kernel(render(values), name, is_interpreted)
