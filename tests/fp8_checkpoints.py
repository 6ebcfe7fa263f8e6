"""Tiny DeepSeek-V3 checkpoints in blocks of fp8, as the published ones are, each beside what its numbers mean.

`write` makes two folders: `fp8` with weights in e4m3 and their `weight_scale_inv`, and `plain` with the products of the
two in fp32, which transformers and moec read as any other model.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers

from moec.runtime.quantise import dequantise_blocks, quantise_fp8_blocks
from tests import checkpoints

QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}
#: Whole blocks, of which etp = 2 cuts an expert's inside in two.
WHOLE = {"hidden_size": 128, "moe_intermediate_size": 256}
#: Last blocks that are not full, along both dims.
RAGGED = {"hidden_size": 152, "moe_intermediate_size": 136}
#: Linear weights: neither the router's, nor embeddings and head.
LINEAR = re.compile(r".*\.(self_attn|mlp)\..*_proj(_with_mqa)?\.weight")


def write(folder: Path, seed: int = 0, **overrides: Any) -> tuple[Path, Path]:
    """Folders of the fp8 checkpoint and of the plain one."""
    plain, fp8 = folder / "plain", folder / "fp8"
    for made in (plain, fp8):
        checkpoints.make("deepseek_v3", made, seed, **{**WHOLE, "dtype": torch.float32, **overrides})
    checkpoints.respell(plain, _dequantised)
    checkpoints.respell(fp8, _quantised)
    config = json.loads((fp8 / "config.json").read_text())
    (fp8 / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION}))
    return fp8, plain


def reference(plain: Path) -> transformers.PreTrainedModel:
    """The plain checkpoint in transformers, fp32 and in eval mode."""
    kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()


def _quantised(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if LINEAR.fullmatch(name):
            found[name], found[f"{name}_scale_inv"] = _blocks(tensor)
        else:
            found[name] = tensor
    return found


def _dequantised(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: dequantise_blocks(*_blocks(x)) if LINEAR.fullmatch(name) else x for name, x in tensors.items()}


def _blocks(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    quantised = quantise_fp8_blocks(matrix[None])
    return quantised.values[0, :, : matrix.shape[1]].contiguous(), quantised.scales[0].contiguous()
