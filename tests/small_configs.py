"""Small configs of the three families, and the models and refusals they give."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from moec.checked import Model, Moe
from moec.checkpoint.family import family_of
from moec.diagnostics import MoecError, Span
from moec.importer.folder import import_config
from tests import micro_checkpoint as micro

QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 30,
    "hidden_size": 8,
    "intermediate_size": 12,
    "moe_intermediate_size": 6,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}

DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 30,
    "hidden_size": 8,
    "intermediate_size": 12,
    "moe_intermediate_size": 6,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 6,
    "q_lora_rank": 10,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
}

CONFIGS = {"mixtral": micro.CONFIG, "qwen3_moe": QWEN, "deepseek_v3": DEEPSEEK}


def model_of(family: str, **changes: Any) -> Model:
    """The model of a small config; a change to None writes null."""
    config = CONFIGS[family] | changes
    return import_config(config, family_of(config, "config.json"), Path("here/config.json"))


def refusal(family: str, **changes: Any) -> str:
    with pytest.raises(MoecError) as caught:
        model_of(family, **changes)
    assert caught.value.exit_code == 3
    return caught.value.diagnostics[0].one_line()


def plain(value: object) -> object:
    """A checked value as plain data, without spans and without the names that a writer chooses."""
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, Span):
        return {x.name: plain(getattr(value, x.name)) for x in fields(value) if x.name not in ("span", "name")}
    return value


def moe_of(model: Model) -> Moe:
    return next(layer.ffn for layer in model.layers if isinstance(layer.ffn, Moe))


def sparse(model: Model) -> list[int]:
    return [index for index, layer in enumerate(model.layers) if isinstance(layer.ffn, Moe)]
