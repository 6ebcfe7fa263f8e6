"""Builds a Type while `moec.ir.parse` reads its text, and what reading types and programs share."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

from lark import Token, Transformer, v_args

from moec.ir.program import Loc, Type
from moec.layout import Layout, Partial, Place, Placed, Replicate, Routed, Shard


class ReadError(Exception):
    """The text says something no program can."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise ReadError(what)


def integer(token: str) -> int:
    require(re.fullmatch(r"-?\d{1,18}", token) is not None, f"{token[:20]} is no number of up to 18 digits")
    return int(token)


def number(token: Token) -> Any:
    """The number or the name a token says."""
    kinds: dict[str, Callable[[str], Any]] = {"INT": integer, "FLOAT": float}
    return kinds.get(token.type, str)(token)


def sizes(name: Token, type: Type) -> tuple[int, ...]:
    """A shape of numbers only."""
    require(all(isinstance(dim, int) and dim > 0 for dim in type.shape), f"{name} has the shape {list(type.shape)}")
    return cast(tuple[int, ...], type.shape)


def string(token: Token) -> str:
    """What a quoted text says."""
    return re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), token[1:-1], flags=re.DOTALL)


def location(token: Token) -> Loc:
    """`!7:3`, or with a file in front."""
    file, line, column = ("", *token[1:].split(":")) if token.count(":") == 1 else token[1:].rsplit(":", 2)
    name = string(cast(Token, file)) if file.startswith('"') else file
    return Loc(integer(line), integer(column), name)


@v_args(inline=True)
class TypeReader(Transformer[Token, Any]):
    """One method per rule of the grammar of types."""

    def start(self, *parts: Any) -> Type:
        pending, dtype, *dims, lies = parts
        return Type(tuple(d for d in dims if d is not None), str(dtype), lies or Layout(), pending is not None)

    def dim(self, token: Token) -> int | str:
        return cast(int | str, number(token))

    def layout(self, view: Token, *places: Any) -> Layout:
        require(len(dict(places)) == len(places), "a layout names an axis twice")
        return Layout(str(view), places)

    def place(self, axis: Token, kind: Token, table: Token | None) -> tuple[str, Place]:
        return str(axis), _place(str(kind), table)


def _place(kind: str, table: Token | None) -> Place:
    if table is not None and kind in ("home", "node", "local", "expert", "grouped"):
        return Routed(str(table), kind)
    if table is not None and kind == "placed":
        return Placed(str(table))
    if table is None and (match := re.fullmatch(r"S(\d)(?:x(\d{1,5}))?", kind)):
        return Shard(int(match[1]), int(match[2] or 1))
    require(table is None and kind in ("R", "P"), f"there is no placement {kind}")
    return Replicate() if kind == "R" else Partial()
