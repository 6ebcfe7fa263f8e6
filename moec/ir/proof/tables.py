"""Routing tables to prove an exchange with: random ones, and those that hurt."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from moec.ir.proof.rows import Token
from moec.mesh import Mesh
from moec.placement import Placement


@dataclass(frozen=True)
class Table:
    """Which experts each token has: chosen ones, then shared ones, `top` in all. `sizes`: tokens of each dp index."""

    name: str
    top: int
    sizes: tuple[int, ...]
    ids: dict[Token, tuple[int, ...]]


#: Token -> its experts, best first.
Choose = Callable[[Token], tuple[int, ...]]


@dataclass(frozen=True)
class Tables:
    """All tables for `placement` on `mesh`, `top` experts a token; at most about `rows` tokens a rank.

    The last `shared` experts are nobody's choice: every token has them behind those that it chose.
    """

    mesh: Mesh
    placement: Placement
    top: int
    rows: int = 3
    shared: int = 0

    @property
    def num_routed(self) -> int:
        return self.placement.num_experts - self.shared

    def __iter__(self) -> Iterator[Table]:
        dp, rows = self.mesh.dp, self.rows * self.mesh.tp
        full, rng = (rows,) * dp, random.Random(0)
        ragged = tuple(rng.randint(0, rows) for _ in range(dp))
        for seed in range(3):
            yield self._table(f"random {seed}", full, self._random(seed))
        yield self._table("ragged", ragged, self._random(3))
        yield self._table("every second rank has no token", tuple(rows * (i % 2) for i in range(dp)), self._random(4))
        yield self._table("one token in all", (0,) * (dp - 1) + (1,), self._random(5))
        yield self._table("no token", (0,) * dp, self._random(6))
        yield self._table("all to one expert", full, lambda token: self._near(0, self.num_routed // 2))
        yield self._table("all to the last rank", ragged, lambda token: self._near(-1))
        yield self._table("all to the last rank of the next node", full, self._far)
        yield self._table("one expert in all choices", ragged, self._repeated)
        yield self._table("every expert once", self._enough(), self._in_turn)

    def _table(self, name: str, sizes: tuple[int, ...], choose: Choose) -> Table:
        tokens = [Token(dp * self.mesh.tp, i) for dp, size in enumerate(sizes) for i in range(size)]
        beside = tuple(range(self.num_routed, self.placement.num_experts))
        return Table(name, self.top + self.shared, sizes, {token: choose(token) + beside for token in tokens})

    def _random(self, seed: int) -> Choose:
        rng = random.Random(seed)
        return lambda token: tuple(rng.sample(range(self.num_routed), self.top))

    def _near(self, rank: int, first: int | None = None) -> tuple[int, ...]:
        """Expert `first`, then those of the ep rank, then any others."""
        near = [expert for expert in self.placement.slots[rank] if expert < self.num_routed]
        wanted = [*([] if first is None else [first]), *near, *range(self.num_routed)]
        return tuple(dict.fromkeys(wanted))[: self.top]

    def _far(self, token: Token) -> tuple[int, ...]:
        nodes, local = max(1, self.mesh.nodes), self.mesh.local
        node = self.mesh.coordinate(token.rank, "ep") // local
        return self._near((node + 1) % nodes * local + local - 1)

    def _repeated(self, token: Token) -> tuple[int, ...]:
        return ((token.rank + token.row) % self.num_routed,) * self.top

    def _enough(self) -> tuple[int, ...]:
        """Just so many tokens that every expert is chosen."""
        tokens = -(-self.num_routed // self.top)
        return tuple(tokens // self.mesh.dp + (i < tokens % self.mesh.dp) for i in range(self.mesh.dp))

    def _in_turn(self, token: Token) -> tuple[int, ...]:
        before = sum(self._enough()[: token.rank // self.mesh.tp]) + token.row
        return tuple((before * self.top + i) % self.num_routed for i in range(self.top))
