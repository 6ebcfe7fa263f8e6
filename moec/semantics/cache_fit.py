"""A checked cache put on the model and the mesh of a plan: are there experts to hold, to pin and to fetch ahead."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from moec.checked import Cache, MeshSpec, Model, Moe
from moec.diagnostics import Label, Span
from moec.semantics.cache import DeclaredCache
from moec.semantics.values import Problems


def fit_cache(declared: DeclaredCache, model: Model, mesh: MeshSpec, at: Span, problems: Problems) -> Cache:
    """The cache with its sizes per rank. `at` is where the plan names it. Reports E0227, E0228 and E0229.

    Whether slots and tiers are large enough is known when experts are placed: `moec.cache_sizes`.
    """
    cache = declared.cache
    if cache.host is not None and cache.host.bytes_per_rank is not None and declared.is_host_per_node:
        per_rank = cache.host.bytes_per_rank // mesh.cluster.devices_per_node
        cache = replace(cache, host=replace(cache.host, bytes_per_rank=per_rank))
    stages = _stages(model, mesh.pp)
    if not any(stages):
        message = f"model `{model.name}` has no experts for cache `{cache.name}` to hold"
        also = [Label(model.span, "all its layers are dense")]
        problems.add("E0228", message, at, help="leave `with` out", also=also)
        return cache
    _check_pins(declared, model, [ffn for stage in stages for ffn in stage], at, problems)
    _check_ahead(declared, model, max(map(len, stages)), at, problems)
    return cache


def _stages(model: Model, pp: int) -> list[list[Moe]]:
    """The sparse layers of each pipeline stage; stages are runs of layers of balanced length, the longer ones first."""
    size, longer = divmod(len(model.layers), pp)
    starts = [stage * size + min(stage, longer) for stage in range(pp + 1)]
    return [[x.ffn for x in model.layers[a:b] if isinstance(x.ffn, Moe)] for a, b in pairwise(starts)]


def _check_pins(declared: DeclaredCache, model: Model, sparse: list[Moe], at: Span, problems: Problems) -> None:
    """What is pinned is there: shared experts in some layer, numbered ones in every sparse layer."""
    also = [Label(at, f"with model `{model.name}`")]
    if declared.cache.pin_shared and not any(ffn.shared for ffn in sparse):
        message = f"model `{model.name}` has no shared experts to pin"
        problems.add("E0227", message, declared.pins[0], help="leave `pin` out, or pin experts by number", also=also)
    fewest = min(ffn.routed.count for ffn in sparse)
    for expert, span in zip(declared.cache.pinned, declared.pins, strict=False):  # `shared` has a span, no number
        if expert >= fewest:
            message = f"there is no expert {expert} to pin: `{model.name}` has {fewest} routed experts in a layer"
            problems.add("E0227", message, span, help=f"use numbers from 0 to {fewest - 1}", also=also)


def _check_ahead(declared: DeclaredCache, model: Model, depth: int, at: Span, problems: Problems) -> None:
    """Prefetching looks ahead by sparse layers of one stage, of which there are at most `depth`."""
    cache = declared.cache
    if cache.ahead >= depth:
        layers = f"{depth} sparse layer{'s' * (depth > 1)}"
        message = f"`ahead` = {cache.ahead} looks past the last layer: a rank has {layers}"
        help = f"use `ahead = {depth - 1}`" + " or less" * (depth > 2) if depth > 1 else "use `prefetch = none`"
        problems.add("E0229", message, declared.ahead_at, help=help, also=[Label(at, f"with model `{model.name}`")])
