"""Accounting, from headers only: every parameter is written exactly once, every tensor is used or known to be idle.

Checked in both directions because either alone passes wrong models: a reader that skips keys it does not know runs with
experts nobody filled, and one that only counts does not see which.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moec.blocks import BLOCK, SCALES, num_blocks
from moec.checkpoint.family import Family, Target, family_of, tensor_key
from moec.checkpoint.folder import Checkpoint, open_checkpoint
from moec.checkpoint.header import DTYPE_BYTES, Tensor
from moec.checkpoint.scales import FP8, SUFFIX, check_kept, check_scales, is_scales
from moec.diagnostics import fail

Shape = tuple[int, ...]
READABLE = ("BF16", "F16", "F32", FP8)
_SHOWN = 5


@dataclass(frozen=True)
class Block:
    """Contiguous bytes of a shard: a whole parameter, or the part of one expert. `offset` from the file's start.

    `scales`: those of an fp8 matrix, one for each block of it.
    """

    tensor: str
    file: str
    dtype: str
    shape: Shape
    offset: int
    scales: Block | None = None


@dataclass(frozen=True)
class Sources:
    """Where each logical parameter of a model is read from. `parameters`: its name and shape."""

    checkpoint: Checkpoint
    parameters: Mapping[str, Shape]
    _found: dict[tuple[str, int | None], tuple[str, int]]

    def block(self, parameter: str, expert: int | None = None) -> Block:
        """The bytes of a parameter, or with `expert` of that expert's part (dim 0) of a stacked one."""
        shape = self.parameters[parameter] if expert is None else self.parameters[parameter][1:]
        tensor, first = self._found.get((parameter, expert)) or self._found[parameter, None]
        source = self.checkpoint.tensors[tensor]
        row = DTYPE_BYTES[source.dtype]
        for size in shape[1:]:
            row *= size
        if expert is not None and len(source.shape) > len(shape):
            first += expert * source.shape[1]  # a stacked tensor holds all experts, one after the other
        scales = self._scales(tensor, first, shape) if source.dtype == FP8 else None
        return Block(tensor, source.file, source.dtype, shape, source.offset + first * row, scales)

    def _scales(self, tensor: str, first: int, shape: Shape) -> Block:
        """The scales of an fp8 matrix that begins at row `first` of its tensor. Raises E0748 inside a block."""
        source, scales = self.checkpoint.tensors[tensor], self.checkpoint.tensors[tensor + SUFFIX]
        stacked, within = divmod(first, source.shape[-2])
        if within % BLOCK:
            message = f"`{tensor}` of `{source.file}` joins matrices inside a block of {BLOCK} rows, at row {within}"
            raise fail("E0748", message, "use weights with a tensor for each matrix")
        rows, columns = num_blocks(shape[-2]), num_blocks(shape[-1])
        row = stacked * scales.shape[-2] + within // BLOCK
        where = scales.offset + row * columns * DTYPE_BYTES[scales.dtype]
        return Block(tensor + SUFFIX, scales.file, scales.dtype, (rows, columns), where)


def open_sources(folder: Path, parameters: Mapping[str, Shape]) -> Sources:
    """Read the headers of `folder` and account for `parameters`. Raises E0701 to E0749."""
    checkpoint = open_checkpoint(folder)
    return resolve(checkpoint, family_of(checkpoint.config, folder / "config.json"), parameters)


def resolve(checkpoint: Checkpoint, family: Family, parameters: Mapping[str, Shape]) -> Sources:
    """Match the tensors of `checkpoint` with `parameters` by the patterns of `family`.

    What a tensor in fp8 holds is parameters of another dtype, or, where their scales are among `parameters`, stays so.

    Raises E0743 for a dtype that is not read, E0748 for fp8 without its scales, E0749 for what is to stay in fp8 and
    is in something else, E0741 for other shapes or another number of experts, E0742 for a parameter written twice,
    E0740 for parameters and tensors that are left over.
    """
    _check_dtypes(checkpoint)
    check_scales(checkpoint)
    account = _Account(checkpoint, parameters, _extra_layers(checkpoint, family, parameters))
    for name, tensor in checkpoint.tensors.items():
        account.enter(family, name, tensor)
    check_kept(checkpoint, parameters, {place: tensor for place, (tensor, _) in account.found.items()})
    account.close(checkpoint.folder)
    return Sources(checkpoint, parameters, account.found)


