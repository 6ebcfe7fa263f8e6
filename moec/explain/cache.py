"""The part of `moec explain` that says which experts are resident, what copies of the others cost, and why prefetch is
where it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

MIB, GIB = 2**20, 2**30
PLACES = {"exit": "behind its experts", "ffn": "before its experts", "entry": "before its attention"}


def cache_lines(cache: dict[str, Any]) -> Iterator[str]:
    """What has a slot, and where the rest waits."""
    asked = cache["prefetch"]
    guess = "none" if asked["asked"] == "none" else f"{asked['asked']}, {_layers_ahead(asked['ahead'])} ahead"
    yield f"cache {cache['name']}: evict {cache['evict']}, prefetch {guess}"
    each = " or ".join(map(_size, cache["expert_bytes"]))
    if cache["slots"] >= cache["held"]:
        yield f"  slots      for all {cache['held']} experts of a layer on a rank: nothing is copied while it runs"
        return
    size = f"{each} each, {_size(cache['arena_bytes'])} in all"
    yield f"  slots      {cache['slots']} for the {cache['held']} experts of a layer on a rank, {size}"
    pinned = [f"experts {', '.join(map(str, cache['pinned']))}"] if cache["pinned"] else []
    pinned += ["shared experts, as always"] if cache["pin_shared"] else []
    if pinned:
        yield f"  pinned     {' and '.join(pinned)}"
    yield from (f"  {_tier(cache, tier)}" for tier in cache["tiers"])
    if cache["staging_bytes"]:
        yield f"  staging    {_size(cache['staging_bytes'])} of host memory between nvme and the device"
    for what, trace in (("evict", cache["evict_trace"]), ("prefetch", cache["prefetch_trace"])):
        if trace is not None:
            yield f"  {what:<10} by {trace['path']} (sha256 {trace['sha256'][:16]})"


def _tier(cache: dict[str, Any], tier: dict[str, Any]) -> str:
    rate = "rate unknown" if tier["gbps"] is None else f"{tier['gbps']:g} GB/s, {tier['latency_us']:g} us a copy"
    kept = f"{_size(tier['bytes'])} on a rank"
    file = f", file of all experts in {cache['nvme']}" if tier["name"] == "nvme" else ""
    return f"{tier['name']:<10} for {tier['experts']} experts of a layer: {kept}{file}, {rate}"


def phase_lines(found: dict[str, Any]) -> Iterator[str]:
    """Hits, bytes, and what copies add to each kind of layer."""
    source = "in the trace" if found["is_traced"] else "as random routing would"
    moved = ", ".join(f"{_size(size)} from {tier}" for tier, size in found["bytes_per_token"].items())
    yield f"expert cache: {found['hit_rate']:.1%} of look-ups hit, {source}; copied to a rank per token: {moved}"
    yield from (f"  {_on_demand(layer)}" for layer in found["on_demand"])
    if (predictor := found["predictor"]) is not None:
        source = "in the trace" if predictor["is_traced"] else "taken from two small models"
        yield f"  of what {predictor['by']} names, {predictor['recall']:.0%} is needed, {source}"
    yield from (f"  {_decision(item)}" for item in found["prefetch"])


def _on_demand(layer: dict[str, Any]) -> str:
    where = f"{layer['body']}, {_ranges(layer['layers'])}"
    used = f"{where}: {layer['active']:.1f} experts a step, {layer['missed']:.1f} missed"
    if layer["layer_us"] is None:
        return f"{used}; their time is not known"
    return f"{used}; copies on demand add {layer['exposed_us']:.1f} us to {layer['layer_us']:.1f} us"


def _decision(item: dict[str, Any]) -> str:
    where = f"{item['body']}, {_ranges(item['layers'])}"
    chosen = item["chosen"]
    if chosen is None:
        return f"no prefetch in {where}: {item['reason']}"
    many = f"{chosen['most']} expert{'s' * (chosen['most'] > 1)}"
    left = "" if item["exposed_us"] is None else f" (window {item['window_us'][chosen['place']]:.1f} us)"
    adds = "" if item["exposed_us"] is None else f"; copies then add {item['exposed_us']:.1f} us"
    distance = item["later"]["distance"]
    later = f"{_layers_ahead(distance)} later" if distance > 0 else _next_step(item["layers"], distance)
    return f"prefetch in {where}, {PLACES[chosen['place']]}, of {many} {later}{left}: {item['reason']}{adds}"


def _next_step(layers: Sequence[int], distance: int) -> str:
    """The layers that the last ones of a step fetch for."""
    return f"of {_ranges([layer + distance for layer in layers])} in the next step, those used most"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.3f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.3f} MiB"


def _layers_ahead(count: int) -> str:
    return f"{count} layer{'s' * (count > 1)}"


def _ranges(layers: Sequence[int]) -> str:
    """`layer 3`, `layers 1..4, 7`."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and runs[-1][1] + 1 == layer:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    shown = ", ".join(str(first) if first == last else f"{first}..{last}" for first, last in runs)
    return f"layer{'s' * (len(layers) > 1)} {shown}"
