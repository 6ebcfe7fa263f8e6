"""How often a decode step will find its experts in their slots: the plan's own policy, run over the plan's trace."""

from __future__ import annotations

from itertools import zip_longest

import numpy as np

from moec.cache.policies import policy_named
from moec.cache.simulate import simulate
from moec.cache.trace import DECODE, Trace
from moec.cache_sizes import held_experts, pinned_keys
from moec.cost.sizes import token_rows
from moec.ir.program import Program

#: Look-ups of a layer that are simulated at most, of all ranks together: about a second's worth.
MOST_LOOK_UPS = 1 << 15


def traced_hit_rate(program: Program) -> float:
    """Share of look-ups that are hits, over all ranks of an ep group, without prefetch.

    The trace's tokens are taken in their order, as many at a time as a step of the plan brings together; what they
    choose is looked up at once. Slots are warm: as full as they get.
    """
    cache, routing = program.cache, program.routing
    assert cache is not None and cache.slots is not None and routing is not None
    num_experts, num_layers = max(program.experts.values()), len(routing.expert_ids)
    per_step = token_rows(program) * program.mesh.ep
    num_steps = max(1, MOST_LOOK_UPS // (num_layers * program.mesh.ep))
    trace = _in_steps(routing.expert_ids[:, : num_steps * per_step], num_experts, per_step)
    worth = routing.popularity(num_experts).tolist()
    hits = lookups = 0
    for rank in range(program.mesh.ep):
        held = held_experts(program, rank)
        places = zip_longest(*held)  # each layer's first, then the second ones
        warm = [(layer, expert) for place in places for layer, expert in enumerate(place) if expert is not None]
        policy = policy_named(cache.evict, num_layers, num_experts, worth)
        found = simulate(trace, policy, cache.slots, held, pinned_keys(cache, held), warm)
        hits, lookups = hits + found.hits, lookups + found.lookups
    return hits / lookups


def _in_steps(expert_ids: np.ndarray, num_experts: int, per_step: int) -> Trace:
    num_tokens = expert_ids.shape[1]
    starts = np.arange(0, num_tokens, per_step)
    return Trace(
        expert_ids,
        num_experts,
        seq_lengths=np.array([num_tokens]),
        phase=np.full(num_tokens, DECODE, np.uint8),
        step_starts=np.append(starts, num_tokens),
    )
