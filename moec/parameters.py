"""The logical parameters of a model, with their shapes, and how many numbers they are.

The names are the contract between lowering, the family files and the loader. Matrices are row-major [out, in].
Shapes: V vocabulary, D hidden, E experts, I inner width, H heads, K KV heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moec.blocks import SCALES, scales_shape
from moec.checked import Gqa, Layer, Mla, Model, Moe

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Counts:
    """Numbers of parameters. `active`: those one token uses; `active_no_input_embed`: without the input embedding.

    The selection bias of a router is a statistic kept beside the weights and is not counted.
    """

    total: int
    active: int
    active_no_input_embed: int


def count(model: Model) -> Counts:
    """Exact counts of `model`. A tied table is counted once, and as the head it stays in `active_no_input_embed`."""
    total = active = 0
    for name, shape in logical_parameters(model).items():
        numbers = math.prod(shape)
        if name.endswith("router.bias"):
            continue
        total += numbers
        active += numbers
    for layer in model.layers:
        if isinstance(layer.ffn, Moe):
            unused = layer.ffn.routed.count - layer.ffn.router.top
            active -= unused * 3 * layer.ffn.routed.inner * model.hidden
    embed = 0 if model.tied else model.vocab * model.hidden
    return Counts(total, active, active - embed)


def logical_parameters(model: Model) -> dict[str, Shape]:
    """Every parameter's name and shape, in the order of use."""
    found: dict[str, Shape] = {"embed": (model.vocab, model.hidden)}
    for index, layer in enumerate(model.layers):
        found |= {f"layers.{index}.{name}": shape for name, shape in layer_parameters(layer, model.hidden).items()}
    found["norm"] = (model.hidden,)
    if not model.tied:
        found["head"] = (model.vocab, model.hidden)
    return found


def stored_parameters(model: Model) -> dict[str, Shape]:
    """Every parameter, and after each that is kept in fp8 blocks its scales: what ranks read from a checkpoint."""
    found: dict[str, Shape] = {}
    for name, shape in logical_parameters(model).items():
        found[name] = shape
        if model.expert_dtype == "fp8" and ".experts." in name:
            found[name + SCALES] = scales_shape(shape)
    return found


def layer_parameters(layer: Layer, hidden: int) -> dict[str, Shape]:
    """Parameters of one layer, named without the layer."""
    attention = layer.attention
    inner = _gqa(attention, hidden) if isinstance(attention, Gqa) else _mla(attention, hidden)
    return {
        "attention_norm": (hidden,),
        **{f"attention.{name}": shape for name, shape in inner.items()},
        "ffn_norm": (hidden,),
        **_ffn(layer, hidden),
    }


def _gqa(attention: Gqa, hidden: int) -> dict[str, Shape]:
    q, kv = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    found: dict[str, Shape] = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
    if attention.bias:
        found |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
    if attention.out_bias:
        found["o_bias"] = (hidden,)
    if attention.qk_norm:
        found |= {"q_norm": (attention.head_dim,), "k_norm": (attention.head_dim,)}
    return found


def _mla(attention: Mla, hidden: int) -> dict[str, Shape]:
    q = attention.heads * (attention.nope + attention.rope)
    found: dict[str, Shape] = {"q": (q, hidden)}
    if attention.q_rank is not None:
        rank = attention.q_rank
        found = {"q_a": (rank, hidden), "q_a_norm": (rank,), "q_b": (q, rank)}
    return found | {
        "kv_a": (attention.kv_rank + attention.rope, hidden),
        "kv_a_norm": (attention.kv_rank,),
        "kv_b": (attention.heads * (attention.nope + attention.value), attention.kv_rank),
        "o": (hidden, attention.heads * attention.value),
    }


def _ffn(layer: Layer, hidden: int) -> dict[str, Shape]:
    ffn = layer.ffn
    if not isinstance(ffn, Moe):
        return _mlp("ffn", ffn.inner, hidden)
    experts = ffn.routed.count
    found: dict[str, Shape] = {"router.weight": (experts, hidden)}
    if ffn.router.bias:
        found["router.bias"] = (experts,)
    found |= {name: (experts, *shape) for name, shape in _mlp("experts", ffn.routed.inner, hidden).items()}
    if ffn.shared is not None:
        found |= _mlp("shared", ffn.shared.count * ffn.shared.inner, hidden)
    return found


def _mlp(name: str, inner: int, hidden: int) -> dict[str, Shape]:
    return {f"{name}.gate": (inner, hidden), f"{name}.up": (inner, hidden), f"{name}.down": (hidden, inner)}
