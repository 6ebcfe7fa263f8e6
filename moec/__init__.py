"""moec: a compiler for Mixture-of-Experts inference.

    import moec
    artifact = moec.compile(Path("tiny.moe"), overrides=["plan.compute=fp32"])
    artifact.save(Path("tiny.build"))
    model = moec.load(Path("tiny.build"))
    model.generate([[5, 17, 4]], max_new_tokens=8)

The names below import torch when they are first used; `import moec` alone does not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moec.api import Model, load
    from moec.compiler import compile

__all__ = ["Model", "compile", "load"]

_HOMES = {"Model": "moec.api", "load": "moec.api", "compile": "moec.compiler"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module `moec` has no `{name}`")
    return getattr(import_module(_HOMES[name]), name)
