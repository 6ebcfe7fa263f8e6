"""Attention kernels over the KV memory, against fp64 written as the definition says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moec.placement import span
from moec.runtime.context import Context
from moec.runtime.kernels import torch_attention
from moec.runtime.kernels.torch_attention import attention, mla_attention
from moec.runtime.step import Piece
from tests.contexts import context

SLOTS, CONTEXT = 4, 40
#: Prompts by slot; 17 rows are more than two blocks of 8 query rows.
LENGTHS = {2: 17, 0: 1, 3: 9}
HEADS, HEAD_DIM = 6, 10
RANK, NOPE, ROPE, VALUE = 14, 8, 4, 6

#: Attends a chunk of the rows of `pieces`; rows of the whole sequences are in the closure.
Attend = Callable[[Context, dict[int, slice], tuple[int, int]], Tensor]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_attention, "QUERY_ROWS", 8)


def naive(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """[T, H, d], [T, H, d], [T, H, e] -> [T, H, e] in fp64: each row over itself and those before."""
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys.double()) * scale
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khe->qhe", scores.masked_fill(hidden, float("-inf")).softmax(-1), values.double())


def part_of(rows: dict[int, Tensor], taken: dict[int, slice], chunk: tuple[int, int]) -> Tensor:
    """Of the rows of a step those of one chunk."""
    x = torch.cat([rows[slot][part] for slot, part in taken.items()] or [rows[2][:0]])
    return x[span(len(x), *chunk)]


def gqa_case(kv_heads: int) -> tuple[Attend, dict[int, Tensor], dict[str, tuple[int, ...]]]:
    torch.manual_seed(kv_heads)
    rows = {slot: torch.randn(n, HEADS + 2 * kv_heads, HEAD_DIM) for slot, n in LENGTHS.items()}
    exact = {}
    for slot, x in rows.items():
        q, keys, values = x.split((HEADS, kv_heads, kv_heads), dim=1)
        copies = [t.repeat_interleave(HEADS // kv_heads, dim=1) for t in (keys, values)]
        exact[slot] = naive(q, *copies, scale=0.3)

    def attend(ctx: Context, taken: dict[int, slice], chunk: tuple[int, int]) -> Tensor:
        x = part_of(rows, taken, chunk)
        return attention(ctx, *x.split((HEADS, kv_heads, kv_heads), dim=1), scale=0.3, chunk=chunk)

    return attend, exact, {"k": (kv_heads, HEAD_DIM), "v": (kv_heads, HEAD_DIM)}


def mla_case(form: str) -> tuple[Attend, dict[int, Tensor], dict[str, tuple[int, ...]]]:
    torch.manual_seed(9)
    sizes = (HEADS * NOPE, HEADS * ROPE, RANK, ROPE)
    rows = {slot: torch.randn(n, sum(sizes)) for slot, n in LENGTHS.items()}
    w_kv_b = torch.randn(HEADS * (NOPE + VALUE), RANK) * RANK**-0.5

    def parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q_nope, q_rope, latent, k_rope = x.split(sizes, dim=1)
        return q_nope.view(-1, HEADS, NOPE), q_rope.view(-1, HEADS, ROPE), latent, k_rope

    exact = {}
    for slot, x in rows.items():
        q_nope, q_rope, latent, k_rope = parts(x.double())
        kv = (latent @ w_kv_b.double().T).view(-1, HEADS, NOPE + VALUE)
        keys = torch.cat((kv[..., :NOPE], k_rope[:, None].expand(-1, HEADS, -1)), -1)
        exact[slot] = naive(torch.cat((q_nope, q_rope), -1), keys, kv[..., NOPE:], scale=0.2)

    def attend(ctx: Context, taken: dict[int, slice], chunk: tuple[int, int]) -> Tensor:
        x = part_of(rows, taken, chunk)
        return mla_attention(ctx, *parts(x), w_kv_b, scale=0.2, value=VALUE, form=form, chunk=chunk)

    return attend, exact, {"latent": (RANK,), "rope": (ROPE,)}


CASES = {
    "gqa": lambda: gqa_case(2),
    "mha": lambda: gqa_case(6),
    "mqa": lambda: gqa_case(1),
    "mla-expanded": lambda: mla_case("expanded"),
    "mla-absorbed": lambda: mla_case("absorbed"),
}


def run(name: str, steps: list[dict[int, tuple[int, int]]], chunks: int = 1) -> None:
    """Attend in the given steps (slot -> first and last row + 1) over memory full of NaN, and compare every row."""
    attend, exact, shapes = CASES[name]()
    kv = {key: torch.full((SLOTS, CONTEXT, *shape), float("nan")) for key, shape in shapes.items()}
    for step in steps:
        pieces = [Piece([0] * (stop - start), slot, start) for slot, (start, stop) in step.items()]
        ctx, taken = context(pieces, kv=kv), {slot: slice(*bounds) for slot, bounds in step.items()}
        found = torch.cat([attend(ctx, taken, (index, chunks)) for index in range(chunks)])
        expected = torch.cat([exact[slot][start:stop] for slot, (start, stop) in step.items()] or [exact[2][:0]])
        assert found.shape == expected.shape
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("name", CASES)
def test_prompts_of_different_lengths(name: str) -> None:
    run(name, [{2: (0, 17), 0: (0, 1), 3: (0, 9)}])


@pytest.mark.parametrize("name", CASES)
def test_a_prompt_in_chunks_is_a_prompt_at_once(name: str) -> None:
    run(name, [{2: (0, 5), 3: (0, 2)}, {2: (5, 15), 3: (2, 3)}, {3: (3, 9), 2: (15, 17)}])


@pytest.mark.parametrize("name", CASES)
def test_one_row_at_a_time_is_a_prompt_at_once(name: str) -> None:
    """Sequences of unequal length are read together; a slot's memory behind its end is NaN."""
    steps = [{2: (i, i + 1), **({3: (i - 3, i - 2)} if 3 <= i < 12 else {})} for i in range(17)]
    run(name, [{0: (0, 1), 2: (0, 1)}, *steps[1:]])


