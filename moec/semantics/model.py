"""Model declarations to `checked.Model`: names resolved, layers laid out, router held against experts."""

from __future__ import annotations

from dataclasses import dataclass, field

from moec.blocks import BLOCK
from moec.checked import Experts, Gqa, Layer, Mla, Model, Moe, Router, Swiglu
from moec.diagnostics import Label, Span, did_you_mean
from moec.grammar import ast
from moec.semantics.blocks import check_attention, check_experts, check_rotary, check_router, check_swiglu
from moec.semantics.fields import Fields, arguments, settings, whole
from moec.semantics.values import Values

#: Layers are listed one by one, so their number is bounded.
MAX_LAYERS = 10_000
SETTINGS = ("hidden", "vocab", "norm", "rotary", "head", "dtype", "expert_dtype", "weights")
BLOCKS = ("swiglu", "moe")
Part = ast.Attention | ast.Router | ast.ExpertGroup
KINDS = {ast.Attention: "an attention", ast.Router: "a router", ast.ExpertGroup: "an expert group"}


@dataclass
class _Parts:
    """The named parts of one model: as declared, as checked (None: broken), and which were used."""

    declared: dict[str, Part] = field(default_factory=dict)
    checked: dict[str, Gqa | Mla | Router | Experts | None] = field(default_factory=dict)
    router_fields: dict[str, Fields] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    layers: dict[object, Layer | None] = field(default_factory=dict)


def check_model(node: ast.Model, values: Values) -> Model | None:
    """The model, or None after errors were reported."""
    before = len(values.problems.found)
    fields = Fields(values, f"model `{node.name.id}`", node.name.span, settings(node.items), SETTINGS)
    hidden, vocab = fields.whole("hidden"), fields.whole("vocab")
    norm_eps = _norm(fields)
    rotary = check_rotary(fields)
    head = fields.choice("head", ("untied", "tied"), "untied")
    dtype = fields.choice("dtype", ("bf16", "fp16", "fp32"), "bf16")
    expert_dtype, weights = _expert_dtype(fields), _weights(fields)
    parts = _declare(node, values, hidden)
    found = len(values.problems.found)
    layers = _layers(node, values, parts)
    if len(values.problems.found) == found:
        _report_unused(parts, values)
    if len(values.problems.found) > before or hidden is None or vocab is None or norm_eps is None:
        return None
    if rotary is None or head is None or dtype is None or layers is None:
        return None
    if expert_dtype is not None and not any(isinstance(layer.ffn, Moe) for layer in layers):
        message = "`expert_dtype` is not used: no layer has experts"
        values.problems.add("E0212", message, fields.key_at("expert_dtype"), help="remove it")
        return None
    tied = head == "tied"
    return Model(node.name.id, hidden, vocab, norm_eps, tied, rotary, weights, dtype, layers, node.span, expert_dtype)


def _norm(fields: Fields) -> float | None:
    call = fields.call("norm", "rms")
    return arguments(fields.values, call, ("eps",)).decimal("eps", above_zero=False) if call else None


def _expert_dtype(fields: Fields) -> str | None:
    """`fp8(block = 128)`, the one format in which routed experts are kept besides the model's own dtype."""
    call = fields.call("expert_dtype", "fp8") if fields.has("expert_dtype") else None
    block = arguments(fields.values, call, ("block",)).whole("block", low=BLOCK, high=BLOCK) if call else None
    return "fp8" if block is not None else None


def _weights(fields: Fields) -> str | None:
    call = fields.call("weights", "huggingface") if fields.has("weights") else None
    given = arguments(fields.values, call, ("path",)) if call else None
    node = given.need("path") if given else None
    if node is not None and (not isinstance(node, ast.Text) or not node.value):
        help = 'write it like `huggingface("FOLDER or NAME")`'
        fields.problems.add("E0207", "`huggingface(...)` takes a text that is not empty", node.span, help=help)
        return None
    return node.value if isinstance(node, ast.Text) else None


