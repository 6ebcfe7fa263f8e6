"""The files of a plan's expert cache on this machine, and how a run uses the cache. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moec.cache.trace import Trace, read_trace
from moec.diagnostics import Diagnostic, fail


@dataclass(frozen=True)
class CacheSettings:
    """What a run adds to a plan's cache.

    `nvme`: folder of the expert files. `popularity`, `history`: traces for `evict = trace` and `prefetch = history`.
    `is_emulated`: copies take the time that the plan's rates say. `is_cold`: at the start only pinned experts are in
    their slots. `warn`: takes what the user is to know although the run goes on; None: each rank prints it.
    """

    nvme: Path | None = None
    popularity: Trace | None = None
    history: Trace | None = None
    is_emulated: bool = False
    is_cold: bool = False
    warn: Callable[[Diagnostic], None] | None = None


def find_cache(document: Mapping[str, Any], bases: Sequence[Path], is_emulated: bool = False) -> CacheSettings:
    """The files that a plan document names. A relative path starts in one of `bases`.

    Raises:
        MoecError: E0640, the nvme folder is not there; E0645, a trace is not there or not the one that was compiled
            with; E0646, there is nothing to emulate.
    """
    cache = document.get("cache")
    if cache is None:
        if is_emulated:
            help = "leave --emulate out, or run a plan `with` a cache"
            raise fail("E0646", f"plan `{document['plan']}` has no expert cache to emulate", help)
        return CacheSettings()
    if is_emulated and (unknown := [tier["name"] for tier in cache["tiers"] if tier["gbps"] is None]):
        which = f"the {unknown[0]} tier has" if len(unknown) == 1 else f"the tiers {' and '.join(unknown)} have"
        message = f"{which} no bandwidth to emulate in cache `{cache['name']}`"
        raise fail("E0646", message, "write `bandwidth = ..` there, or leave --emulate out")
    return CacheSettings(
        _find_folder(cache["nvme"], bases),
        _find_trace(cache["evict_trace"], bases),
        _find_trace(cache["prefetch_trace"], bases),
        is_emulated,
    )


def _find_folder(written: str | None, bases: Sequence[Path]) -> Path | None:
    if written is None:
        return None
    folder = next((base / written for base in bases if (base / written).is_dir()), None)
    if folder is None:
        first, named = bases[0] / written, _either(base / written for base in bases)
        message = f"the folder for experts {named} {'is no folder' if first.exists() else 'does not exist'}"
        raise fail("E0640", message, "create it, or name another one at `nvme`")
    return folder


def _find_trace(named: Mapping[str, str] | None, bases: Sequence[Path]) -> Trace | None:
    if named is None:
        return None
    places = [base / named["path"] for base in bases]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        message = f"the trace {_either(places)} that the cache goes by is not there"
        raise fail("E0645", message, "put it back, or compile the `.moe` file again")
    try:
        content = path.read_bytes()
    except OSError as error:
        message = f"the trace `{path}` that the cache goes by cannot be read: {error.strerror}"
        raise fail("E0645", message, "make it readable") from None
    if hashlib.sha256(content).hexdigest() != named["sha256"]:
        message = f"the trace `{path}` is not the one that the plan was compiled with"
        raise fail("E0645", message, "compile the `.moe` file again")
    return read_trace(path)


def _either(places: Iterable[Path]) -> str:
    """Where something was looked for, each place once."""
    return " or ".join(f"`{place}`" for place in dict.fromkeys(places))
