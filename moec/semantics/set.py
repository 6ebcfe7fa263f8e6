"""`--set KEY=VALUE`: changes of the syntax tree before it is checked, so that a bad one is refused like any other text.

A key is a path: `plan.context`, `plan.decode.batch`, `mesh.attention`, `serve.exchange` (both phases), `const.n`.
It begins with a kind, which means every declaration of that kind in the main file, or with a declared name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from moec.diagnostics import CompileError, SourceFile, Span, did_you_mean
from moec.grammar import ast
from moec.grammar.parser import parse_override
from moec.semantics.files import File
from moec.semantics.values import Problems

KINDS: dict[str, type[ast.Node]] = {
    "const": ast.Constant,
    "cluster": ast.Cluster,
    "model": ast.Model,
    "mesh": ast.Mesh,
    "cache": ast.Cache,
    "plan": ast.Plan,
}
#: Settings of a phase that may be given for both at once.
BOTH_PHASES = ("exchange", "combine", "capacity", "overlap", "sums")
PHASES = ("prefill", "decode")
Target = ast.Constant | ast.Cluster | ast.Model | ast.Mesh | ast.Cache | ast.Plan
#: Items of a block that stand under their own name.
NAMED = (ast.Setting, ast.Grouping, ast.Capped, ast.Attention, ast.ExpertGroup)
TARGETS = (ast.Constant, ast.Cluster, ast.Model, ast.Mesh, ast.Cache, ast.Plan)


def apply_overrides(files: list[File], overrides: Sequence[str], problems: Problems) -> None:
    """Change the declarations of `files` as the overrides say. Raises CompileError: E0222, E0201, E01."""
    for text in overrides:
        source = SourceFile("--set", text)
        key, equals, _ = text.partition("=")
        path = [part.strip() for part in key.split(".")]
        if not equals or not all(path) or len(path) < 2:
            help = "write it like `--set plan.context=512`"
            problems.add("E0222", "`--set` takes KEY=VALUE", Span(source, 0, len(text)), help=help)
            continue
        try:
            value = parse_override(source, len(key) + 1)
        except CompileError as error:
            problems.found += error.diagnostics
            continue
        _Override(source, path, value, problems).apply(files)
    if problems.found:
        raise CompileError(*problems.found)


class _Override:
    """One override on its way down the tree."""

    def __init__(self, source: SourceFile, path: list[str], value: ast.Override, problems: Problems) -> None:
        self.source, self.path, self.value, self.problems = source, path, value, problems

    def apply(self, files: list[File]) -> None:
        found = False
        for file in files:
            for i, node in enumerate(file.declarations):
                if isinstance(node, TARGETS) and self._is_meant(node, file):
                    found = True
                    changed = self._constant(node) if isinstance(node, ast.Constant) else self._change(node, 1)
                    file.declarations[i] = changed
        if not found:
            self._refuse_head([n for f in files for n in f.declarations if isinstance(n, TARGETS)])

    def _is_meant(self, node: Target, file: File) -> bool:
        head = self.path[0]
        if isinstance(node, ast.Constant):
            return head == "const" and self.path[1] == node.name.id
        if head in KINDS:
            return isinstance(node, KINDS[head]) and file.used_by is None
        return node.name.id == head

    def _constant(self, node: ast.Constant) -> ast.Constant:
        if len(self.path) > 2 or self.value.keep is not None or self.value.drop is not None:
            self._refuse(f"constant `{node.name.id}` has no parts", 0, "write it like `--set const.n=4`")
        return replace(node, value=self.value.value)

    def _change(self, block: Any, depth: int) -> Any:
        """The block (any node with `items`) with the setting that the path names from `depth` on."""
        key, rest = self.path[depth], self.path[depth + 1 :]
        if rest:
            return self._change_inner(block, depth)
        if isinstance(block, ast.Plan) and key in BOTH_PHASES:
            for phase in PHASES:
                block = self._with_phase(block, phase, key)
            return block
        if self._is_refused(block):
            return block
        name = ast.Name(key, span=self._span(depth))
        old = next((i for i in block.items if _key(i) == key), None)
        new = self._item(block, name, old)
        items = tuple(new if item is old else item for item in block.items)
        return replace(block, items=items if old is not None else (*items, new))

    def _is_refused(self, block: ast.Node) -> bool:
        """Whether the value has a word after it that no setting of this block takes."""
        tails = (("keep", self.value.keep, ast.Router, "groups"), ("drop", self.value.drop, ast.Phase, "capacity"))
        for word, part, owner, setting in tails:
            if part is not None and not isinstance(block, owner):
                help = f"only `{setting}` has a `{word}`"
                self._refuse(f"`{'.'.join(self.path)}` takes no `{word}`", len(self.path) - 1, help)
                return True
        return False

    def _item(self, block: ast.Node, name: ast.Name, old: ast.Node | None) -> ast.Node:
        """What stands for `name` from now on."""
        value, keep, span = self.value.value, self.value.keep, Span(self.source, 0, len(self.source.text))
        if isinstance(old, (ast.Attention, ast.ExpertGroup)):
            return replace(old, value=value, span=span)
        if isinstance(block, ast.Mesh) and name.id in ("attention", "experts"):
            return ast.View(name.id, value, span=span)
        if isinstance(old, ast.Grouping):
            return replace(old, groups=value, keep=keep or old.keep)
        if keep is not None:
            return ast.Grouping(name, value, keep, span=span)
        if self.value.drop is not None:
            return ast.Capped(name, value, span=span)
        return ast.Setting(name, value, span=span)

    def _change_inner(self, block: Any, depth: int) -> Any:
        """A setting of a block inside this one: a phase of a plan, a router of a model."""
        key = self.path[depth]
        inner = [i for i in block.items if isinstance(i, (ast.Router, ast.Phase))]
        known = PHASES if isinstance(block, ast.Plan) else [i.name.id for i in inner if isinstance(i, ast.Router)]
        if key not in known or len(self.path) > depth + 2:
            names = ", ".join(f"`{k}`" for k in known)
            help = did_you_mean(key, known) or (f"its parts are {names}" if known else "give one of its settings")
            self._refuse(f"`{'.'.join(self.path[:depth])}` has no part `{key}`", depth, help)
            return block
        if isinstance(block, ast.Plan):
            return self._with_phase(block, key, self.path[depth + 1])
        items = (
            self._change(i, depth + 1) if isinstance(i, ast.Router) and i.name.id == key else i for i in block.items
        )
        return replace(block, items=tuple(items))

    def _with_phase(self, plan: ast.Plan, kind: str, key: str) -> ast.Plan:
        """The plan with a setting of one phase, which is added where the plan leaves it out."""
        depth = len(self.path) - 1
        old = next((i for i in plan.items if isinstance(i, ast.Phase) and i.kind == kind), None)
        new = self._change(old or ast.Phase(kind, (), span=self._span(depth)), depth)
        items = tuple(new if item is old else item for item in plan.items)
        return replace(plan, items=items if old is not None else (*items, new))

    def _span(self, depth: int) -> Span:
        """Where part `depth` of the key is."""
        raw = self.source.text.partition("=")[0].split(".")
        start = sum(len(part) + 1 for part in raw[:depth])
        return Span(self.source, start, start + len(raw[depth]))

    def _refuse(self, message: str, depth: int, help: str) -> None:
        self.problems.add("E0222", message, self._span(depth), help=help)

    def _refuse_head(self, declared: list[Target]) -> None:
        head = self.path[0]
        if head == "const":
            known = [n.name.id for n in declared if isinstance(n, ast.Constant)]
            help = did_you_mean(self.path[1], known) or "declare it with `const`"
            self._refuse(f"no constant `{self.path[1]}` is declared", 1, help)
        elif head in KINDS:
            self._refuse(f"no {head} is declared in this file", 0, "name a declaration of a used file")
        else:
            known = [*KINDS, *(n.name.id for n in declared if not isinstance(n, ast.Constant))]
            help = did_you_mean(head, known) or "begin with " + ", ".join(f"`{k}`" for k in KINDS)
            self._refuse(f"`{head}` is neither a kind nor a declared name", 0, help)


def _key(item: ast.Node) -> str | None:
    """The name under which `--set` finds an item of a block."""
    if isinstance(item, ast.View):
        return item.kind
    return item.name.id if isinstance(item, NAMED) else None
