"""What an operation of a symbolic run may know besides its operands."""

from __future__ import annotations

from dataclasses import dataclass, field

from moec.ir.program import Program
from moec.ir.proof.rows import Token
from moec.ir.proof.tables import Table


@dataclass
class Log:
    """What happened to each (token, choice): the ranks that computed it; whether a full buffer left it out."""

    served: dict[tuple[Token, int], list[int]] = field(default_factory=dict)
    dropped: set[tuple[Token, int]] = field(default_factory=set)


@dataclass(frozen=True)
class Here:
    """One rank, the routing table it works on, and the log that all ranks write."""

    program: Program
    rank: int
    table: Table
    log: Log

    @property
    def tokens(self) -> list[Token]:
        """Tokens of this rank in the attention view: those of its dp index, in order."""
        mesh = self.program.mesh
        dp = mesh.coordinate(self.rank, "dp")
        return [Token(dp * mesh.tp, index) for index in range(self.table.sizes[dp])]

    @property
    def ep_index(self) -> int:
        return self.program.mesh.coordinate(self.rank, "ep")

    def destination(self, table: str, group: str, expert: int) -> int:
        """Index in `group` of the rank that a row for `expert` goes to next."""
        owner = self.program.placements[table].rank_of[expert]
        node, local = self.program.mesh.ep_position(owner)
        return {"experts.ep": owner, "links.node": node, "links.local": local}[group]

    def room(self, bound: int) -> int:
        """`bound` in the same proportion to this table's tokens as it is to those of a full step."""
        return max(1, -(-bound * max(self.table.sizes) // self.program.tokens))
