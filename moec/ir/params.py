"""What a parameter or a KV state is, and the check of it that the verifier and the reader of program text share."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from moec.layout import WHOLE, Layout, Placed, Replicate, Shard
from moec.mesh import VIEWS, Mesh
from moec.placement import Placement

if TYPE_CHECKING:
    from moec.ir.program import Dim, Program

D = TypeVar("D")
#: Begins the name of a part that belongs to a later layer, by how much later.
NEXT = re.compile(r"next(\d+)\.")


@dataclass(frozen=True)
class Shared:
    """Shared experts behind the routed ones: `count` slots, one for each piece of `parts` cut along their `dim`.

    There is one matrix for each part of the parameter, of all shared experts together.
    """

    parts: tuple[str, ...]
    count: int
    dim: int


@dataclass(frozen=True)
class Param:
    """A parameter of a body: logical parameters `parts` concatenated along `dim`; `shape` is global, of all parts.

    In a layer body `parts` are relative to the layer: `attention.q` is `layers.{l}.attention.q`, and
    `next2.router.weight` that of the layer after the next. Each part is sharded by the layout first, then the rank's
    pieces are concatenated. `sizes`: of the parts along `dim`, none where they are equal. `shared`: what
    the last slots of a stack of experts are; they are sharded as the others.
    """

    parts: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    layout: Layout = WHOLE
    dim: int = 0
    shared: Shared | None = None
    sizes: tuple[int, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The logical parameters that it is made of."""
        return self.parts + (self.shared.parts if self.shared is not None else ())

    @property
    def num_routed(self) -> int:
        """Of a stack of experts: slots before those of shared ones."""
        return self.shape[0] - (self.shared.count if self.shared is not None else 0)

    @property
    def is_fp8(self) -> bool:
        """In e4m3, in blocks whose scales are a parameter of their own (`moec.blocks`)."""
        return self.dtype == "fp8"

    @property
    def is_borrowed(self) -> bool:
        """A later layer's own parameter, which this one reads too."""
        return NEXT.match(self.parts[0]) is not None

    def apart(self) -> tuple[Param, ...]:
        """Itself, or where its parts have sizes of their own one parameter for each."""
        if not self.sizes:
            return (self,)
        sized = zip(self.parts, self.sizes, strict=True)
        shapes = ((part, resized(self.shape, self.dim, size)) for part, size in sized)
        return tuple(replace(self, parts=(part,), shape=shape, sizes=()) for part, shape in shapes)

    def in_layer(self, layer: int) -> Param:
        """The parameter of one layer, its parts named as in the whole model."""

        def named(parts: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(full_name(part, layer) for part in parts)

        shared = self.shared and replace(self.shared, parts=named(self.shared.parts))
        return replace(self, parts=named(self.parts), shared=shared)

    def local_shape(self, mesh: Mesh, placements: dict[str, Placement]) -> tuple[Dim, ...]:
        """Shape on one rank; the expert dim is the symbol M where ranks hold different numbers of experts.

        Raises ValueError where a dim does not divide.
        """
        if self.sizes:
            shapes = [part.local_shape(mesh, placements) for part in self.apart()]
            return resized(shapes[0], self.dim, sum(int(shape[self.dim]) for shape in shapes))
        shape: list[Dim] = list(self.shape)
        for axis, place in self.layout.places:
            if isinstance(place, Shard):
                parts, size = mesh.axis_size(axis) // place.copies, shape[place.dim]
                if not isinstance(size, int) or size % (parts * len(self.parts if place.dim == self.dim else "1")):
                    raise ValueError(f"dim {place.dim} of {'+'.join(self.parts)} ({size}) does not divide by {parts}")
                shape[place.dim] = size // parts
            elif isinstance(place, Placed):
                table = placements[place.table]
                shape[0] = table.counts[0] if table.is_even else "M"
        return tuple(shape)


def resized(shape: tuple[D, ...], dim: int, size: D) -> tuple[D, ...]:
    """The shape with another size along one dim."""
    return (*shape[:dim], size, *shape[dim + 1 :])


@dataclass(frozen=True)
class State:
    """KV memory of one layer: `shape` per token (global), dtype and layout; dims count from the per-token shape."""

    shape: tuple[int, ...]
    dtype: str
    layout: Layout = WHOLE

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        shape = list(self.shape)
        for axis, place in self.layout.places:
            if isinstance(place, Shard):
                shape[place.dim] //= mesh.axis_size(axis) // place.copies
        return tuple(shape)


def full_name(part: str, layer: int) -> str:
    """Name of a layer's part in the whole model: `layers.3.attention.q`; one of a later layer has that one's number."""
    if (later := NEXT.match(part)) is not None:
        return f"layers.{layer + int(later[1])}.{part[later.end() :]}"
    return f"layers.{layer}.{part}"


def param_fault(program: Program, param: Param) -> str:
    """Why no rank could hold its piece of a parameter, or the empty string."""
    if param.dim >= len(param.shape) or not _has_parts(param):
        return f"dim {param.dim} of {list(param.shape)} cannot join {len(param.parts)} parts"
    if fault := layout_fault(program, param.layout, param.shape) or _shared_fault(param):
        return fault
    try:
        param.local_shape(program.mesh, program.placements)
    except ValueError as error:
        return str(error)
    return ""


def _has_parts(param: Param) -> bool:
    whole = param.shape[param.dim]
    if not param.sizes:
        return whole % len(param.parts) == 0
    is_each = len(param.sizes) == len(param.parts) and min(param.sizes) > 0 and param.shared is None
    return is_each and sum(param.sizes) == whole


def _shared_fault(param: Param) -> str:
    """What no slots of shared experts can be, or the empty string."""
    shared = param.shared
    if shared is None:
        return ""
    if len(param.shape) != 3 or not 0 < shared.count < param.shape[0] or shared.dim > 1:
        return f"{shared.count} slots along dim {shared.dim} of {list(param.shape)} are no shared experts"
    if len(shared.parts) != len(param.parts):
        return f"{len(shared.parts)} parts of shared experts beside {len(param.parts)} of routed ones"
    return ""


def layout_fault(program: Program, layout: Layout, shape: tuple[int, ...]) -> str:
    """What no parameter or state of this shape can be, or the empty string."""
    if layout.view is None:
        return "" if not layout.places else "places without a view"
    if layout.view not in VIEWS or tuple(axis for axis, _ in layout.places) != program.mesh.axes(layout.view):
        return f"it is laid out on {layout.view} along {[axis for axis, _ in layout.places]}"
    for axis, place in layout.places:
        if isinstance(place, Placed):
            table = program.placements.get(place.table)
            if axis != "ep" or table is None or table.num_experts != shape[0]:
                return f"{place} on axis {axis} of {shape[0]} experts"
        elif isinstance(place, Shard):
            if place.dim >= len(shape) or place.copies < 1 or program.mesh.axis_size(axis) % place.copies:
                return f"{place} on axis {axis} of {program.mesh.axis_size(axis)} ranks"
        elif place != Replicate():
            return f"{place} on axis {axis} is no way to hold it"
    return ""
