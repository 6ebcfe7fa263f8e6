"""Plans to `checked.Plan`: what runs where, and whether the model's dimensions fit the mesh's degrees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from moec.blocks import BLOCK
from moec.checked import Experts, Gqa, MeshSpec, Model, Moe, Phase, Plan
from moec.diagnostics import Label, Span, did_you_mean
from moec.grammar import ast
from moec.semantics.cache import DeclaredCache
from moec.semantics.cache_fit import fit_cache
from moec.semantics.fields import Fields, settings
from moec.semantics.values import Values

DTYPES = ("bf16", "fp16", "fp32")
EXCHANGES = ("flat", "padded", "gather", "two_hop", "aggregate", "auto")
COMBINES = ("ordered", "reduced", "auto")
SUMS = ("fixed", "any")
PHASE_SETTINGS = ("exchange", "combine", "capacity", "overlap", "sums")
#: Most chunks of `overlap`: each costs two messages per peer and layer more.
MOST_CHUNKS = 8
DEFAULT_CONTEXT, DEFAULT_TOKENS, DEFAULT_BATCH = 4096, 4096, 8
T = TypeVar("T")
SIZES = {"prefill": ("tokens", DEFAULT_TOKENS), "decode": ("batch", DEFAULT_BATCH)}


def check_plan(
    node: ast.Plan,
    values: Values,
    models: Mapping[str, Model | None],
    meshes: Mapping[str, MeshSpec | None],
    caches: Mapping[str, DeclaredCache | None],
    expert_views: Mapping[str, Span],
    one_rank: MeshSpec | None,
) -> Plan | None:
    """The plan, or None after errors were reported. `expert_views`: where each mesh says something about experts.

    `one_rank` is the mesh of a `run` that names none. What is declared and None was reported where it is declared.
    """
    before = len(values.problems.found)
    fields = Fields(values, f"plan `{node.name.id}`", node.name.span, settings(node.items), ("compute", "context"))
    context = fields.whole("context", DEFAULT_CONTEXT)
    compute = fields.choice("compute", DTYPES) if fields.has("compute") else ""
    phases = {kind: _phase(node, kind, values) for kind in SIZES}
    run = _run(node, values)
    if run is None:
        return None
    model = _find(run.model, "model", models, values)
    mesh = _find(run.mesh, "mesh", meshes, values) if run.mesh is not None else one_rank
    declared = _find(run.cache, "cache", caches, values) if run.cache is not None else None
    if model is None or mesh is None or context is None or compute is None:
        return None
    _join(model, mesh, run.span, values)
    for phase in phases.values():
        _need_equal_nodes(node, phase, mesh, values)
        _need_exchange(node, phase, model, mesh, run.span, values)
    _need_experts(model, mesh, expert_views.get(run.mesh.id if run.mesh else ""), run.span, values)
    cache = None
    if declared is not None and run.cache is not None:
        cache = fit_cache(declared, model, mesh, run.cache.span, values.problems)
        for phase in phases.values():
            _need_one_piece(node, phase, run.cache, values)
    prefill, decode = phases["prefill"], phases["decode"]
    if prefill is None or decode is None or len(values.problems.found) > before:
        return None
    return Plan(node.name.id, model, mesh, compute or model.dtype, context, prefill, decode, node.span, cache)


def _run(node: ast.Plan, values: Values) -> ast.Run | None:
    runs = [item for item in node.items if isinstance(item, ast.Run)]
    if not runs:
        help = "add `run MODEL on MESH`"
        values.problems.add("E0204", f"plan `{node.name.id}` needs `run`", node.name.span, help=help)
        return None
    for again in runs[1:]:
        also = [Label(runs[0].span, "first given here")]
        values.problems.add("E0205", "`run` is given twice", again.span, help="write a plan for each", also=also)
    return runs[0]


def _find(name: ast.Name, kind: str, declared: Mapping[str, T | None], values: Values) -> T | None:
    if name.id not in declared:
        help = did_you_mean(name.id, declared) or "declare it, or name its file with `use`"
        values.problems.add("E0201", f"unknown {kind} `{name.id}`", name.span, help=help)
    return declared.get(name.id)


def _written(node: ast.Plan, kind: str) -> list[ast.Phase]:
    return [item for item in node.items if isinstance(item, ast.Phase) and item.kind == kind]


def _phase(node: ast.Plan, kind: str, values: Values) -> Phase | None:
    """The settings of one phase; the phase may be left out."""
    phases = _written(node, kind)
    for again in phases[1:]:
        also = [Label(phases[0].span, "first given here")]
        values.problems.add("E0205", f"`{kind}` is given twice", again.span, help="join them", also=also)
    span = phases[0].span if phases else node.name.span
    key, default = SIZES[kind]
    items = phases[0].items if phases else ()
    fields = Fields(values, f"`{kind}`", span, [(i.name, i.value) for i in items], (key, *PHASE_SETTINGS))
    size = fields.whole(key, default)
    exchange = fields.choice("exchange", EXCHANGES, "flat")
    sums = fields.choice("sums", SUMS, "fixed")
    combine = _combine(fields, exchange, sums)
    capacity = _capacity(fields, exchange)
    drop = _drop(items, values)
    overlap = _overlap(fields, exchange)
    if not (overlap and size and exchange and combine and sums):
        return None
    return Phase(kind, size, exchange, span, combine, capacity, drop, overlap, sums)


def _combine(fields: Fields, exchange: str | None, sums: str | None) -> str | None:
    """How results come home. Only `flat` sends a row for each choice of a token home, to be summed there in order."""
    in_order = "reduced" if sums == "any" else "ordered"
    default = in_order if exchange == "flat" else "auto" if exchange == "auto" else "reduced"
    combine = fields.choice("combine", COMBINES, default)
    if exchange == "auto" and combine not in (None, "auto"):
        _refuse_pair(fields, f"combine = {combine}", exchange, "both are chosen together: leave `combine` out")
    elif exchange not in (None, "flat", "auto") and combine == "ordered":
        help = "sums come back there: leave `combine` out, or use `exchange = flat`"
        _refuse_pair(fields, "combine = ordered", exchange, help)
    elif sums == "any" and combine == "ordered":
        also = [Label(fields.at("sums"), "because of this")]
        message, help = "`combine = ordered` does not go with `sums = any`", "leave one of them out"
        fields.problems.add("E0224", message, fields.key_at("combine"), help=help, also=also)
    return default if combine == "auto" and exchange != "flat" else combine


def _capacity(fields: Fields, exchange: str | None) -> float | None:
    if not fields.has("capacity"):
        return None
    if exchange not in (None, "padded"):
        help = "only a padded exchange has one: leave it out, or use `exchange = padded`"
        _refuse_pair(fields, "capacity", exchange, help)
    return fields.decimal("capacity")


def _refuse_pair(fields: Fields, what: str, exchange: str | None, help: str) -> None:
    """A setting that does not go with the phase's exchange."""
    also = [Label(fields.at("exchange"), "because of this")] if fields.has("exchange") else []
    message = f"`{what}` does not go with `exchange = {exchange}`"
    fields.problems.add("E0224", message, fields.key_at(what.split()[0]), help=help, also=also)


