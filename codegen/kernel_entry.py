"""What `plan.json` keeps of a compiled kernel: its figures, as `moec kernels` and `moec explain` print them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moec.codegen.devices import Device, Occupancy, occupancy
from moec.codegen.gemm_variant import Weights
from moec.codegen.kernel_choice import write_choice
from moec.codegen.kernel_cost import GemmCost, match_loops
from moec.codegen.kernel_select import Choice, describe
from moec.codegen.kernel_store import Compiled
from moec.codegen.layer_cost import RowsCost
from moec.codegen.pair_product import PairProduct
from moec.codegen.targets import find_target


def gemm_entry(choice: Choice, device: Device, rows_per_expert: int) -> dict[str, Any]:
    """A grouped GEMM, chosen for about so many rows an expert, and costed."""
    values, kernel, cost = choice.values, choice.kernel, choice.cost
    assert cost.occupancy is not None
    found = zip(values.bodies, match_loops(values, kernel.code.loops), strict=True)
    loops = {loop: tile for tile, loop in reversed(list(found)) if loop is not None}  # one may hold several bodies
    return {
        **_usage((kernel,), cost.occupancy, device),
        "launches": 1,
        "form": values.form.value,
        "tiles": describe(values),
        **({"choice": write_choice(values, rows_per_expert)} if values.weights is Weights.PLAIN else {}),
        "matrix": [
            {
                "rows": tile.m,
                "op": str(loop.op),
                "slots": round(loop.slots_per_op, 2),
                "tile_slots": loop.tile_slots,
                "loads": dict(loop.loads),
            }
            for loop, tile in reversed(loops.items())
        ],
        "bytes": {"moved": round(cost.traffic.moved), "minimum": round(cost.traffic.minimum)},
        "rows": {"useful": cost.useful_rows, "padded": cost.padded_rows, "tiles": cost.tiles},
        "us": _times(cost),
        "fallback": values.fallback.text,
        "selection": {"candidates": choice.candidates, "compiled": choice.compiled, "times": dict(choice.times)},
        "tuned_us": min((us for _, us in choice.times), default=None),
    }


def pair_entry(values: PairProduct, kernel: Compiled, cost: GemmCost, device: Device) -> dict[str, Any]:
    """A product of pairs, costed; its loop multiplies no matrices."""
    assert cost.occupancy is not None
    usage = _usage((kernel,), cost.occupancy, device)
    limit = usage["shared_limit"]
    over = f"asks for {kernel.report.shared_bytes} of {limit} bytes of shared memory"
    spilled = f"spills {kernel.code.spills} registers"
    return {
        **usage,
        "launches": 1,
        "form": "pointer",
        "tiles": f"{values.block_pairs} pairs x {values.columns} x {values.step}, {values.stages} stages",
        "matrix": [],
        "bytes": {"moved": round(cost.traffic.moved), "minimum": round(cost.traffic.minimum)},
        "rows": {"useful": cost.useful_rows, "padded": cost.padded_rows, "tiles": cost.tiles},
        "us": _times(cost),
        "fallback": spilled if kernel.code.spills else over if kernel.report.shared_bytes > limit else "",
        "selection": None,
        "tuned_us": None,
    }


def rows_entry(kernels: Sequence[Compiled], warps: int, cost: RowsCost, fallback: str = "") -> dict[str, Any]:
    """Kernels that move rows for one operation, one launch each; registers and shared memory of the largest."""
    device = cost.device
    target = find_target(kernels[0].report.target)
    fits = min(
        (occupancy(device, target, warps, k.code.registers, k.report.shared_bytes) for k in kernels),
        key=lambda found: found.blocks,
    )
    return {
        **_usage(kernels, fits, device),
        "launches": cost.launches,
        "form": "pointer",
        "tiles": "",
        "matrix": [],
        "bytes": {"moved": round(cost.moved), "minimum": 0},
        "rows": None,
        "us": {
            "memory": round(cost.moved / (device.memory_gbps * 1e3), 3),
            "predicted": round(cost.predicted_us, 3),
            "roof": 0.0,
        },
        "fallback": fallback,
        "selection": None,
        "tuned_us": None,
    }


def _usage(kernels: Sequence[Compiled], fits: Occupancy, device: Device) -> dict[str, Any]:
    target = find_target(kernels[0].report.target)
    return {
        "target": target.name,
        "device": device.name,
        "registers": max(kernel.code.registers for kernel in kernels),
        "accumulators": max(kernel.code.accumulators for kernel in kernels),
        "spills": sum(kernel.code.spills for kernel in kernels),
        "shared_bytes": max(kernel.report.shared_bytes for kernel in kernels),
        "shared_limit": target.shared_limit,
        "occupancy": {"blocks": fits.blocks, "share": round(fits.share, 4), "limit": fits.limit},
    }


def _times(cost: GemmCost) -> dict[str, float]:
    names = ("memory", "l2", "tensor", "issue", "busiest", "predicted", "roof")
    return {name: round(float(getattr(cost, f"{name}_us")), 3) for name in names}
