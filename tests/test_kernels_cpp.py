"""The C++ kernels against sums in fp64 and against torch's kernels, on one library of every shape tested here.

Shapes: T rows, K summed, N outputs, M experts, E experts, k choices, H heads, d head dim, B sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from moec.codegen.cpp import (
    Attention,
    LatentAttention,
    Norm,
    Pairs,
    Product,
    Rope,
    Route,
    Router,
    collect,
    render_cpp,
)
from moec.codegen.kernel_route import Score
from moec.codegen.targets import Dtype
from moec.diagnostics import MoecError
from moec.placement import linear as even
from moec.placement import span
from moec.runtime.context import Context
from moec.runtime.cpp_build import find_compiler
from moec.runtime.cpp_library import Library
from moec.runtime.kernels import cpp_products, torch_attention, torch_dense, torch_moe, torch_pairs, torch_rope
from moec.runtime.step import Piece
from tests.contexts import context, poisoned_memory

PAGES = Path(__file__).parent.parent / "specs" / "errors"
#: K, I, M, T: a covering set of pairs; products go K -> 2 I -> K.
EXPERTS = (
    (50, 33, 1, 1), (33, 50, 5, 7), (1025, 50, 8, 0), (50, 1025, 64, 7), (1025, 33, 160, 257), (1025, 50, 8, 64),
    (50, 33, 160, 1), (1025, 50, 1, 257), (33, 50, 64, 257), (50, 33, 160, 7), (50, 33, 64, 0), (50, 1025, 5, 64),
)  # fmt: skip
#: E, k, groups, keep, score, renormalize.
ROUTES = (
    (1, 1, 1, 1, "softmax", True), (5, 5, 1, 1, "softmax", False), (8, 3, 1, 1, "softmax", True),
    (64, 8, 8, 3, "sigmoid", True), (160, 6, 8, 3, "softmax", False), (160, 8, 1, 1, "sigmoid", True),
    (257, 1, 1, 1, "softmax", True), (512, 1, 1, 1, "sigmoid", True), (8, 2, 8, 4, "sigmoid", False),
)  # fmt: skip
#: H, C, r: heads, latent, its rotated part.
LATENTS = ((5, 33, 50), (8, 64, 16))
HEADS = ((2, 3, 50), (4, 4, 64), (1, 8, 33))
#: Columns of a query, a key and a value: heads of `HEADS[0]`.
QKV = (300, 100, 100)
DTYPES = {torch.float32: Dtype.FP32, torch.bfloat16: Dtype.BF16}
#: Largest difference, where numbers are about 1.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])


def _shapes() -> list[object]:
    products = [Product(k, i, True) for k, i, _, _ in EXPERTS] + [Product(i, k) for k, i, _, _ in EXPERTS]
    products += [Product(33, columns) for columns in (*QKV, sum(QKV))]
    routes = [Route(*route[:4], Score(route[4]), route[5]) for route in ROUTES]
    ropes = [Rope(dim, pairs) for dim in (50, 64) for pairs in Pairs]
    attentions = [*(Attention(*heads) for heads in HEADS), *(LatentAttention(*of) for of in LATENTS)]
    return [*products, *routes, *ropes, *attentions, Norm(50), Norm(1025), Router(1025, 5), Router(50, 160)]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Callable[[torch.dtype], SimpleNamespace]:
    """Every kernel by operation, for a dtype."""
    try:
        find_compiler()
    except MoecError as error:
        pytest.skip(str(error))
    made: dict[torch.dtype, SimpleNamespace] = {}

    def of(dtype: torch.dtype) -> SimpleNamespace:
        if dtype not in made:
            text = render_cpp(collect(DTYPES[dtype], _shapes()))  # type: ignore[arg-type]
            made[dtype] = SimpleNamespace(**cpp_products.bind(Library(text)))
        return made[dtype]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        for dtype in DTYPES:
            of(dtype)
    return of


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype and found.shape == wanted.shape
    torch.testing.assert_close(found.double(), wanted.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def ends_of(rows: int, experts: int) -> Tensor:
    """Uneven shares of the rows; the second expert gets none, and where there are many only every third gets any."""
    share = torch.arange(experts) * 7 % 11 * (torch.arange(experts) % 3 != 1)
    share[0] += 1
    return (share.cumsum(0) * rows // int(share.sum())).int()


@each_dtype
@pytest.mark.parametrize(("hidden", "inner", "experts", "rows"), EXPERTS)
def test_grouped_products(
    kernels: Callable[[torch.dtype], SimpleNamespace],
    dtype: torch.dtype,
    hidden: int,
    inner: int,
    experts: int,
    rows: int,
) -> None:
    """B19, B23, B40: odd sizes, experts without rows, memory that starts as NaN; any number of rows."""
    k, ends = kernels(dtype), ends_of(rows, experts)
    owner = torch.arange(experts).repeat_interleave(ends.diff(prepend=ends.new_zeros(1)).long())
    x = draw(rows, hidden, dtype=dtype)
    gate_up = (draw(experts, 2 * inner, hidden, seed=2) / hidden**0.5).to(dtype)
    down = (draw(experts, hidden, inner, seed=3) / inner**0.5).to(dtype)
    gate, up = torch.einsum("rk,rnk->rn", x.double(), gate_up.double()[owner]).chunk(2, dim=-1)
    with poisoned_memory():
        act = k.grouped_gate_up(context(), x, ends, gate_up)
        out = k.grouped_linear(context(), act, ends, down)
    close(act, torch.nn.functional.silu(gate) * up, dtype)
    close(out, torch.einsum("rk,rnk->rn", act.double(), down.double()[owner]), dtype)


@each_dtype
def test_all_rows_to_one_expert(kernels: Callable[[torch.dtype], SimpleNamespace], dtype: torch.dtype) -> None:
    x, w = draw(64, 33, dtype=dtype), (draw(8, 50, 33, seed=2) / 33**0.5).to(dtype)
    for chosen in (0, 5, 7):
        ends = torch.where(torch.arange(8) >= chosen, 64, 0).int()
        close(kernels(dtype).grouped_linear(context(), x, ends, w), x.double() @ w[chosen].double().T, dtype)


@each_dtype
@pytest.mark.parametrize("rows", [0, 1, 9, 65])
def test_parts_of_a_wider_product(
    kernels: Callable[[torch.dtype], SimpleNamespace], dtype: torch.dtype, rows: int
) -> None:
    """They have the bits of products by each part alone, and kernels read them where they lie."""
    k, ones = kernels(dtype), torch.ones(50, dtype=dtype)
    x, w = draw(rows, 33, dtype=dtype), (draw(sum(QKV), 33, seed=2) / 33**0.5).to(dtype)
    merged = k.merged_linear(context(), x, w, sizes=QKV)
    apart = [k.linear(context(), x, part) for part in torch.split(w, list(QKV))]
    results = []
    for parts in (merged, apart):
        kv = {name: torch.zeros(1, 65, 2, 50, dtype=dtype) for name in ("k", "v")}
        ctx = context([Piece([1] * rows, 0)], kv=kv)
        q, key, value = (part.view(rows, part.shape[1] // 50, 50) for part in parts)
        q, key = (k.rms_norm(ctx, part, ones, eps=1e-6) for part in (q, key))
        q = k.rope(ctx, q, ctx.positions, theta=1e4, pairs="halves", yarn=None)
        results.append(k.attention(ctx, q, key, value, scale=0.1))
    assert all(map(torch.equal, merged, apart)) and torch.equal(*results)


@each_dtype
@pytest.mark.parametrize("size", [33, 50, 1025])
def test_b23_sums_of_ones_are_whole_numbers(
    kernels: Callable[[torch.dtype], SimpleNamespace], dtype: torch.dtype, size: int
) -> None:
    outer = next(i for k, i, _, _ in EXPERTS if k == size)
    found = kernels(dtype).gate_up(
        context(), torch.ones(3, size, dtype=dtype), torch.ones(2 * outer, size, dtype=dtype)
    )
    assert found.unique().tolist() == [torch.tensor(float(size * size)).to(dtype)]


@each_dtype
def test_b41_bits_of_a_row_depend_on_nothing_else(
    kernels: Callable[[torch.dtype], SimpleNamespace], dtype: torch.dtype
) -> None:
    """Neither on the rows beside it, nor on the number of threads, nor on which call it is."""
    k, x = kernels(dtype), draw(257, 1025, dtype=dtype)
    w = draw(100, 1025, dtype=dtype, seed=2)  # work enough for two threads
    whole = k.gate_up(context(), x, w)
    for first, count in ((0, 1), (5, 3), (100, 64), (251, 6)):
        rows = slice(first, first + count)
        assert torch.equal(k.gate_up(context(), x[rows], w), whole[rows])
    library = k.gate_up.args[0]
    try:
        library.set_threads(2)
        assert all(torch.equal(k.gate_up(context(), x, w), whole) for _ in range(50))
    finally:
        library.set_threads(1)


def test_lost_rows_are_refused(kernels: Callable[[torch.dtype], SimpleNamespace]) -> None:
    with pytest.raises(MoecError, match="experts were given 3 of 4 rows") as error:
        kernels(torch.float32).grouped_linear(
            context(), torch.zeros(4, 33), torch.tensor([1, 3], dtype=torch.int32), torch.zeros(2, 50, 33)
        )
    assert error.value.diagnostics[0].code == "E0508"


def test_a_shape_that_the_plan_does_not_have_is_a_bug(kernels: Callable[[torch.dtype], SimpleNamespace]) -> None:
    with pytest.raises(MoecError) as error:
        kernels(torch.float32).linear(context(), torch.zeros(1, 3), torch.zeros(2, 3))
    assert error.value.diagnostics[0].render() in (PAGES / "E0543.md").read_text()


@each_dtype
@pytest.mark.parametrize("rows", [0, 1, 7, 64])
def test_norms_rotary_embedding_and_router(
    kernels: Callable[[torch.dtype], SimpleNamespace], dtype: torch.dtype, rows: int
) -> None:
    k = kernels(dtype)
    for width in (50, 1025):
        x, w = draw(rows, width, dtype=dtype), draw(width, dtype=dtype, seed=2)
        close(k.rms_norm(context(), x, w, eps=1e-6), torch_dense.rms_norm(context(), x, w, eps=1e-6), dtype)
    for width, experts in ((1025, 5), (50, 160)):
        x, w = draw(rows, width, dtype=dtype), draw(experts, width, dtype=dtype, seed=2) / 30
        torch.testing.assert_close(k.router_logits(context(), x, w), x.float() @ w.float().T, rtol=1e-5, atol=1e-5)
    for dim in (50, 64):
        for pairs in ("halves", "interleaved"):
            x, ctx = draw(rows, 3, dim, dtype=dtype), context([Piece([1], slot, 5 * slot) for slot in range(rows)])
            turn = {"theta": 1e4, "pairs": pairs, "yarn": None}
            wanted = torch_rope.rope(ctx, x, ctx.positions, **turn)
            close(k.rope(ctx, x, ctx.positions, **turn), wanted, dtype)


@each_dtype
@pytest.mark.parametrize(("kv_heads", "group", "dim"), HEADS)
@pytest.mark.parametrize("cached", [(0,), (9, 0, 40), ()])
def test_attention_of_one_new_row_a_sequence(
    kernels: Callable[[torch.dtype], SimpleNamespace],
    dtype: torch.dtype,
    kv_heads: int,
    group: int,
    dim: int,
    cached: tuple[int, ...],
) -> None:
    """Slots in any order; what lies behind a sequence's end is NaN and never read."""
    slots, results = (3, 0, 2), []
    pieces = [Piece([1], slot, length) for slot, length in zip(slots, cached, strict=False)]
    q = draw(len(pieces), kv_heads * group, dim, dtype=dtype)
    key, value = (draw(len(pieces), kv_heads, dim, dtype=dtype, seed=s) for s in (2, 3))
    for kernel in (kernels(dtype).attention, torch_attention.attention):
        kv = {name: draw(4, 48, kv_heads, dim, dtype=dtype, seed=4) for name in ("k", "v")}
        for slot, length in zip(slots, cached, strict=False):
            kv["k"][slot, length:] = kv["v"][slot, length:] = float("nan")
        results.append((kernel(context(pieces, kv=kv), q, key, value, scale=dim**-0.5), kv))
    close(results[0][0], results[1][0], dtype)
    for name in ("k", "v"):
        assert torch.equal(results[0][1][name].nan_to_num(), results[1][1][name].nan_to_num())