def _drop(items: Sequence[ast.Setting | ast.Capped], values: Values) -> bool:
    """Whether what does not fit is left out."""
    capped = [item for item in items if isinstance(item, ast.Capped)]
    for item in capped:
        if item.name.id != "capacity":
            help = "only `capacity = N drop` has a `drop`"
            values.problems.add("E0202", f"`{item.name.id}` takes no `drop`", item.span, help=help)
    return bool(capped)


def _overlap(fields: Fields, exchange: str | None) -> str | None:
    """`off`, `auto`, or in how many chunks the tokens of a sparse layer go."""
    node = fields.need("overlap") if fields.has("overlap") else None
    if node is None or isinstance(node, (ast.Name, ast.Call)):
        return fields.choice("overlap", ("off", "auto"), "off")
    chunks = fields.whole("overlap", low=2, high=MOST_CHUNKS)
    if chunks is not None and exchange == "padded":
        help = "a padded step has one shape: use `overlap = auto` or `off`"
        _refuse_pair(fields, f"overlap = {chunks}", exchange, help)
    return None if chunks is None else str(chunks)


def _join(model: Model, mesh: MeshSpec, run: Span, values: Values) -> None:
    """Every dimension that a mesh axis shards splits evenly; the errors say which degrees would do."""
    if mesh.pp > len(model.layers):
        depth = f"{len(model.layers)} layer{'s' * (len(model.layers) > 1)}"
        message = f"the {depth} of `{model.name}` cannot be split over pp({mesh.pp})"
        help = f"pp can be 1 to {len(model.layers)}"
        values.problems.add("E0310", message, run, help=help, also=[Label(mesh.span, f"pp({mesh.pp})")])
    for layer in dict.fromkeys(model.layers):
        attention, ffn = layer.attention, layer.ffn
        heads = f"the {attention.heads} heads of `{attention.name}`"
        is_split = _divide("E0305", heads, attention.heads, "tp", mesh, attention.span, run, values)
        if is_split and isinstance(attention, Gqa):
            _share_kv(attention, mesh, run, values)
        if isinstance(ffn, Moe):
            _split_experts(ffn.routed, model.expert_dtype, mesh, run, values)


