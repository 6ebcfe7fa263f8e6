"""Cache declarations to `checked.Cache`: what device memory holds of the experts, and where the others wait.

What depends on the model and the mesh that a plan puts a cache on is in `cache_fit`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moec.checked import Cache, Tier
from moec.diagnostics import Label, Span, did_you_mean
from moec.grammar import ast
from moec.semantics.blocks import MAX_EXPERTS
from moec.semantics.fields import Fields, arguments, expect_call, settings, whole
from moec.semantics.model import MAX_LAYERS
from moec.semantics.values import Values

CACHE_SETTINGS = ("hbm", "host", "nvme", "evict", "prefetch", "pin")
#: How `evict` and `prefetch` are written, by their first word.
EVICTS = {
    "lru": "lru",
    "lfu": "lfu",
    "layer_lru": "layer_lru",
    "sweep_lfu": "sweep_lfu",
    "least_stale": "least_stale",
    "trace": 'trace("FILE.npz")',
}
PREFETCHES = {"none": "none", "next_router": "next_router(ahead = 1)", "history": 'history("FILE.npz", ahead = 1)'}
DEFAULT_EVICT, DEFAULT_PREFETCH, DEFAULT_AHEAD = "layer_lru", "none", 1
#: What a word of `evict` and `prefetch` takes in brackets.
PARTS: Mapping[str, Sequence[str]] = {"trace": ("path",), "next_router": ("ahead",), "history": ("path", "ahead")}


@dataclass(frozen=True)
class DeclaredCache:
    """A cache that is not on a mesh yet: the size of its host tier counts per node where `is_host_per_node`."""

    cache: Cache
    is_host_per_node: bool
    pins: tuple[Span, ...]  # where each of `cache.pinned` is written, or the one `shared`
    ahead_at: Span


@dataclass(frozen=True)
class _Choice:
    """A value of `evict` or `prefetch`."""

    word: str
    trace: str | None
    ahead: int
    ahead_at: Span


def check_cache(node: ast.Cache, values: Values) -> DeclaredCache | None:
    """The cache, or None after errors were reported."""
    before = len(values.problems.found)
    fields = Fields(values, f"cache `{node.name.id}`", node.name.span, settings(node.items), CACHE_SETTINGS)
    hbm, slots, share = _device_memory(fields)
    host, is_per_node = _host(fields)
    nvme = _nvme(fields)
    if not fields.has("host") and not fields.has("nvme"):
        message = f"cache `{node.name.id}` has no place for the experts that are not in device memory"
        help = 'add `host = tier()`, host memory without a limit, or `nvme = "FOLDER"`'
        values.problems.add("E0226", message, node.name.span, help=help)
    evict = _choice(fields, "evict", EVICTS, DEFAULT_EVICT)
    prefetch = _choice(fields, "prefetch", PREFETCHES, DEFAULT_PREFETCH)
    pin_shared, pinned = _pins(fields)
    if evict is None or prefetch is None or len(values.problems.found) > before:
        return None
    cache = Cache(
        name=node.name.id,
        hbm=hbm,
        slots=slots,
        share=share,
        host=host,
        nvme=nvme,
        evict=evict.word,
        evict_trace=evict.trace,
        prefetch=prefetch.word,
        prefetch_trace=prefetch.trace,
        ahead=prefetch.ahead,
        pin_shared=pin_shared,
        pinned=tuple(sorted(pinned)),
        span=node.span,
    )
    pins = (fields.at("pin"),) if pin_shared else tuple(pinned[expert] for expert in sorted(pinned))
    return DeclaredCache(cache, is_per_node, pins, prefetch.ahead_at)


def _device_memory(fields: Fields) -> tuple[int | None, int | None, float | None]:
    """(bytes per rank, slots per layer and rank, share of a layer's experts): the one that is given, else None."""
    node = fields.need("hbm")
    if not isinstance(node, ast.Call):
        size = None if node is None else fields.amount("hbm", "bytes per rank", "40 GiB per rank")
        return None if size is None else int(size), None, None
    call = expect_call(fields.values, node, "`hbm`", ("slots", "share"))
    if call is None:
        return None, None, None
    if call.name.id == "slots":
        return None, arguments(fields.values, call, ("count",)).whole("count", high=MAX_EXPERTS), None
    given = arguments(fields.values, call, ("part",))
    part = given.decimal("part")
    if part is not None and part > 1:
        help = "use `share(1)` for all experts"
        fields.problems.add("E0208", "`part` must be at most 1", given.at("part"), f"this is {part}", help)
    return None, None, part


def _host(fields: Fields) -> tuple[Tier | None, bool]:
    """The host tier, and whether its size is per node. Without a size it has no limit."""
    found = _tier(fields, "host", "size") if fields.has("host") else None
    if found is None:
        return None, False
    given, key = found
    example = "800 GiB per node"
    size = given.amount_of(key, ("bytes per node", "bytes per rank"), example) if given.has(key) else None
    tier = Tier(None if size is None else int(size.value), *_rate(given), None, fields.at("host"))
    return tier, size is not None and size.dimension == "bytes per node"


def _nvme(fields: Fields) -> Tier | None:
    """The nvme tier: a folder, which has room for every expert."""
    found = _tier(fields, "nvme", "path") if fields.has("nvme") else None
    if found is None:
        return None
    given, key = found
    return Tier(None, *_rate(given), given.text(key, f'{key} = "/raid/experts"'), fields.at("nvme"))


def _tier(fields: Fields, key: str, own: str) -> tuple[Fields, str] | None:
    """Where a tier's size or path is given, and as what: inside `tier(...)`, or as the setting itself."""
    node = fields.need(key)
    if not isinstance(node, ast.Call):
        return fields, key
    call = expect_call(fields.values, node, f"`{key}`", ("tier",))
    return None if call is None else (arguments(fields.values, call, (own, "bandwidth", "latency")), own)


def _rate(given: Fields) -> tuple[float | None, float]:
    """(bytes per second, seconds) of a tier. A latency alone would be added to a rate of who knows what."""
    if not given.has("bandwidth") and not given.has("latency"):
        return None, 0.0
    latency = given.amount("latency", "time", "10 us", above_zero=False) if given.has("latency") else 0.0
    return given.amount("bandwidth", "bytes per second", "2 GB/s"), (latency or 0.0) / 1e6


def _choice(fields: Fields, key: str, options: Mapping[str, str], default: str) -> _Choice | None:
    """A word, or a call where the word takes something."""
    node = fields.need(key) if fields.has(key) else None
    if node is None:
        return _Choice(default, None, 0, fields.span)
    word = node.id if isinstance(node, ast.Name) else node.name.id if isinstance(node, ast.Call) else ""
    if word not in options or isinstance(node, ast.Call) != (word in PARTS):
        help = f"write `{options[word]}`" if word in options else did_you_mean(word, options)
        if word == "belady":
            help = "it knows what comes, as a simulation does: `moec cache` shows it beside the others"
        help = help or "write one of " + ", ".join(f"`{text}`" for text in options.values())
        fields.problems.add("E0209", f"`{node.span.text[:40]}` is not a value of `{key}`", node.span, help=help)
        return None
    if not isinstance(node, ast.Call):
        return _Choice(word, None, 0, node.span)
    given = arguments(fields.values, node, PARTS[word])
    trace = _trace(given, options[word]) if "path" in PARTS[word] else None
    ahead = given.whole("ahead", DEFAULT_AHEAD, high=MAX_LAYERS) if "ahead" in PARTS[word] else 0
    return None if ahead is None else _Choice(word, trace, ahead, given.at("ahead"))


def _trace(given: Fields, example: str) -> str | None:
    """The path of a trace, found from the file that names it; from the current folder where `--set` does."""
    written = given.text("path", example)
    if written is None:
        return None
    at = given.at("path")
    path = os.path.normpath(os.path.join(os.path.dirname(at.source.name), written))
    if not os.path.isfile(path):
        help = "`moec run --record FILE.npz` writes one; the path is relative to the file that names it"
        given.problems.add("E0225", f"there is no trace `{path}`", at, help=help)
    return path


def _pins(fields: Fields) -> tuple[bool, dict[int, Span]]:
    """Whether `shared` is pinned, and the pinned experts with where each is written."""
    node = fields.need("pin") if fields.has("pin") else None
    if node is None or (isinstance(node, ast.Name) and node.id == "shared"):
        return node is not None, {}
    if not isinstance(node, ast.List):
        help = did_you_mean(node.id if isinstance(node, ast.Name) else "", ("shared",))
        help = help or "write `shared`, or experts by number like `[0, 3]`"
        fields.problems.add("E0209", f"`{node.span.text[:40]}` is not a value of `pin`", node.span, help=help)
        return False, {}
    found: dict[int, Span] = {}
    for item in node.items:
        expert = whole(fields.values, item, "an expert of `pin`", 0, MAX_EXPERTS - 1)
        if expert in found:
            also = [Label(found[expert], "first given here")]
            message = f"expert {expert} is given twice"
            fields.problems.add("E0205", message, item.span, help="remove one of them", also=also)
        elif expert is not None:
            found[expert] = item.span
    return False, found
