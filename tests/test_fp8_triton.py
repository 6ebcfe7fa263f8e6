"""Models whose experts stay in fp8, served by Triton's kernels: interpreted against torch's, and compiled offline.

Computed in fp16, whose kernels are the same and whose rounding is finer than bf16's. Every expert is chosen, so that no
rounding makes a token choose another one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moec.artifact import Artifact
from moec.compiler import compile
from moec.explain.page import explain_plan
from moec.ir.program import op_of
from moec.runtime import quantise
from moec.runtime.kernels import torch_moe, triton_fp8
from tests import fp8_checkpoints
from tests.parity import Outcome, compile_checkpoint, run, worst

PROMPTS = ((5, 9, 3, 61, 20), (7, 2))
NUM_TOKENS = 2
SMALL = ("plan.prefill.tokens=8", "plan.decode.batch=2", "plan.compute=fp16")
ALL_CHOSEN = {"n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
DIMS = ALL_CHOSEN | {"num_hidden_layers": 2}
#: Logits are of some units: roundings of fp16 in two layers.
TOLERANCE = 0.03


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, _ = fp8_checkpoints.write(tmp_path_factory.mktemp("fp8"), **DIMS)
    return folder


def outcome(folder: Path, work: Path, mesh: str | None, kernels: str) -> tuple[Artifact, Outcome]:
    artifact = compile_checkpoint(folder, work, mesh, "flat", kernels, *SMALL)
    return artifact, run(artifact, folder, work, PROMPTS, NUM_TOKENS)


def served(artifact: Artifact) -> set[str]:
    nodes = [node for program in artifact.programs for _, node in program.nodes()]
    return {op_of(node).name for node in nodes if node.meta["kernel"] == "triton"}


def with_rows_in_e4m3(multiply: Callable[..., object]) -> Callable[..., object]:
    """The reference's product, of rows that are quantised first."""

    def product(rows: object, *weights: object, **sides: int) -> object:
        return multiply(quantise.dequantise_rows(quantise.quantise_rows(rows)), *weights, **sides)  # type: ignore[arg-type]

    return product


@pytest.fixture(scope="module")
def by_torch(fp8: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return outcome(fp8, tmp_path_factory.mktemp("torch"), None, "torch")[1]


@pytest.mark.parametrize("mesh", (None, "ep=2"), ids=str)
def test_rows_as_they_are_give_torchs_logits(
    mesh: str | None, fp8: Path, by_torch: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on devices that do not multiply e4m3. On one rank the shared expert is in the same products, in fp8 too."""
    monkeypatch.setattr(triton_fp8, "has_fp8_products", lambda target: False)
    artifact, found = outcome(fp8, tmp_path, mesh, "triton")
    assert {"gathered_gate_up" if mesh is None else "grouped_gate_up", "grouped_linear"} <= served(artifact)
    assert worst(found.logits, by_torch.logits) < TOLERANCE
    assert found.tokens == by_torch.tokens


def test_rows_in_e4m3_give_the_logits_of_rows_that_were_rounded_so(
    fp8: Path, by_torch: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on devices that do. A row's last bit may make another number of e4m3 of it: so near, no nearer."""
    _, found = outcome(fp8, tmp_path, "ep=2", "triton")
    monkeypatch.setattr(torch_moe, "multiply_fp8", with_rows_in_e4m3(torch_moe.multiply_fp8))
    (again := tmp_path / "again").mkdir()
    _, wanted = outcome(fp8, again, "ep=2", "torch")
    assert spread(found, wanted) < 0.5 * spread(found, by_torch)


def spread(found: Outcome, wanted: Outcome) -> float:
    """Root of the mean square of what logits differ by."""
    pairs = zip(found.logits, wanted.logits, strict=True)
    return float(torch.cat([(a - b).flatten() for a, b in pairs]).square().mean().sqrt())


@pytest.mark.parametrize("dims", ({"plan.compute": "fp32"}, {}), ids=("fp32", "ragged"))
def test_what_no_kernel_takes_is_left_to_torch(dims: dict[str, str], fp8: Path, tmp_path: Path) -> None:
    """Rows in fp32, and columns that end inside a block. The rest of the layer stays Triton's."""
    folder = fp8
    if not dims:
        folder, _ = fp8_checkpoints.write(tmp_path / "ragged", **fp8_checkpoints.RAGGED)
    settings = [*SMALL, *(f"{key}={value}" for key, value in dims.items())]
    artifact = compile_checkpoint(folder, tmp_path, None, "flat", "triton", *settings)
    found = served(artifact)
    assert "fallback    Triton's kernels multiply experts in fp8 with rows in" in explain_plan(dict(artifact.document))
    assert "route" in found and not found & {"gathered_gate_up", "grouped_gate_up", "grouped_linear"}


def test_cached_experts_are_left_to_torch_for_want_of_a_kernel(tmp_path: Path) -> None:
    source = tmp_path / "model.moe"
    cache = "mesh one { attention = dp(1)  experts = ep(1) }\ncache few { hbm = slots(2)  host = 1 GiB per rank }"
    source.write_text(cache + MODEL.replace("run small", "run small on one with few"))
    for kernels, why in (
        ("triton", "cached experts in fp8 have no Triton kernel"),
        ("cpp", "experts in fp8 have no C++"),
    ):
        (found,) = compile(source, kernels=kernels).document["left_to_torch"]
        assert found.startswith(why)


@pytest.mark.parametrize(("target", "rows"), [("cuda:90", "e4m3"), ("cuda:80", "bf16")])
def test_an_artifact_has_the_kernels_of_fp8_experts(target: str, rows: str, tmp_path: Path) -> None:
    """Listed and costed with a byte for each weight; what makes rows e4m3 stands before each product."""
    source = tmp_path / "model.moe"
    source.write_text(MODEL)
    artifact = compile(source, target=target)
    entries = [entry for entry in artifact.document["kernels"] if entry["phase"] == "prefill"]
    ops = [entry["op"] for entry in entries]
    assert ops.count("quantise_rows") == (2 if rows == "e4m3" else 0)
    products = [entry for entry in entries if entry["op"] in ("gathered_gate_up", "grouped_linear")]
    assert len(products) == 2 and all(f"_m8_{rows}_fp8_" in entry["name"] for entry in products)
    for entry, sides in zip(products, (2, 1), strict=True):
        weights = 8 * sides * 256 * 384 * (1 + 4 / 128**2)
        assert weights < entry["bytes"]["minimum"] < weights + 2 * 64 * 256 * 2
        assert entry["spills"] == 0 and "choice" not in entry
        assert f"kernels/{entry['name']}.py" in artifact.sources


MODEL = """
model small {
  hidden = 256  vocab = 64  norm = rms(eps = 1e-6)  expert_dtype = fp8(block = 128)
  attention a = gqa(heads = 4, head_dim = 16)
  router r { score = softmax  top = 2 }
  experts e = 8 * swiglu(384)
  layers 0 { a  moe(r, e) }
}
plan p { run small  context = 64  prefill { tokens = 64 }  decode { batch = 1 } }
"""
