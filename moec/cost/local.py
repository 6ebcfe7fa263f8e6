"""What an operation does on its own rank: floating-point operations, and bytes read and written.

Every operand is read once and every result written once, but where that is not so: a row that is gathered is read as
often as it is written, of the experts' weights only those in use are read, attention reads KV memory, and views move
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import fx

from moec.cost.sizes import Sizes
from moec.ir.ops.table import WIDTH, base_symbol, symbol
from moec.ir.program import Type, op_of, operands, results_of, type_of

Work = tuple[float, float]

#: Operations whose results are views of their operands, or that only wait.
VIEWS = ("split_heads", "merge_heads", "split", "relayout", "chunk_rows", "all_to_all.wait")


def work(sizes: Sizes, node: fx.Node) -> Work:
    """(flops, bytes of memory traffic) of an operation that is no collective."""
    name = op_of(node).name
    if name in VIEWS:
        return 0.0, 0.0
    return RULES.get(name, _plain)(sizes, node)


def _types(node: fx.Node) -> tuple[list[Type], list[Type]]:
    made = [value.meta["type"] for value in results_of(node)]
    return [type_of(value) for value in operands(node)], made


def _sum(sizes: Sizes, types: list[Type]) -> float:
    return sum(map(sizes.bytes, types))


def _plain(sizes: Sizes, node: fx.Node) -> Work:
    read, written = _types(node)
    return 0.0, _sum(sizes, read + written)


def _gathered(sizes: Sizes, node: fx.Node) -> Work:
    """Rows written, each read from wherever it lay; the rest as it is."""
    (_, *rest), (rows, *made) = _types(node)
    small = [type for type in rest if len(type.shape) == 1 or type.dtype in ("i64", "fp32")]
    return 0.0, 2 * sizes.bytes(rows) + _sum(sizes, small + made)


def _looked_up(sizes: Sizes, node: fx.Node) -> Work:
    """Rows taken from a table by number."""
    return 0.0, 2 * _sum(sizes, _types(node)[1])


def _opened(sizes: Sizes, node: fx.Node) -> Work:
    """A message's row is a view; its ids and weights are read and written."""
    return 0.0, 2 * _sum(sizes, _types(node)[1][1:])


def _product(sizes: Sizes, node: fx.Node) -> Work:
    """x [rows, K] by w [N, K]."""
    (x, w), made = _types(node)
    return 2 * _elements(sizes, x) * sizes.dim(w.shape[0]), _sum(sizes, [x, w, *made])


def _grouped(sizes: Sizes, node: fx.Node) -> Work:
    """Rows [X, K] by their experts' [N, K] each, and the scales of those in fp8."""
    (rows, _, *weights), made = _types(node)
    w = weights[0]
    share = sizes.dim(rows.shape[0]) / sizes.dim(base_symbol(rows.shape[0]))
    used = 1.0 if sizes.route is None else sizes.active_experts(share) / sizes.dim(w.shape[0])
    moved = _sum(sizes, [rows, *made]) + _sum(sizes, weights) * used
    return 2 * _elements(sizes, rows) * sizes.dim(w.shape[1]), moved


def _gathered_product(sizes: Sizes, node: fx.Node) -> Work:
    """As `_grouped`; each row that a pair reads is found in caches once another pair has read it."""
    (x, offsets, pairs, *weights), made = _types(node)
    w = weights[0]
    used = 1.0 if sizes.route is None else sizes.active_experts() / sizes.dim(w.shape[0])
    flops = 2 * sizes.dim(pairs.shape[0]) * sizes.dim(w.shape[1]) * sizes.dim(w.shape[2])
    return flops, _sum(sizes, [x, offsets, pairs, *made]) + _sum(sizes, weights) * used


def _reduced_product(sizes: Sizes, node: fx.Node) -> Work:
    """As `_grouped`, but for its results: sums in fp32 that are cleared, added to and cast."""
    (x, _, w, pairs, weights), (made,) = _types(node)
    used = 1.0 if sizes.route is None else sizes.active_experts() / sizes.dim(w.shape[0])
    sums = 3 * WIDTH["fp32"] * _elements(sizes, made)
    flops = 2 * _elements(sizes, x) * sizes.dim(w.shape[1])
    return flops, _sum(sizes, [x, pairs, weights, made]) + sums + sizes.bytes(w) * used


