"""What a pass is: a frozen dataclass with a name, whose fields are its options, rewriting a Program in place."""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from moec.diagnostics import CompileError, Diagnostic, did_you_mean
from moec.ir.program import Program

#: What an option's field can be.
KINDS: dict[str, Callable[[str], Any]] = {"int": int, "str": str, "float": float}


@dataclass(frozen=True)
class Pass(ABC):
    """One rewrite. `exact`: no sum changes its order, so the reference evaluator gives the same bits as before."""

    name: ClassVar[str]
    exact: ClassVar[bool] = True

    @abstractmethod
    def run(self, program: Program) -> None:
        """Rewrite `program` in place. Raises CompileError where the program cannot be compiled as declared."""

    def __str__(self) -> str:
        """`fuse-dispatch{min-tokens=4}`: only options that differ from their default."""
        options = [
            f"{field.name.replace('_', '-')}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return self.name + (f"{{{','.join(options)}}}" if options else "")


def pass_named(name: str) -> type[Pass]:
    """A pass by its name: for those that try others out, which no pass imports."""
    return next(cls for cls in Pass.__subclasses__() if cls.name == name)


def parse_pass(text: str, known: tuple[type[Pass], ...]) -> Pass:
    """The pass a spelling like `name{option=value}` means. Raises CompileError E0402."""
    match = re.fullmatch(r"([a-z0-9-]+)(?:\{([^{}]*)\})?", text.strip())
    by_name = {cls.name: cls for cls in known}
    if match is None or match[1] not in by_name:
        help = did_you_mean(match[1] if match else text, by_name) or f"known passes: {', '.join(by_name)}"
        raise CompileError(Diagnostic("E0402", f"there is no pass `{text}`", help=help))
    cls = by_name[match[1]]
    types = {field.name: field.type for field in dataclasses.fields(cls)}
    items = (match[2] or "").split(",") if match[2] else []
    return cls(**dict(_option(cls.name, item, types) for item in items))


def _option(name: str, item: str, types: dict[str, Any]) -> tuple[str, Any]:
    key, equals, value = item.partition("=")
    field = key.strip().replace("-", "_") if equals else ""
    try:
        return field, KINDS[str(types[field])](value)
    except (KeyError, ValueError):
        help = f"options of {name}: {', '.join(types) or 'none'}"
        raise CompileError(Diagnostic("E0402", f"{name} cannot take {item}", help=help)) from None
