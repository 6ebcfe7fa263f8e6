"""A rank's expert cache put together: its tiers, its policy, and what is in its slots at the start."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from moec.cache.policies import policy_named
from moec.cache.predictors import History
from moec.cache.residency import Residency
from moec.cache.simulate import popularity_of
from moec.cache.trace import Trace
from moec.cache_files import CacheSettings
from moec.cache_sizes import host_experts, pinned_keys
from moec.checkpoint.map import Sources
from moec.ir.program import Program
from moec.ir.program import Tier as Declared
from moec.runtime.experts.cache import ExpertCache
from moec.runtime.experts.copier import Copier
from moec.runtime.experts.file import Contents, Key
from moec.runtime.experts.pace import Rate
from moec.runtime.experts.tiers import HostTier, Tier, open_nvme
from moec.runtime.launch.rank import Rank
from moec.runtime.weights_experts import CachedLayer, ExpertReader, cached_layers, contents_of

Progress = Callable[[int, int], None]


def open_cache(
    programs: Sequence[Program],
    sources: Sources,
    rank: Rank,
    settings: CacheSettings,
    first_layer: int = 0,
    progress: Progress | None = None,
) -> ExpertCache | None:
    """The cache that the programs of a stage share, filled; None where they read all experts from their parameters.

    `first_layer`: sparse layers of the model that lie in earlier stages.

    Raises:
        MoecError: E0640 to E0644, an expert cannot be brought to its tier.
    """
    program = programs[0]
    layers, declared = cached_layers(program, rank.rank), program.cache
    if not layers or declared is None or declared.slots is None:
        return None
    contents = contents_of(layers, program.mesh, rank.rank, sources.checkpoint.fingerprint.to_json())
    num_experts = max(program.experts.values())
    past, history = (
        _own_part(t, first_layer, len(layers), num_experts) for t in (settings.popularity, settings.history)
    )
    counts = popularity_of(past).tolist() if past is not None else None
    policy = policy_named(declared.evict, len(layers), num_experts, counts)
    held = [layer.experts for layer in layers]
    order = fill_order(held, past)
    tiers = _open_tiers(program, contents, sources, layers, order, rank, settings, progress)
    residency = Residency(held, declared.slots, policy, pinned_keys(declared, held))
    followers = None
    if history is not None and len(layers) > declared.ahead:
        followers = History(history.expert_ids, num_experts, declared.ahead)
    numbers = [layer.number for layer in layers]
    cache = ExpertCache(numbers, contents, residency, Copier(tiers), rank.device, followers, rank.status)
    cache.fill([] if settings.is_cold else order)
    return cache


def _own_part(trace: Trace | None, first: int, num_layers: int, num_experts: int) -> Trace | None:
    """The layers of a stage, as of a model with so many experts: a trace may not know of those that nobody chose."""
    if trace is None:
        return None
    own = slice(first, first + num_layers)
    return replace(
        trace, expert_ids=trace.expert_ids[own], num_experts=num_experts, gate_weights=None, predicted_ids=None
    )


def fill_order(held: Sequence[Collection[int]], popularity: Trace | None) -> list[Key]:
    """Every expert that a rank holds: the most popular of each layer (else the lowest id), then the second ones, ..."""
    counts = popularity_of(popularity) if popularity is not None else None
    ranked = []
    for index, experts in enumerate(held):
        worth = counts[index].tolist() if counts is not None else [0] * (max(experts, default=0) + 1)
        ranked += [(place, index, e) for place, e in enumerate(sorted(experts, key=lambda e: (-worth[e], e)))]
    return [(index, e) for _, index, e in sorted(ranked)]


def _open_tiers(
    program: Program,
    contents: Contents,
    sources: Sources,
    layers: Sequence[CachedLayer],
    order: Sequence[Key],
    rank: Rank,
    settings: CacheSettings,
    progress: Progress | None,
) -> list[Tier]:
    """Host memory takes the first of each layer's experts, the nvme file (where there is one) has them all."""
    cache = program.cache
    assert cache is not None
    rates = {tier.name: _rate(tier) if settings.is_emulated else None for tier in cache.tiers}
    room, tiers = host_experts(program), list[Tier]()
    if "host" in rates:
        in_host = [key for index in range(len(layers)) for key in [k for k in order if k[0] == index][:room]]
        is_pinned = rank.device.type == "cuda"
        reader = ExpertReader(sources, layers)
        tiers.append(HostTier(contents, in_host, reader, rate=rates["host"], is_pinned=is_pinned, progress=progress))
        reader.close()
    if "nvme" in rates:
        assert settings.nvme is not None
        reader = ExpertReader(sources, layers)  # its own: the copier's thread reads what the file has lost
        rate, warn = rates["nvme"], settings.warn
        tiers.append(open_nvme(settings.nvme, contents, reader, rate=rate, warn=warn, progress=progress))
    return tiers


def _rate(tier: Declared) -> Rate | None:
    return None if tier.link is None else Rate(tier.link.gbps * 1e9, tier.link.latency_us * 1e-6)