def _paired(sizes: Sizes, node: fx.Node) -> Work:
    """Rows [R, D] by gate, up and down of each pair's expert; activations [X, I] are written and read."""
    (x, ids, weights, gate_up, down), made = _types(node)
    used = 1.0 if sizes.route is None else sizes.active_experts() / sizes.dim(down.shape[0])
    pairs, inner = sizes.dim(symbol("X", ids.shape[0])), sizes.dim(down.shape[2])
    flops = 2 * pairs * inner * (2 + 1) * sizes.dim(x.shape[1])
    activations = 2 * pairs * inner * WIDTH[x.dtype]
    return flops, _sum(sizes, [x, ids, weights, *made]) + activations + _sum(sizes, [gate_up, down]) * used


def _served(sizes: Sizes, node: fx.Node) -> Work:
    """Rows [X, D] by gate, up and down [., I, D] of their experts; what is between the products is in caches."""
    rows, _, _, *weights = _types(node)[0]
    gate_up, down = weights[:2]
    used = 1.0 if sizes.route is None else sizes.active_experts() / sizes.dim(down.shape[0])
    flops = 2 * _elements(sizes, rows) * (sizes.dim(gate_up.shape[1]) + sizes.dim(down.shape[2]))
    return flops, 2 * sizes.bytes(rows) + _sum(sizes, weights) * used


def _guess(sizes: Sizes, node: fx.Node) -> Work:
    """The router's product; the norm before it is small."""
    (x, _, w, *_), made = _types(node)
    return 2 * _elements(sizes, x) * sizes.dim(w.shape[0]), _sum(sizes, [x, w, *made])


def _attention(sizes: Sizes, node: fx.Node) -> Work:
    """Queries [T, H, d] over keys and values [., K, d]: two products per key that a query looks at."""
    read, made = _types(node)
    q, k, _ = read
    chunk = _chunk_of(node)
    flops = 4 * _elements(sizes, q) * sizes.attended(chunk)
    return flops, _sum(sizes, read + made) + 2 * _row_bytes(sizes, k) * sizes.cached_tokens(chunk)


def _mla_attention(sizes: Sizes, node: fx.Node) -> Work:
    """Over latents [., C] as they are (absorbed), or over keys and values made of them (expanded)."""
    read, made = _types(node)
    q_nope, q_rope, latent, k_rope, _ = read
    rows, heads, nope = map(sizes.dim, q_nope.shape)
    rope, rank, value = sizes.dim(q_rope.shape[2]), sizes.dim(latent.shape[1]), float(str(node.kwargs["value"]))
    chunk = _chunk_of(node)
    cached, is_absorbed = sizes.cached_tokens(chunk), node.kwargs["form"] == "absorbed"
    per_key = 2 * rank + rope if is_absorbed else nope + rope + value
    applied = rows if is_absorbed else rows + cached  # rows that kv_b is applied to
    flops = 2 * heads * (rows * sizes.attended(chunk) * per_key + applied * rank * (nope + value))
    return flops, _sum(sizes, read + made) + (_row_bytes(sizes, latent) + _row_bytes(sizes, k_rope)) * cached


def _chunk_of(node: fx.Node) -> tuple[int, int]:
    """(index, parts) of the chunk that it attends, all rows where it is told of none."""
    index, parts = cast(tuple[int, int], node.kwargs.get("chunk", (0, 1)))
    return index, parts


def _row_bytes(sizes: Sizes, type: Type) -> float:
    return sizes.bytes(type) / sizes.dim(type.shape[0])


def _elements(sizes: Sizes, type: Type) -> float:
    return sizes.bytes(type) / WIDTH[type.dtype]


RULES: dict[str, Callable[[Sizes, fx.Node], Work]] = {
    "embed": _looked_up,
    "take": _looked_up,
    "fan_out": _gathered,
    "group_rows": _gathered,
    "return_rows": _gathered,
    "open_rows": _opened,
    "linear": _product,
    "merged_linear": _product,
    "gate_up": _product,
    "router_logits": _product,
    "grouped_linear": _grouped,
    "grouped_gate_up": _grouped,
    "gathered_gate_up": _gathered_product,
    "reduced_linear": _reduced_product,
    "paired_experts": _paired,
    "cached_experts": _served,
    "guess": _guess,
    "attention": _attention,
    "mla_attention": _mla_attention,
}
