"""The C++ kernels of a program, as a library that this process has loaded."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from typing import Any

from moec.codegen.cpp import Shape, kernels_of, render_cpp
from moec.diagnostics import MoecError, fail
from moec.ir import Program
from moec.runtime.cpp_build import load
from moec.runtime.kernels_torch_moe import BUG


class Library:
    """A plan's kernels, by shape."""

    def __init__(self, source: str) -> None:
        self._library = load(source)
        self._found: dict[Shape | str, Any] = {}

    def set_threads(self, count: int) -> None:
        """Kernels of much work share it out over so many threads, the caller's among them."""
        self.get("set_threads", (ctypes.c_int,))(count)

    def get(self, shape: Shape | str, arguments: tuple[Any, ...], result: Any = None) -> Any:
        """The function of a shape (or of a name) for ctypes. Raises E0543 for a shape that the plan does not have."""
        found = self._found.get(shape)
        if found is None:
            name = shape if isinstance(shape, str) else shape.name
            try:
                found = getattr(self._library, name)
            except AttributeError:
                raise fail("E0543", f"there is no C++ kernel `{name}` in the plan's library", BUG) from None
            found.argtypes, found.restype = arguments, result
            self._found[shape] = found
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
    opened = [open_library(program) for program in programs]
    return list(dict.fromkeys(str(error) for error in opened if isinstance(error, MoecError)))


@functools.cache
def _open(source: str) -> Library | MoecError:
    try:
        return Library(source)
    except MoecError as error:
        return error
