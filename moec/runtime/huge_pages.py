"""Large pages behind large tensors on the CPU: of weights that a step reads once, each page costs a look-up."""

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


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    found: Callable[[int, int, int], int] = advise
    return found
