"""Dense torch kernels and rotary embedding, against fp64 formulas and against transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV3Config, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3RotaryEmbedding,
    apply_rotary_pos_emb_interleave,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding, apply_rotary_pos_emb

from moec.runtime.kernels import torch_dense as k
from moec.runtime.kernels.torch_rope import frequencies, rope
from tests.contexts import context

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 30), (5, 3, 14), (0, 30)])
def test_rms_norm_is_computed_in_fp32(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Squares of values near 300 pass fp16's largest number: a norm in fp16 would give zeros."""
    torch.manual_seed(1)
    x, w = (300 * torch.randn(shape)).to(dtype), torch.rand(shape[-1]).to(dtype)
    exact = x.double() / torch.sqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * w.double()
    found = k.rms_norm(context(), x, w, eps=1e-5)
    assert found.dtype == dtype and found.shape == shape
    torch.testing.assert_close(found, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_rms_norm_eps_counts() -> None:
    x = torch.full((1, 4), 1e-3)
    found = k.rms_norm(context(), x, torch.ones(4), eps=1e-6)
    torch.testing.assert_close(found, torch.full((1, 4), 0.5**0.5))


@pytest.mark.parametrize("num_rows", [0, 1, 6])
def test_gate_up_is_its_parts(num_rows: int) -> None:
    torch.manual_seed(2)
    ctx, x, gate, up = context(), torch.randn(num_rows, 20), torch.randn(12, 20), torch.randn(12, 20)
    fused = k.gate_up(ctx, x, torch.cat((gate, up)))
    exact = (x.double() @ gate.double().T).sigmoid() * (x.double() @ gate.double().T) * (x.double() @ up.double().T)
    torch.testing.assert_close(fused, exact.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(k.silu_mul(ctx, k.linear(ctx, x, gate), k.linear(ctx, x, up)), fused)


@pytest.mark.parametrize("num_rows", [0, 1, 6])
def test_a_merged_linear_is_its_parts(num_rows: int) -> None:
    ctx, x, parts = context(), torch.randn(num_rows, 20), [torch.randn(size, 20) for size in (12, 4, 5)]
    merged = k.merged_linear(ctx, x, torch.cat(parts), sizes=(12, 4, 5))
    for found, part in zip(merged, parts, strict=True):
        torch.testing.assert_close(found, k.linear(ctx, x, part), rtol=1e-5, atol=1e-5)


def test_silu_mul_leaves_its_operands_alone() -> None:
    gate, up = torch.tensor([1.0]), torch.tensor([2.0])
    assert k.silu_mul(context(), gate, up).item() == pytest.approx(1.462117, abs=1e-6)
    assert (gate.item(), up.item()) == (1.0, 2.0)


def test_heads_of_no_rows() -> None:
    heads = k.split_heads(context(), torch.empty(0, 12), head_dim=4)
    assert heads.shape == (0, 3, 4)
    assert k.merge_heads(context(), heads).shape == (0, 12)


def test_heads_are_the_outer_part_of_the_width() -> None:
    x = torch.arange(24.0).view(2, 12)
    heads = k.split_heads(context(), x, head_dim=4)
    assert heads[1, 2].tolist() == [20, 21, 22, 23]
    assert torch.equal(k.merge_heads(context(), heads), x)
    left, right = k.split(context(), heads, sizes=(3, 1))
    assert left.shape == (2, 3, 3) and right[1, 0].tolist() == [15]


def test_rows_by_index() -> None:
    w = torch.arange(10.0).view(5, 2)
    assert k.embed(context(), torch.tensor([4, 0, 4]), w).tolist() == [[8, 9], [0, 1], [8, 9]]
    assert k.take(context(), w, torch.tensor([3])).tolist() == [[6, 7]]
    assert k.take(context(), w, torch.empty(0, dtype=torch.int64)).shape == (0, 2)


# --- rotary embedding ---------------------------------------------------------------------------------------------

POSITIONS = torch.tensor([0, 1, 5, 63, 1000, 4095])


def test_rope_by_halves_is_that_of_transformers() -> None:
    torch.manual_seed(3)
    config = Qwen3MoeConfig(head_dim=14, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    x = torch.randn(6, 3, 14)
    cos, sin = Qwen3MoeRotaryEmbedding(config)(x, POSITIONS[None])
    theirs, _ = apply_rotary_pos_emb(x[None], x[None], cos, sin, unsqueeze_dim=2)
    ours = rope(context(), x, POSITIONS, theta=1e6, pairs="halves", yarn=None)
    torch.testing.assert_close(ours, theirs[0], rtol=0, atol=1e-6)


#: factor, original, beta_fast, beta_slow, mscale, mscale_all_dim. First: DeepSeek-V3's own.
YARNS = [
    (40.0, 4096, 32.0, 1.0, 1.0, 1.0),
    (40.0, 4096, 32.0, 1.0, 0.707, 0.0),
    (8.0, 512, 16.0, 2.0, 0.707, 1.0),
    (0.5, 2048, 32.0, 1.0, 0.707, 0.5),
    (4.0, 64, 32.0, 1.0, 1.0, 1.0),  # few pairs turn at all: the ramp begins at 0
    (4.0, 1_000_000, 32.0, 1.0, 1.0, 1.0),  # even the slowest pair turns: the ramp ends behind the last
]


@pytest.mark.parametrize("yarn", [None, *YARNS])
@pytest.mark.parametrize("dim", [8, 64])
def test_interleaved_rope_with_yarn_is_that_of_transformers(yarn: tuple[float, ...] | None, dim: int) -> None:
    """transformers returns the first and then the second members of the pairs; here a pair stays where it is."""
    torch.manual_seed(4)
    x = torch.randn(6, 3, dim)
    cos, sin = DeepseekV3RotaryEmbedding(_deepseek(dim, yarn))(x, POSITIONS[None])
    theirs, _ = apply_rotary_pos_emb_interleave(x[None], x[None], cos, sin, unsqueeze_dim=2)
    ours = rope(context(), x, POSITIONS, theta=10000.0, pairs="interleaved", yarn=yarn)  # type: ignore[arg-type]
    torch.testing.assert_close(torch.cat((ours[..., ::2], ours[..., 1::2]), -1), theirs[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize("yarn", YARNS)
def test_yarn_frequencies_are_those_of_transformers(yarn: tuple[float, int, float, float, float, float]) -> None:
    module = DeepseekV3RotaryEmbedding(_deepseek(64, yarn))
    frequency_F, factor = frequencies(64, 10000.0, yarn)
    torch.testing.assert_close(frequency_F, module.inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(module.attention_scaling, rel=1e-12)


def _deepseek(dim: int, yarn: tuple[float, ...] | None) -> DeepseekV3Config:
    parameters: dict[str, object] = {"rope_type": "default", "rope_theta": 10000.0}
    if yarn is not None:
        names = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        parameters |= {"rope_type": "yarn", **dict(zip(names, yarn, strict=True))}
    return DeepseekV3Config(qk_rope_head_dim=dim, rope_parameters=parameters)


@pytest.mark.parametrize("pairs", ["halves", "interleaved"])
def test_rope_of_one_key_is_that_of_a_head(pairs: str) -> None:
    torch.manual_seed(5)
    x, ctx = torch.randn(6, 1, 10), context()
    single = rope(ctx, x[:, 0], POSITIONS, theta=500.0, pairs=pairs, yarn=None)
    assert torch.equal(single, rope(ctx, x, POSITIONS, theta=500.0, pairs=pairs, yarn=None)[:, 0])
    assert rope(ctx, x[:0], POSITIONS[:0], theta=500.0, pairs=pairs, yarn=None).shape == (0, 1, 10)


@pytest.mark.parametrize("pairs", ["halves", "interleaved"])
def test_rope_of_a_slice_that_starts_anywhere(pairs: str) -> None:
    """A single row's slice counts as contiguous, wherever it starts in memory."""
    torch.manual_seed(7)
    x = torch.randn(1, 11)
    sliced = rope(context(), x[:, 1:], POSITIONS[3:4], theta=500.0, pairs=pairs, yarn=None)
    assert torch.equal(sliced, rope(context(), x[:, 1:].clone(), POSITIONS[3:4], theta=500.0, pairs=pairs, yarn=None))


def test_rope_tables_follow_the_positions_they_were_made_for() -> None:
    """The table is kept for the step's other layers, never for other positions or another base."""
    x, ctx = torch.ones(2, 4), context()
    first = rope(ctx, x, torch.tensor([0, 1]), theta=100.0, pairs="halves", yarn=None)
    other = rope(ctx, x, torch.tensor([2, 3]), theta=100.0, pairs="halves", yarn=None)
    base = rope(ctx, x, torch.tensor([0, 1]), theta=50.0, pairs="halves", yarn=None)
    assert not torch.equal(first, other) and not torch.equal(first, base)


def test_rope_in_half_precision_rounds_once() -> None:
    torch.manual_seed(6)
    x = torch.randn(6, 2, 16).bfloat16()
    exact = rope(context(), x.float(), POSITIONS, theta=1e4, pairs="halves", yarn=None)
    found = rope(context(), x, POSITIONS, theta=1e4, pairs="halves", yarn=None)
    assert torch.equal(found, exact.bfloat16())
