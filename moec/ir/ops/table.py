"""The operation table: what each operation of a Program is called, gives, and may be served by.

One entry fixes name, attributes, number of results, shape rule, layout rule, side effects and kernels. A layout rule
speaks of one mesh axis at a time: given how each argument lies on that axis it gives how the result lies, or refuses.
The refusals are the compiler's type system: a `Partial` is never added to a `Replicate`, routed rows are never read as
token rows. The operations themselves: `dense` products and activations; `attention` attention; `moe`
routing and experts; `fused` an expert's product joined with its neighbours; `cache` experts that wait
elsewhere; `exchange` and `pairs` what brings rows there and back; `comm` what moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moec.ir.ops.attributes import attribute_fault
from moec.ir.program import Dim, Type
from moec.layout import Layout, Partial, Place, Replicate, Shard
from moec.mesh import VIEWS, Mesh
from moec.placement import Placement


class OpError(ValueError):
    """An operation was given what its rules refuse. The text says what and why."""


@dataclass(frozen=True)
class Call:
    """One use of an operation: types of its arguments, attributes, and the program's tables."""

    op: Op
    types: tuple[Type, ...]
    attrs: dict[str, Any]
    mesh: Mesh
    placements: dict[str, Placement]

    def shape(self, index: int) -> tuple[Dim, ...]:
        return self.types[index].shape

    def dtype(self, index: int) -> str:
        return self.types[index].dtype

    def require(self, holds: bool, why: str) -> None:
        if not holds:
            raise OpError(why)

    def same_dims(self, a: Dim, b: Dim, what: str) -> None:
        self.require(a == b, f"{what} differ: {a} and {b}")

    def placement(self) -> Placement:
        """The placement table that attribute `table` names."""
        table = self.attrs["table"]
        self.require(table in self.placements, f"experts {table} are not placed")
        return self.placements[table]


Places = tuple[Place, ...]
Shapes = tuple[tuple[tuple[Dim, ...], str], ...]
ShapeRule = Callable[[Call], Shapes]
PlaceRule = Callable[[Call, str, Places], Places]
LayoutRule = Callable[[Call], Layout]


#: What `Op.args` may ask of an operand's dtype.
DTYPES = {"float": ("bf16", "fp16", "fp32"), "fp32": ("fp32",), "i64": ("i64",), "i32": ("i32",)}
DTYPES["weight"] = ("fp8", *DTYPES["float"])
DTYPES["bytes"] = ("bytes",)
DTYPES["row"] = ("bytes", *DTYPES["float"])
DTYPES["any"] = ("bf16", "fp16", "fp32", "i64", "i32")
#: Kernels of an operation that has one in C++ too.
CPP = ("torch", "cpp")
#: Of one that has a Triton kernel; in C++ as well.
TRITON, ALL = ("torch", "triton"), ("torch", "cpp", "triton")
#: Bytes of one element.
WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2, "i64": 8, "i32": 4, "fp8": 1, "bytes": 1}


@dataclass(frozen=True)
class Op:
    """One operation. `args`: the dtype of each operand (a key of `DTYPES`), of which the last `num_optional` may be
    left out; so may the attributes in `options`. `num_results`: 0 for one for each of its `sizes`.
    `effects`: `kv` reads and appends this layer's KV state; `comm` is a collective on `group`; `cache` moves experts
    between their tiers and their slots.
    """

    name: str
    args: tuple[str, ...]
    shape: ShapeRule = field(repr=False)
    place: PlaceRule = field(repr=False)
    attrs: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    num_optional: int = 0
    num_results: int = 1
    effects: frozenset[str] = frozenset()
    kernels: tuple[str, ...] = ("torch",)
    relayout: LayoutRule | None = field(default=None, repr=False)

    @property
    def __name__(self) -> str:  # torch.fx names nodes by it
        return self.name.replace(".", "_")

    def __call__(self, *args: object, **attrs: object) -> object:
        raise TypeError(f"{self.name} is an operation of a Program, run by moec.runtime or moec.ir.evaluator.program")

    def __deepcopy__(self, memo: object) -> Op:
        return self

    def count(self, attrs: Mapping[str, Any]) -> int:
        """How many results it has."""
        sizes = attrs.get("sizes")
        return self.num_results or (len(sizes) if isinstance(sizes, tuple) else 0)

    def fault(self, num_args: int, attrs: dict[str, Any]) -> str:
        """What is wrong with the number of operands or with an attribute, or the empty string."""
        low, high = len(self.args) - self.num_optional, len(self.args)
        if not low <= num_args <= high:
            return f"{self.name} takes {low}{f' to {high}' if high > low else ''} operands, not {num_args}"
        if missing := sorted(set(attrs) ^ {*self.attrs, *(set(self.options) & set(attrs))}):
            return f"{self.name} has the attributes {', '.join(self.attrs) or 'none'}; check {', '.join(missing)}"
        return next(filter(None, (attribute_fault(key, value) for key, value in sorted(attrs.items()))), "")

    def infer(
        self, types: tuple[Type, ...], attrs: dict[str, Any], mesh: Mesh, placements: dict[str, Placement]
    ) -> tuple[Type, ...]:
        """Types of the results. Raises OpError where the rules refuse."""
        call = Call(self, types, attrs, mesh, placements)
        fault = self.fault(len(types), attrs)
        call.require(not fault, fault)
        pending = self.name == "all_to_all.wait"
        for i, (type, wanted) in enumerate(zip(types, self.args, strict=False)):
            call.require(type.pending == (pending and i == 0), "only a wait reads a start")
            call.require(type.dtype in DTYPES[wanted], f"operand {i} of {self.name} is {type.dtype}, not {wanted}")
        shapes, layouts = self._shapes(call), self._layouts(call)
        return tuple(
            Type(shape, dtype, lay, pending=self.name.endswith(".start"))
            for (shape, dtype), lay in zip(shapes, layouts, strict=True)
        )

    def _shapes(self, call: Call) -> Shapes:
        try:
            return self.shape(call)
        except OpError:
            raise
        except (ValueError, IndexError):  # a rule unpacks the dims it expects
            shown = ", ".join(str(list(t.shape)) for t in call.types)
            raise OpError(f"{self.name} cannot take operands of shapes {shown}".replace("'", "")) from None

    def _layouts(self, call: Call) -> tuple[Layout, ...]:
        views = {t.layout.view for t in call.types if t.layout.view is not None}
        call.require(len(views) == 1, f"{self.name} mixes the views {' and '.join(sorted(views))}: relayout first")
        view = views.pop()
        call.require(view in VIEWS, f"{self.name} on {view}, which is no view")
        if self.relayout is not None:
            return (self.relayout(call),)
        if "comm" in self.effects:
            group, axis = call.attrs["group"], group_axis(call)
            known = group == f"{view}.{axis}" or (view == "experts" and group.startswith("links."))
            call.require(known, f"{self.name} on {group} of a value on {view}")
        by_axis = {}
        for axis in call.mesh.axes(view):
            by_axis[axis] = self.place(call, axis, tuple(t.layout.on(axis) for t in call.types))
        return tuple(
            Layout(view, tuple((axis, places[i]) for axis, places in by_axis.items()))
            for i in range(self.count(call.attrs))
        )


