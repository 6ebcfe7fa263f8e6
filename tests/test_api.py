"""The Python API: compile, save, load, logits, generate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import moec
from moec.diagnostics import MoecError
from tests import checkpoints
from tests.parity import compile_checkpoint, worst


def test_loaded_model_equals_transformers(tmp_path: Path) -> None:
    reference = checkpoints.make("mixtral", tmp_path / "weights")
    compile_checkpoint(tmp_path / "weights", tmp_path, "ep=2").save(tmp_path / "model.build")
    model = moec.load(tmp_path / "model.build")
    prompts = checkpoints.prompts(reference.config.vocab_size, (6, 11, 3))
    with torch.inference_mode():
        wanted = [reference(torch.tensor([prompt])).logits[0] for prompt in prompts]
    assert worst(model.logits(prompts), wanted) < 1e-4
    tokens = model.generate(prompts, max_new_tokens=5, ignore_eos=True)
    assert tokens == [checkpoints.greedy(reference, prompt, 5) for prompt in prompts]


def test_weights_that_changed_are_refused(tmp_path: Path) -> None:
    checkpoints.make("mixtral", tmp_path / "weights")
    compile_checkpoint(tmp_path / "weights", tmp_path, None).save(tmp_path / "model.build")
    changed = {"rope_type": "default", "rope_theta": 5000.0}
    checkpoints.make("mixtral", tmp_path / "weights", rope_parameters=changed)
    with pytest.raises(MoecError, match=r"config\.json"):
        moec.load(tmp_path / "model.build")


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="complie"):
        moec.complie  # type: ignore[attr-defined]  # noqa: B018
