"""Embedding and sums in C++ against torch's, bit for bit; and memory that a process keeps.

Shapes: T tokens, V vocabulary, D hidden.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest
import torch

from moec.codegen.cpp import Norm, collect, render_cpp
from moec.codegen.targets import Dtype
from moec.diagnostics import MoecError
from moec.runtime.cpp_build import find_compiler
from moec.runtime.cpp_library import Library
from moec.runtime.kernels import cpp_rows
from tests.contexts import context, poisoned_memory

DTYPES = {torch.float32: Dtype.FP32, torch.bfloat16: Dtype.BF16}


@pytest.fixture(scope="module", params=DTYPES, ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.fixture(scope="module")
def library(dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory) -> Library:
    try:
        find_compiler()
    except MoecError as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return Library(render_cpp(collect(DTYPES[dtype], [Norm(33)])))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(0, 33), (1, 1), (1, 33), (7, 50), (64, 1025), (300, 1024)])
def test_sums(library: Library, dtype: torch.dtype, shape: tuple[int, int], threads: int) -> None:
    """B19, B23: sizes that fill no vector, memory that starts as NaN; infinities and what rounds to them."""
    a, b = (torch.randn(shape, generator=torch.Generator().manual_seed(s)).to(dtype) for s in (1, 2))
    if a.numel() > 1:
        largest = torch.finfo(dtype).max
        a.view(-1)[-2:], b.view(-1)[-2:] = torch.tensor([largest, float("inf")]), torch.tensor([largest, 1.0])
    library.set_threads(threads)
    try:
        with poisoned_memory():
            assert torch.equal(cpp_rows.add(library, context(), a, b), a + b)
            assert torch.equal(cpp_rows.add(library, context(), a.T, b.T), (a + b).T)
    finally:
        library.set_threads(1)


@pytest.mark.parametrize("hidden", [1, 33, 1024])
@pytest.mark.parametrize("tokens", [[], [6], [0, 6, 3, 3] * 200])
def test_embedding(library: Library, dtype: torch.dtype, hidden: int, tokens: list[int]) -> None:
    table, ids = torch.randn(7, hidden).to(dtype), torch.tensor(tokens, dtype=torch.int64)
    with poisoned_memory():
        assert torch.equal(cpp_rows.embed(library, context(), ids, table), table[ids])


@pytest.mark.parametrize("token", [-1, 7, 1 << 40])
def test_a_token_that_the_table_does_not_have_is_torchs_to_refuse(
    library: Library, dtype: torch.dtype, token: int
) -> None:
    with pytest.raises(IndexError):
        cpp_rows.embed(library, context(), torch.tensor([0, token]), torch.zeros(7, 33, dtype=dtype))


ROUNDS = """
import ctypes, resource, sys
from moec.runtime.host_memory import keep_freed

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
if sys.argv[1] == "keep":
    keep_freed()

def faults(count, num_bytes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [libc.malloc(num_bytes) for _ in range(count)]
    for place in held:
        ctypes.memset(place, 1, num_bytes)
    for place in held:
        libc.free(place)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults(1, 48 << 20), faults(1, 48 << 20), *(faults(4, 16 << 20) for _ in range(5)))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
@pytest.mark.parametrize("is_kept", [True, False])
def test_freed_memory_is_kept(is_kept: bool) -> None:
    """Results as large as those before them cost no pages; by the system's own rule, and over the limit, all do."""
    command = [sys.executable, "-c", ROUNDS, "keep" if is_kept else "free"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *large, first, second, third, fourth, fifth = map(int, done.stdout.split())
    pages = (16 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert min(large) >= 3 * pages and first >= 0.9 * 4 * pages
    for again in (second, third, fourth, fifth):
        assert again < pages // 64 if is_kept else again >= 0.9 * 4 * pages
