"""The C++ kernels of a program, as a library that this process has loaded."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Hashable, Iterable
from typing import Any

from moec.cache_sizes import host_experts
from moec.codegen.cpp import (
    Attention,
    LatentAttention,
    Norm,
    Product,
    Rope,
    Route,
    Router,
    Shape,
    kernels_of,
    render_cpp,
)
from moec.diagnostics import MoecError, fail
from moec.ir.program import Program
from moec.ir.slots import is_cached
from moec.runtime.cpp_build import load
from moec.runtime.experts.memory_lane import memory_library
from moec.runtime.kernels.torch_moe import BUG

_P, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
#: Arguments and result of the kernels of a kind of shape, and of those that have a name only.
SIGNATURES: dict[type[Shape] | str, tuple[tuple[Any, ...], Any]] = {
    Product: ((_P, _P, _N, _P, _P), None),
    Norm: ((_P, _N, _P, _P, _F), None),
    Rope: ((_P, _N, _N, _P, _P, _P, _P), None),
    Attention: ((*(_P,) * 7, _N, _N, _F, _P), None),
    LatentAttention: ((*(_P,) * 7, _N, _N, _F, _P), None),
    Router: ((_P, _P, _N, _P, _P), None),
    Route: ((_P, _N, _P, _F, _P, _P), _N),
    "take_rows": ((_P, _N, _P, _N, _N, _P), ctypes.c_bool),
    "add": ((_P, _P, _N, _P), None),
    "group_rows": ((_P, *(_N,) * 3, _P, _P, _N, _N, _P, _P, _P), _N),
    "reduce_rows": ((_P, _N, _N, _P, _P, _N, _N, _P), None),
    "set_threads": ((ctypes.c_int,), None),
}


class Library:
    """A plan's kernels, by shape."""

    def __init__(self, source: str) -> None:
        self._library = load(source)
        self._found: dict[Hashable, Any] = {}

    def set_threads(self, count: int) -> None:
        """Kernels of much work share it out over so many threads, the caller's among them."""
        self.get("set_threads")(count)

    def get(self, kind: type[Shape] | str, *numbers: Any) -> Any:
        """The function of the shape `kind(*numbers)`, or of a name. Raises E0543 for what the plan does not have."""
        found = self._found.get((kind, numbers))  # a shape itself takes long to hash
        return self._find(kind, numbers) if found is None else found

    def _find(self, kind: type[Shape] | str, numbers: tuple[Any, ...]) -> Any:
        name = kind if isinstance(kind, str) else kind(*numbers).name
        try:
            found = getattr(self._library, name)
        except AttributeError:
            raise fail("E0543", f"there is no C++ kernel `{name}` in the plan's library", BUG) from None
        found.argtypes, found.restype = SIGNATURES[kind]
        self._found[kind, numbers] = found
        return found


def open_library(program: Program) -> Library | MoecError | None:
    """The C++ kernels of a program, built once a process; why there are none (E0540 to E0542); None: it wants none."""
    kernels = kernels_of(program)
    return None if kernels is None else _open(render_cpp(kernels))


def notes(programs: Iterable[Program], device: str) -> list[str]:
    """Builds the libraries of programs, to be called before ranks are forked; why torch's kernels serve instead."""
    if device != "cpu":
        wanted = any(kernels_of(program) is not None for program in programs)
        return ["C++ kernels are for the CPU"] if wanted else []
    programs = list(programs)
    if any(is_cached(program) and host_experts(program) for program in programs):
        memory_library()  # which no rank is to build either; a thread of Python's serves where there is none
    opened = [open_library(program) for program in programs]
    return list(dict.fromkeys(str(error) for error in opened if isinstance(error, MoecError)))


@functools.cache
def _open(source: str) -> Library | MoecError:
    try:
        return Library(source)
    except MoecError as error:
        return error
