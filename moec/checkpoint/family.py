"""A family file of specs/families: which config keys and which tensor names a `model_type` has, as data.

This module reads the file and turns its tensor patterns into a table; `moec.importer.config` reads its config rules.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from moec.diagnostics import fail

SECTIONS = ("model", "rotary", "attention", "router", "experts", "shared", "dense", "layers")
_TABLES = (*SECTIONS, "config", "quantization", "tensors", "ignored_tensors")
_EVERY_CONFIG = "ignored_keys"
_TARGET = re.compile(r"(?P<logical>[a-z0-9_.{}]+?)(?P<expert>\[\{e\}\])?")
_PLACES = {"{l}", "{e}"}


@dataclass(frozen=True)
class Target:
    """What a tensor name stands for. More than one logical parameter: their rows follow each other in the tensor.

    `numbers` says what the name's numbers are, in order: `l` layer, `e` expert. `one_expert`: the tensor is the part of
    one expert, so the logical parameters have a dim more.
    """

    logical: tuple[str, ...]
    numbers: str
    one_expert: bool


@dataclass(frozen=True)
class Family:
    """One family. `rules` holds the sections of the file as read; `ignored_keys` are those of every config too."""

    name: str
    architecture: str
    rules: dict[str, dict[str, Any]]
    quantization: dict[str, Any] | None
    tensors: dict[str, Target]
    ignored_tensors: dict[str, str]
    ignored_keys: frozenset[str] = field(default_factory=frozenset)

    @property
    def extra_layer_keys(self) -> list[str]:
        """Config keys that count layers after the last one, which are not part of the model."""
        return list(self.rules["config"].get("extra_layers", ()))


def family_names() -> list[str]:
    """The families moec ships, sorted."""
    names = (entry.name for entry in resources.files("moec.specs").joinpath("families").iterdir())
    return sorted(name[:-5] for name in names if name.endswith(".toml") and name != f"{_EVERY_CONFIG}.toml")


def family_of(config: dict[str, Any], where: object) -> Family:
    """The family of a config by its `model_type`. `where` names the config in an error. Raises E0720."""
    name, known = config.get("model_type"), family_names()
    if not isinstance(name, str) or name not in known:
        found = f"is `{name}`" if isinstance(name, str) else "is missing" if name is None else "is not text"
        # no "did you mean": another model's weights are not read by renaming them after the nearest family
        help = f"families: {', '.join(known)}; a new one is a file in specs/families"
        raise fail("E0720", f"`model_type` in `{where}` {found}, which moec has no family for", help)
    return load_family(name)


@cache
def load_family(name: str) -> Family:
    """The family in specs/families/NAME.toml. Raises E0724 where the file is not well formed."""
    every = _read(_EVERY_CONFIG)
    return parse_family(name, _read(name), frozenset(every["ignored"]))


def parse_family(name: str, text: dict[str, Any], every_config: frozenset[str] = frozenset()) -> Family:
    """Family from the parsed TOML of file NAME.toml. Raises E0724 naming the file and what is wrong in it."""
    _check(name, text.get("name") == name, f"`name` is not `{name}`")
    _check(name, isinstance(text.get("architecture"), str), "`architecture` is missing")
    unknown = sorted(set(text) - {"name", "architecture", *_TABLES})
    _check(name, not unknown, f"`{unknown[0] if unknown else ''}` is no section")
    rules = {section: text.get(section, {}) for section in (*SECTIONS, "config")}
    for section in ("model", "attention", "tensors"):
        _check(name, bool(text.get(section)), f"section [{section}] is missing")
    tensors = dict(_targets(name, text["tensors"]))
    ignored = {_key(name, pattern)[0]: reason for pattern, reason in text.get("ignored_tensors", {}).items()}
    keys = every_config | frozenset(rules["config"].get("ignored", ()))
    return Family(name, text["architecture"], rules, text.get("quantization"), tensors, ignored, keys)


def tensor_key(name: str) -> tuple[str, tuple[int, ...]]:
    """`model.layers.3.mlp.experts.7.up_proj.weight` -> (`model.layers.#.mlp.experts.#.up_proj.weight`, (3, 7))."""
    words = name.split(".")
    numbers = tuple(int(word) for word in words if word.isdecimal())
    return ".".join("#" if word.isdecimal() else word for word in words), numbers


def _targets(family: str, patterns: dict[str, Any]) -> Iterator[tuple[str, Target]]:
    for pattern, written in patterns.items():
        key, numbers = _key(family, pattern)
        targets = written if isinstance(written, list) else [written]
        matches = [_TARGET.fullmatch(target) for target in targets if isinstance(target, str)]
        good = len(matches) == len(targets) > 0 and None not in matches
        _check(family, good, f"tensor `{pattern}` has no parameter names on its right")
        found = [match for match in matches if match is not None]
        one_expert = found[0]["expert"] is not None
        same = all((match["expert"] is not None) == one_expert for match in found)
        _check(family, same and one_expert == ("e" in numbers), f"tensor `{pattern}`: `{{e}}` on one side only")
        logical = tuple(match["logical"] for match in found)
        _check(
            family,
            all(("{l}" in x) == ("l" in numbers) for x in logical),
            f"tensor `{pattern}`: `{{l}}` on one side only",
        )
        yield key, Target(logical, numbers, one_expert)


def _key(family: str, pattern: str) -> tuple[str, str]:
    """Lookup key of a pattern, and which number each `{...}` is."""
    words = pattern.split(".")
    places = [word for word in words if "{" in word]
    _check(
        family,
        set(places) <= _PLACES and len(set(places)) == len(places),
        f"tensor `{pattern}`: `{{l}}`, `{{e}}`, once",
    )
    key = ".".join("#" if word in _PLACES else word for word in words)
    return key, "".join(place[1] for place in places)


def _read(name: str) -> dict[str, Any]:
    text = resources.files("moec.specs").joinpath("families", f"{name}.toml").read_text("utf-8")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise fail("E0724", f"family file specs/families/{name}.toml: {error}") from None


def _check(family: str, holds: bool, what: str) -> None:
    if not holds:
        raise fail("E0724", f"family file specs/families/{family}.toml: {what}", "see a family file that works")
