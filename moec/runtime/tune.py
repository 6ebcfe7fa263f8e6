"""Times grouped GEMM kernels on the GPU that is there, for `moec compile --tune`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moec.codegen.expected_rows import Rows
from moec.codegen.gemm_variant import RowSource, Store
from moec.codegen.grouped_gemm import GroupedGemm
from moec.codegen.kernel_tune import Measure as Measure
from moec.codegen.targets import TARGETS, find_target
from moec.diagnostics import fail
from moec.runtime.kernels.triton_products import DTYPES, architecture_of, launch_grouped_gemm

#: Milliseconds that a candidate runs before it is timed, and while it is.
WARM_MS, TIMED_MS = 20, 80


def measurer(target: str) -> Measure:
    """Times kernels for `target`. Raises E0521 where that is none, E0535 without a GPU, E0536 with another one."""
    find_target(target)
    if not torch.cuda.is_available():
        without = "without `--tune` the cost model chooses, which needs no GPU"
        raise fail("E0535", "`--tune` times kernels, and there is no GPU here", without)
    if (found := architecture_of(torch.device("cuda"))) != target:
        instead = f"--target {found}" if found in TARGETS else "without `--tune` the cost model chooses"
        raise fail("E0536", f"`--tune` times kernels for {target}, but the GPU here is {found}", instead)
    return _measure


def _measure(values: GroupedGemm, rows: Rows, tokens: int) -> float:
    """Median microseconds by CUDA events, with L2 cleared before each run (as `triton.testing.do_bench` does)."""
    from triton.testing import do_bench

    run = prepare(values, rows, tokens, torch.device("cuda"))
    median: Any = do_bench(run, warmup=WARM_MS, rep=TIMED_MS, return_mode="median")
    return 1e3 * float(median)


def prepare(values: GroupedGemm, rows: Rows, tokens: int, device: torch.device) -> Callable[[], None]:
    """A launch of a kernel on random numbers, for `rows` [M] rows of each expert from so many tokens."""
    dtype = {kind: name for name, kind in DTYPES.items()}[values.dtype]
    routed = int(rows.sum())
    is_gathered = values.rows is RowSource.GATHERED
    source = torch.randn(tokens if is_gathered else routed, values.depth, device=device, dtype=dtype)
    lines = values.sides * values.width
    w_MLK = torch.randn(values.experts, lines, values.depth, device=device, dtype=dtype)
    offsets_M = torch.from_numpy(rows.cumsum()).to(device, torch.int32)
    pairs_X = torch.randperm(tokens * values.top, device=device)[:routed]
    is_added = values.store is Store.ACCUMULATED
    out = torch.zeros(
        tokens if is_added else routed, values.width, device=device, dtype=torch.float32 if is_added else dtype
    )
    weights = torch.ones(tokens * values.top, device=device)

    def run() -> None:
        launch_grouped_gemm(values, source, offsets_M, w_MLK, out, pairs_X, weights)

    return run
