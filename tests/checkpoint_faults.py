"""One minimal bad input for every E07 code, in a folder `model`: what each page of specs/errors shows."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from moec.checkpoint.family import family_of, parse_family
from moec.checkpoint.folder import check_unchanged, open_checkpoint, read_config
from moec.checkpoint.map import Sources, open_sources
from moec.declared import declared
from moec.importer.folder import import_config, import_model
from moec.importer.match import check_declared
from moec.parameters import logical_parameters, stored_parameters
from tests import micro_checkpoint as micro

MODEL = Path("model")
EXPERT = "model.layers.0.block_sparse_moe.experts.1.w3.weight"


def sources_of(folder: Path = MODEL) -> Sources:
    """The accounting that `moec run` does before a rank starts."""
    config, _ = read_config(folder)
    return open_sources(folder, logical_parameters(import_config(config, family_of(config, folder), folder)))


def _no_config() -> None:
    read_config(MODEL)


def _no_weights() -> None:
    (micro.write(MODEL) / "model.safetensors").unlink()
    open_checkpoint(MODEL)


def _pickles() -> None:
    (micro.write(MODEL) / "model.safetensors").rename(MODEL / "pytorch_model.bin")
    open_checkpoint(MODEL)


def _lfs_pointer() -> None:
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4976698672\n"
    (micro.write(MODEL) / "model.safetensors").write_text(text)
    open_checkpoint(MODEL)


def _cut_short() -> None:
    file = micro.write(MODEL) / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    open_checkpoint(MODEL)


def _directory() -> None:
    file = micro.write(MODEL) / "model.safetensors"
    file.unlink()
    file.mkdir()
    open_checkpoint(MODEL)


def _not_safetensors() -> None:
    (micro.write(MODEL) / "model.safetensors").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(64))
    open_checkpoint(MODEL)


def _overlap() -> None:
    entries = micro.header_of(micro.shapes())
    entries["model.norm.weight"]["data_offsets"] = [40, 56]
    (micro.write(MODEL) / "model.safetensors").write_bytes(micro.shard_bytes(entries, 784))
    open_checkpoint(MODEL)


def _bad_name() -> None:
    micro.write(MODEL, {"model.embed{{7*7}}": ("F32", [3, 4])})
    open_checkpoint(MODEL)


def _no_weight_map() -> None:
    (micro.write_sharded(MODEL) / "model.safetensors.index.json").write_text('{"metadata": {}}')
    open_checkpoint(MODEL)


def _path_outside() -> None:
    micro.write_sharded(MODEL, {"model.norm.weight": "../other/model.safetensors"})
    open_checkpoint(MODEL)


def _missing_shard() -> None:
    (micro.write_sharded(MODEL) / "model-00002-of-00002.safetensors").unlink()
    open_checkpoint(MODEL)


def _wrong_shard() -> None:
    micro.write_sharded(MODEL, {"model.norm.weight": "model-00002-of-00002.safetensors"})
    open_checkpoint(MODEL)


def _config_twice() -> None:
    (micro.write(MODEL) / "config.json").write_text('{"model_type": "mixtral", "hidden_size": 4, "hidden_size": 8}')
    read_config(MODEL)


def _unknown_family() -> None:
    import_model(micro.write(MODEL, model_type="mixtrl"))


def _refused_settings() -> None:
    import_model(micro.write(MODEL, sliding_window=4096, hidden_act="gelu", logit_scale=0.5))


def _missing_key() -> None:
    import_model(micro.write(MODEL, hidden_size=None))


def _contradiction() -> None:
    import_model(micro.write(MODEL, num_experts_per_tok=3))


def _bad_family_file() -> None:
    parse_family("mine", {"name": "mine", "architecture": "MineForCausalLM", "modle": {}})


def _axis_twice() -> None:
    import_model(micro.write(MODEL), mesh="ep=2,ep=3")


def _unwritable_path() -> None:
    import_model(micro.write(Path('a "model"')))


def _renamed_expert() -> None:
    tensors = {name.replace("experts.1.w3", "experts.1.v3"): entry for name, entry in micro.shapes().items()}
    micro.write(MODEL, tensors)
    sources_of()


def _other_shapes() -> None:
    micro.write(MODEL, hidden_size=8, head_dim=2, num_local_experts=4)
    sources_of()


def _written_twice() -> None:
    micro.write(MODEL, micro.shapes() | {"model.layers.0.mlp.experts.down_proj": ("F32", [2, 4, 6])})
    sources_of()


def _whole_numbers() -> None:
    micro.write(MODEL, micro.shapes() | {EXPERT: ("I64", [6, 4])})
    sources_of()


def _without_scales() -> None:
    micro.write(MODEL, micro.shapes() | {EXPERT: ("F8_E4M3", [6, 4])})
    sources_of()


def _not_in_fp8() -> None:
    config, _ = read_config(micro.write(MODEL))
    model = replace(import_config(config, family_of(config, MODEL), MODEL), expert_dtype="fp8")
    open_sources(MODEL, stored_parameters(model))


def _changed() -> None:
    before = open_checkpoint(micro.write(MODEL)).fingerprint
    micro.write(MODEL, rms_norm_eps=1e-6)
    check_unchanged(before, open_checkpoint(MODEL))


def _cut_later() -> None:
    from moec.runtime.weights import read_whole

    micro.write(MODEL)
    sources = sources_of()
    os.truncate(MODEL / "model.safetensors", sources.block("norm").offset + 4)
    read_whole(sources, "norm")


def _not_a_number() -> None:
    from moec.runtime.weights import read_whole

    file = micro.write(MODEL) / "model.safetensors"
    sources = sources_of()
    block = sources.block("layers.0.experts.up", 1)
    data = bytearray(file.read_bytes())
    data[block.offset : block.offset + 4] = bytes.fromhex("0000c07f")
    file.write_bytes(data)
    read_whole(sources, "layers.0.experts.up")


def _other_mathematics() -> None:
    table = declared(import_config(micro.CONFIG, family_of(micro.CONFIG, MODEL), MODEL))
    check_declared(table, micro.write(MODEL, num_experts_per_tok=2, rope_theta=500000.0))


CASES: dict[str, Callable[[], None]] = {
    "E0701": _no_config,
    "E0702": _no_weights,
    "E0703": _pickles,
    "E0704": _lfs_pointer,
    "E0705": _cut_short,
    "E0706": _directory,
    "E0707": _not_safetensors,
    "E0708": _overlap,
    "E0709": _bad_name,
    "E0710": _no_weight_map,
    "E0711": _path_outside,
    "E0712": _missing_shard,
    "E0713": _wrong_shard,
    "E0714": _config_twice,
    "E0720": _unknown_family,
    "E0721": _refused_settings,
    "E0722": _missing_key,
    "E0723": _contradiction,
    "E0724": _bad_family_file,
    "E0730": _axis_twice,
    "E0731": _unwritable_path,
    "E0740": _renamed_expert,
    "E0741": _other_shapes,
    "E0742": _written_twice,
    "E0743": _whole_numbers,
    "E0744": _changed,
    "E0745": _cut_later,
    "E0746": _not_a_number,
    "E0747": _other_mathematics,
    "E0748": _without_scales,
    "E0749": _not_in_fp8,
}
