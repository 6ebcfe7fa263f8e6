"""What a device can do, and how many blocks of a kernel one of its multiprocessors holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from moec.codegen.targets import Dtype, Target

#: Part of the nominal rate of memory that kernels reach which do nothing but read weights: aiconfigurator's figures of
#: SGLang on H200 (`docs/kernels.md`), 302 us at 64 tokens of Qwen3-30B-A3B less six launches, against 252 us.
MEMORY_SHARE = 0.9
#: Microseconds from the end of one kernel to the first products of the next, in a CUDA graph: the same figures at one
#: token, 36.6 us in six launches against 15.7 us for the bytes.
LAUNCH_US = 3.5
#: Nanoseconds from asking for a tile's first operands until they are there, off chip (H100: Chips and Cheese, 2023).
FILL_NS = 600.0
#: Bytes that a multiprocessor can take from L2, and from its shared memory, in a cycle (CUDA C best practices; H100).
PORT_BYTES, SHARED_BYTES = 64.0, 128.0
#: Rates of memory that differ by more than this part are of other devices.
NEAR = 0.25
#: Warp instructions that a multiprocessor issues in a cycle: one of each scheduler.
SCHEDULERS = 4


@dataclass(frozen=True)
class Device:
    """Figures of one device. `clock_ghz` is the one that vendors count `tflops` (dense, by dtype) at.

    `l2_gbps`: what all multiprocessors together read of tiles that are in L2. `registers` and `shared` are those of one
    multiprocessor, `threads` and `blocks` what it holds at most; `reserved` bytes of shared memory go to every block.
    """

    name: str
    target: str
    num_sms: int
    clock_ghz: float
    memory_gbps: float
    tflops: tuple[tuple[str, float], ...]
    l2_gbps: float
    l2_bytes: int
    shared: int
    threads: int = 2048
    blocks: int = 32
    registers: int = 65536
    reserved: int = 1024

    @property
    def cycles_per_us(self) -> float:
        return self.clock_ghz * 1e3

    def peak(self, dtype: Dtype | str) -> float:
        """FLOP per microsecond of the whole device, of a dtype or of `fp8`.

        fp32 products run on the plain units, at 128 FMA a cycle.
        """
        tflops = dict(self.tflops).get(dtype if isinstance(dtype, str) else dtype.value)
        return tflops * 1e6 if tflops is not None else self.num_sms * 256 * self.cycles_per_us

    def roof_us(self, num_bytes: float, flops: float, dtype: Dtype | str) -> float:
        """What nothing can beat: the larger of bytes over the rate of memory and operations over the peak."""
        return max(num_bytes / (self.memory_gbps * 1e3), flops / self.peak(dtype))


HOPPER = (("bf16", 989.4), ("fp16", 989.4), ("fp8", 1978.9))
BLACKWELL = (("bf16", 2250.0), ("fp16", 2250.0), ("fp8", 4500.0))
#: Vendors' data sheets and tuning guides (multiprocessors, boost clock, dense rates, memory, L2, shared memory).
#: `l2_gbps`: H100 and H200 as fitted to SGLang's 2377 us at 16,384 tokens (`docs/kernels.md`; the slices could give
#: 5120 bytes a cycle, 9.4 TB/s; Chips and Cheese measured 5.5 to 5.7 on the PCIe board of 114); the others scaled from
#: it by multiprocessors and clock, MI300X: the vendor's 17.2 TB/s of Infinity Cache by the same 0.7. Assumptions.
DEVICES = {
    device.name: device
    for device in (
        Device("a100", "cuda:80", 108, 1.41, 2039, (("bf16", 312), ("fp16", 312)), 4200, 40 << 20, 164 << 10),
        Device("h100", "cuda:90", 132, 1.83, 3350, HOPPER, 6600, 50 << 20, 228 << 10),
        Device("h200", "cuda:90", 132, 1.83, 4800, HOPPER, 6600, 50 << 20, 228 << 10),
        Device("b200", "cuda:100", 148, 1.85, 7700, BLACKWELL, 7500, 126 << 20, 228 << 10),
        Device(
            "mi300x", "hip:gfx942", 304, 2.1, 5300, (("bf16", 1307.4), ("fp16", 1307.4)), 12000, 256 << 20, 64 << 10,
            registers=131072, reserved=0,
        ),
    )
}  # fmt: skip


def device_for(target: Target, memory_gbps: float | None = None, tflops: tuple[tuple[str, float], ...] = ()) -> Device:
    """The device of an architecture whose memory is nearest to a cluster's `memory_gbps`, with the cluster's rates.

    Without a rate it is the first of the table: A100, H100, B200, MI300X. So it is where no device's memory is near:
    the target is then another one than the cluster's.
    """
    known = [device for device in DEVICES.values() if device.target == target.name]
    if memory_gbps is None:
        return known[0]
    nearest = min(known, key=lambda device: abs(device.memory_gbps - memory_gbps))
    if abs(nearest.memory_gbps - memory_gbps) > NEAR * nearest.memory_gbps:
        return known[0]
    return replace(nearest, memory_gbps=memory_gbps, tflops=tuple({**dict(nearest.tflops), **dict(tflops)}.items()))


@dataclass(frozen=True)
class Occupancy:
    """Blocks that a multiprocessor holds at once, the share of its threads they are, and what allows no more."""

    blocks: int
    share: float
    limit: str


def occupancy(device: Device, target: Target, warps: int, registers: int, shared: int) -> Occupancy:
    """Of blocks of `warps` warps with `registers` a thread and `shared` bytes, static and dynamic.

    NVIDIA gives registers to warps in units of 256, AMD vector registers in units of 8 a lane, 512 a lane in all.
    """
    if target.backend == "hip":
        by_registers = 512 // max(8, -(-registers // 8) * 8) * 4 // warps
    else:
        by_registers = device.registers // (warps * -(-registers * target.warp_size // 256) * 256)
    limits = {
        "registers": by_registers,
        "shared memory": device.shared // (shared + device.reserved) if shared + device.reserved else inf,
        "threads": device.threads // (warps * target.warp_size),
        "blocks": device.blocks,
    }
    limit, blocks = min(limits.items(), key=lambda item: item[1])
    return Occupancy(int(blocks), int(blocks) * warps * target.warp_size / device.threads, limit)
