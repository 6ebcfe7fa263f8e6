"""Shipped descriptions: clusters, models, checkpoint families and the pages of `moec explain CODE`. Data, not code."""

from __future__ import annotations

from importlib import resources


def shipped(folder: str, suffix: str) -> list[str]:
    """The names of the files of a folder that end in `suffix`, without it, sorted: `shipped("clusters", ".moe")`."""
    here = resources.files("moec.specs").joinpath(folder)
    if not here.is_dir():
        return []
    return sorted(f.name.removesuffix(suffix) for f in here.iterdir() if f.name.endswith(suffix))


def read(folder: str, name: str) -> str:
    """The text of one shipped file: `read("clusters", "dgx_h100.moe")`. Raises FileNotFoundError."""
    if "/" in name or "\\" in name or not shipped(folder, name):
        raise FileNotFoundError(f"{folder}/{name}")
    return resources.files("moec.specs").joinpath(folder).joinpath(name).read_text("utf-8")
