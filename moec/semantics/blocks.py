"""The parts a model is made of: attentions, routers, expert groups, rotary embedding; syntax to checked values."""

from __future__ import annotations

from moec.checked import Experts, Gqa, Mla, Rotary, Router, Swiglu, Yarn
from moec.diagnostics import Label
from moec.grammar import ast
from moec.semantics.fields import Fields, arguments, expect_call, settings, whole
from moec.semantics.values import Values

#: Placement tables list every expert, so their number is bounded.
MAX_EXPERTS = 1 << 16
ROUTER_SETTINGS = ("score", "top", "groups", "keep", "bias", "renormalize", "scale")
YARN_ARGUMENTS = ("factor", "original", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def check_attention(node: ast.Attention, values: Values, hidden: int | None) -> Gqa | Mla | None:
    call = expect_call(values, node.value, "`attention`", ("gqa", "mla"))
    if call is None:
        return None
    return _gqa(node, call, values, hidden) if call.name.id == "gqa" else _mla(node, call, values)


def _gqa(node: ast.Attention, call: ast.Call, values: Values, hidden: int | None) -> Gqa | None:
    fields = arguments(values, call, ("heads", "kv_heads", "head_dim", "bias", "out_bias", "qk_norm"))
    heads = fields.whole("heads")
    kv_heads = fields.whole("kv_heads") if fields.has("kv_heads") else heads
    head_dim = fields.whole("head_dim") if fields.has("head_dim") else _default_head_dim(fields, heads, hidden)
    bias, out_bias, qk_norm = (fields.flag(key, False) for key in ("bias", "out_bias", "qk_norm"))
    if heads and kv_heads and heads % kv_heads:
        also = [Label(fields.at("heads"), f"{heads} query heads")]
        help = "each KV head serves the same number of query heads: `kv_heads` divides `heads`"
        message = f"{kv_heads} KV heads do not divide {heads} heads"
        values.problems.add("E0218", message, fields.at("kv_heads"), help=help, also=also)
        return None
    _need_even(fields, "head_dim", head_dim)
    if heads is None or kv_heads is None or head_dim is None or bias is None or out_bias is None or qk_norm is None:
        return None
    return Gqa(node.name.id, heads, kv_heads, head_dim, bias, out_bias, qk_norm, node.span)


def _default_head_dim(fields: Fields, heads: int | None, hidden: int | None) -> int | None:
    if heads is None or hidden is None:
        return None
    if hidden % heads:
        message = f"`hidden` = {hidden} does not split into {heads} heads"
        fields.problems.add("E0218", message, fields.span, help="give `head_dim`")
        return None
    return hidden // heads


def _mla(node: ast.Attention, call: ast.Call, values: Values) -> Mla | None:
    fields = arguments(values, call, ("heads", "q_rank", "kv_rank", "nope", "rope", "value"))
    q_rank = fields.whole("q_rank") if fields.has("q_rank") else None
    heads, kv_rank, nope, rope, value = (fields.whole(k) for k in ("heads", "kv_rank", "nope", "rope", "value"))
    _need_even(fields, "rope", rope)
    if heads is None or kv_rank is None or nope is None or rope is None or value is None:
        return None
    return Mla(node.name.id, heads, q_rank, kv_rank, nope, rope, value, node.span)


def _need_even(fields: Fields, key: str, size: int | None) -> None:
    if size is not None and size % 2:
        message = f"`{key}` = {size} is odd: rotary embedding turns pairs"
        fields.problems.add("E0218", message, fields.at(key), help="use an even number")


def check_router(node: ast.Router, values: Values) -> tuple[Router | None, Fields]:
    """The router, and its fields for the errors that need the expert group as well."""
    given = settings(node.items)
    for item in node.items:
        if isinstance(item, ast.Grouping):
            if item.name.id != "groups":
                help = "only `groups = N keep M` has a `keep`"
                values.problems.add("E0202", f"`{item.name.id}` takes no `keep`", item.keep.span, help=help)
            given += [(item.name, item.groups)]
            given += [(ast.Name("keep", span=item.keep.span), item.keep)] if item.name.id == "groups" else []
    fields = Fields(values, f"router `{node.name.id}`", node.name.span, given, ROUTER_SETTINGS)
    score = fields.choice("score", ("softmax", "sigmoid"))
    top = fields.whole("top")
    groups = fields.whole("groups", 1)
    keep = fields.whole("keep") if fields.has("keep") else groups
    bias = fields.choice("bias", ("frozen", "none"), "none")
    renormalize = fields.flag("renormalize", False)
    scale = fields.decimal("scale", 1.0)
    if groups is not None and keep is not None and keep > groups:
        also = [Label(fields.at("groups"), f"{groups} groups")]
        help = f"lower `keep` to at most {groups}"
        values.problems.add(
            "E0213", f"{keep} of {groups} groups cannot be kept", fields.at("keep"), help=help, also=also
        )
        return None, fields
    if None in (score, top, groups, keep, bias, renormalize, scale):
        return None, fields
    assert score and top and groups and keep and bias and renormalize is not None and scale
    router = Router(node.name.id, score, top, groups, keep, bias == "frozen", renormalize, scale, node.span)
    return router, fields


def check_experts(node: ast.ExpertGroup, values: Values) -> Experts | None:
    """`COUNT * swiglu(INNER)`; the block is the last factor."""
    value = node.value
    block = value.factors[-1] if isinstance(value, ast.Product) else None
    if (
        not isinstance(value, ast.Product)
        or block is None
        or block.operator != "*"
        or not isinstance(block.value, ast.Call)
    ):
        help = "write it like `experts routed = 8 * swiglu(14336)`"
        message = "an expert group is a number times a block"
        values.problems.add("E0207", message, value.span, help=help)
        return None
    counts = value.factors[:-1]
    end = counts[-1].span.end if counts else value.first.span.end
    span = type(value.span)(value.span.source, value.span.start, end)
    count_node = ast.Product(value.first, counts, span=span) if counts else value.first
    count = whole(values, count_node, "the number of experts", high=MAX_EXPERTS)
    call = expect_call(values, block.value, "`experts`", ("swiglu",))
    mlp = check_swiglu(call, values) if call else None
    return Experts(node.name.id, count, mlp.inner, node.span) if count and mlp else None


def check_swiglu(call: ast.Call, values: Values) -> Swiglu | None:
    inner = arguments(values, call, ("inner",)).whole("inner")
    return None if inner is None else Swiglu(inner, call.span)


def check_rotary(fields: Fields) -> Rotary | None:
    """`rope(theta = 10000, pairs = halves, scaling = yarn(...))`, each with a default."""
    if not fields.has("rotary"):
        return Rotary()
    call = fields.call("rotary", "rope")
    if call is None:
        return None
    given = arguments(fields.values, call, ("theta", "pairs", "scaling"))
    theta = given.decimal("theta", Rotary.theta)
    pairs = given.choice("pairs", ("halves", "interleaved"), Rotary.pairs)
    yarn = _yarn(given) if given.has("scaling") else None
    if theta is None or pairs is None or (yarn is None and given.has("scaling")):
        return None
    return Rotary(theta, pairs, yarn)


def _yarn(fields: Fields) -> Yarn | None:
    call = fields.call("scaling", "yarn")
    if call is None:
        return None
    given = arguments(fields.values, call, YARN_ARGUMENTS)
    factor, original = given.decimal("factor"), given.whole("original")
    beta_fast = given.decimal("beta_fast", Yarn.beta_fast)
    beta_slow = given.decimal("beta_slow", Yarn.beta_slow)
    mscale = given.decimal("mscale", Yarn.mscale, above_zero=False)
    mscale_all_dim = given.decimal("mscale_all_dim", Yarn.mscale_all_dim, above_zero=False)
    if factor is None or original is None or beta_fast is None or beta_slow is None:
        return None
    return (
        Yarn(factor, original, beta_fast, beta_slow, mscale, mscale_all_dim)
        if (mscale is not None and mscale_all_dim is not None)
        else None
    )
