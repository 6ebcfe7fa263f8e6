"""What each attribute of an operation may say: one rule per name, whatever operation carries it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_index(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_yarn(value: Any) -> bool:
    return value is None or (isinstance(value, tuple) and len(value) == 6 and all(map(_is_number, value)))


def _one_of(*words: str) -> Callable[[Any], bool]:
    return lambda value: value in words


def _is_sizes(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) > 1 and all(map(_is_count, value))


def _is_chunk(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and _is_index(value[0]) and _is_count(value[1])


ATTRIBUTES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "ahead": ("a number of layers", lambda value: type(value) is int and value != 0),
    "back": ("true or false", lambda value: isinstance(value, bool)),
    "by": ("next_router, history or frequency", _one_of("next_router", "history", "frequency")),
    "bound": ("none or a count", lambda value: value is None or _is_count(value)),
    "chunk": ("an index and a count", _is_chunk),
    "dim": ("a dim", _is_index),
    "drop": ("true or false", lambda value: isinstance(value, bool)),
    "dtype": ("a dtype", _one_of("bf16", "fp16", "fp32")),
    "eps": ("a number", _is_number),
    "form": ("expanded or absorbed", _one_of("expanded", "absorbed")),
    "group": ("a group's name", lambda value: isinstance(value, str)),
    "groups": ("a count", _is_count),
    "head_dim": ("a count", _is_count),
    "hidden": ("a count", _is_count),
    "how": ("keep, slice or gather", _one_of("keep", "slice", "gather")),
    "index": ("an index", _is_index),
    "keep": ("a count", _is_count),
    "most": ("a count", _is_count),
    "pairs": ("halves or interleaved", _one_of("halves", "interleaved")),
    "parts": ("a count", _is_count),
    "renormalize": ("true or false", lambda value: isinstance(value, bool)),
    "rows": ("a count", _is_count),
    "scale": ("a number", _is_number),
    "score": ("softmax or sigmoid", _one_of("softmax", "sigmoid")),
    "shared": ("a count", _is_count),
    "sizes": ("two counts or more", _is_sizes),
    "sums": ("fixed or any", _one_of("fixed", "any")),
    "table": ("a table's name", lambda value: isinstance(value, str)),
    "theta": ("a number", _is_number),
    "to": ("experts or attention", _one_of("experts", "attention")),
    "top": ("a count", _is_count),
    "value": ("a count", _is_count),
    "yarn": ("none or six numbers", _is_yarn),
}


def attribute_fault(name: str, value: Any) -> str:
    """What is wrong with an attribute, or the empty string."""
    wanted, holds = ATTRIBUTES[name]
    return "" if holds(value) else f"{name} is {value}, not {wanted}"
