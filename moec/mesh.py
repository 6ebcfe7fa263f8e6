"""The mesh of one program: two views of the same ranks, and the process groups each axis makes.

    rank = dp_i * tp + tp_i                        view `attention`
         = (edp_i * ep + ep_i) * etp + etp_i       view `experts`

Groups follow from the degrees alone, so every rank derives the same list in the same order (creating a process group is
a collective over the whole world).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

#: Axes of each view, outermost first.
VIEWS = {"attention": ("dp", "tp"), "experts": ("edp", "ep", "etp")}

RankLists = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Mesh:
    """Parallel degrees, with dp * tp == edp * ep * etp (the checker sees to it).

    `pp`: pipeline stages, each on `size` neighbouring ranks that lie in these views; `size` counts one stage's ranks,
    `world` all of them.

    `nodes`: nodes of the cluster that each ep group spans, the same number of its ranks in each and neighbours
    together; 0 where that is not so. The ep axis then also reads as links: node x local.
    """

    dp: int = 1
    tp: int = 1
    edp: int = 1
    ep: int = 1
    etp: int = 1
    nodes: int = 1
    pp: int = 1

    @property
    def size(self) -> int:
        return self.dp * self.tp

    @property
    def world(self) -> int:
        return self.size * self.pp

    def axis_size(self, axis: str) -> int:
        return int(getattr(self, axis))

    def axes(self, view: str) -> tuple[str, ...]:
        """Axes of a view that have more than one rank: a layout says nothing about the others."""
        return tuple(axis for axis in VIEWS[view] if self.axis_size(axis) > 1)

    def coordinate(self, rank: int, axis: str) -> int:
        """Index of `rank` along `axis`, in its stage."""
        view = next(axes for axes in VIEWS.values() if axis in axes)
        for name in reversed(view):
            rank, index = divmod(rank, self.axis_size(name))
            if name == axis:
                return index
        raise AssertionError(axis)

    @property
    def split_parts(self) -> int:
        """Pieces a token block falls into between the views: max(tp, etp) / min(tp, etp)."""
        return max(self.tp, self.etp) // min(self.tp, self.etp)

    @property
    def local(self) -> int:
        """Ranks of an ep group in one node."""
        return self.ep // max(1, self.nodes)

    def ep_position(self, ep_index: int) -> tuple[int, int]:
        """(node, local) of the ep group's rank `ep_index`."""
        return divmod(ep_index, self.local)

    @cache  # noqa: B019  (a mesh is a small frozen value)
    def groups(self) -> dict[str, RankLists]:
        """Name -> the rank lists of that group over the world, for every group of more than one rank.

        `split` joins the ranks that hold the pieces of one token block where tp and etp differ. Where an ep group spans
        nodes, `links.local` joins its ranks in one node and `links.node` those of the same place in each node. `stages`
        joins the ranks of the same place in each stage.
        """
        found = {f"{view}.{axis}": self._along(axis, VIEWS[view]) for view in VIEWS for axis in self.axes(view)}
        if self.split_parts > 1:
            found["split"] = self._split()
        if self.pp > 1:
            found["stages"] = _bundle(((rank % self.size,), rank) for rank in range(self.world))
        if self.nodes > 1:
            found |= {name: lists for name, lists in self._links().items() if len(lists[0]) > 1}
        return found

    def group_of(self, name: str, rank: int) -> tuple[int, ...]:
        """The ranks of group `name` that `rank` is in, in order."""
        return next(ranks for ranks in self.groups()[name] if rank in ranks)

    def _along(self, axis: str, view: tuple[str, ...]) -> RankLists:
        others = [name for name in view if name != axis]
        return _bundle(
            ((rank // self.size, *(self.coordinate(rank, name) for name in others)), rank) for rank in range(self.world)
        )

    def _split(self) -> RankLists:
        block, stride = max(self.tp, self.etp), min(self.tp, self.etp)
        return _bundle(((rank // block, rank % stride), rank) for rank in range(self.world))

    def _links(self) -> dict[str, RankLists]:
        def key(rank: int, part: int) -> tuple[int, ...]:
            others = (rank // self.size, self.coordinate(rank, "edp"), self.coordinate(rank, "etp"))
            return (*others, self.ep_position(self.coordinate(rank, "ep"))[part])

        return {
            "links.node": _bundle((key(rank, 1), rank) for rank in range(self.world)),
            "links.local": _bundle((key(rank, 0), rank) for rank in range(self.world)),
        }

    def describe(self) -> str:
        """`dp=2 tp=2`: the axes that act, or `one rank`."""
        acting = [axis for view in VIEWS for axis in self.axes(view)] + (["pp"] if self.pp > 1 else [])
        return " ".join(f"{axis}={self.axis_size(axis)}" for axis in acting) or "one rank"


def _bundle(pairs: Iterable[tuple[tuple[int, ...], int]]) -> RankLists:
    """Ranks with the same key, in rank order; groups in order of their first rank."""
    found: dict[tuple[int, ...], list[int]] = {}
    for key, rank in pairs:
        found.setdefault(key, []).append(rank)
    return tuple(tuple(ranks) for ranks in found.values())
