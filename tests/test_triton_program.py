"""Whole models whose routing and experts Triton's kernels serve, interpreted on the CPU, against torch's kernels.

Tolerance: 5e-5 (fp32, max abs over logits of a few units); the greedy tokens are identical.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from moec import api, compiler
from moec.artifact import Artifact
from moec.compiler_kernels import Kernels
from moec.diagnostics import MoecError
from moec.ir.program import op_of
from tests import checkpoints
from tests.commands import moec
from tests.parity import Outcome, compile_checkpoint, run, worst

PROMPTS = ((5, 9, 3, 61, 20), (7, 2))
NUM_TOKENS = 2
SMALL = ("plan.prefill.tokens=8", "plan.decode.batch=2")
#: What a sparse layer on one rank needs, on which no operation is left to torch.
GATHERED = ("route", "group_pairs", "gathered_gate_up", "grouped_linear", "reduce_rows", "paired_experts")
SORTED = ("route", "group_rows", "grouped_gate_up", "grouped_linear", "reduce_rows")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


@cache
def _checkpoint(family: str, root: Path) -> Path:
    checkpoints.make(family, root / family)
    return root / family


@cache
def _by_torch(family: str, root: Path) -> Outcome:
    """On one rank: what any mesh must give."""
    folder = _checkpoint(family, root)
    return run(compile_checkpoint(folder, root, None), folder, root, PROMPTS, NUM_TOKENS)


def _served(artifact: Artifact, kernel: str) -> set[str]:
    """Operations that a kernel serves, in both phases."""
    nodes = (node for program in artifact.programs for _, node in program.nodes())
    return {op_of(node).name for node in nodes if node.meta["kernel"] == kernel}


#: Each family on one rank and with rows that travel; rows in padded messages in one.
MESHES = [
    *((family, None, "flat", GATHERED) for family in checkpoints.FAMILIES),
    *((family, "ep=2", "flat", (*SORTED[:-1], "combine")) for family in checkpoints.FAMILIES),
    ("qwen3_moe", "ep=2", "padded", SORTED),
]


@pytest.mark.parametrize(("family", "mesh", "exchange", "served"), MESHES)
def test_a_models_logits_are_those_of_torch(
    family: str, mesh: str | None, exchange: str, served: tuple[str, ...], folders: Path, tmp_path: Path
) -> None:
    """Prefill and decode, on softmax and on DeepSeek-V3's gate with groups and bias; experts that do not divide."""
    folder = _checkpoint(family, folders)
    artifact = compile_checkpoint(folder, tmp_path, mesh, exchange, "triton", *SMALL)
    assert _served(artifact, "triton") == set(served)
    found = run(artifact, folder, tmp_path, PROMPTS, NUM_TOKENS)
    wanted = _by_torch(family, folders)
    assert worst(found.logits, wanted.logits) < 5e-5
    assert found.tokens == wanted.tokens


@pytest.mark.parametrize(
    ("mesh", "sums", "kernels"), [("tp=2,etp=2", "fixed", "triton"), (None, "any", "triton"), (None, "any", "torch")]
)
def test_shared_experts_are_computed_with_the_routed_ones(
    mesh: str | None, sums: str, kernels: str, folders: Path, tmp_path: Path
) -> None:
    """DeepSeek-V3 with two of them; what is compiled for Triton runs on torch's kernels too."""
    folder = _checkpoint("deepseek_v3", folders)
    artifact = compile_checkpoint(folder, tmp_path, mesh, "flat", "triton", f"plan.sums={sums}", *SMALL)
    params = {name for program in artifact.programs for body in program.bodies.values() for name in body.params}
    assert "experts.down" in params and "shared.down" not in params
    for program in artifact.programs if kernels == "torch" else ():
        for _, node in program.nodes():
            node.meta["kernel"] = "torch"
    found, wanted = run(artifact, folder, tmp_path, PROMPTS, NUM_TOKENS), _by_torch("deepseek_v3", folders)
    assert worst(found.logits, wanted.logits) < 5e-5
    assert found.tokens == wanted.tokens


