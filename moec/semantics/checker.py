"""The checker: a .moe file and what it uses -> checked models, meshes and plans. No torch.

1. read the file and, through `use`, others; 2. add the default plan where there is one model and no plan;
3. apply `--set`; 4. check clusters, models, meshes, caches and plans, in this order, each with all its errors;
5. refuse what is declared and not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TypeVar

from moec.checked import MeshSpec, Model, Plan
from moec.diagnostics import CompileError, Diagnostic, Label, SourceFile, Span, did_you_mean, fail
from moec.grammar import ast
from moec.grammar.parser import parse
from moec.semantics.cache import DeclaredCache, check_cache
from moec.semantics.files import File, Load, Use, load_file, load_files, shipped_file
from moec.semantics.mesh import check_cluster, check_mesh
from moec.semantics.model import check_model
from moec.semantics.plan import check_plan
from moec.semantics.set import apply_overrides
from moec.semantics.values import Problems, Values
from moec.topology import Cluster

KINDS: dict[type[ast.Node], str] = {
    ast.Cluster: "cluster",
    ast.Model: "model",
    ast.Mesh: "mesh",
    ast.Cache: "cache",
    ast.Plan: "plan",
}
Declared = ast.Cluster | ast.Model | ast.Mesh | ast.Cache | ast.Plan
T = TypeVar("T")


@dataclass(frozen=True)
class Spec:
    """Everything a file and what it uses declare, by name. `sources`: all files, the main one first."""

    models: Mapping[str, Model]
    meshes: Mapping[str, MeshSpec]
    plans: Mapping[str, Plan]
    sources: tuple[SourceFile, ...]

    def plan(self, name: str | None = None) -> Plan:
        """The plan of this name, or the only one. Raises MoecError E0223."""
        names = ", ".join(f"`{n}`" for n in self.plans)
        file = self.sources[0].name
        if name is not None and name not in self.plans:
            help = did_you_mean(name, self.plans) or (f"its plans are {names}" if names else "declare a plan")
            raise fail("E0223", f"`{file}` has no plan `{name}`", help)
        if name is None and len(self.plans) != 1:
            what = f"has {len(self.plans)} plans" if self.plans else "has no plan"
            help = f"choose one with `--plan`: {names}" if self.plans else "add `plan NAME { run MODEL on MESH }`"
            raise fail("E0223", f"`{file}` {what}", help)
        return self.plans[name if name is not None else next(iter(self.plans))]


def check(source: SourceFile, load: Load = load_file, overrides: Sequence[str] = ()) -> Spec:
    """Check a file. `load` reads what it uses; `overrides` are `KEY=VALUE` as `--set` takes them.

    Raises CompileError with every error found: E01, E02, E0301-E0319.
    """
    problems = Problems()
    files = load_files(source, load, problems)
    _add_default_plan(files)
    apply_overrides(files, overrides, problems)
    scope = _Scope(files, problems)
    spec = scope.check()
    if not problems.found:
        scope.report_unused()
    if problems.found:
        raise CompileError(*_in_order(problems.found, files))
    return spec


def _in_order(found: list[Diagnostic], files: list[File]) -> list[Diagnostic]:
    """By file, main file first, then by place; what `--set` did comes last."""
    order = {file.source.name: i for i, file in enumerate(files)}

    def key(diagnostic: Diagnostic) -> tuple[int, int]:
        span = diagnostic.primary.span if diagnostic.primary else None
        return (order.get(span.source.name, len(order)), span.start) if span else (0, 0)

    return sorted(found, key=key)


def _add_default_plan(files: list[File]) -> None:
    """One model, at most one mesh, at most one cache, no plan: the plan `default` of them. No mesh: one rank."""
    declared = [d for file in files for d in file.declarations]
    models = [d for d in declared if isinstance(d, ast.Model)]
    meshes = [d for d in declared if isinstance(d, ast.Mesh)]
    caches = [d for d in declared if isinstance(d, ast.Cache)]
    if len(models) != 1 or len(meshes) > 1 or len(caches) > 1 or any(isinstance(d, ast.Plan) for d in declared):
        return
    span = models[0].name.span
    if not meshes:
        meshes = [_one_rank(span)]
        files[0].declarations.append(meshes[0])
    run = ast.Run(models[0].name, meshes[0].name, caches[0].name if caches else None, span=span)
    files[0].declarations.append(ast.Plan(ast.Name("default", span=span), (run,), span=span))


def _one_rank(span: Span) -> ast.Mesh:
    """The mesh `default`: one rank of localhost."""
    return ast.Mesh(ast.Name("default", span=span), None, (), span=span)


@dataclass
class _Scope:
    """All declarations of all files by kind and name, the values of each file's constants, and what was used."""

    files: list[File]
    problems: Problems
    named: dict[tuple[str, str], tuple[Declared, File]] = field(default_factory=dict)
    values: dict[str, Values] = field(default_factory=dict)
    used: set[tuple[str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        for file in self.files:
            constants = [d for d in file.declarations if isinstance(d, ast.Constant)]
            self.values[file.source.name] = Values(constants, self.problems)
            for declaration in file.declarations:
                if isinstance(declaration, (ast.Cluster, ast.Model, ast.Mesh, ast.Cache, ast.Plan)):
                    self._name(declaration, file)

    def _name(self, node: Declared, file: File) -> None:
        kind = KINDS[type(node)]
        first, _ = self.named.setdefault((kind, node.name.id), (node, file))
        if first is not node:
            also = [Label(first.name.span, "first declared here")]
            message = f"{kind} `{node.name.id}` is declared twice"
            self.problems.add("E0206", message, node.name.span, help="rename one of them", also=also)

    def _of(self, kind: str) -> list[tuple[str, Declared, Values]]:
        found = [(name, *pair) for (k, name), pair in self.named.items() if k == kind]
        return [(name, node, self.values[file.source.name]) for name, node, file in found]

    def check(self) -> Spec:
        """Check every declaration. Those that are broken are left out of the result."""
        clusters: dict[str, Cluster | None] = {}
        models: dict[str, Model | None] = {}
        meshes: dict[str, MeshSpec | None] = {}
        caches: dict[str, DeclaredCache | None] = {}
        plans: dict[str, Plan | None] = {}
        views: dict[str, Span] = {}
        for name, node, values in self._of("cluster"):
            clusters[name] = check_cluster(node, values) if isinstance(node, ast.Cluster) else None
        clusters.setdefault("localhost", _localhost())
        for name, node, values in self._of("model"):
            models[name] = check_model(node, values) if isinstance(node, ast.Model) else None
        for name, node, values in self._of("mesh"):
            if isinstance(node, ast.Mesh):
                meshes[name] = check_mesh(node, values, clusters)
                views.update((name, i.span) for i in node.items if not isinstance(i, ast.View) or i.kind == "experts")
                self.used.add(("cluster", node.location.cluster.id if node.location else "localhost"))
        for name, node, values in self._of("cache"):
            caches[name] = check_cache(node, values) if isinstance(node, ast.Cache) else None
        for name, node, values in self._of("plan"):
            if isinstance(node, ast.Plan):
                alone = check_mesh(_one_rank(node.name.span), values, clusters)
                plans[name] = check_plan(node, values, models, meshes, caches, views, alone)
                for run in (i for i in node.items if isinstance(i, ast.Run)):
                    used = {"model": run.model, "mesh": run.mesh, "cache": run.cache}
                    self.used.update((kind, name.id) for kind, name in used.items() if name is not None)
        for values in self.values.values():
            values.check_constants()
        sources = tuple(file.source for file in self.files)
        return Spec(_whole(models), _whole(meshes), _whole(plans), sources)

    def report_unused(self) -> None:
        """What is declared acts or is refused. A file without a plan is a library: only its constants must be used."""
        for file in self.files:
            values = self.values[file.source.name]
            for name, constant in values.constants.items():
                if name not in values.used:
                    self._unused(f"constant `{name}`", constant.name.span)
        if not any(kind == "plan" for kind, _ in self.named):
            return
        for (kind, name), (node, file) in self.named.items():
            if file.used_by is None and kind != "plan" and (kind, name) not in self.used:
                self._unused(f"{kind} `{name}`", node.name.span)
        for use in self.files[0].declarations:
            if isinstance(use, (ast.UseShipped, ast.UseFile)) and not self._is_needed(use):
                self._unused(f"`{use.span.text}`", use.span)

    def _is_needed(self, use: Use) -> bool:
        if isinstance(use, ast.UseShipped):
            return (use.kind, use.name.id) in self.used
        # a file that was used before, or that is used for a plan, a name or a file of its own
        first = next((file for file in self.files if file.used_by is use), None)
        return first is None or self._serves(first)

    def _serves(self, file: File) -> bool:
        own = [(KINDS[type(d)], d.name.id) for d in file.declarations if isinstance(d, tuple(KINDS))]  # type: ignore[union-attr]
        inner = [f for f in self.files if any(f.used_by is d for d in file.declarations)]
        return any(kind == "plan" or (kind, n) in self.used for kind, n in own) or any(self._serves(f) for f in inner)

    def _unused(self, what: str, at: Span) -> None:
        self.problems.add("E0212", f"{what} is not used", at, help="use it, or remove it")


@cache
def _localhost() -> Cluster | None:
    """Where a mesh without a cluster sits."""
    node = next(d for d in parse(shipped_file("cluster", "localhost")).declarations if isinstance(d, ast.Cluster))
    return check_cluster(node, Values((), Problems()))


def _whole(checked: Mapping[str, T | None]) -> dict[str, T]:
    return {name: value for name, value in checked.items() if value is not None}
