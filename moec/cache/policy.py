"""What a policy of eviction is: it says which resident expert gives up its slot.

A policy sees every look-up (`use`), and the keys that may leave (from `admit` to `evict`). It never sees a pinned key,
nor a prefetched one before its layer has been looked up: those cannot leave, and `Residency` sees to that. Its `scope`
says what it chooses among: the slots of one layer, or all slots of the rank.

Every choice is deterministic: equal keys leave in the order of their layer and expert numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, Protocol

#: (layer, expert); layers are numbered from 0 among the sparse layers of the model.
Key = tuple[int, int]
Scope = Literal["layer", "rank"]


class Policy(Protocol):
    """What `Residency` asks. A look-up calls `use` once, then `evict`, then `admit`."""

    @property
    def scope(self) -> Scope:
        """`layer`: a pool of slots for each layer. `rank`: one pool for all layers of the rank."""
        ...

    def use(self, layer: int, experts: Sequence[int]) -> None:
        """One step looks up these distinct experts of a layer, resident or not, all at once."""
        ...

    def admit(self, layer: int, experts: Sequence[int]) -> None:
        """These experts of a layer have slots, got one after the other, and may be told to leave them from now on."""
        ...

    def evict(self, layer: int, count: int, kept: Collection[Key]) -> list[Key]:
        """At most `count` admitted keys of the pool of `layer`, not in `kept`, leave: these, in this order."""
        ...

    def worth(self, key: Key) -> float:
        """What it is worth to keep a key that is resident or has just been looked up: the least leaves first.

        Asked where a step streams; of policies that are `COUNTING`, of any key, to fetch what is used most.
        """
        ...