@pytest.mark.parametrize("name", CASES)
def test_equal_lengths_in_neighbouring_slots(name: str) -> None:
    """Read in place, without a copy."""
    run(name, [{2: (i, i + 1), 3: (i, i + 1)} for i in range(9)])


@pytest.mark.parametrize("chunks", [2, 3, 8])
@pytest.mark.parametrize("name", CASES)
def test_chunks_of_a_step_give_what_the_step_gives(name: str, chunks: int) -> None:
    """Cut inside sequences and between them, chunks of one row and of none, sequences of one row read together."""
    run(
        name,
        [{2: (0, 11), 0: (0, 1), 3: (0, 4)}, {3: (4, 7), 2: (11, 15)}, {2: (15, 16), 3: (7, 8)}, {3: (8, 9)}],
        chunks,
    )


@pytest.mark.parametrize("name", CASES)
def test_no_rows(name: str) -> None:
    run(name, [{}, {2: (0, 0)}, {2: (0, 3)}, {2: (3, 3), 3: (0, 1)}])


@pytest.mark.parametrize("name", ["gqa", "mla-absorbed"])
def test_a_slot_taken_over_keeps_nothing_of_its_last_sequence(name: str) -> None:
    run(name, [{2: (0, 17)}, {2: (0, 4)}, {2: (4, 5)}])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_softmax_of_half_precision_is_in_fp32(dtype: torch.dtype) -> None:
    """1,000 equal keys: probabilities and sums rounded to bf16 on the way would drift by far more."""
    kv = {name: torch.zeros(1, 1001, 1, 8, dtype=dtype) for name in ("k", "v")}
    values = torch.ones(1000, 1, 8, dtype=dtype)
    zeros = torch.zeros(1000, 2, 8, dtype=dtype)
    attention(context([Piece([0] * 1000, 0)], kv=kv), zeros, zeros[:, :1], values, scale=1.0)
    last = attention(context([Piece([0], 0, 1000)], kv=kv), zeros[:1], zeros[:1, :1], 3 * values[:1], scale=1.0)
    torch.testing.assert_close(last, torch.full_like(last, 1003 / 1001), rtol=torch.finfo(dtype).eps, atol=0)
