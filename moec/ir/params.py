"""What a parameter or a KV state can be: the check that the verifier and the reader of program text share."""

from __future__ import annotations

from moec.ir.program import Param, Program
from moec.layout import Layout, Placed, Replicate, Shard
from moec.mesh import VIEWS


def param_fault(program: Program, param: Param) -> str:
    """Why no rank could hold its piece of a parameter, or the empty string."""
    if param.dim >= len(param.shape) or param.shape[param.dim] % len(param.parts):
        return f"dim {param.dim} of {list(param.shape)} cannot join {len(param.parts)} parts"
    if fault := layout_fault(program, param.layout, param.shape):
        return fault
    try:
        param.local_shape(program.mesh, program.placements)
    except ValueError as error:
        return str(error)
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
