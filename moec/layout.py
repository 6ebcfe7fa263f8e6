"""Where a value lies on the ranks: a view of the mesh, and a placement for each of its axes (docs/layout.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moec.mesh import Mesh


@dataclass(frozen=True)
class Replicate:
    """Every rank of the axis holds the same whole value."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Shard:
    """Equal pieces along `dim`; `copies` neighbouring ranks hold the same piece (KV heads fewer than tp)."""

    dim: int
    copies: int = 1

    def __str__(self) -> str:
        return f"S{self.dim}" if self.copies == 1 else f"S{self.dim}x{self.copies}"


@dataclass(frozen=True)
class Partial:
    """The value is the sum over the ranks of the axis."""

    def __str__(self) -> str:
        return "P"


@dataclass(frozen=True)
class Placed:
    """A parameter whose dim 0 counts experts, dealt to the ranks by placement table `table`."""

    table: str

    def __str__(self) -> str:
        return f"placed({self.table})"


@dataclass(frozen=True)
class Routed:
    """Rows scattered by routing table `table`, that lie where `at` says: home, node, local, expert or grouped.

    `moec.ir.ops.exchange` tells what each means and which operation moves rows from one to the next.
    """

    table: str
    at: str

    def __str__(self) -> str:
        return f"{self.at}({self.table})"


Place = Replicate | Shard | Partial | Placed | Routed


@dataclass(frozen=True)
class Layout:
    """A mesh view and a placement for each of its axes of more than one rank. View None: whole, fits every view."""

    view: str | None = None
    places: tuple[tuple[str, Place], ...] = ()

    def on(self, axis: str) -> Place:
        return dict(self.places).get(axis, Replicate())

    def with_place(self, axis: str, place: Place) -> Layout:
        return replace(self, places=tuple((a, place if a == axis else p) for a, p in self.places))


#: The layout of what lies whole on every rank, whatever the view.
WHOLE = Layout()


def layout(mesh: Mesh, view: str, **places: Place) -> Layout:
    """The layout on `view` with the given placements, `Replicate` on the other axes."""
    return Layout(view, tuple((axis, places.get(axis, Replicate())) for axis in mesh.axes(view)))