def attend_fp64(ctx: Context, q: Tensor, kv: dict[str, Tensor], scale: float) -> Tensor:
    """Each row over its sequence up to itself, from the memory as a kernel left it."""
    step, group, rows = ctx.step, q.shape[1] // kv["k"].shape[2], []
    for slot, start, stop in zip(step.slots, step.starts, step.starts[1:], strict=False):
        for row in range(start, stop):
            end = int(ctx.positions[row]) + 1
            k, v = (kv[name][slot, :end].double().repeat_interleave(group, dim=1) for name in ("k", "v"))
            shares = (torch.einsum("hd,lhd->hl", q[row].double(), k) * scale).softmax(dim=-1)
            rows.append(torch.einsum("hl,lhd->hd", shares, v))
    return torch.stack(rows)


@each_dtype
@pytest.mark.parametrize(("kv_heads", "group", "dim"), HEADS)
def test_attention_of_prompts(
    kernels: Callable[[torch.dtype], SimpleNamespace], dtype: torch.dtype, kv_heads: int, group: int, dim: int
) -> None:
    """Prompts, one behind a cached part, and a single row; in chunks the bits are the same."""
    pieces = [Piece([1] * 33, 2), Piece([1] * 7, 0, 20), Piece([1], 3, 40)]
    q = draw(41, kv_heads * group, dim, dtype=dtype)
    key, value = (draw(41, kv_heads, dim, dtype=dtype, seed=s) for s in (2, 3))
    results = []
    for chunks in (1, 3):
        kv = {name: draw(4, 48, kv_heads, dim, dtype=dtype, seed=4) for name in ("k", "v")}
        ctx, found = context(pieces, kv=kv), []
        for index in range(chunks):
            rows = slice(span(41, index, chunks).start, span(41, index, chunks).stop)
            chunk = {"chunk": (index, chunks)} if chunks > 1 else {}
            found.append(kernels(dtype).attention(ctx, q[rows], key[rows], value[rows], scale=dim**-0.5, **chunk))
        results.append(torch.cat(found))
    close(results[0], attend_fp64(ctx, q, kv, dim**-0.5), dtype)
    assert torch.equal(*results)


