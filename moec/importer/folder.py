"""`moec import`: a Hugging Face model folder, or its config.json alone, becomes a readable `.moe` file. No torch.

1. Read config.json and find its family in specs/families by `model_type`.
2. Map every key, or refuse it by name (`config`, `model`).
3. With weights there: read all shard headers and account for every parameter and every tensor (`moec.checkpoint.map`).
4. Write model, mesh and plan as text (`text`).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from moec.checked import Model
from moec.checkpoint.family import Family, family_of
from moec.checkpoint.folder import Checkpoint, has_weights, open_checkpoint, read_config
from moec.checkpoint.map import resolve
from moec.diagnostics import fail
from moec.importer.config import ConfigReader
from moec.importer.mesh import parse_cluster, parse_mesh
from moec.importer.model import build_model
from moec.importer.text import MAX_CONTEXT, moe_text
from moec.parameters import stored_parameters

#: Words of the language that a folder might be called.
_RESERVED = {
    "use", "const", "cluster", "model", "attention", "router", "experts", "layers", "step", "mesh", "on", "cache",
    "plan", "run", "with", "keep", "per", "prefill", "decode", "true", "false", "us", "ms",
}  # fmt: skip
_DTYPES = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}


def import_model(path: Path, mesh: str | None = None, cluster: str | None = None, output: Path | None = None) -> str:
    """Text of a `.moe` file for the model at `path`, a folder or a config.json.

    `output` is where the text will be written: a relative weights path is then relative to its folder.
    Raises MoecError (E0701 to E0749).
    """
    degrees, place = parse_mesh(mesh), parse_cluster(cluster)
    if place is not None and mesh is None:
        raise fail(
            "E0730", "--cluster is given without --mesh", "say how its devices are used, for example --mesh ep=8"
        )
    config, _ = read_config(path)
    where = path / "config.json" if path.is_dir() else path
    family = family_of(config, where)
    checkpoint = open_checkpoint(path) if path.is_dir() and has_weights(path) else None
    weights = _weights_path(path, output) if checkpoint else None
    model = import_config(config, family, where, weights, _stored_dtype(checkpoint))
    if checkpoint is not None:
        resolve(checkpoint, family, stored_parameters(model))
    longest = config.get("max_position_embeddings")
    context = min(longest, MAX_CONTEXT) if type(longest) is int and longest > 0 else MAX_CONTEXT
    return moe_text(model, _notes(config, family, model, checkpoint), degrees, place, context)


def import_config(
    config: dict[str, Any], family: Family, where: Path, weights: str | None = None, dtype: str | None = None
) -> Model:
    """The checked model of a parsed config; `dtype` is that of the weights, where the config names none."""
    reader = ConfigReader(config, family, str(where))
    return build_model(reader, model_name(where, family), dtype, weights)


def model_name(path: Path, family: Family) -> str:
    """An identifier from the folder's name, or from the config's own where it has one: `mixtral_8x7b_v0_1`."""
    named = path.parent if path.name == "config.json" else path.with_suffix("") if path.suffix == ".json" else path
    name = re.sub(r"[^a-z0-9]+", "_", named.resolve().name.lower()).strip("_")[:56]
    if not re.match(r"[a-z]", name):
        name = f"{family.name}_{name}".strip("_")[:64]
    return f"{name}_model" if name in _RESERVED else name


def _weights_path(path: Path, output: Path | None) -> str:
    written = str(path) if output is None or path.is_absolute() else os.path.relpath(path, output.parent)
    if '"' in written or not written.isprintable():
        raise fail("E0731", f"the path {written!r} cannot be written in a .moe file", "rename the folder")
    return written


def _stored_dtype(checkpoint: Checkpoint | None) -> str | None:
    """dtype of the largest tensor that is in one, which is one of the matrices."""
    known = [tensor for tensor in checkpoint.tensors.values() if tensor.dtype in _DTYPES] if checkpoint else []
    return _DTYPES[max(known, key=lambda tensor: tensor.nbytes).dtype] if known else None


def _notes(config: dict[str, Any], family: Family, model: Model, checkpoint: Checkpoint | None) -> list[str]:
    notes = [f"Imported from a {family.name} config.json."]
    if checkpoint is None:
        notes.append('No weights: add `weights = huggingface("FOLDER")` to run it.')
    if model.expert_dtype is not None:
        notes.append(
            f"Experts stay in the checkpoint's {model.expert_dtype}; what else is in it is read as {model.dtype}."
        )
    extra = next((config[key] for key in family.extra_layer_keys if config.get(key)), 0)
    if extra:
        notes.append(f"Layers of multi-token prediction, left out: {extra}.")
    return notes
