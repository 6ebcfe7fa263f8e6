"""The GPU benchmark as far as it runs without a GPU: its routing, and its kernels where moec is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
#: What the script must do without: a machine with a GPU may have torch, triton, jinja2, networkx and lark only.
MISSING = ("typer", "rich", "safetensors", "tokenizers", "xxhash", "transformers", "matplotlib")


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_moe_layers

    return gpu_moe_layers


def test_routings_are_what_they_are_called(layers: object) -> None:
    for layer in layers.LAYERS:
        for tokens in layers.TOKENS:
            for routing in layers.ROUTINGS:
                loads = layers.expert_loads(layer, tokens, routing)
                assert sum(loads) == tokens * layer.top
                assert max(loads) <= tokens
                assert max(loads) - min(loads) <= 1 or routing != "balanced"
    skewed = layers.expert_loads(layers.LAYERS[0], 4096, "power_law_1.01")
    assert max(skewed) > 5 * 4096 * 8 / 128


def test_tokens_choose_different_experts_in_the_numbers_drawn(layers: object) -> None:
    layer = layers.LAYERS[0]
    loads = layers.expert_loads(layer, 64, "power_law_1.01")
    ids = layers.choices(layer, loads, 64, torch.device("cpu"))
    assert ids.shape == (64, 8)
    assert all(len(set(row)) == 8 for row in ids.tolist())
    assert sorted(ids.flatten().bincount(minlength=128).tolist()) == sorted(loads)


def run_script(*arguments: str, without: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    start = "; ".join(
        ("import runpy, sys", *(f"sys.modules[{name!r}] = None" for name in without),
         f"sys.path.insert(0, {str(BENCHMARKS)!r})", f"sys.argv = ['gpu_moe.py', *{list(arguments)!r}]",
         f"runpy.run_path({str(BENCHMARKS / 'gpu_moe.py')!r}, run_name='__main__')")
    )  # fmt: skip
    # Without `site`, an editable install of moec is not seen: the script finds the tree that it lies in.
    places = [path for path in sys.path if path.endswith("-packages")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, "-S", "-c", start], capture_output=True, text=True, env=env, timeout=120)


def test_kernels_agree_with_fp64_where_moec_is_not_installed() -> None:
    done = run_script("--kernels-on-cpu", without=MISSING)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    plain = [error for forms in found["small"].values() for error in forms.values()]
    fp8 = [error for forms in found["small-fp8"].values() for error in forms.values()]
    assert len(plain) == 7
    assert len(fp8) == 4
    assert 0 < max(plain) < 0.03  # bf16 in the rows, activations and results
    assert 0.03 < max(fp8) < 0.25  # e4m3 in rows, weights and activations: nearer would be another product than is said


def test_without_a_gpu_it_says_so() -> None:
    done = run_script()
    assert done.returncode == 2
    assert "there is no GPU here" in done.stderr
