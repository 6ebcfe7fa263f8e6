"""Element types, and the devices that kernels are compiled for."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from moec.diagnostics import did_you_mean, fail


class Dtype(enum.Enum):
    """Element types the kernels take; the value is the name in `.moe` files and in the types of Triton's arguments."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"

    @property
    def num_bytes(self) -> int:
        return 4 if self is Dtype.FP32 else 2

    @property
    def triton(self) -> str:
        """The name in `triton.language`."""
        return {Dtype.FP32: "float32", Dtype.FP16: "float16", Dtype.BF16: "bfloat16"}[self]


@dataclass(frozen=True)
class Target:
    """A device architecture. `shared_limit` is the shared memory (LDS) one block may ask for, in bytes."""

    name: str
    backend: str
    arch: int | str
    warp_size: int
    shared_limit: int
    has_tma: bool = False

    @property
    def barrier_bytes(self) -> int:
        return 256 if self.has_tma else 0


#: CUDA C programming guide, "Technical specifications per compute capability"; AMD CDNA3 ISA (64 KiB of LDS).
TARGETS = {
    t.name: t
    for t in (
        Target("cuda:80", "cuda", 80, 32, 163 * 1024),
        Target("cuda:90", "cuda", 90, 32, 227 * 1024, has_tma=True),
        Target("cuda:100", "cuda", 100, 32, 227 * 1024, has_tma=True),
        Target("hip:gfx942", "hip", "gfx942", 64, 64 * 1024),
    )
}


def find_target(name: str) -> Target:
    """The target named `cuda:90` and the like; E0521 for a name that is none."""
    if name not in TARGETS:
        known = ", ".join(["cpu", *TARGETS])
        raise fail("E0521", f"`{name}` is not a target", did_you_mean(name, TARGETS) or f"the targets are {known}")
    return TARGETS[name]
