"""The policies by the names that the language has for them."""

from __future__ import annotations

from collections.abc import Sequence

from moec.cache.policy import Policy, Scope
from moec.cache.recency import LayerLru, LeastStale, Lru
from moec.cache.scored import Lfu, Popularity
from moec.cache.sweep import SweepLfu

#: Names that the language takes, in the order of a report.
POLICIES = ("lru", "layer_lru", "lfu", "sweep_lfu", "least_stale", "trace")

#: Those that know of every expert, resident or not, how much it is used.
COUNTING = ("lfu", "sweep_lfu", "trace")


def policy_named(
    name: str, num_layers: int, num_experts: int, popularity: Sequence[Sequence[float]] | None = None
) -> Policy:
    """A new policy for a rank. `popularity[layer][expert]` are the counts that `trace` goes by.

    Raises ValueError for a name that is none, and for `trace` without counts.
    """
    match name:
        case "lru":
            return Lru()
        case "layer_lru":
            return LayerLru()
        case "lfu":
            return Lfu(num_layers, num_experts)
        case "sweep_lfu":
            return SweepLfu(num_layers, num_experts)
        case "least_stale":
            return LeastStale(num_layers)
        case "trace" if popularity is not None:
            return Popularity(popularity)
        case "trace":
            raise ValueError("policy `trace` needs the counts of a recorded trace")
    raise ValueError(f"policy `{name}` is none of {', '.join(POLICIES)}")


def scope_of(name: str) -> Scope:
    """What the policy chooses among: the slots of one layer, or all slots of the rank."""
    return policy_named(name, 1, 1, [[0.0]]).scope