@dataclass
class _Account:
    """The books: `found` (parameter, expert) -> (tensor, rows of it before the parameter)."""

    checkpoint: Checkpoint
    parameters: Mapping[str, Shape]
    extra_layers: range
    found: dict[tuple[str, int | None], tuple[str, int]] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    shapes: list[tuple[str, str, str, str]] = field(default_factory=list)
    experts: dict[str, int] = field(default_factory=dict)  # parameter -> 1 + the highest expert that the file has

    def enter(self, family: Family, name: str, tensor: Tensor) -> None:
        """One tensor: for the parameters that it fills, or as one that nothing uses."""
        key, numbers = tensor_key(name.removesuffix(SUFFIX))
        target = family.tensors.get(key)
        if target is None or len(numbers) != len(target.numbers):
            if key not in family.ignored_tensors and not (numbers and numbers[0] in self.extra_layers):
                self.unused.append(name)
            return
        place = dict(zip(target.numbers, numbers, strict=True))
        logical = [text.replace("{l}", str(place["l"])) if "l" in place else text for text in target.logical]
        if is_scales(name):
            if self._is_read_with_weights(name, logical):
                return
            logical = [parameter + SCALES for parameter in logical]
        if not all(parameter in self.parameters for parameter in logical):
            is_empty = tensor.nbytes == 0  # what transformers writes for no shared experts: [0, hidden]
            if place.get("l") not in self.extra_layers and not is_empty:
                self.unused.append(name)
            return
        expert = place.get("e")
        if expert is not None:
            self.experts[logical[0]] = max(self.experts.get(logical[0], 0), expert + 1)
            if expert >= self.parameters[logical[0]][0]:
                return  # told as a wrong number of experts
        self._write(target, name, tensor, logical, expert)

    def close(self, folder: Path) -> None:
        """Raise the first of what is wrong."""
        held: dict[int, int] = {}
        for name, count in self.experts.items():
            held[self.parameters[name][0]] = max(held.get(self.parameters[name][0], 0), count)
        counts = [("experts of a layer", str(want), str(has), "") for want, has in held.items() if want != has]
        if self.shapes or counts:
            message = f"`{folder}` does not have the shapes that its config gives{_table(counts + self.shapes)}"
            raise fail("E0741", message, "config.json and the weights are of different models")
        if self.twice:
            message = f"`{folder}` gives {_many(self.twice, 'parameter')} twice: {_some(self.twice)}"
            raise fail("E0742", message, "remove one of the two spellings")
        empty = [_label(name, expert) for name, expert in self._wanted() if (name, expert) not in self.found]
        notes = [f"nothing fills {_many(empty, 'parameter')}: {_some(empty)}"] if empty else []
        notes += [f"nothing uses {_many(self.unused, 'tensor')}: {_some(self.unused)}"] if self.unused else []
        if notes:
            help = "the names are those of specs/families; a part may be missing, or the model be of another family"
            raise fail("E0740", f"the weights in `{folder}` do not fit the model: {'; '.join(notes)}", help)

    def _write(self, target: Target, name: str, tensor: Tensor, logical: list[str], expert: int | None) -> None:
        """Enter one tensor for the parameters it holds, whose rows follow each other."""
        shapes = [
            self.parameters[parameter][1:] if target.one_expert else self.parameters[parameter] for parameter in logical
        ]
        rows = -2 if len(shapes[0]) > 1 else -1
        want = list(shapes[0])
        want[rows] = sum(shape[rows] for shape in shapes)
        if tuple(want) != tensor.shape:
            self.shapes.append((_label("+".join(logical), expert), str(want), str(list(tensor.shape)), name))
            return
        first = 0
        for parameter, shape in zip(logical, shapes, strict=True):
            if self._is_written(parameter, expert):
                self.twice.append(f"{_label(parameter, expert)} ({name})")
            self.found[parameter, expert] = (name, first)
            first += shape[rows]

    def _is_read_with_weights(self, name: str, logical: list[str]) -> bool:
        """Whether these are scales of fp8 weights that do not stay so, but are multiplied when they are read."""
        weights = self.checkpoint.tensors.get(name.removesuffix(SUFFIX))
        is_fp8 = weights is not None and weights.dtype == FP8
        return is_fp8 and all(p in self.parameters and p + SCALES not in self.parameters for p in logical)

    def _is_written(self, parameter: str, expert: int | None) -> bool:
        """A stacked tensor and one of a single expert write the same place."""
        if (parameter, None) in self.found or (parameter, expert) in self.found:
            return True
        return expert is None and parameter in self.experts

    def _wanted(self) -> Iterable[tuple[str, int | None]]:
        for parameter, shape in self.parameters.items():
            if parameter in self.experts:
                yield from ((parameter, expert) for expert in range(shape[0]))
            else:
                yield parameter, None


def _extra_layers(checkpoint: Checkpoint, family: Family, parameters: Mapping[str, Shape]) -> range:
    """Layers after the model's last one that its config counts apart (multi-token prediction)."""
    layers = 1 + max((int(name.split(".")[1]) for name in parameters if name.startswith("layers.")), default=-1)
    extra = max((checkpoint.config.get(key) or 0 for key in family.extra_layer_keys), default=0)
    return range(layers, layers + (extra if type(extra) is int else 0))


def _check_dtypes(checkpoint: Checkpoint) -> None:
    bad = [name for name, tensor in checkpoint.tensors.items() if tensor.dtype not in READABLE]
    if not bad:
        return
    dtype = checkpoint.tensors[bad[0]].dtype
    message = f"`{checkpoint.folder}`: {dtype} weights are not read: {_many(bad, 'tensor')}: {_some(bad)}"
    raise fail("E0743", message, "use a bf16, fp16 or fp32 copy of the weights")


def _label(parameter: str, expert: int | None) -> str:
    return parameter if expert is None else f"{parameter}[{expert}]"


def _table(rows: list[tuple[str, str, str, str]]) -> str:
    """Columns under each other, up to five rows and the count of the others."""
    shown = [("parameter", "config says", "file has", "tensor"), *rows[:_SHOWN]]
    widths = [max(len(row[column]) for row in shown) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown]
    more = [f"and {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else []
    return "".join(f"\n  {line}" for line in [*lines, *more])


def _many(names: list[str], noun: str) -> str:
    return f"{len(names)} {noun}" + ("s" if len(names) != 1 else "")


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(f"`{name}`" for name in listed[:_SHOWN]) + (", ..." if len(listed) > _SHOWN else "")
