"""The layers that `gpu_moe.py` times, how tokens choose experts in them, and what others have published.

Published: microseconds of a whole MoE layer on one H200 in bf16, by CUDA graph and events, best of SGLang (Triton),
TensorRT-LLM (CUTLASS) and vLLM (Triton): ai-dynamo/aiconfigurator at 095f58a, `systems/data/h200_sxm/moe`; all of
them for Qwen3-30B are in `moec.codegen.layer_cost`.

Shapes: T tokens, E experts, k choices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moec.codegen.expected_rows import even_rows, power_law_rows
from moec.codegen.layer_cost import PUBLISHED_US

TOKENS = (1, 8, 64, 512, 1024, 2048, 4096, 16384)
ROUTINGS = ("balanced", "power_law_1.01")


@dataclass(frozen=True)
class Layer:
    """One MoE layer: `experts` of [2 * inner, hidden] and [hidden, inner], `top` of them a token."""

    name: str
    hidden: int
    inner: int
    experts: int
    top: int
    is_fp8: bool = False

    @property
    def weight_bytes(self) -> int:
        """One expert's three matrices; block scales of FP8 are left out."""
        return 3 * self.hidden * self.inner * (1 if self.is_fp8 else 2)


LAYERS = (
    Layer("qwen3-30b", 2048, 768, 128, 8),
    Layer("qwen3-235b", 4096, 1536, 128, 8),
    Layer("deepseek-v3", 7168, 2048, 256, 8, is_fp8=True),
    Layer("mixtral-8x7b", 4096, 14336, 8, 2),
)

#: Layer, routing -> tokens -> microseconds.
PUBLISHED = {
    ("qwen3-30b", "balanced"): {tokens: min(even) for tokens, even, _ in PUBLISHED_US},
    ("qwen3-30b", "power_law_1.01"): {tokens: min(skewed) for tokens, _, skewed in PUBLISHED_US},
    ("qwen3-235b", "balanced"): {64: 1130.0, 4096: 2172.0},
    ("mixtral-8x7b", "balanced"): {2048: 1778.0},
}
#: What moec is to reach on an H200.
WANTED = {
    ("qwen3-30b", "balanced"): {1: 27.0, 64: 280.0, 4096: 528.0},
    ("qwen3-30b", "power_law_1.01"): {4096: 640.0},
}


def expert_loads(layer: Layer, tokens: int, routing: str) -> list[int]:
    """Rows of each expert, T * k in all, none more than T: as equal as can be, or by the power law of the published."""
    draw = even_rows if routing == "balanced" else power_law_rows
    return [int(rows) for rows in draw(layer.experts, layer.top, tokens)]


def choices(layer: Layer, loads: list[int], tokens: int, device: torch.device, seed: int = 0) -> Tensor:
    """ids i64 [T, k] that give every expert its load, k different ones a token: pairs are dealt to tokens in turn.

    Experts are numbered at random, so that neighbours in a token are no neighbours in memory.
    """
    generator = torch.Generator().manual_seed(seed)
    names = torch.randperm(layer.experts, generator=generator)
    dealt = torch.repeat_interleave(names, torch.tensor(loads)).view(layer.top, tokens)
    return dealt.t()[torch.randperm(tokens, generator=generator)].contiguous().to(device)