@each_dtype
@pytest.mark.parametrize(("heads", "rank", "rope"), LATENTS)
@pytest.mark.parametrize("cached", [(0,), (9, 0, 40), ()])
def test_latent_attention_of_one_new_row_a_sequence(
    kernels: Callable[[torch.dtype], SimpleNamespace],
    dtype: torch.dtype,
    heads: int,
    rank: int,
    rope: int,
    cached: tuple[int, ...],
) -> None:
    """The absorbed form, as torch's expanded one in fp32 has it and as torch's absorbed one in bf16."""
    slots, results = (3, 0, 2), []
    pieces = [Piece([1], slot, length) for slot, length in zip(slots, cached, strict=False)]
    q_nope, q_rope = draw(len(pieces), heads, 24, dtype=dtype), draw(len(pieces), heads, rope, dtype=dtype, seed=2)
    latent, turned = draw(len(pieces), rank, dtype=dtype, seed=3), draw(len(pieces), rope, dtype=dtype, seed=4)
    w = (draw(heads * (24 + 10), rank, seed=5) / rank**0.5).to(dtype)
    reference = "expanded" if dtype is torch.float32 else "absorbed"
    for kernel, form in (
        (kernels(dtype).mla_attention, "absorbed"),
        (torch_attention.mla_attention, reference),
    ):
        kv = {"latent": draw(4, 48, rank, dtype=dtype, seed=6), "rope": draw(4, 48, rope, dtype=dtype, seed=7)}
        for slot, length in zip(slots, cached, strict=False):
            kv["latent"][slot, length:] = kv["rope"][slot, length:] = float("nan")
        ctx = context(pieces, kv=kv)
        results.append((kernel(ctx, q_nope, q_rope, latent, turned, w, scale=0.1, value=10, form=form), kv))
    close(results[0][0], results[1][0], dtype)
    for name in ("latent", "rope"):
        assert torch.equal(results[0][1][name].nan_to_num(), results[1][1][name].nan_to_num())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_routes(
    kernels: Callable[[torch.dtype], SimpleNamespace],
    route: tuple[int, int, int, int, str, bool],
    has_bias: bool,
) -> None:
    """B24, B28: the last id, equal scores, all-negative logits, biases that outweigh every score; as torch's kernel."""
    experts, top, groups, keep, score, renormalize = route
    choice = {"score": score, "top": top, "groups": groups, "keep": keep, "renormalize": renormalize}
    choice |= {"scale": 1.5, "table": "routed"}
    last = torch.zeros(1, experts)
    last[0, -1] = 1.0
    logits = torch.cat([draw(33, experts), torch.zeros(1, experts), -50.0 - draw(2, experts).abs(), last])
    bias = draw(experts, seed=3) * 0.1 if has_bias else None
    if bias is not None:
        bias[0], bias[-1] = -10.0, 12.0
    ids, weights = kernels(torch.float32).route(context(), logits, bias, **choice)
    wanted_ids, wanted = torch_moe.route(context(), logits, bias, **choice)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted, rtol=1e-5, atol=1e-6)


