"""The expert exchange on a cluster of namespaces: seconds and bytes of each way to do it, measured in one run.

    sudo python benchmarks/shaped_cluster.py [--clusters 2x2,2x4,4x2] [--experts 64:8,32:4] [--phases decode,prefill]

What is compared: the baseline, which is what engines do without moec, and the lowerings of moec's compiler, run by its
kernels (`shaped_layer.py`).

A cell is a cluster (nodes x ranks per node), a number of experts with a top-k, and a phase. In each repetition all
cases run one after the other, so that what else the machine does hits them alike. Per case: the median time from the
first rank's start to the last rank's end, and the bytes that the nodes' links sent, from the interfaces' own counters
less what the barriers send. `bound` is the fewest bytes possible for the routing used: each token crosses once to each
other node that holds one of its experts, and one sum crosses back. A wrong output ends the run.

Shapes: T tokens of a rank, D hidden, E experts, k experts of a token, P = T * k pairs, R rows received, N ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the store warns that addresses have no names; read on import
import torch
import torch.distributed as dist
import torch.nn.functional as F
from shaped import ShapedCluster
from shaped_layer import TOKENS, Cell, Exchange, ExpertWeights, compile_layer, predicted_s
from shaped_nodes import ClusterError, traffic
from shaped_table import BASELINE, Row, show, summarise
from torch import Tensor

from moec.calibrate_fit import calibrated, declaration, from_rows
from moec.ir.program import Program
from moec.runtime.calibrate import measure as calibrate_rank
from moec.runtime.context import DTYPES
from moec.runtime.groups import make_groups
from moec.runtime.launch.rank import Rank
from moec.topology import Cluster

#: The lowerings of moec by the names of the table.
LOWERINGS = {
    "flat": ("flat", "reduced"),
    "flat ordered": ("flat", "ordered"),
    "padded": ("padded", "reduced"),
    "gather": ("gather", "reduced"),
    "two_hop": ("two_hop", "reduced"),
    "aggregate": ("aggregate", "reduced"),
}


@dataclass(frozen=True)
class Seat:
    """What a case knows besides its tokens: the rank, the cell, and the weights of the rank's experts."""

    rank: Rank
    cell: Cell
    params: dict[str, Tensor]

    def expert(self, rows_RD: Tensor, slot: int) -> None:
        """The work of one of this rank's experts, in place."""
        gate, up, down = (self.params[f"experts.{name}"][slot] for name in ("gate", "up", "down"))
        torch.mm(F.silu(rows_RD @ gate.T) * (rows_RD @ up.T), down.T, out=rows_RD)


Case = Callable[[Tensor, Tensor, Tensor], Tensor]