def _split_experts(routed: Experts, dtype: str | None, mesh: MeshSpec, run: Span, values: Values) -> None:
    """Over etp: an expert's inside by its columns, or in fp8 by whole blocks of them, which share a scale."""
    what, size = f"the inner size {routed.inner} of `{routed.name}`", routed.inner
    if dtype == "fp8":
        what, size = f"{what}, in fp8 blocks of {BLOCK},", size // BLOCK if size % BLOCK == 0 else 1
    _divide("E0307", what, size, "etp", mesh, routed.span, run, values)


def _divide(
    code: str, what: str, size: int, axis: str, mesh: MeshSpec, declared: Span, run: Span, values: Values
) -> bool:
    degree: int = getattr(mesh, axis)
    if size % degree:
        also = [Label(declared, "declared here")]
        message = f"{what} cannot be split over {axis}({degree})"
        values.problems.add(code, message, run, help=f"{axis} can be {_degrees(size)}", also=also)
    return size % degree == 0


def _share_kv(attention: Gqa, mesh: MeshSpec, run: Span, values: Values) -> None:
    """KV heads are split over tp, or each is copied to the same number of ranks."""
    kv, tp = attention.kv_heads, mesh.tp
    if kv % tp and tp % kv:
        also = [Label(attention.span, "declared here")]
        help = f"tp can be {_degrees(kv)}, or a multiple of {kv}"
        message = f"{kv} KV heads of `{attention.name}` neither split over tp({tp}) nor repeat evenly on it"
        values.problems.add("E0306", message, run, help=help, also=also)


def _need_equal_nodes(node: ast.Plan, phase: Phase | None, mesh: MeshSpec, values: Values) -> None:
    """Hops between and inside nodes take place at the same local index in every node."""
    if phase is None or phase.exchange not in ("two_hop", "aggregate") or mesh.ep == 1 or mesh.nodes:
        return
    at = next(item.value.span for item in _written(node, phase.name)[0].items if item.name.id == "exchange")
    cluster, ranks = mesh.cluster, mesh.edp * mesh.ep
    fit = [d for d in range(2, ranks + 1) if ranks % d == 0 and replace(mesh, edp=ranks // d, ep=d).nodes]
    help = f"ep can be {', '.join(map(str, fit))}, or use another exchange" if fit else "use another exchange"
    also = [Label(mesh.span, f"{cluster.num_nodes} nodes of {cluster.devices_per_node} devices")]
    message = f"`{phase.exchange}` needs the same number of ranks of an ep({mesh.ep}) group in each node it spans"
    values.problems.add("E0309", message, at, help=help, also=also)


def _need_exchange(
    node: ast.Plan, phase: Phase | None, model: Model, mesh: MeshSpec, run: Span, values: Values
) -> None:
    """Chunks overlap an exchange with what the experts do: where nothing is exchanged they would do nothing."""
    routes = any(isinstance(layer.ffn, Moe) for layer in model.layers)
    if phase is None or phase.overlap in ("off", "auto") or (routes and mesh.ep > 1):
        return
    why = f"experts with ep({mesh.ep}) exchange nothing" if routes else f"model `{model.name}` has no experts"
    message = f"`overlap = {phase.overlap}` has nothing to overlap: {why}"
    help = "use a mesh with `experts = ep(2)` or more, or " * routes + "leave `overlap` out"
    also = [Label(run, "because of this")]
    values.problems.add("E0224", message, _overlap_at(node, phase), help=help, also=also)


def _overlap_at(node: ast.Plan, phase: Phase) -> Span:
    return next(item.name.span for item in _written(node, phase.name)[0].items if item.name.id == "overlap")


def _need_one_piece(node: ast.Plan, phase: Phase | None, cache: ast.Name, values: Values) -> None:
    """A cache is asked once for all experts that a layer's rows need: chunks would copy an expert once for each."""
    if phase is None or phase.overlap in ("off", "auto"):
        return
    at = _overlap_at(node, phase)
    message = f"`overlap = {phase.overlap}` does not go with cache `{cache.id}`"
    help = "cached experts are looked up once a layer: use `overlap = auto` or `off`"
    values.problems.add("E0224", message, at, help=help, also=[Label(cache.span, "because of this")])


def _degrees(size: int) -> str:
    """The first few divisors of a size, all of them where there are few."""
    divisors = [d for d in range(1, min(size, 1024) + 1) if size % d == 0]
    return ", ".join(map(str, divisors[:12])) + (" ..." if len(divisors) > 12 or size > 1024 else "")


def _need_experts(model: Model, mesh: MeshSpec, view: Span | None, run: Span, values: Values) -> None:
    """What a mesh says about experts must have experts to act on (fault B30)."""
    if view is not None and not any(isinstance(layer.ffn, Moe) for layer in model.layers):
        also = [Label(view, "this would do nothing")]
        message = f"model `{model.name}` has no experts for mesh `{mesh.name}` to place"
        values.problems.add("E0308", message, run, help="leave `experts` and `placement` out of the mesh", also=also)
