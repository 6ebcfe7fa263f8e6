"""One rank of a run: its numbers, its device, its thread count and its place in the process group.

Used alike by ranks that the launcher forked and by ranks that torchrun started.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from moec.diagnostics import fail
from moec.runtime.launch.status import Status

#: Longest wait of one collective. Ranks may load weights at very different speeds; a dead peer is noticed at once.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
JOIN_VARIABLE = "MOEC_JOIN_TIMEOUT"
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h


@dataclass(frozen=True)
class Rank:
    """`rank` of `world` ranks; `local_rank` of the `local_world` ranks on this host."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    device: torch.device
    status: Status


def device_kind() -> str:
    """cuda where a CUDA device is visible. Counting devices does not start CUDA, so ranks may still be forked."""
    return "cuda" if torch.cuda.device_count() else "cpu"


def choose_device(kind: str, local_rank: int, local_world: int, num_devices: int) -> torch.device:
    """The device of a rank: the CPU, or the CUDA device numbered by its local rank.

    Raises:
        MoecError: E0605, fewer devices than ranks on this host.
    """
    if kind == "cpu":
        return torch.device("cpu")
    if num_devices < local_world:
        raise fail(
            "E0605",
            f"{local_world} ranks on this host need a CUDA device each, {num_devices} are visible",
            f"run {num_devices or 1} ranks per host, or hide the devices with CUDA_VISIBLE_DEVICES= to use the CPU",
        )
    return torch.device("cuda", local_rank)


def start_rank(
    rank: int,
    world: int,
    local: tuple[int, int],
    kind: str,
    store: Store | None,
    status: Status,
    threads: int | None = None,
) -> Rank:
    """Set threads and device, and join the process group (gloo on CPU, NCCL on CUDA; none for a world of one rank).

    `local`: local rank and number of ranks on this host. `threads`: intra-op threads, the host's cores shared out
    among its ranks when None.
    """
    status.begin("setup", "init")
    local_rank, local_world = local
    keep_freed_memory()
    torch.set_num_threads(threads or max(1, num_cores() // local_world))
    device = choose_device(kind, local_rank, local_world, torch.cuda.device_count() if kind == "cuda" else 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world > 1:
        assert store is not None
        backend = "nccl" if device.type == "cuda" else "gloo"
        status.enter("init")
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT)
        # The status stays that of a rank that waits: what comes next may do so without saying it.
    return Rank(rank, world, local_rank, local_world, device, status)


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_freed_memory() -> None:
    """Have glibc's malloc reuse the memory of large tensors.

    By default it gives each block above 32 MiB back to the system and takes a fresh one next time, whose pages the
    kernel then clears one by one: for a tensor that is written once, several times the cost of writing it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent` dies, however it dies; leave at once if it already has.

    The signal is bound to the parent's thread that forked, so fork from the main thread. Linux only.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def join_timeout() -> timedelta:
    """How long ranks wait for each other at the start: MOEC_JOIN_TIMEOUT seconds, 30 when it is not set.

    Raises:
        MoecError: E0608, the variable is not a number.
    """
    text = os.environ.get(JOIN_VARIABLE, "30")
    if not text.isdecimal():
        raise fail("E0608", f"{JOIN_VARIABLE}={text} is not understood", "write a number of seconds")
    return timedelta(seconds=int(text))
