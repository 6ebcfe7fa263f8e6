"""Which rank of an expert-parallel group holds which experts: the one table that router and loader both read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Placement:
    """`slots[r]` lists the expert ids held by rank r of the ep group, in slot order. Every expert has one slot."""

    slots: tuple[tuple[int, ...], ...]

    @property
    def num_experts(self) -> int:
        return sum(map(len, self.slots))

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Experts on each rank."""
        return tuple(map(len, self.slots))

    @cached_property
    def flat(self) -> tuple[int, ...]:
        """Expert id of each slot, slots numbered rank by rank."""
        return tuple(expert for held in self.slots for expert in held)

    @cached_property
    def slot_of(self) -> tuple[int, ...]:
        """Slot number (rank by rank) of each expert."""
        where = {expert: slot for slot, expert in enumerate(self.flat)}
        return tuple(where[expert] for expert in range(self.num_experts))

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """Ep rank that holds each expert."""
        where = {expert: rank for rank, held in enumerate(self.slots) for expert in held}
        return tuple(where[expert] for expert in range(self.num_experts))

    @property
    def is_even(self) -> bool:
        return len(set(self.counts)) == 1

    def fault(self, num_experts: int, num_ranks: int) -> str:
        """What makes this table wrong for `num_experts` on `num_ranks`, or the empty string."""
        if len(self.slots) != num_ranks:
            return f"the table has {len(self.slots)} ranks, the ep group {num_ranks}"
        if sorted(self.flat) != list(range(num_experts)):
            missing = sorted(set(range(num_experts)) - set(self.flat))
            return f"experts without a slot: {missing}" if missing else "an expert has two slots or does not exist"
        return ""


def balanced(total: int, parts: int) -> tuple[int, ...]:
    """Sizes of `parts` pieces of `total`, the first ones one longer: 32 in 3 is 11, 11, 10."""
    return tuple(total // parts + (i < total % parts) for i in range(parts))


def span(total: int, index: int, parts: int) -> slice:
    """Where piece `index` of `parts` balanced pieces of `total` lies."""
    sizes = balanced(total, parts)
    first = sum(sizes[:index])
    return slice(first, first + sizes[index])


def linear(num_experts: int, num_ranks: int) -> Placement:
    """Neighbouring experts together: rank 0 holds 0, 1, ..."""
    ids = iter(range(num_experts))
    return Placement(tuple(tuple(next(ids) for _ in range(n)) for n in balanced(num_experts, num_ranks)))


def round_robin(num_experts: int, num_ranks: int) -> Placement:
    """Expert e on rank e mod num_ranks."""
    return Placement(tuple(tuple(range(rank, num_experts, num_ranks)) for rank in range(num_ranks)))


STRATEGIES = {"linear": linear, "round_robin": round_robin}
