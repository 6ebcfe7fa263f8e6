"""Whether a Program can run as a graph of kernels: whether the host need not wait for anything within a step.

A graph is launched as a whole, so what a kernel launches must not depend on what an earlier one has computed: not on
numbers of rows, nor on a fault that is read at once. An exchange must be padded, and what routes rows by Triton.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx

from moec.ir.program import Program, op_of

#: Operations whose results, or what they move, have sizes that only a step tells.
SIZED = {
    *("exchange_counts", "exchange_sizes", "all_gather_rows", "reduce_scatter_rows", "count_pairs", "pair_order"),
    *("return_rows", "combine"),
}
#: Operations of which torch's kernel reads on the host what it has found on the device.
READ_BY_TORCH = {
    *("route", "group_rows", "group_pairs", "reduce_rows", "grouped_linear", "grouped_gate_up"),
    *("gathered_gate_up", "reduced_linear", "paired_experts"),
}
#: Changes of view that learn from other dp ranks how many rows each has: where experts are cut wider than attention.
ASKING = (("gather", "experts"), ("slice", "attention"))


def obstacle(program: Program) -> str:
    """The first operation that stands against a graph, and why; the empty string where none does."""
    return next((f"`{op_of(node).name}` {why}" for _, node in program.nodes() for why in _reasons(program, node)), "")


def notes(programs: Iterable[Program], device: str) -> list[str]:
    """Why decode does not run as a graph of kernels on a GPU; one note, of the first stage that has an obstacle."""
    found = (obstacle(program) for program in programs if program.phase == "decode" and device == "cuda")
    return [f"decode runs kernel by kernel, not as one graph: {why}" for why in found if why][:1]


def _reasons(program: Program, node: fx.Node) -> Iterator[str]:
    op = op_of(node)
    if op.name == "mla_attention" and node.kwargs["form"] == "expanded":
        yield "reads each sequence for itself"
    if "cache" in op.effects:
        yield "waits for experts to be copied"
    if "stage" in op.effects:
        yield "hands rows from stage to stage"
    if op.name in SIZED or (op.name == "all_to_all.start" and len(node.args) > 1):
        yield "moves as many rows as were routed: `exchange = padded` moves as many in each step"
    if op.name in READ_BY_TORCH and node.meta.get("kernel") == "torch":
        yield "by torch waits for the device: Triton's kernel does not"
    if op.name == "fan_out" and node.kwargs["bound"] is None:
        yield "makes as many messages as were routed: `exchange = padded` makes as many in each step"
    elif op.name == "fan_out" and program.capacity is not None:
        yield "counts the rows that its `capacity` has no room for, in a graph with padding rows among them"
    if op.name == "relayout" and (node.kwargs["how"], node.kwargs["to"]) in ASKING:
        yield "asks each rank for its rows: cut experts no wider than attention"
