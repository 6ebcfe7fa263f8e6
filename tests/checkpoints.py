"""Tiny random checkpoints of the three families, made by transformers when a test asks for one.

Dimensions are pairwise different, so that a transposed or swapped tensor cannot have the right shape; expert counts do
not divide by 3; heads, KV heads and inner widths are even, so that tp = 2 and etp = 2 are legal. Weights are scaled
for logits of a few units and router logits of about one: transformers' own initialisation gives near-uniform outputs.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3")

#: `original`: as `save_pretrained` writes it (one tensor per expert, the family's published names).
#: `stacked`: transformers 5's own names, 3-D `gate_up_proj` [E, 2I, D] and `down_proj` [E, D, I].
#: `projections`: one tensor per expert, `mlp.experts.{e}.gate_proj` and so on.
#: `mixed`: `stacked` in the first sparse layer, `projections` in the others.
LAYOUTS = ("original", "stacked", "projections", "mixed")

_CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {
        "vocab_size": 102,
        "hidden_size": 48,
        "intermediate_size": 28,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "num_local_experts": 11,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "qwen3_moe": {
        "vocab_size": 134,
        "hidden_size": 40,
        "intermediate_size": 52,
        "moe_intermediate_size": 22,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 14,
        "num_experts": 13,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,  # layers 1, 3 and 5 are sparse ...
        "mlp_only_layers": [3],  # ... but for this one
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "deepseek_v3": {
        "vocab_size": 118,
        "hidden_size": 56,
        "intermediate_size": 60,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 26,
        "kv_lora_rank": 18,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "n_routed_experts": 20,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 0.9,
            "mscale_all_dim": 0.6,
        },
    },
}
_COMMON: dict[str, Any] = {
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}


def make(
    family: str,
    folder: Path,
    seed: int = 0,
    layout: str = "original",
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> transformers.PreTrainedModel:
    """Write a random checkpoint of `family` to `folder` and return the model that made it, fp32 and in eval mode.

    `overrides` are keys of the transformers config. With `dtype` bf16 or fp16 the weights are rounded first, so that
    the returned model holds exactly the values of the files. Small `max_shard_size` gives several shards and an index.
    """
    config = transformers.AutoConfig.for_model(family, **{**_COMMON, **_CONFIGS[family], **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    _fill(model, torch.Generator().manual_seed(seed), dtype)
    copy.deepcopy(model).to(dtype).save_pretrained(
        folder, max_shard_size=max_shard_size, save_original_format=layout == "original"
    )
    if layout in ("projections", "mixed"):
        respell(folder, _unstack(keep_first=layout == "mixed"))
    return model


def respell(folder: Path, rename: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Rewrite every shard of `folder` through `rename`, and the index with it."""
    index, where = folder / "model.safetensors.index.json", dict[str, str]()
    for shard in sorted(folder.glob("model*.safetensors")):
        tensors = rename(load_file(shard))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, shard, {"format": "pt"})
        where |= dict.fromkeys(tensors, shard.name)
    if index.exists():
        index.write_text(json.dumps({**json.loads(index.read_text()), "weight_map": where}))


def prompts(vocab: int, lengths: Iterable[int], seed: int = 0) -> list[list[int]]:
    """Random token ids of the given lengths, never 0 or 1 (the begin and end tokens)."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, vocab, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def greedy(model: transformers.PreTrainedModel, prompt: list[int], tokens: int) -> list[int]:
    """The next `tokens` ids by plain argmax, not stopping at the end token and without a KV cache."""
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@torch.no_grad()
def margins(model: transformers.PreTrainedModel, ids: list[int]) -> tuple[float, float]:
    """The least gaps over `ids`: top logit to the second, and k-th router score to the (k+1)-th.

    A test that compares tokens wants both well above fp32 noise (about 1e-5). Groups make the second an upper bound.
    """
    gaps: list[float] = []

    def watch(router: torch.nn.Module, _: object, output: tuple[torch.Tensor, ...]) -> None:
        bias = getattr(router, "e_score_correction_bias", None)
        scores = output[0].float().softmax(-1) if bias is None else output[0].float().sigmoid() + bias
        best = scores.sort(dim=-1, descending=True).values
        gaps.append(float((best[:, router.top_k - 1] - best[:, router.top_k]).min()))

    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [router.register_forward_hook(watch) for router in routers]
    try:
        best = model(torch.tensor([ids]), use_cache=False).logits[0].topk(2, dim=-1).values
    finally:
        for hook in hooks:
            hook.remove()
    return float((best[:, 0] - best[:, 1]).min()), min(gaps)


@torch.no_grad()
def _fill(model: transformers.PreTrainedModel, generator: torch.Generator, dtype: torch.dtype) -> None:
    """Random values in place, rounded to `dtype`: norms near one, biases near zero, matrices of unit gain."""
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
        if "rotary" in name:
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("norm.weight"):
            value = 1 + 0.2 * noise
        elif tensor.dim() == 1:
            value = 0.1 * noise
        elif name.endswith("embed_tokens.weight"):
            value = 0.4 * noise
        else:
            gain = 2.0 if name.endswith(("lm_head.weight", "mlp.gate.weight")) else 1.2
            value = gain * noise / tensor.shape[-1] ** 0.5
        tensor.copy_(value.to(dtype))


def _unstack(keep_first: bool) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Rename 3-D expert tensors to one tensor per expert; `keep_first` leaves the first sparse layer stacked."""

    def rename(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        sparse = sorted(int(name.split(".")[2]) for name in tensors if name.endswith("experts.gate_up_proj"))
        out: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            path, _, leaf = name.rpartition(".")
            if not path.endswith(".experts") or (keep_first and int(name.split(".")[2]) == sparse[0]):
                out[name] = tensor
                continue
            parts = {"gate_proj": 0, "up_proj": 1} if leaf == "gate_up_proj" else {leaf: 0}
            for expert, matrix in enumerate(tensor):
                for part, piece in parts.items():
                    out[f"{path}.{expert}.{part}.weight"] = matrix.chunk(len(parts))[piece]
        return out

    return rename
