"""DeepSeek's layers with their shared experts in the routed ones' launches: machine code for sm_90, without a GPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from moec.codegen.targets import TARGETS
from moec.compiler import checked_plan, compile_phase
from moec.compiler_uses import uses
from moec.ir.program import Program, op_of
from tests.test_kernel_gates import compiled_for

pytest.importorskip("triton")

#: Experts and attention of DeepSeek-V2-Lite, and those of DeepSeek-V3 in bf16.
V2_LITE = """
  hidden = 2048  vocab = 102400  norm = rms(eps = 1e-6)  dtype = bf16
  attention latent = mla(heads = 16, kv_rank = 512, nope = 128, rope = 64, value = 128)
  router top_six { score = softmax  top = 6 }
  experts routed = 64 * swiglu(1408)
  experts shared = 2 * swiglu(1408)
  layers 0 { latent  moe(top_six, routed, shared) }
"""
V3 = """
  hidden = 7168  vocab = 129280  norm = rms(eps = 1e-6)  dtype = bf16
  attention latent = mla(heads = 128, q_rank = 1536, kv_rank = 512, nope = 128, rope = 64, value = 128)
  router grouped { score = sigmoid  top = 8  groups = 8 keep 4  bias = frozen  renormalize = true  scale = 2.5 }
  experts routed = 256 * swiglu(2048)
  experts shared = 1 * swiglu(2048)
  layers 0 { latent  moe(grouped, routed, shared) }
"""
ONE, EIGHT = "experts = ep(1)", "attention = tp(8)  experts = ep(1) * etp(8)"


def program_of(folder: Path, model: str, mesh: str, phase: str, kernels: str = "triton") -> Program:
    path = folder / "layer.moe"
    path.write_text(
        f"model layer {{{model}}}\nmesh ranks {{ {mesh} }}\n"
        "plan serve { run layer on ranks  prefill { tokens = 4096 }  decode { batch = 64 } }\n"
    )
    return compile_phase(checked_plan(path)[0], phase, "layer.moe", kernels)


@pytest.mark.parametrize(("model", "mesh", "phase", "experts", "top"), [
    (V2_LITE, ONE, "prefill", 66, 8), (V2_LITE, ONE, "decode", 66, 8), (V3, EIGHT, "decode", 257, 9),
])  # fmt: skip
def test_no_kernel_spills(model: str, mesh: str, phase: str, experts: int, top: int, tmp_path: Path) -> None:
    found = list(uses(program_of(tmp_path, model, mesh, phase)))
    assert {(use.load.top, len(use.load.rows)) for use in found} == {(top, experts)}
    for kernel in (kernel for use in found for kernel in compiled_for(use, TARGETS["cuda:90"])):
        assert kernel.report.spills == kernel.code.spills == 0
        assert kernel.report.shared_bytes <= TARGETS["cuda:90"].shared_limit


def test_four_operations_fewer_are_launched(tmp_path: Path) -> None:
    """The shared expert's two products and its sum over the ranks, and what adds it to the routed ones."""
    ours, plain = (
        Counter(op_of(node).name for _, node in program_of(tmp_path, V3, EIGHT, "prefill", kernels).nodes())
        for kernels in ("triton", "torch")
    )
    assert {name: plain[name] - ours[name] for name in ("gate_up", "linear", "add", "all_reduce")} == {
        "gate_up": 1, "linear": 1, "add": 1, "all_reduce": 1,
    }  # fmt: skip
