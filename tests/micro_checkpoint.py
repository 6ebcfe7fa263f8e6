"""A one-layer Mixtral of a few numbers, its files written byte by byte: fast, and free to be wrong. No torch."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 3,
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "torch_dtype": "float32",
}
SIZES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8}

Shapes = dict[str, tuple[str, list[int]]]


def shapes() -> Shapes:
    """Every tensor of the model: dtype and shape."""
    layer, moe = "model.layers.0", "model.layers.0.block_sparse_moe"
    found = {"model.embed_tokens.weight": [3, 4], "model.norm.weight": [4], "lm_head.weight": [3, 4]}
    found |= {f"{layer}.{norm}_layernorm.weight": [4] for norm in ("input", "post_attention")}
    found |= {
        f"{layer}.self_attn.{p}_proj.weight": s for p, s in zip("qkvo", ([4, 4], [2, 4], [2, 4], [4, 4]), strict=True)
    }
    found[f"{moe}.gate.weight"] = [2, 4]
    for expert in range(2):
        found |= {f"{moe}.experts.{expert}.{w}.weight": [6, 4] for w in ("w1", "w3")}
        found[f"{moe}.experts.{expert}.w2.weight"] = [4, 6]
    return {name: ("F32", shape) for name, shape in found.items()}


def header_of(tensors: Shapes) -> dict[str, Any]:
    """The header's entries, one tensor after the other."""
    entries, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * SIZES[dtype]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    return entries


def shard_bytes(entries: Mapping[str, Any] | bytes, data: int) -> bytes:
    """A safetensors file of `entries` (or of a raw header) with `data` bytes behind it."""
    raw = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(data)


def shard(tensors: Shapes) -> bytes:
    return shard_bytes(header_of(tensors), sum(math.prod(shape) * SIZES[dtype] for dtype, shape in tensors.values()))


def write(folder: Path, tensors: Shapes | None = None, **config: Any) -> Path:
    """The model in one file. `config` changes keys; None as a value removes one."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = {key: value for key, value in (CONFIG | config).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(keys))
    (folder / "model.safetensors").write_bytes(shard(shapes() if tensors is None else tensors))
    return folder


def write_sharded(folder: Path, weight_map: Mapping[str, str] | None = None) -> Path:
    """The model in two files and an index: attention and embeddings, experts. `weight_map` changes the index."""
    write(folder)
    (folder / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + ('experts' in name)}-of-00002.safetensors" for name in shapes()}
    for file in sorted(set(files.values())):
        (folder / file).write_bytes(shard({name: x for name, x in shapes().items() if files[name] == file}))
    index = {"metadata": {"total_size": 0}, "weight_map": files | dict(weight_map or {})}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
