"""Family files: the parameters they name, and that a new one needs no Python."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from moec.checked import Gqa
from moec.checkpoint.family import family_names, load_family, parse_family
from moec.diagnostics import MoecError
from moec.importer.folder import import_config
from moec.parameters import logical_parameters
from tests import micro_checkpoint as micro
from tests.small_configs import DEEPSEEK, QWEN, model_of

ROOT = Path(__file__).resolve().parent.parent


def test_multi_token_prediction_layers_are_left_out(tmp_path: Path) -> None:
    from moec.checkpoint.folder import open_checkpoint
    from moec.checkpoint.map import resolve

    family = load_family("deepseek_v3")
    config = DEEPSEEK | {"num_nextn_predict_layers": 1}
    shapes = logical_parameters(import_config(config, family, tmp_path))
    names = {
        target.logical[0] + "[{e}]" * target.one_expert: key
        for key, target in family.tensors.items()
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj"))
    }
    tensors: micro.Shapes = {}
    for logical, shape in shapes.items():
        layer = logical.split(".")[1] if logical.startswith("layers.") else ""
        plain_name = logical.replace(f"layers.{layer}.", "layers.{l}.") if layer else logical
        key = names.get(plain_name) or names[plain_name + "[{e}]"]
        for expert in range(shape[0]) if plain_name not in names else [None]:
            name = key.replace("#", layer, 1)
            name = name if expert is None else name.replace("#", str(expert))
            tensors[name] = ("F32", list(shape if expert is None else shape[1:]))
    (tmp_path / "config.json").write_text(json.dumps(config))
    extra = {"model.layers.4.eh_proj.weight": ("F32", [8, 16]), "model.layers.4.mlp.gate.weight": ("F32", [8, 8])}
    (tmp_path / "model.safetensors").write_bytes(micro.shard(tensors | extra))
    resolve(open_checkpoint(tmp_path), family, shapes)
    (tmp_path / "model.safetensors").write_bytes(
        micro.shard(tensors | {"model.layers.5.eh_proj.weight": ("F32", [8, 16])})
    )
    with pytest.raises(MoecError, match=r"nothing uses 1 tensor: `model.layers.5.eh_proj.weight`"):
        resolve(open_checkpoint(tmp_path), family, shapes)


@pytest.mark.parametrize("name", family_names())
def test_family_files_name_the_parameters_of_their_model(name: str) -> None:
    """Every pattern stands for parameters that the family's blocks have, and every parameter has a pattern.

    The blocks are those of the family's goldens, and of variants that no golden has.
    """
    variants = {
        "qwen3_moe": [{"attention_bias": True}, {"decoder_sparse_step": 2}],
        "deepseek_v3": [{"q_lora_rank": None}],
    }
    goldens = [json.loads(path.read_text()) for path in (ROOT / "tests" / "golden" / "import").glob("*.json")]
    models = [
        import_config(config, load_family(name), Path("it")) for config in goldens if config["model_type"] == name
    ]
    models += [model_of(name, **changes) for changes in variants.get(name, [])]
    assert models, f"add a config of {name} to tests/golden/import"
    have = {
        re.sub(r"^layers\.\d+", "layers.{l}", parameter) for model in models for parameter in logical_parameters(model)
    }
    named = {logical for target in load_family(name).tensors.values() for logical in target.logical}
    assert named == have


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"modle": {}}, "`modle` is no section"),
        ({"name": "other"}, "`name` is not `mine`"),
        ({"architecture": 3}, "`architecture` is missing"),
        ({"tensors": {}}, r"section \[tensors\] is missing"),
        ({"tensors": {"a.{x}.b": "embed"}}, "once"),
        ({"tensors": {"a.{l}.{l}": "layers.{l}.q"}}, "once"),
        ({"tensors": {"a.{l}.b": "embed"}}, "on one side only"),
        ({"tensors": {"a.{l}.{e}": "layers.{l}.experts.up"}}, "on one side only"),
        ({"tensors": {"a": 3}}, "no parameter names"),
        ({"tensors": {"a": []}}, "no parameter names"),
    ],
)
def test_family_files_that_are_not_well_formed(change: dict[str, Any], what: str) -> None:
    text = tomllib.loads((ROOT / "specs" / "families" / "mixtral.toml").read_text())
    with pytest.raises(MoecError, match=what) as caught:
        parse_family("mine", text | {"name": "mine"} | change)
    assert caught.value.diagnostics[0].code == "E0724"


def test_a_family_of_known_blocks_is_one_file() -> None:
    """Qwen2-MoE without its shared expert, as a new family would be written: no Python."""
    text = tomllib.loads((ROOT / "specs" / "families" / "qwen3_moe.toml").read_text())
    text |= {"name": "mine", "architecture": "MineForCausalLM"}
    text["attention"]["qk_norm"] = {"value": False}
    text["rotary"]["pairs"] = {"value": "interleaved"}
    text["config"] = {"ignored": ["model_type"], "only": {"activation": ["swish"], "layer_kinds": ["full"]}}
    config = QWEN | {"model_type": "mine", "activation": "swish"}
    model = import_config(config, parse_family("mine", text), Path("mine"))
    attention = model.layers[0].attention
    assert isinstance(attention, Gqa) and not attention.qk_norm and model.rotary.pairs == "interleaved"
    with pytest.raises(MoecError, match="`activation`"):
        import_config(config | {"activation": "gelu"}, parse_family("mine", text), Path("mine"))
    import_config(config | {"layer_kinds": ["full"] * 4}, parse_family("mine", text), Path("mine"))
    with pytest.raises(MoecError, match=r"`layer_kinds` = .*only .*full.* is built"):  # one item that is not known
        import_config(config | {"layer_kinds": ["full", "sliding"]}, parse_family("mine", text), Path("mine"))
