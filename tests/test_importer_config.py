"""Every key of a config is mapped, known to be harmless, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from moec.checked import Gqa, Mla, Swiglu
from moec.parameters import logical_parameters
from tests.small_configs import model_of, moe_of, plain, refusal, sparse


def test_defaults_of_renormalisation_are_the_familys() -> None:
    """Fault B06."""
    assert moe_of(model_of("mixtral")).router.renormalize is True
    assert moe_of(model_of("qwen3_moe")).router.renormalize is False
    assert moe_of(model_of("qwen3_moe", norm_topk_prob=True)).router.renormalize is True
    assert moe_of(model_of("deepseek_v3")).router.renormalize is True
    assert moe_of(model_of("deepseek_v3", norm_topk_prob=False)).router.renormalize is False
    assert "`norm_topk_prob` = false (only true is built)" in refusal("mixtral", norm_topk_prob=False)


def test_scale_groups_and_bias_have_one_owner() -> None:
    router = moe_of(model_of("deepseek_v3")).router
    assert (router.score, router.groups, router.keep, router.bias, router.scale) == ("sigmoid", 2, 1, True, 2.5)
    assert moe_of(model_of("deepseek_v3", routed_scaling_factor=1)).router.scale == 1.0
    assert moe_of(model_of("deepseek_v3", topk_method="noaux_tc", scoring_func="sigmoid")).router == router


@pytest.mark.parametrize(
    "bad", [{"scoring_func": "softmax"}, {"topk_method": "greedy"}, {"topk_method": "group_limited_greedy"}]
)
def test_routers_of_deepseek_v2_are_refused(bad: dict[str, str]) -> None:
    line = refusal("deepseek_v3", **bad)
    assert "E0721" in line and next(iter(bad)) in line


@pytest.mark.parametrize(
    ("family", "changes", "want"),
    [
        ("mixtral", {"num_hidden_layers": 3}, [0, 1, 2]),
        ("qwen3_moe", {}, [0, 1, 2, 3]),
        ("qwen3_moe", {"mlp_only_layers": None}, [0, 1, 2, 3]),
        ("qwen3_moe", {"decoder_sparse_step": 2}, [1, 3]),
        ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [1]),
        ("qwen3_moe", {"decoder_sparse_step": 9}, []),
        ("deepseek_v3", {"first_k_dense_replace": 0}, [0, 1, 2, 3]),
        ("deepseek_v3", {}, [1, 2, 3]),
        ("deepseek_v3", {"first_k_dense_replace": 3}, [3]),
        ("deepseek_v3", {"first_k_dense_replace": 4}, []),
        ("deepseek_v3", {"first_k_dense_replace": 1, "moe_layer_freq": 2}, [2]),
    ],
)
def test_dense_layers_among_sparse_ones(family: str, changes: dict[str, Any], want: list[int]) -> None:
    model = model_of(family, **changes)
    assert sparse(model) == want
    dense = [layer.ffn for layer in model.layers if isinstance(layer.ffn, Swiglu)]
    assert len(dense) + len(want) == len(model.layers) and all(ffn.inner == 12 for ffn in dense)
    assert len({id(layer) for layer in model.layers}) <= 2


def test_attention_of_each_family() -> None:
    gqa = model_of("mixtral").layers[0].attention
    assert isinstance(gqa, Gqa) and (gqa.heads, gqa.kv_heads, gqa.head_dim) == (2, 1, 2)
    assert (gqa.bias, gqa.out_bias, gqa.qk_norm) == (False, False, False)
    gqa = model_of("qwen3_moe", attention_bias=True, head_dim=6).layers[0].attention
    assert isinstance(gqa, Gqa) and (gqa.kv_heads, gqa.head_dim) == (2, 6)
    assert (gqa.bias, gqa.out_bias, gqa.qk_norm) == (True, True, True)
    mla = model_of("deepseek_v3", q_lora_rank=None).layers[0].attention
    assert isinstance(mla, Mla) and mla.q_rank is None
    assert "layers.0.attention.q" in logical_parameters(model_of("deepseek_v3", q_lora_rank=None))
    assert "layers.0.attention.q_b" in logical_parameters(model_of("deepseek_v3"))


YARN_4 = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 0.9, "mscale_all_dim": 0.8}

YARN_5 = {"rope_type": "yarn", "rope_theta": 5e4} | {key: value for key, value in YARN_4.items() if key != "type"}


def test_both_spellings_of_rope_are_one() -> None:
    four = model_of("deepseek_v3", rope_theta=50000, rope_scaling=YARN_4).rotary
    five = model_of("deepseek_v3", rope_parameters=YARN_5).rotary
    assert four == five and four.yarn is not None and four.theta == 50000.0
    assert (four.yarn.factor, four.yarn.original, four.yarn.mscale, four.yarn.mscale_all_dim) == (40, 4096, 0.9, 0.8)
    assert (four.yarn.beta_fast, four.yarn.beta_slow) == (32.0, 1.0)
    assert (
        model_of("qwen3_moe", rope_theta=1e6).rotary
        == model_of("qwen3_moe", rope_parameters={"rope_theta": 1e6}).rotary
    )
    assert model_of("mixtral").rotary.theta == 1e6 and model_of("qwen3_moe").rotary.theta == 1e4


def test_yarn_without_its_original_length_takes_the_configs() -> None:
    rotary = model_of("deepseek_v3", rope_scaling={"type": "yarn", "factor": 4}).rotary
    assert rotary.yarn is not None and rotary.yarn.original == 64
    assert (rotary.yarn.mscale, rotary.yarn.mscale_all_dim) == (1.0, 0.0)


def test_pairs_of_the_rotation() -> None:
    assert model_of("deepseek_v3").rotary.pairs == "interleaved"
    assert model_of("deepseek_v3", rope_interleave=False).rotary.pairs == "halves"
    assert model_of("qwen3_moe").rotary.pairs == "halves"


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("mixtral", {"sliding_window": 4096}, "`sliding_window` = 4096"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 4096}, "`use_sliding_window` = true"),
        ("mixtral", {"hidden_act": "gelu"}, '`hidden_act` = "gelu"'),
        ("mixtral", {"attention_bias": True}, "`attention_bias` = true"),
        ("deepseek_v3", {"attention_bias": True}, "`attention_bias` = true"),
        ("deepseek_v3", {"head_dim": 4}, "`head_dim` = 4 (must equal `qk_rope_head_dim`)"),
        ("deepseek_v3", {"num_key_value_heads": 1}, "must equal `num_attention_heads`"),
        ("mixtral", {"rope_scaling": {"type": "linear", "factor": 2}}, "`linear` is not known"),
        ("qwen3_moe", {"rope_parameters": {"rope_type": "llama3", "factor": 2}}, "`llama3` is not known"),
        ("qwen3_moe", {"rope_parameters": YARN_5}, "`mscale`"),
        ("deepseek_v3", {"rope_scaling": YARN_4 | {"attention_factor": 1.2}}, "`attention_factor`"),
        ("deepseek_v3", {"rope_scaling": YARN_4 | {"truncate": False}}, "`truncate`"),
        ("mixtral", {"partial_rotary_factor": 0.5}, "`partial_rotary_factor` = 0.5"),
        ("mixtral", {"quantization_config": {"quant_method": "gptq"}}, "`quantization_config`"),
        (
            "deepseek_v3",
            {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}},
            '`fmt` = "e5m2" and no `weight_block_size`',
        ),
        ("mixtral", {"architectures": ["MixtralForSequenceClassification"]}, "`architectures`"),
        ("qwen3_moe", {"num_local_experts": 5}, "`num_local_experts` = 5 (differs from `num_experts`)"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "`shared_expert_intermediate_size` = 8"),
        ("qwen3_moe", {"topk_gruop": 2}, "`topk_gruop` = 2"),
    ],
)
def test_keys_that_change_the_mathematics_are_refused_by_name(family: str, changes: dict[str, Any], named: str) -> None:
    """Faults B17 (a gate on the shared expert) and B30 (a key that is dropped in silence)."""
    line = refusal(family, **changes)
    assert "E0721" in line and named in line


def test_all_refused_keys_are_listed_at_once() -> None:
    line = refusal("qwen3_moe", clip_qkv=1.0, hidden_act="relu", use_sliding_window=True, logit_scale=2)
    assert all(key in line for key in ("`clip_qkv`", "`hidden_act`", "`use_sliding_window`", "`logit_scale`"))


def test_harmless_keys_are_accepted() -> None:
    quiet = {
        "sliding_window": None,
        "attention_bias": False,
        "router_jitter_noise": 0.1,
        "use_cache": False,
        "eos_token_id": [1, 2],
    }
    assert plain(model_of("mixtral", **quiet)) == plain(model_of("mixtral"))
    assert plain(model_of("qwen3_moe", sliding_window=4096, max_window_layers=48)) == plain(model_of("qwen3_moe"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_experts_per_tok": "2"}, '`num_experts_per_tok` in `here/config.json` is "2", not a whole number from 1'),
        ({"hidden_size": 0}, "is 0, not a whole number"),
        ({"hidden_size": True}, "is true, not a whole number"),
        ({"hidden_size": 4.5}, "is 4.5, not a whole number"),
        ({"hidden_size": 10**30}, "not a whole number"),
        ({"vocab_size": None}, "is null, not a whole number"),
        ({"rms_norm_eps": -1e-6}, "not a number above 0"),
        ({"rms_norm_eps": float("inf")}, "not a number above 0"),
        ({"tie_word_embeddings": "yes"}, "not true or false"),
        ({"mlp_only_layers": [0, -1]}, "not a list of layer numbers"),
        ({"decoder_sparse_step": 0}, "is 0, not a whole number from 1"),
        ({"rope_scaling": "yarn"}, "not a table"),
        ({"rope_scaling": {"type": "yarn"}}, "`factor`"),
        ({"norm_topk_prob": None}, "is null, not true or false"),
    ],
)
def test_values_of_the_wrong_type_are_refused(changes: dict[str, Any], text: str) -> None:
    line = refusal("qwen3_moe", **changes)
    assert "E0722" in line and text in line


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 5}),
        ("qwen3_moe", {"num_key_value_heads": 3}),
        ("qwen3_moe", {"hidden_size": 9}),
        ("qwen3_moe", {"head_dim": 3}),
        ("qwen3_moe", {"mlp_only_layers": [4]}),
        ("deepseek_v3", {"n_group": 3}),
        ("deepseek_v3", {"topk_group": 3}),
        ("deepseek_v3", {"num_experts_per_tok": 5}),
        ("deepseek_v3", {"qk_rope_head_dim": 3}),
    ],
)
def test_contradictions_are_refused(family: str, changes: dict[str, Any]) -> None:
    assert "E0723" in refusal(family, **changes)