def per_expert(seat: Seat, tokens_TD: Tensor, ids_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
    """What engines do without moec: one row per (token, expert) by `all_to_all_single`, and back the same way.

    Experts work on the rows where they arrived, which spares this case the sorting that engines do.
    """
    cell = seat.cell
    order_P = ids_Tk.flatten().argsort(stable=True)
    counts_E = ids_Tk.flatten().bincount(minlength=cell.num_experts)
    recv_E = torch.empty_like(counts_E)
    dist.all_to_all_single(recv_E, counts_E)
    sends, receives = (counts.view(cell.world, -1).sum(1).tolist() for counts in (counts_E, recv_E))
    rows_PD = tokens_TD[order_P // cell.top]
    rows_RD = rows_PD.new_empty(sum(receives), cell.hidden)
    dist.all_to_all_single(rows_RD, rows_PD, receives, sends)
    for i, piece in enumerate(rows_RD.split(recv_E.tolist())):
        if len(piece):
            seat.expert(piece, i % cell.experts_per_rank)
    dist.all_to_all_single(rows_PD, rows_RD, sends, receives)
    pairs_TkD = rows_PD[order_P.argsort()].view(-1, cell.top, cell.hidden)
    return torch.bmm(weights_Tk.to(pairs_TkD.dtype).unsqueeze(1), pairs_TkD).squeeze(1)


# --- inside a rank ------------------------------------------------------------------------------------------------


def route(cell: Cell, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [T, D], the experts of each (uniform, none twice) [T, k] and their weights [T, k], from the seed."""
    generator = torch.Generator().manual_seed(1000 * cell.seed + rank)
    num_tokens = TOKENS[cell.phase]
    tokens_TD = torch.randn(num_tokens, cell.hidden, generator=generator).to(DTYPES[cell.dtype])
    ids_Tk = torch.rand(num_tokens, cell.num_experts, generator=generator).topk(cell.top).indices
    weights_Tk = torch.rand(num_tokens, cell.top, generator=generator) + 0.1
    return tokens_TD, ids_Tk, weights_Tk / weights_Tk.sum(1, keepdim=True)


def crossing_rows(cell: Cell, rank: int, ids_Tk: Tensor) -> int:
    """Distinct (token, other node) pairs of a rank's tokens: the fewest rows that must leave its node."""
    nodes_Tk = ids_Tk // (cell.experts_per_rank * cell.ranks_per_node)
    touched_TN = torch.zeros(len(ids_Tk), cell.nodes, dtype=torch.bool).scatter_(1, nodes_Tk, True)
    touched_TN[:, rank // cell.ranks_per_node] = False
    return int(touched_TN.sum())


def run_cell(rank: Rank, cell: Cell, programs: dict[str, Program], repeats: int) -> dict[str, object]:
    """Every case `repeats` times, after a first time that is checked and not counted.

    Gives `rows` (`crossing_rows`) and per case a list of [start s, end s, bytes sent by the node, bytes received].
    """
    batch = route(cell, rank.rank)
    weights = ExpertWeights.of(cell)
    wanted_TD = weights.reference(*batch)
    limit = 5e-5 if cell.dtype == "fp32" else 1e-1
    cases = make_cases(rank, cell, programs, weights)
    samples: dict[str, list[tuple[float, float, int, int]]] = {name: [] for name in cases}
    for repeat in range(repeats + 1):
        for name, case in cases.items():
            out_TD, sample = timed(case, *batch)
            if repeat:
                samples[name].append(sample)
            elif name != "nothing" and (worst := float((out_TD.float() - wanted_TD).abs().max())) > limit:
                raise ValueError(f"{name} is wrong by {worst:.2g} in {cell}")
    return {"rows": crossing_rows(cell, rank.rank, batch[1]), **samples}


def make_cases(rank: Rank, cell: Cell, programs: dict[str, Program], weights: ExpertWeights) -> dict[str, Case]:
    """What is compared by name, and `nothing`."""
    first = rank.rank * cell.experts_per_rank
    seat = Seat(rank, cell, weights.part(range(first, first + cell.experts_per_rank)))
    cases: dict[str, Case] = {"nothing": lambda tokens, _ids, _weights: tokens, BASELINE: partial(per_expert, seat)}
    groups = make_groups(next(iter(programs.values())).mesh, rank) if programs else {}
    return cases | {name: Exchange(program, groups, rank, weights).run for name, program in programs.items()}


@torch.inference_mode()
def timed(case: Case, *args: Tensor) -> tuple[Tensor, tuple[float, float, int, int]]:
    """A case's output, start, end, and what the node's link carried, three barriers included."""
    dist.barrier()
    before = traffic()
    dist.barrier()  # no rank sends before all have read the counters
    start = time.monotonic()
    out = case(*args)
    end = time.monotonic()
    dist.barrier()
    carried = traffic() - before
    return out, (start, end, carried.sent, carried.received)


# --- the table ----------------------------------------------------------------------------------------------------


def measure(cluster: ShapedCluster, cell: Cell, repeats: int, programs: dict[str, Program]) -> list[Row]:
    """The rows of a cell: the baseline and each of `programs`.

    Raises:
        ClusterError: a rank failed, or the output of a case was wrong.
    """
    ranks = cluster.run(run_cell, cell, programs, repeats)
    bound = 2 * sum(rank["rows"] for rank in ranks) * cell.hidden * DTYPES[cell.dtype].itemsize
    leaders = ranks[:: cell.ranks_per_node]  # all ranks of a node read the same counters

    def sent(case: str) -> int:
        return round(statistics.median([sum(int(rank[case][i][2]) for rank in leaders) for i in range(repeats)]))

    rows = []
    for case in (BASELINE, *programs):
        spans = [[rank[case][i] for rank in ranks] for i in range(repeats)]
        times = [max(end for _, end, *_ in span) - min(start for start, *_ in span) for span in spans]
        program = programs.get(case)
        predicted = predicted_s(program) if program is not None else None
        rows.append(Row(cell, case, times, sent(case) - sent("nothing"), bound, predicted))
    return rows


def calibrate(cluster: ShapedCluster) -> str:
    """The declaration that `moec calibrate` writes for this cluster."""
    rows = cluster.run(calibrate_rank, cluster.nodes, cluster.ranks_per_node)[0]
    here = Cluster("shaped", cluster.nodes, cluster.ranks_per_node)
    text = declaration(calibrated(here, from_rows(rows)))
    print(f"\n{text.rstrip()}", flush=True)
    return text


def compile_cases(cell: Cell, names: str, declared: str | None) -> dict[str, Program]:
    """The lowerings of a cell by name. Only on a calibrated cluster does the cost model know what to say of them."""
    return {name: compile_layer(cell, *LOWERINGS[name], cluster=declared) for name in names.split(",")}


def mark_chosen(rows: list[Row], auto: Program) -> list[Row]:
    """The rows, where that of the lowering that `auto` is, is marked."""
    return [replace(row, is_chosen=LOWERINGS.get(row.case) == (auto.exchange, auto.combine)) for row in rows]


def numbers(text: str, between: str) -> list[tuple[int, int]]:
    """`2x2,4x2` -> [(2, 2), (4, 2)]"""
    return [(int(a), int(b)) for a, _, b in (pair.partition(between) for pair in text.split(","))]


def main() -> int:
    parser = argparse.ArgumentParser(description="The expert exchange on a cluster of network namespaces.")
    parser.add_argument("--clusters", default="2x2,2x4,4x2", help="nodes x ranks per node")
    parser.add_argument("--experts", default="64:8,32:4", help="experts : top-k")
    parser.add_argument("--phases", default="decode,prefill")
    parser.add_argument("--cases", default=",".join(LOWERINGS), help="lowerings that are held against the baseline")
    parser.add_argument("--dtype", default="fp32", choices=DTYPES)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--mbit", type=int, default=400, help="of each node's link, per direction")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--calibrate", action="store_true", help="predict times and choices from measured constants")
    parser.add_argument("--json", type=Path, help="write every figure into this file")
    options = parser.parse_args()
    table: list[Row] = []
    try:
        for nodes, ranks_per_node in numbers(options.clusters, "x"):
            with ShapedCluster(nodes, ranks_per_node, options.mbit) as cluster:
                declared = calibrate(cluster) if options.calibrate else None
                for num_experts, top in numbers(options.experts, ":"):
                    for phase in options.phases.split(","):
                        cell = Cell(nodes, ranks_per_node, num_experts, top, phase, options.hidden, options.dtype)
                        rows = measure(cluster, cell, options.repeats, compile_cases(cell, options.cases, declared))
                        if declared is not None:
                            rows = mark_chosen(rows, compile_layer(cell, "auto", cluster=declared))
                        show(rows)
                        table += rows
    except ClusterError as error:
        print(f"shaped_cluster: {error}", file=sys.stderr)
        return 4
    except KeyboardInterrupt:
        return 130
    if options.calibrate:
        summarise(table)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in table], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