def _declare(node: ast.Model, values: Values, hidden: int | None) -> _Parts:
    """Every attention, router and expert group of the model, by name."""
    parts = _Parts()
    for item in node.items:
        if not isinstance(item, (ast.Attention, ast.Router, ast.ExpertGroup)):
            continue
        name = item.name.id
        first = parts.declared.setdefault(name, item)
        if first is not item:
            also = [Label(first.name.span, "first declared here")]
            message = f"`{name}` is declared twice"
            values.problems.add("E0206", message, item.name.span, help="rename one of them", also=also)
        elif isinstance(item, ast.Attention):
            parts.checked[name] = check_attention(item, values, hidden)
        elif isinstance(item, ast.Router):
            parts.checked[name], parts.router_fields[name] = check_router(item, values)
        else:
            parts.checked[name] = check_experts(item, values)
    return parts


def _layers(node: ast.Model, values: Values, parts: _Parts) -> tuple[Layer, ...] | None:
    """One `Layer` per depth; every depth from 0 to the last must be given once."""
    placed: dict[int, tuple[Layer | None, Span]] = {}
    is_broken = False
    for item in (i for i in node.items if isinstance(i, ast.Layers)):
        layer = _layer(item, values, parts)
        for where in item.where.ranges:
            depths = _depths(where, values)
            is_broken |= depths is None
            overlap = next((d for d in depths or () if d in placed), None)
            if overlap is not None:
                also = [Label(placed[overlap][1], "first given here")]
                message = f"layer {overlap} is given twice"
                values.problems.add("E0215", message, where.span, help="give each layer once", also=also)
            else:
                placed.update((d, (layer, where.span)) for d in depths or ())
    if not placed:
        if not is_broken:
            help = "add `layers 0..N { ATTENTION BLOCK }`"
            values.problems.add("E0204", f"model `{node.name.id}` needs `layers`", node.name.span, help=help)
        return None
    missing = [d for d in range(max(placed)) if d not in placed]
    if missing and not is_broken:
        last = placed[max(placed)][1]
        also = [Label(last, f"layers go up to {max(placed)}")]
        message = f"layer {missing[0]} is not given" + (
            f", nor are {len(missing) - 1} more" if len(missing) > 1 else ""
        )
        values.problems.add("E0215", message, node.name.span, help="give every layer from 0 on", also=also)
    layers = [placed[d][0] for d in range(len(placed)) if d in placed]
    return None if missing or is_broken or None in layers else tuple(x for x in layers if x is not None)


def _depths(where: ast.LayerRange, values: Values) -> range | None:
    """The layers of `4`, `0..2` or `0..58 step 2`."""
    first = whole(values, where.first, "a layer", 0, MAX_LAYERS - 1)
    last = first if where.last is None else whole(values, where.last, "a layer", 0, MAX_LAYERS - 1)
    step = 1 if where.step is None else whole(values, where.step, "`step`", 1, MAX_LAYERS)
    if first is None or last is None or step is None:
        return None
    if last < first:
        help = f"write {last}..{first}"
        values.problems.add("E0208", f"the range {first}..{last} is empty", where.span, help=help)
        return None
    return range(first, last + 1, step)


def _layer(node: ast.Layers, values: Values, parts: _Parts) -> Layer | None:
    """An attention, then a feed-forward block. Alike layers are one object."""
    if len(node.blocks) != 2:
        span = node.blocks[2].span if len(node.blocks) > 2 else node.where.span
        help = "write it like `layers 0..31 { attention  moe(router, experts) }`"
        values.problems.add("E0216", "a layer is an attention and a feed-forward block", span, help=help)
        return None
    attention = _part(node.blocks[0], ast.Attention, values, parts)
    ffn = _ffn(node.blocks[1], values, parts)
    if not isinstance(attention, (Gqa, Mla)) or ffn is None:
        return None
    key = (attention.name, ffn.inner if isinstance(ffn, Swiglu) else (ffn.router, ffn.routed, ffn.shared))
    return parts.layers.setdefault(key, Layer(attention, ffn, node.span))


