"""Symbols that the proof of an exchange computes with, instead of numbers.

A row knows its token, and the terms summed in it: which expert gave each, where, and with which weights. Ids are real
expert ids of a routing table. A column is what one rank holds of a value: a list of rows, ids, weights, messages or
numbers (counts, origins, pairs, offsets), or a parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import fx


class Token(NamedTuple):
    """Row `row` of the batch that `rank` (the first one of its tp group) starts with."""

    rank: int
    row: int

    def __str__(self) -> str:
        return f"token {self.row} of rank {self.rank}"


class Term(NamedTuple):
    """What `expert` gave for `token` on `rank`, times the weights (token, choice); `part`: which piece of etp."""

    token: Token
    choice: int
    expert: int
    rank: int
    part: int | None
    weights: tuple[tuple[Token, int], ...] = ()

    def __str__(self) -> str:
        return f"{self.token}, choice {self.choice} (expert {self.expert})"


class Row(NamedTuple):
    """A row of `token` (None: empty room) with the experts' terms summed in it."""

    token: Token | None
    terms: tuple[Term, ...] = ()


class Work(NamedTuple):
    """A row on its way through its expert; `stage`: in, gate, up, act."""

    token: Token
    choice: int
    expert: int
    stage: str = "in"
    part: int | None = None

    def __str__(self) -> str:
        return f"{self.token}, choice {self.choice} (expert {self.expert})"


class Ids(NamedTuple):
    """The experts of each choice of a token; -1: not for here."""

    token: Token | None
    experts: tuple[int, ...]


class Weights(NamedTuple):
    """The weights of all choices of a token."""

    token: Token | None


class Message(NamedTuple):
    row: Row
    ids: Ids
    weights: Weights


#: What one rank holds of a value.
Column = list[Any]


@dataclass(frozen=True)
class Value:
    """One column per rank. `kind`: rows, ids, weights, messages, numbers, param; `pending` between start and wait."""

    kind: str
    columns: list[Column]
    pending: bool = False


class Fault(Exception):
    """What is wrong with an exchange; `node` is the operation that shows it."""

    node: fx.Node | None = None


def require(holds: bool, why: str) -> None:
    if not holds:
        raise Fault(why)


def same_length(a: Column, b: Column, what: str) -> None:
    require(len(a) == len(b), f"{what} differ in number: {len(a)} and {len(b)}")


def same_tokens(what: str, *columns: Column) -> None:
    for other in columns[1:]:
        same_length(columns[0], other, what)
    for items in zip(*columns, strict=True):
        names = {item.token for item in items}
        require(len(names) == 1, f"{what} are of {' and '.join(sorted(map(str, names)))}")


def terms_of(row: Row | Work) -> tuple[Term, ...]:
    require(isinstance(row, Row), f"{row}: summed before its expert has given it")
    assert isinstance(row, Row)
    return row.terms
