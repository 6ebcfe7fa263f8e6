"""Whether the config.json beside the weights describes the model that a program was compiled from.

Shapes are compared with the tensors themselves (`moec.checkpoint.map`), but most of the mathematics leaves no trace in
a shape: how many experts a token takes, the rotary base, the norms' epsilon. A program that differs there from what its
weights were trained as runs, and is wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moec.checkpoint.family import family_of
from moec.checkpoint.folder import read_config
from moec.declared import declared, rows_of
from moec.diagnostics import fail
from moec.importer.folder import import_config
from moec.importer.text import layer_ranges, number


def check_declared(table: dict[str, Any] | None, folder: Path) -> None:
    """Compare a program's table of `moec.declared` with what config.json of `folder` says.

    Raises:
        MoecError: E0747 with every difference; E0720 to E0723 for a config that moec cannot honour.
    """
    config, _ = read_config(folder)
    where = folder / "config.json"
    if table is None:
        what = f"the program does not say which model it is of, so it cannot be compared with `{where}`"
        raise fail("E0747", what, "it is of an older moec: compile it again")
    says = declared(import_config(config, family_of(config, where), where))
    if found := differences(says, table):
        what = f"`{where}` is of another model than the program: {'; '.join(found)}"
        raise fail("E0747", what, "edit the .moe file to agree, or make it anew with `moec import`")


def differences(says: dict[str, Any], has: dict[str, Any]) -> list[str]:
    """One text for each name and pair of values that differ, alike layers together.

    A name that one table lacks follows from another that differs: a kind of block, or the number of layers.
    """
    program = {(layer, name): value for layer, name, value in rows_of(has)}
    layers: dict[tuple[str, str, str], list[int]] = {}
    for layer, name, value in rows_of(says):
        other = program.get((layer, name), value)
        if other != value:
            at = layers.setdefault((name, _word(value), _word(other)), [])
            at += [] if layer is None else [layer]
    return [f"{name}{_at(at)}: config says {left}, program has {right}" for (name, left, right), at in layers.items()]


def _at(layers: list[int]) -> str:
    return f" of layer{'s' if len(layers) > 1 else ''} {layer_ranges(layers)}" if layers else ""


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return number(value) if isinstance(value, float) else str(value)