def test_sums_in_any_order_are_added_as_they_come(folders: Path, tmp_path: Path) -> None:
    folder = _checkpoint("mixtral", folders)
    artifact = compile_checkpoint(folder, tmp_path, None, "flat", "triton", "plan.sums=any", *SMALL)
    assert _served(artifact, "triton") == {*GATHERED[:3], "reduced_linear", "paired_experts"}
    found = run(artifact, folder, tmp_path, PROMPTS, NUM_TOKENS)
    wanted = _by_torch("mixtral", folders)
    assert worst(found.logits, wanted.logits) < 5e-5
    assert found.tokens == wanted.tokens


def test_torchs_kernels_serve_the_same_program(folders: Path, tmp_path: Path) -> None:
    """Of every operation that Triton serves there is torch's, also of those that only a Triton program has."""
    folder = _checkpoint("qwen3_moe", folders)
    artifact = compile_checkpoint(folder, tmp_path, None, "flat", "triton", "plan.prefill.sums=any")
    before = Counter(op_of(node).name for program in artifact.programs for _, node in program.nodes())
    for program in artifact.programs:
        for _, node in program.nodes():
            node.meta["kernel"] = "torch"
    assert {*GATHERED[:3], "reduced_linear", "paired_experts"} <= set(before)
    found = run(artifact, folder, tmp_path, PROMPTS, NUM_TOKENS)
    wanted = _by_torch("qwen3_moe", folders)
    assert worst(found.logits, wanted.logits) < 5e-5
    assert found.tokens == wanted.tokens


# --- moec run ----------------------------------------------------------------------------------------------------

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize("mesh", [(), ("--set", "ranks.attention=dp(1)", "--set", "ranks.experts=ep(1)")])
def test_run_interprets_on_the_cpu(mesh: tuple[str, ...], tiny: Path, tmp_path: Path) -> None:
    """`--kernels interpret` compiles for Triton, and gives torch's tokens, which chose the same experts.

    On one rank the shared expert is nobody's choice, though the kernels are told of it as of one.
    """
    asked = (str(tiny), *mesh, "--tokens", "1,2,3", "--max-new-tokens", "2", "--json", "--record")
    plain, interpreted = (
        moec("run", *asked, str(tmp_path / f"{kernels}.npz"), "--kernels", kernels, env=NO_GPU).wait()
        for kernels in ("torch", "interpret")
    )
    assert interpreted.code == 0, interpreted.err
    assert interpreted.out == plain.out
    theirs, ours = (np.load(tmp_path / f"{kernels}.npz", allow_pickle=False) for kernels in ("torch", "interpret"))
    assert sorted(theirs) == sorted(ours) and any(theirs[name].size for name in theirs)
    for name in theirs:
        if theirs[name].dtype.kind in "iu":
            assert np.array_equal(theirs[name], ours[name]), name
        elif theirs[name].dtype.kind == "f":
            assert np.allclose(theirs[name], ours[name], atol=2e-2), name  # the example is in bf16


def test_run_with_triton_wants_a_gpu(tiny: Path) -> None:
    done = moec("run", str(tiny), "--tokens", "1,2", "--kernels", "triton", env=NO_GPU).wait()
    assert done.code == 4 and len(done.error_lines) == 1
    page = (Path(__file__).parent.parent / "specs" / "errors" / "E0537.md").read_text()
    assert done.error_lines[0] in page


def test_run_wants_a_gpu_for_what_was_compiled_for_one(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "compile_kernels", lambda *given: Kernels())
    compiler.compile(tiny, target="cuda:90").save(tmp_path / "build")
    done = moec("run", str(tmp_path / "build"), "--tokens", "1,2", env=NO_GPU).wait()
    assert done.code == 4 and "E0537" in done.err and "was compiled for cuda:90" in done.err
    monkeypatch.setattr(api, "device_kind", lambda: "cpu")
    with pytest.raises(MoecError, match="compiled for cuda:90") as error:
        api.load(tmp_path / "build", weights=tiny.parent).generate([[1, 2]], max_new_tokens=1)
    assert error.value.diagnostics[0].code == "E0537"


@pytest.fixture
def tiny() -> Path:
    """The example that has its weights beside it."""
    return Path(__file__).parent.parent / "examples" / "tiny" / "tiny.moe"