def _part(node: ast.Expression, kind: type[Part], values: Values, parts: _Parts) -> Gqa | Mla | Router | Experts | None:
    """The checked part a name stands for, if it is of the kind wanted here."""
    wanted = KINDS[kind]
    of_kind = [name for name, part in parts.declared.items() if isinstance(part, kind)]
    if not isinstance(node, ast.Name):
        values.problems.add("E0216", f"{wanted} is given by name here", node.span, help="declare it and write its name")
        return None
    part = parts.declared.get(node.id)
    if part is None:
        help = did_you_mean(node.id, of_kind) or f"declare {wanted} named `{node.id}` in this model"
        values.problems.add("E0201", f"unknown name `{node.id}`", node.span, f"{wanted} is wanted here", help)
        return None
    parts.used.add(node.id)
    if not isinstance(part, kind):
        also = [Label(part.name.span, "declared here")]
        message = f"`{node.id}` is {KINDS[type(part)]}, not {wanted}"
        help = did_you_mean(node.id, of_kind) or f"write the name of {wanted}"
        values.problems.add("E0216", message, node.span, help=help, also=also)
        return None
    return parts.checked[node.id]


def _ffn(node: ast.Name | ast.Call, values: Values, parts: _Parts) -> Swiglu | Moe | None:
    if isinstance(node, ast.Call) and node.name.id == "swiglu":
        return check_swiglu(node, values)
    if isinstance(node, ast.Call) and node.name.id == "moe":
        return _moe(node, values, parts)
    name = node.name.id if isinstance(node, ast.Call) else node.id
    help = did_you_mean(name, BLOCKS) or "write `swiglu(INNER)` or `moe(ROUTER, EXPERTS)`"
    values.problems.add("E0216", f"`{node.span.text[:40]}` is no feed-forward block", node.span, help=help)
    return None


def _moe(node: ast.Call, values: Values, parts: _Parts) -> Moe | None:
    fields = arguments(values, node, ("router", "routed", "shared"))
    kinds: dict[str, type[Part]] = {"router": ast.Router, "routed": ast.ExpertGroup, "shared": ast.ExpertGroup}
    found = {}
    for key, kind in kinds.items():
        given = fields.need(key) if key != "shared" or fields.has(key) else None
        found[key] = _part(given, kind, values, parts) if given is not None else None
    router, routed, shared = found["router"], found["routed"], found["shared"]
    if not isinstance(router, Router) or not isinstance(routed, Experts):
        return None
    if (fields.has("shared") and shared is None) or not _fits(router, routed, values, parts):
        return None
    return Moe(router, routed, shared if isinstance(shared, Experts) else None, node.span)


def _fits(router: Router, routed: Experts, values: Values, parts: _Parts) -> bool:
    """Whether the router can select `top` distinct experts of this group (faults B29, B37)."""
    fields, declared = parts.router_fields[router.name], parts.declared[routed.name]
    also = [Label(declared.span, f"only {routed.count} experts are declared")]
    if router.top > routed.count:
        label, help = f"{router.top} experts are selected per token", f"lower `top` to at most {routed.count}"
        message = "`top` exceeds the number of experts"
        values.problems.add("E0203", message, fields.at("top"), label, help, also)
        return False
    if routed.count % router.groups:
        also = [Label(declared.span, f"{routed.count} experts")]
        help = f"use a number of groups that divides {routed.count}"
        message = f"{routed.count} experts do not split into {router.groups} equal groups"
        values.problems.add("E0213", message, fields.at("groups"), help=help, also=also)
        return False
    eligible = router.keep * (routed.count // router.groups)
    if router.top > eligible:
        also = [Label(fields.at("keep"), f"{router.keep} of {router.groups} groups keep {eligible} experts eligible")]
        message = f"`top` = {router.top} exceeds the {eligible} experts of the kept groups"
        help = f"lower `top` to at most {eligible}, or keep more groups"
        values.problems.add("E0213", message, fields.at("top"), help=help, also=also)
        return False
    return True


def _report_unused(parts: _Parts, values: Values) -> None:
    for name, part in parts.declared.items():
        if name not in parts.used:
            message = f"{KINDS[type(part)][KINDS[type(part)].index(' ') + 1 :]} `{name}` is not used"
            values.problems.add("E0212", message, part.name.span, help="use it in `layers`, or remove it")
