"""Tensors in fp8 and the scales of their blocks: `NAME` in F8_E4M3, and beside it `NAME_scale_inv`.

The scale is what a block's numbers are multiplied with, though DeepSeek's name for it says the inverse.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from moec.blocks import SCALES, scales_shape
from moec.checkpoint.folder import Checkpoint
from moec.checkpoint.header import Tensor
from moec.diagnostics import fail

FP8 = "F8_E4M3"
#: DeepSeek's scales are in fp32, others' in bf16, which fp32 holds too.
SCALE_DTYPES = ("F32", "BF16")
#: Ends the name of a tensor that holds the scales of the one named before it.
SUFFIX = "_scale_inv"
_SHOWN = 5


def is_scales(name: str) -> bool:
    """Whether a tensor holds the scales of another."""
    return name.endswith(SUFFIX)


def check_scales(checkpoint: Checkpoint) -> None:
    """Raise E0748 where a tensor in fp8 is not a matrix, or a stack of them, with a scale for each block."""
    faults = [
        f"`{name}` of `{tensor.file}` {fault}"
        for name, tensor in checkpoint.tensors.items()
        if tensor.dtype == FP8 and (fault := _fault(name, tensor, checkpoint.tensors))
    ]
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        message = f"`{checkpoint.folder}` has fp8 weights without their scales: {'; '.join(faults[:_SHOWN])}{more}"
        raise fail("E0748", message, "fetch the model again, or convert it again: a matrix has a scale for each block")


def check_kept(checkpoint: Checkpoint, parameters: Iterable[str], found: Mapping[tuple[str, int | None], str]) -> None:
    """Raise E0749 where weights that are to stay in fp8 are in something else.

    `found`: (parameter, expert) -> the tensor that has it.
    """
    kept = {name.removesuffix(SCALES) for name in parameters if name.endswith(SCALES)}
    others = [name for (parameter, _), name in found.items() if parameter in kept]
    wrong = [name for name in others if checkpoint.tensors[name].dtype != FP8]
    if wrong:
        first = checkpoint.tensors[wrong[0]]
        message = f"`{checkpoint.folder}` has {len(wrong)} of the experts' tensors in another dtype than the program's"
        what = f"{message} fp8, first `{wrong[0]}` of `{first.file}` in {first.dtype}"
        help = (
            "without `expert_dtype` in the model they are read as its `dtype`; for a model file to take that out of, "
        )
        raise fail("E0749", what, help + "import config.json alone")


def _fault(name: str, tensor: Tensor, tensors: Mapping[str, Tensor]) -> str:
    """What stands against multiplying an fp8 tensor with its scales, or the empty string."""
    scales = tensors.get(name + SUFFIX)
    if len(tensor.shape) not in (2, 3):
        return f"is {list(tensor.shape)}, which has no blocks"
    if scales is None:
        return f"has no `{name + SUFFIX}`"
    want = scales_shape(tensor.shape)
    if scales.dtype not in SCALE_DTYPES or scales.shape != want:
        dtypes = " or ".join(SCALE_DTYPES)
        return f"has scales {list(scales.shape)} in {scales.dtype}, its blocks want {list(want)} in {dtypes}"
    return ""
