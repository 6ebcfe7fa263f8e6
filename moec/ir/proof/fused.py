"""What the operations that join an expert's product with its neighbours do to the symbols of one rank."""

from __future__ import annotations

from typing import Any

from moec.ir.proof.local import (
    Symbolic,
    experts_of,
    group_rows,
    grouped_gate_up,
    grouped_linear,
    pairs_of,
    reduce_rows,
    start_work,
)
from moec.ir.proof.rank import Here
from moec.ir.proof.rows import Column, require


def group_pairs(here: Here, ids: Column, table: str) -> tuple[Column, Column]:
    """Pairs by expert; which rows they are of is the business of what reads rows through them."""
    pairs = [pairs_of(here, ids, expert) for expert in here.program.placements[table].slots[here.ep_index]]
    offsets = [sum(map(len, pairs[: slot + 1])) for slot in range(len(pairs))]
    return offsets, [index * here.table.top + choice for served in pairs for index, choice in served]


def gathered_gate_up(
    here: Here, rows: Column, offsets: Column, pairs: Column, param: Column, *scales: Column, table: str, top: int
) -> tuple[Column]:
    experts = experts_of(here, param[0])
    grouped: Column = []
    for expert, start, end in zip(experts, [0, *offsets], offsets, strict=False):
        for pair in pairs[start:end]:
            index, choice = divmod(pair, top)
            require(index < len(rows), f"pair {pair} of {len(rows)} rows")
            grouped.append(start_work(here, rows[index], choice, expert))
    return grouped_gate_up(here, grouped, offsets, param)


def reduced_linear(
    here: Here, rows: Column, offsets: Column, param: Column, pairs: Column, weights: Column, table: str
) -> tuple[Column]:
    (given,) = grouped_linear(here, rows, offsets, param)
    return reduce_rows(here, given, pairs, weights, table)


def paired_experts(
    here: Here, x: Column, ids: Column, weights: Column, gate_up: Column, down: Column, table: str, **attrs: Any
) -> tuple[Column]:
    rows, offsets, pairs = group_rows(here, x, ids, table)
    (act,) = grouped_gate_up(here, rows, offsets, gate_up)
    return reduced_linear(here, act, offsets, down, pairs, weights, table)


FUSED: dict[str, Symbolic] = {
    "group_pairs": Symbolic(group_pairs, ("ids",), ("numbers", "numbers")),
    "gathered_gate_up": Symbolic(gathered_gate_up, ("rows", "numbers", "numbers", "param"), ("rows",)),
    "reduced_linear": Symbolic(reduced_linear, ("rows", "numbers", "param", "numbers", "weights"), ("rows",)),
    "paired_experts": Symbolic(paired_experts, ("rows", "ids", "weights", "param", "param"), ("rows",)),
}