#: Every operation by name. Filled by `register` from the modules named above.
OPS: dict[str, Op] = {}


def register(op: Op) -> Op:
    OPS[op.name] = op
    return op


def refuse(call: Call, axis: str, places: Places, why: str = "") -> OpError:
    """The error of a layout rule that has no line for these placements."""
    shown = ", ".join(map(str, places))
    return OpError(f"{call.op.name} cannot take ({shown}) on axis {axis}" + (f": {why}" if why else ""))


def group_axis(call: Call) -> str:
    """The mesh axis a collective reduces or moves over: `experts.ep` is ep, of which `links` are the two parts.

    It must be of more than one rank.
    """
    group = call.attrs["group"]
    call.require(group in call.mesh.groups(), f"{call.op.name} runs on {group}, which this mesh does not have")
    view, _, axis = str(group).partition(".")
    return "ep" if view == "links" else axis


def symbol(name: str, like: Dim) -> str:
    """The symbol `name` of the chunk of tokens that `like` counts: P beside T, P.1 beside T.1."""
    _, dot, chunk = str(like).partition(".")
    return name + dot + chunk


def base_symbol(dim: Dim) -> Dim:
    """P for P.1; a number stays one."""
    return dim.partition(".")[0] if isinstance(dim, str) else dim


def require_chunk(call: Call, rows: Dim) -> None:
    """What asks the step about its rows says of which chunk they are, by `chunk` = (index, parts), or of none."""
    index, parts = call.attrs.get("chunk", (0, 1))
    call.require(index < parts, f"chunk {index} of {parts}")
    named = f"{base_symbol(rows)}.{index}" if "chunk" in call.attrs else base_symbol(rows)
    call.same_dims(rows, named, "rows and rows of the chunk")


def rowwise(call: Call, axis: str, places: Places) -> Places:
    """Each row of every argument stands for itself: all whole, or all cut along dim 0."""
    if len(set(places)) == 1 and places[0] in (Replicate(), Shard(0)):
        return places[:1] * call.op.num_results
    raise refuse(call, axis, places, partial_hint(places))


def rows_and_param(call: Call, axis: str, places: Places) -> Places:
    """Row-wise in the first argument; the others are parameters, which must be whole."""
    if all(p == Replicate() for p in places[1:]):
        return rowwise(call, axis, places[:1])
    raise refuse(call, axis, places, "the parameter must be whole")


def partial_hint(places: Places) -> str:
    return "a partial sum must be reduced first" if Partial() in places else ""


def like_first(call: Call) -> Shapes:
    return ((call.shape(0), call.dtype(0)),)


def local_dim(value: Dim, what: str) -> int:
    """A dim that must be a number, not a run-time symbol."""
    if not isinstance(value, int):
        raise OpError(f"{what} must be a known number, not {value}")
    return value


def is_by_head(call: Call, places: Places) -> bool:
    """The first argument is [T, H, d], cut along its heads, and the others are whole."""
    first, *rest = places
    heads = len(call.shape(0)) == 3 and isinstance(first, Shard) and first.dim == 1
    return heads and all(p == Replicate() for p in rest)
