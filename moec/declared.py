"""The mathematics of a model as one flat table: what a config.json must say too for its weights to mean the same.

A plan keeps the table of its program, and `moec.importer.match` compares it with the config beside the weights. Names,
the dtype of the checkpoint and where a declaration stands are left out: they change no result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from typing import Any

from moec.checked import Gqa, Layer, Mla, Model, Moe, Swiglu

Row = dict[str, Any]


def declared(model: Model) -> dict[str, Any]:
    """`model`: rows of the whole model; `layers`: [first, last, rows] of each run of alike layers. Plain JSON."""
    rotary = model.rotary
    rows: Row = {"hidden": model.hidden, "vocab": model.vocab, "layers": len(model.layers), "norm eps": model.norm_eps}
    rows |= {"tied head": model.tied, "rope theta": rotary.theta, "rope pairs": rotary.pairs}
    yarn = asdict(rotary.yarn) if rotary.yarn else {}
    rows |= {"yarn": bool(yarn)} | {f"yarn {key}": value for key, value in yarn.items()}
    found = [_layer(layer) for layer in model.layers]
    runs = [[index for index, _ in run] for _, run in groupby(enumerate(found), key=lambda entry: entry[1])]
    return {"model": rows, "layers": [[run[0], run[-1], found[run[0]]] for run in runs]}


def rows_of(table: dict[str, Any]) -> Iterator[tuple[int | None, str, Any]]:
    """(layer, or None for the whole model; name; value) of everything in a table of `declared`."""
    yield from ((None, name, value) for name, value in table["model"].items())
    for first, last, rows in table["layers"]:
        for index in range(first, last + 1):
            yield from ((index, name, value) for name, value in rows.items())


def _layer(layer: Layer) -> Row:
    return _block("attention", layer.attention) | (_moe(layer.ffn) if isinstance(layer.ffn, Moe) else _mlp(layer.ffn))


def _block(name: str, block: Gqa | Mla) -> Row:
    kind = "gqa" if isinstance(block, Gqa) else "mla"
    fields = {key: value for key, value in vars(block).items() if key not in ("name", "span")}
    return {name: kind} | {f"{kind} {key}": value for key, value in fields.items()}


def _mlp(mlp: Swiglu) -> Row:
    return {"ffn": "dense", "dense width": mlp.inner}


def _moe(moe: Moe) -> Row:
    router, shared = moe.router, moe.shared
    fields = {key: value for key, value in vars(router).items() if key not in ("name", "span")}
    if router.keep == router.groups:  # every group stays eligible: no limit at all
        fields |= {"groups": 1, "keep": 1}
    width = shared.count * shared.inner if shared else 0  # several shared experts are one wider MLP
    rows = {"ffn": "moe", "experts": moe.routed.count, "expert width": moe.routed.inner, "shared width": width}
    return rows | {f"router {key}": value for key, value in fields.items()}
