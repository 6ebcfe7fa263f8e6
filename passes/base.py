"""What a pass is: a frozen dataclass with a name, whose fields are its options, rewriting a Program in place."""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from moec.diagnostics import CompileError, Diagnostic, did_you_mean
from moec.ir import Program


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


def parse_pass(text: str, known: tuple[type[Pass], ...]) -> Pass:
    """The pass a spelling like `name{option=value}` means. Raises CompileError E0402."""
    match = re.fullmatch(r"([a-z0-9-]+)(?:\{([^{}]*)\})?", text.strip())
    by_name = {cls.name: cls for cls in known}
    if match is None or match[1] not in by_name:
        help = did_you_mean(match[1] if match else text, by_name) or f"known passes: {', '.join(by_name)}"
        raise CompileError(Diagnostic("E0402", f"there is no pass `{text}`", help=help))
    cls = by_name[match[1]]
    types = {field.name: field.type for field in dataclasses.fields(cls)}
    given = dict(item.split("=", 1) for item in (match[2] or "").split(",") if "=" in item)
    return cls(**{key.replace("-", "_"): _option(cls.name, key, value, types) for key, value in given.items()})


def _option(name: str, key: str, value: str, types: dict[str, Any]) -> Any:
    kind = types.get(key.replace("-", "_"))
    try:
        return {"int": int, "str": str, "float": float}[str(kind)](value)
    except (KeyError, ValueError):
        help = f"options of {name}: {', '.join(types) or 'none'}"
        raise CompileError(Diagnostic("E0402", f"{name} cannot take {key}={value}", help=help)) from None
