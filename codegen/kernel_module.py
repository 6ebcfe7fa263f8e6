"""Make a Triton kernel from rendered text, without a file: nothing in a build folder is ever imported.

Triton reads a kernel's source through `inspect`, so the text is registered in `linecache` under a path that cannot
exist (inside `/dev/null`): no file put anywhere can take its place. Triton's own cache finds machine code by content.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.abc
import importlib.util
import linecache
import sys
from types import CodeType, ModuleType
from typing import Any

from moec.codegen.renderer import check_python
from moec.diagnostics import fail

#: Combine functions of the templates, by name, that the interpreter has a fast form of: it takes that where it sees
#: the function of Triton's library, and calls any other in Python for every element.
FAST_COMBINES = {"add": "_sum_combine", "larger": "_elementwise_max", "smaller": "_elementwise_min"}


@functools.cache
def load_kernel(source: str, name: str, interpret: bool) -> Any:
    """The kernel `name` of a rendered module: Triton's interpreted form for CPU tensors, or its compiled form.

    One process may hold both forms of one text, whichever way `TRITON_INTERPRET` was set when Triton was imported: the
    templates use no function of Triton's standard library, which is fixed to one form by then. Raises E0520 where
    Triton is missing and E0503 or E0504 for text that the renderer would refuse.
    """
    check_python(source, name)
    knobs = _triton().knobs
    with knobs.runtime.scope():
        knobs.runtime.interpret = interpret
        module = _import_text(source, name, interpret)
    if interpret:
        _use_fast_combines(module)
    return getattr(module, name)


def _triton() -> Any:
    try:
        import triton
    except ImportError as error:
        raise fail(
            "E0520", f"Triton cannot be imported: {error}", "install triton, or use `--kernels torch`"
        ) from error
    return triton


def _use_fast_combines(module: ModuleType) -> None:
    """Put the functions that the interpreter knows in the place of the module's own, which do the same."""
    from triton.language import standard

    for name, known in FAST_COMBINES.items():
        if hasattr(module, name):
            setattr(module, name, getattr(standard, known, getattr(module, name)))


class _TextLoader(importlib.abc.InspectLoader):
    """Loads a module from a string."""

    def __init__(self, source: str, path: str) -> None:
        self.source, self.path = source, path

    def get_source(self, fullname: str) -> str:
        return self.source

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.source, self.path)


def _import_text(source: str, name: str, interpret: bool) -> ModuleType:
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    module_name = f"moec_{'interpreted' if interpret else 'compiled'}_{name}_{digest}"
    path = f"/dev/null/{module_name}.py"
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    spec = importlib.util.spec_from_loader(module_name, _TextLoader(source, path), origin=path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # `inspect` finds a function's module by name
    spec.loader.exec_module(module)
    return module
