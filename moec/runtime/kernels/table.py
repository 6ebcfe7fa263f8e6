"""The kernel table: which function runs an operation, under which of the kernel's names.

`k.linear(...)` in a rendered phase module is the torch kernel, `k.cpp.linear(...)` the C++ one and
`k.triton.grouped_gate_up(...)` the Triton one. To add a kernel, write the function
`kernel(ctx, *tensors, **attributes)`, list it here, and name it in the operation's entry in `moec.ir.ops.table`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor

from moec.diagnostics import fail
from moec.ir.program import Program, op_of
from moec.runtime import collectives
from moec.runtime.context import Context
from moec.runtime.cpp_library import Library, open_library
from moec.runtime.kernels import (
    cached,
    cpp_products,
    torch_attention,
    torch_dense,
    torch_exchange,
    torch_fused,
    torch_moe,
    torch_pairs,
    torch_rope,
    triton_fp8,
    triton_fused,
    triton_pairs,
    triton_route,
    triton_rows,
)

Kernel = Callable[..., Any]


def _named(module: ModuleType, *names: str) -> dict[str, Kernel]:
    return {name: getattr(module, name) for name in names}


#: Kernel name -> operation (dots as underscores) -> function.
KERNELS: dict[str, dict[str, Kernel]] = {
    "torch": {
        **_named(torch_dense, "embed", "take", "rms_norm", "linear", "add_bias", "add", "silu_mul", "gate_up"),
        **_named(torch_dense, "merged_linear", "split_heads", "merge_heads", "split"),
        **_named(torch_rope, "rope"),
        **_named(torch_attention, "attention", "mla_attention"),
        **_named(torch_moe, "router_logits", "route", "grouped_linear", "grouped_gate_up"),
        **_named(torch_exchange, "chunk_rows", "join_rows", "fan_out", "open_rows", "fan_in"),
        **_named(torch_pairs, "group_rows", "reduce_rows", "return_rows", "count_pairs", "pair_order"),
        **_named(torch_pairs, "combine"),
        **_named(torch_fused, "group_pairs", "gathered_gate_up", "reduced_linear", "paired_experts"),
        **_named(collectives, "exchange_counts", "all_to_all_start", "all_to_all_wait", "exchange_sizes"),
        **_named(collectives, "all_gather_rows", "reduce_scatter_rows", "all_reduce", "all_gather", "relayout"),
        **_named(collectives, "send", "receive", "sum_counts"),
        **_named(cached, "guess", "count_experts", "prefetch_start", "prefetch_wait", "cached_experts"),
    },
    "triton": {
        **_named(triton_route, "route"),
        **_named(triton_rows, "group_rows", "reduce_rows", "combine"),
        **_named(triton_fp8, "grouped_gate_up", "grouped_linear", "gathered_gate_up"),
        **_named(triton_fused, "group_pairs", "reduced_linear"),
        **_named(triton_pairs, "paired_experts"),
    },
}
# Torch's serve where there is no library; `kernels_for` puts those of the plan's library in their place.
KERNELS["cpp"] = {name: KERNELS["torch"][name] for name in cpp_products.KERNELS}

#: Operations that a rank says it is in, and the part of a step that their time counts towards.
TIMED = {
    "attention": "attention",
    "mla_attention": "attention",
    "gate_up": "dense",
    "grouped_gate_up": "experts",
    "grouped_linear": "experts",
    "gathered_gate_up": "experts",
    "reduced_linear": "experts",
    "paired_experts": "experts",
    "cached_experts": "experts",
}


def kernels_for(program: Program, device: str = "cpu") -> SimpleNamespace:
    """The object a phase module calls its kernels on. Raises E0509 for an operation that no kernel serves.

    C++ kernels are those of the program's library, which is built when it is not kept yet; where it cannot be (which
    `cpp_library.notes` tells), and on other devices than the CPU, torch's serve.
    """
    for _, node in program.nodes():
        op, kernel = op_of(node), node.meta.get("kernel", "torch")
        if op.__name__ not in KERNELS.get(kernel, {}):
            known = [name for name, table in KERNELS.items() if op.__name__ in table]
            raise fail(
                "E0509",
                f"there is no {kernel} kernel for `{op.name}`",
                f"it has kernels in: {', '.join(known)}" if known else "a pass must lower it first: run all passes",
            )
    library = open_library(program) if device == "cpu" else None
    chosen = KERNELS if not isinstance(library, Library) else KERNELS | {"cpp": cpp_products.bind(library)}
    tables = {name: {op: _told(name, op, kernel) for op, kernel in table.items()} for name, table in chosen.items()}
    others = {name: SimpleNamespace(**table) for name, table in tables.items() if name != "torch"}
    return SimpleNamespace(**tables["torch"], **others)


def _told(table: str, op: str, kernel: Kernel) -> Kernel:
    """`kernel`, which tells the rank's status that it runs and how long it takes; the quick ones as they are."""
    if op not in TIMED:
        return kernel

    def run(ctx: Context, x: Tensor, *tensors: Tensor, **attributes: Any) -> Any:
        status = ctx.status
        since = time.perf_counter_ns()
        if table != "triton":
            status.work(op)
            result = kernel(ctx, x, *tensors, **attributes)
        else:
            with status.within("compile", op):  # what takes long in launching a Triton kernel is its compiler
                result = kernel(ctx, x, *tensors, **attributes)
        status.worked(TIMED[op], since, x.shape[0])
        return result

    return run
