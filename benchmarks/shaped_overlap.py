"""What overlap gains on the shaped cluster: one sparse layer's whole model, prefilled with `overlap = off` and planned.

Each case runs its two plans in one run, their steps interleaved. Where the cost model predicts a gain: a shared expert
that takes about as long as the exchange, and attention that does, for which the whole layer is cut in two. Where it
declines: four tokens on slow messages; there the Program must equal the one with `overlap = off`. Linux, root,
iproute2. The outputs of both are compared.

Exit code 1 where the Programs differ, or where the median of the pairs' ratios with the shared expert is below 1.2;
with attention it is printed only.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the store warns that addresses have no names; read on import
import torch
import torch.distributed as dist
from shaped import ShapedCluster
from shaped_nodes import ClusterError

from moec.compiler import compile_phase
from moec.diagnostics import SourceFile
from moec.ir.program import Program
from moec.runtime.context import DTYPES
from moec.runtime.executor import Executor, local_shape
from moec.runtime.groups import make_groups
from moec.runtime.kv import allocate_kv
from moec.runtime.launch.rank import Rank
from moec.runtime.step import Piece, make_step
from moec.runtime.weights import wanted
from moec.semantics.checker import check

_TEXT = """
cluster shaped {{
  devices = 2  memory_rate = 4 GB/s  compute = peak(fp32 = {tflops} TFLOP/s)
  intra = link({intra} GB/s, latency = {latency} us)  inter = link({inter} GB/s, latency = {latency} us)
}}
model layer {{
  hidden = 2048  vocab = 8  norm = rms(eps = 1e-6)  dtype = fp32
  attention one = gqa(heads = {heads}, head_dim = {head_dim})
  router uniform {{ score = softmax  top = 8  renormalize = true }}
  experts routed = 64 * swiglu({inner})
  experts shared = 1 * swiglu({shared})
  layers 0 {{ one  moe(uniform, routed, shared) }}
}}
mesh ranks on shaped[2] {{ experts = ep(4) }}
plan p {{
  run layer on ranks
  context = 1024
  prefill {{ tokens = {tokens}  exchange = two_hop  overlap = {overlap} }}
  decode  {{ batch = 1 }}
}}
"""
#: A node's 400 Mbit/s are shared by its two ranks; two ranks share each core.
_SMALL: dict[str, Any] = {"intra": 1, "inter": 0.0246, "tflops": 0.02, "inner": 8, "heads": 1, "head_dim": 2}
PAYS: dict[str, dict[str, Any]] = {
    "the shared expert": {**_SMALL, "tokens": 1024, "latency": 200, "shared": 1536},
    "attention": {**_SMALL, "tokens": 1024, "latency": 200, "shared": 8, "heads": 16, "head_dim": 64},
}
#: Times as fast that the shared expert has to make a step.
LEAST, REQUIRED = 1.2, "the shared expert"
DECLINES = {**_SMALL, "tokens": 4, "latency": 1000, "shared": 8}


def compiled(overlap: str, **values: Any) -> Program:
    text = _TEXT.format(overlap=overlap, **values)
    return compile_phase(check(SourceFile("layer.moe", text)).plan(), "prefill", "layer.moe")


def build(program: Program, rank: Rank, groups: Any) -> Executor:
    """The program with random weights, the same for every plan."""
    generator = torch.Generator().manual_seed(rank.rank)
    tensors = {
        name: torch.randn(local_shape(program, param, rank.rank), generator=generator).mul_(param.shape[-1] ** -0.5)
        for name, param in sorted(wanted([program]).items())
    }
    tensors = {name: tensor.to(DTYPES["fp32"]) for name, tensor in tensors.items()}
    return Executor(program, tensors, allocate_kv(program), rank=rank.rank, groups=groups, status=rank.status)


def main_rank(rank: Rank, repeats: int, case: str) -> list[list[float]]:
    """Seconds of each step: overlap off, and as planned."""
    programs = [compiled(overlap, **PAYS[case]) for overlap in ("off", "auto")]
    groups = make_groups(programs[0].mesh, rank)
    executors = [build(program, rank, groups) for program in programs]
    step = make_step([Piece([(i * 7 + rank.rank) % 8 for i in range(1024)], 0)])
    outputs = [executor.run(step) for executor in executors]
    worst = float((outputs[0] - outputs[1]).abs().max())
    assert worst < 1e-3, f"overlap changed the result by {worst}"
    times: list[list[float]] = [[], []]
    for _ in range(repeats):
        for taken, executor in zip(times, executors, strict=True):
            dist.barrier()
            start = time.perf_counter()
            executor.run(step)
            dist.barrier()
            taken.append(time.perf_counter() - start)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description="Overlap of exchange and compute on a shaped cluster.")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    declined, off = compiled("auto", **DECLINES), compiled("off", **DECLINES)
    print(f"where it declines, auto plans overlap = {declined.overlap}; equal to off: {declined == off}")
    gains = {}
    try:
        with ShapedCluster(2, 2, 400) as cluster:
            for case, values in PAYS.items():
                print(f"{case} under the exchange: auto plans overlap = {compiled('auto', **values).overlap}")
                gains[case] = show(cluster.run(main_rank, options.repeats, case)[0])
    except ClusterError as error:
        print(f"shaped_overlap: {error}", file=sys.stderr)
        return 4
    print(f"{REQUIRED}: {gains[REQUIRED]:.2f} times as fast, pair by pair; at least {LEAST:.2f} is required")
    return 0 if gains[REQUIRED] >= LEAST and declined == off else 1


def show(times: list[list[float]]) -> float:
    """The median of the ratios, pair by pair."""
    pairs = [a / b for a, b in zip(*times, strict=True)]
    medians = [statistics.median(taken) for taken in times]
    median = float(statistics.median(pairs))
    print(f"  off {medians[0]:.3f} s, planned {medians[1]:.3f} s: {medians[0] / medians[1]:.2f} times as fast")
    print(f"  pair by pair: {', '.join(f'{ratio:.2f}' for ratio in pairs)} (median {median:.2f})")
    return median


if __name__ == "__main__":
    sys.exit(main())
