"""Memory of the CPU, which a step pays for by the page: large pages behind large tensors, and pages that are kept.

A page that the system gives is first filled with zeros, and each look-up of one that the processor has not seen lately
takes time: a prompt of 512 tokens spent a tenth of its time on the pages of its results.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

from torch import Tensor

#: A huge page of x86 and of most ARM systems; systems with other sizes take or leave the advice.
PAGE_BYTES = 2 << 20
#: `MADV_HUGEPAGE` of Linux.
_ADVICE = 14
#: `M_MMAP_THRESHOLD` and `M_TRIM_THRESHOLD` of glibc's mallopt(3), in bytes. The first has this limit there.
_KEPT = ((-3, 32 << 20), (-1, 256 << 20))


def advise_huge(tensor: Tensor) -> Tensor:
    """`tensor` itself, whose memory the system is asked to make of huge pages; before it is first written to."""
    if tensor.device.type != "cpu" or (advise := _madvise()) is None:
        return tensor
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
    first = -(-start // PAGE_BYTES) * PAGE_BYTES
    if (size := end // PAGE_BYTES * PAGE_BYTES - first) > 0:
        advise(first, size, _ADVICE)  # an advice: where it is refused, small pages serve
    return tensor


def new_empty(like: Tensor, *shape: int) -> Tensor:
    """`like.new_empty(*shape)`; many rows on huge pages, since a step pays for its memory by the page."""
    out = like.new_empty(shape)
    return advise_huge(out) if out.numel() >= PAGE_BYTES else out


def keep_freed() -> None:
    """What this process frees stays its own for what it asks for next, but for pieces of more than 32 MiB.

    Up to 256 MiB free memory are kept. On systems without glibc their own rule holds.
    """
    if sys.platform.startswith("linux") and (set_option := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        for option, value in _KEPT:
            set_option(option, value)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    found: Callable[[int, int, int], int] = advise
    return found
