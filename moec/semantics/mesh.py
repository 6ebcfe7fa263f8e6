"""Cluster and mesh declarations to `topology.Cluster` and `checked.MeshSpec`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from moec.checked import MeshSpec
from moec.diagnostics import Label, Span, did_you_mean
from moec.grammar import ast
from moec.semantics.fields import Fields, arguments, settings, whole
from moec.semantics.values import Values
from moec.topology import Cluster, Device, Link

CLUSTER_SETTINGS = ("devices", "memory", "memory_rate", "compute", "intra", "inter", "host", "nvme")
DTYPES = ("fp32", "bf16", "fp16", "fp8", "fp4")
AXES = {"attention": ("dp", "tp"), "experts": ("edp", "ep", "etp")}
#: Process groups list every rank, so their number is bounded.
MAX_RANKS = 1 << 16
UNBUILT = {"replicas": "each expert has one copy in a group: leave `replicas` out"}


def check_cluster(node: ast.Cluster, values: Values) -> Cluster | None:
    """One node of the cluster; 0 devices where `devices` is left out: as many as the mesh asks for."""
    before = len(values.problems.found)
    fields = Fields(values, f"cluster `{node.name.id}`", node.name.span, settings(node.items), CLUSTER_SETTINGS)
    devices = fields.whole("devices", 0, high=MAX_RANKS)
    memory = fields.amount("memory", "bytes", "80 GB") if fields.has("memory") else None
    rate = fields.amount("memory_rate", "bytes per second", "3.35 TB/s") if fields.has("memory_rate") else None
    tflops = _peak(fields) if fields.has("compute") else ()
    links = {key: _link(fields, key) for key in ("intra", "inter", "host", "nvme") if fields.has(key)}
    if devices is None or len(values.problems.found) > before:
        return None
    device = Device(int(memory) if memory else None, rate / 1e9 if rate else None, tflops)
    return Cluster(node.name.id, 1, devices, device, **links)


def _peak(fields: Fields) -> tuple[tuple[str, float], ...]:
    call = fields.call("compute", "peak")
    given = arguments(fields.values, call, DTYPES) if call else None
    if given is None:
        return ()
    rates = [(d, given.amount(d, "arithmetic rate", "989 TFLOP/s")) for d in DTYPES if given.has(d)]
    return tuple((dtype, rate) for dtype, rate in rates if rate is not None)


def _link(fields: Fields, key: str) -> Link | None:
    call = fields.call(key, "link")
    if call is None:
        return None
    given = arguments(fields.values, call, ("rate", "latency", "concurrency"))
    rate = given.amount("rate", "bytes per second", "450 GB/s")
    latency = given.amount("latency", "time", "2 us", above_zero=False) if given.has("latency") else 0.0
    concurrency = given.whole("concurrency", Link.concurrency, high=MAX_RANKS)
    return Link(rate / 1e9, latency, concurrency) if rate and latency is not None and concurrency else None


def check_mesh(node: ast.Mesh, values: Values, clusters: Mapping[str, Cluster | None]) -> MeshSpec | None:
    """The degrees, held against each other and against the cluster. None after errors were reported."""
    given = settings(node.items)
    fields = Fields(values, f"mesh `{node.name.id}`", node.name.span, given, ("placement", "stages"), UNBUILT)
    placement = fields.choice("placement", ("linear", "round_robin"), "linear")
    stages = _stages(fields)
    axes = _axes(node, values)
    cluster = _cluster(node, values, clusters)
    if axes is None or placement is None or stages is None:
        return None
    degrees = _fill(axes)
    if not _agree(node, degrees, stages, values) or cluster is None:
        return None
    cluster = _sized(node, cluster, degrees["dp"] * degrees["tp"], stages, values)
    if cluster is None:
        return None
    return MeshSpec(node.name.id, cluster, **degrees, placement=placement, span=node.span, pp=stages)


def _stages(fields: Fields) -> int | None:
    """`stages = pp(2)`: pipeline stages, each on as many ranks as the two views have."""
    if not fields.has("stages"):
        return 1
    call = fields.call("stages", "pp")
    return None if call is None else arguments(fields.values, call, ("degree",)).whole("degree", high=MAX_RANKS)


def _axes(node: ast.Mesh, values: Values) -> dict[str, dict[str, int]] | None:
    """View -> axis -> degree, as written."""
    views: dict[str, dict[str, int]] = {}
    seen: dict[str, Span] = {}
    is_broken = False
    for view in (item for item in node.items if isinstance(item, ast.View)):
        if view.kind in seen:
            also = [Label(seen[view.kind], "first given here")]
            values.problems.add("E0205", f"`{view.kind}` is given twice", view.span, help="remove one", also=also)
            is_broken = True
            continue
        seen[view.kind] = view.span
        axes = _view_axes(view, values)
        is_broken |= axes is None
        views[view.kind] = axes or {}
    return None if is_broken else views


def _view_axes(view: ast.View, values: Values) -> dict[str, int] | None:
    """`dp(4) * tp(8)` as {dp: 4, tp: 8}."""
    value = view.value
    factors = [value.first, *(f.value for f in value.factors)] if isinstance(value, ast.Product) else [value]
    divided = isinstance(value, ast.Product) and any(f.operator == "/" for f in value.factors)
    if divided or not all(isinstance(f, ast.Call) for f in factors):
        example = " * ".join(f"{axis}(2)" for axis in AXES[view.kind])
        message = f"`{view.kind}` is a product of axes"
        values.problems.add("E0303", message, value.span, help=f"write it like `{view.kind} = {example}`")
        return None
    degrees: dict[str, int | None] = {}
    for call in factors:
        assert isinstance(call, ast.Call)
        axis = call.name.id
        if axis not in AXES[view.kind] or axis in degrees:
            _bad_axis(view, call, values)
            return None
        degrees[axis] = arguments(values, call, ("degree",)).whole("degree", high=MAX_RANKS)
    if list(degrees) != sorted(degrees, key=AXES[view.kind].index):
        order = " * ".join(axis for axis in AXES[view.kind] if axis in degrees)
        message = "the axes are in the wrong order: ranks are numbered with the last axis running fastest"
        values.problems.add("E0303", message, value.span, help=f"write them as {order}")
        return None
    return None if None in degrees.values() else {a: d for a, d in degrees.items() if d is not None}


def _bad_axis(view: ast.View, call: ast.Call, values: Values) -> None:
    axis, own = call.name.id, AXES[view.kind]
    if axis in own:
        values.problems.add("E0205", f"axis `{axis}` is given twice", call.span, help="remove one of them")
        return
    other = next((v for v, axes in AXES.items() if axis in axes), None)
    names = ", ".join(f"`{a}`" for a in own)
    other = "stages" if axis == "pp" else other
    help = f"`{axis}` belongs to `{other}`" if other else did_you_mean(axis, own) or f"its axes are {names}"
    values.problems.add("E0303", f"`{view.kind}` has no axis `{axis}`", call.name.span, help=help)


def _fill(views: dict[str, dict[str, int]]) -> dict[str, int]:
    """Degrees left out: 1, except where one view alone is given, which then decides the other."""
    degrees = {"dp": 1, "tp": 1, "edp": 1, "ep": 1, "etp": 1}
    for axes in views.values():
        degrees.update(axes)
    if "experts" not in views:
        degrees["ep"] = degrees["dp"] * degrees["tp"]
    elif "attention" not in views:
        degrees["dp"], degrees["tp"] = degrees["edp"] * degrees["ep"], degrees["etp"]
    return degrees


def describe(degrees: Mapping[str, int], view: str) -> str:
    """`dp(4) * tp(8) = 32`, for messages."""
    axes = AXES[view]
    product = " * ".join(f"{axis}({degrees[axis]})" for axis in axes)
    return f"{product} = {prod(degrees[a] for a in axes)}"


def _view_span(node: ast.Mesh, kind: str) -> Span:
    return next((i.span for i in node.items if isinstance(i, ast.View) and i.kind == kind), node.name.span)


def _agree(node: ast.Mesh, degrees: dict[str, int], stages: int, values: Values) -> bool:
    """Both views span the same ranks, and their tensor degrees nest."""
    problems, at = values.problems, _view_span(node, "experts")
    attention, experts = describe(degrees, "attention"), describe(degrees, "experts")
    world = degrees["dp"] * degrees["tp"]
    also = [Label(_view_span(node, "attention"), attention)]
    if degrees["edp"] * degrees["ep"] * degrees["etp"] != world:
        message = f"the two views span different numbers of ranks: {attention}, but {experts}"
        problems.add("E0301", message, at, experts, "make dp * tp equal to edp * ep * etp", also)
        return False
    if world * stages > MAX_RANKS:
        product = attention if stages == 1 else f"{attention}, times pp({stages}) = {world * stages}"
        message = f"a mesh has at most {MAX_RANKS} ranks: {product}"
        problems.add("E0302", message, _view_span(node, "attention"), help="lower a degree")
        return False
    tp, etp = degrees["tp"], degrees["etp"]
    if tp % etp and etp % tp:
        message = f"tp({tp}) and etp({etp}) do not divide one another"
        problems.add("E0304", message, at, help="make one a multiple of the other", also=also)
        return False
    return True


def _cluster(node: ast.Mesh, values: Values, clusters: Mapping[str, Cluster | None]) -> Cluster | None:
    """The cluster with its number of nodes, or None after an error. No cluster named: localhost."""
    where = node.location
    if where is None:
        here = clusters.get("localhost")
        return None if here is None else replace(here, device=Device())
    nodes = 1 if where.nodes is None else whole(values, where.nodes, "the number of nodes", high=MAX_RANKS)
    name = where.cluster.id
    if name not in clusters:
        help = did_you_mean(name, clusters) or f"add `use cluster {name}`, or declare it"
        values.problems.add("E0201", f"unknown cluster `{name}`", where.cluster.span, help=help)
        return None
    cluster = clusters[name]
    if cluster is None or nodes is None:
        return None
    return replace(cluster, num_nodes=nodes)


def _sized(node: ast.Mesh, cluster: Cluster, ranks: int, stages: int, values: Values) -> Cluster | None:
    """The cluster, of exactly as many devices as all stages have ranks; one of open size takes as many as needed."""
    world = ranks * stages
    if cluster.devices_per_node == 0 and world % cluster.num_nodes == 0:
        return replace(cluster, devices_per_node=world // cluster.num_nodes)
    if cluster.num_devices == world:
        return cluster
    where = node.location
    span = where.span if where else node.name.span
    nodes = f"{cluster.num_nodes} node{'s' * (cluster.num_nodes > 1)}"
    size = f"{nodes} of {cluster.devices_per_node or 'equally many'} devices"
    message = f"the mesh has {world} ranks, but `{cluster.name}` has {size}"
    if cluster.devices_per_node:
        message += f" = {cluster.num_devices}"
    degrees = _view_span(node, "attention")
    also = [Label(degrees, f"{ranks} ranks")] if degrees != node.name.span else []
    also += [Label(item.span, f"times {stages}") for item in node.items if _is_stages(item)]
    values.problems.add("E0302", message, span, help="make the product of the axes equal to the devices", also=also)
    return None


def _is_stages(item: ast.View | ast.Setting) -> bool:
    return isinstance(item, ast.Setting) and item.name.id == "stages"
    return None