def test_scores_that_are_not_numbers_are_refused(kernels: Callable[[torch.dtype], SimpleNamespace]) -> None:
    logits = draw(3, 8)
    logits[1, 2] = float("nan")
    choice = {"score": "softmax", "top": 3, "groups": 1, "keep": 1, "renormalize": True, "scale": 1.0}
    with pytest.raises(MoecError, match="first for row 1") as error:
        kernels(torch.float32).route(context(), logits, **choice, table="routed")
    assert error.value.diagnostics[0].code == "E0506"


@each_dtype
@pytest.mark.parametrize("ranks", [1, 3])
def test_pairs_there_and_back(
    kernels: Callable[[torch.dtype], SimpleNamespace], dtype: torch.dtype, ranks: int
) -> None:
    """B29: an id named twice counts twice; other ranks' experts and -1 are passed over; rows without any are zero."""
    k, ctx = kernels(dtype), context(placement=even(8, ranks), rank=ranks - 1)
    ids = torch.randint(-1, 8, (20, 3), generator=torch.Generator().manual_seed(1))
    ids[3], ids[4] = 7, -1
    x, weights = draw(20, 50, dtype=dtype), draw(20, 3)
    with poisoned_memory():
        found = k.group_rows(ctx, x, ids, table="routed")
        wanted = torch_pairs.group_rows(ctx, x, ids, table="routed")
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        back = k.reduce_rows(ctx, found[0], found[2], weights, table="routed")
    close(back, torch_pairs.reduce_rows(ctx, found[0], found[2], weights, table="routed"), dtype)
    assert not back[4].any()


def test_an_id_that_is_no_expert_is_refused(kernels: Callable[[torch.dtype], SimpleNamespace]) -> None:
    with pytest.raises(MoecError, match="expert 8 of `routed` does not exist") as error:
        kernels(torch.float32).group_rows(context(), torch.zeros(1, 50), torch.tensor([[8]]), table="routed")
    assert error.value.diagnostics[0].code == "E0507"
