"""Imports run one way, the quick commands stay clear of torch, and no input is ever executed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"grammar": "moec.grammar", "passes": "moec.passes", "codegen": "moec.codegen", "specs": "moec.specs"}

#: Layer -> layers that it may import. A layer is a subpackage with what lies in it, or the modules of moec/ that share
#: a first word: `compiler` is compiler.py and compiler_uses.py. A module with an entry of its own is a layer too:
#: `plan.overlap` is what a pass asks, the rest of plan is made from programs that passed.
ALLOWED: dict[str, set[str]] = {
    "diagnostics": set(),
    "files": {"diagnostics"},
    "cache": {"files", "diagnostics"},  # whose policies the run time drives, and the cost model asks
    "topology": {"diagnostics"},
    "calibrate": {"topology"},
    "blocks": set(),
    "mesh": {"diagnostics"},
    "placement": {"diagnostics"},
    "specs": {"diagnostics"},
    "grammar": {"diagnostics"},
    "checked": {"diagnostics", "topology"},
    "parameters": {"blocks", "checked"},
    "declared": {"checked"},
    "semantics": {"blocks", "grammar", "checked", "topology", "specs", "diagnostics"},
    "weights": {"diagnostics"},
    "checkpoint": {"blocks", "specs", "diagnostics"},
    "importer": {"blocks", "checkpoint", "checked", "declared", "parameters", "specs", "diagnostics"},
    "layout": {"mesh"},
    "routing": set(),  # which a Program carries while it is compiled
    "ir": {"blocks", "cache", "routing", "layout", "mesh", "placement", "topology", "diagnostics"},
    "cache_sizes": {"cache", "ir", "diagnostics"},  # what a Program's cache is like: slots, bytes, tiers
    "schedule": {"ir"},
    "cost": {"cache", "cache_sizes", "routing", "ir", "layout", "mesh", "placement", "topology", "diagnostics"},
    "lowering": {"blocks", "checked", "ir", "mesh", "topology", "placement", "diagnostics"},
    "plan.overlap": {"cost", "ir", "schedule"},
    "plan.trace": {"cache", "checked", "routing", "diagnostics"},
    "plan.pairs": {"cache", "cache_sizes", "ir"},
    "plan.prefetch": {"cache_sizes", "cost", "ir", "plan.pairs", "schedule"},
    "plan.timeline": {"cost", "ir", "schedule"},
    "passes": {
        "blocks", "cache", "cache_sizes", "ir", "layout", "mesh", "placement", "cost", "schedule", "plan.overlap",
        "plan.pairs", "plan.prefetch", "topology", "diagnostics",
    },
    "codegen": {"files", "ir", "layout", "diagnostics"},
    "artifact": {"ir", "diagnostics"},
    "plan": {
        "cache", "cache_sizes", "checked", "checkpoint", "cost", "routing", "declared", "ir", "parameters",
        "plan.pairs", "plan.prefetch", "plan.trace", "schedule", "diagnostics",
    },
    "explain": {"cache", "specs", "diagnostics"},
    "runtime": {
        "importer",  # reads the config beside the weights, which must be of the model that the program is of
        "artifact", "blocks", "cache", "cache_sizes", "codegen", "ir", "layout", "mesh", "placement", "topology",
        "checkpoint", "weights", "files", "diagnostics",
    },
    "compiler": {
        "grammar", "semantics", "lowering", "passes", "artifact", "codegen", "checked", "checkpoint", "cost",
        "routing", "ir", "plan", "plan.trace", "weights", "diagnostics",
    },
    "cli": {
        "cache", "compiler", "importer", "runtime", "explain", "artifact", "grammar", "semantics", "passes", "checked",
        "ir", "weights", "mesh", "calibrate", "files", "parameters", "placement", "plan.timeline", "plan.trace",
        "topology", "diagnostics",
    },
    "api": {"artifact", "cache", "ir", "runtime", "weights", "diagnostics"},
    "package": {"api", "compiler"},
    "main": {"cli"},
}  # fmt: skip
SAME_LAYER = {"__main__": "main", "": "package"}


def modules() -> Iterator[tuple[str, Path]]:
    """(module name, file) of everything that is shipped."""
    for folder, package in {"moec": "moec", **FOLDERS}.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join((package, *parts)).removesuffix(".__init__"), file


def layer(module: str) -> str:
    first, _, rest = module.partition(".")[2].partition(".")
    own = f"{first}.{rest}"
    return own if own in ALLOWED else SAME_LAYER.get(first) or (first if first in ALLOWED else first.split("_")[0])


def imported(tree: ast.Module, known: set[str]) -> Iterator[str]:
    """Modules that a file imports, inside functions too. `from moec import x` means moec.x where there is one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            base = node.module or ""
            named = [f"{base}.{alias.name}" for alias in node.names]
            yield from [name if name in known else base for name in named]
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


MODULES = dict(modules())


def tree_of(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(), str(MODULES[name]))


def targets(name: str) -> set[str]:
    return {t for t in imported(tree_of(name), set(MODULES)) if t.split(".")[0] == "moec"}


def test_imports_run_one_way() -> None:
    homeless = [name for name in MODULES if layer(name) not in ALLOWED]
    assert not homeless, "in no layer: add them to the table, or give them the name of one"
    allowed = {name: ALLOWED[layer(name)] | {layer(name)} for name in MODULES}
    wrong = [f"{name} imports {t}" for name in MODULES for t in sorted(targets(name)) if layer(t) not in allowed[name]]
    assert not wrong


def test_the_table_has_no_circle() -> None:
    order: list[str] = []
    while left := ALLOWED.keys() - set(order):
        free = {name for name in left if ALLOWED[name] <= set(order)}
        assert free, f"a circle among {sorted(left)}"
        order += sorted(free)


def test_no_pass_imports_another() -> None:
    passes = {name for name in MODULES if name.startswith("moec.passes.")} - {"moec.passes.base", "moec.passes.runner"}
    assert passes
    assert not [(name, t) for name in passes for t in targets(name) & passes]


def test_semantics_takes_only_the_tree_from_the_grammar() -> None:
    allowed = {"moec.grammar.ast", "moec.grammar.parser"}  # the parser, to read the files that `use` names
    taken = {t for name in MODULES if layer(name) == "semantics" for t in targets(name) if layer(t) == "grammar"}
    assert taken <= allowed


#: What `check`, `fmt`, `explain`, `import` and `--help` load.
QUICK = [
    "moec.cli.app",
    "moec.semantics.checker",
    "moec.grammar.formatter",
    "moec.importer.folder",
    "moec.explain.page",
    "moec.explain.kernels",
    "moec.artifact_files",
]


@pytest.mark.parametrize("name", QUICK)
def test_quick_commands_do_not_import_torch(name: str) -> None:
    code = f"import sys, {name}; print(sorted({{'torch', 'triton', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd="/")
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


#: Every module that calls a function which runs text, with those calls.
EXECUTES = {"moec.runtime.executor": ["compile", "exec"]}
NUMPY_LOADS = {"numpy.load", "np.load"}
FORBIDDEN = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "runpy"}


def test_input_is_never_executed() -> None:
    """One `exec` in all: of text that the executor has just rendered from installed templates."""
    trees = {name: tree_of(name) for name in MODULES}
    assert {name: found for name, tree in trees.items() if (found := _executing_calls(tree))} == EXECUTES
    assert not {name: taken for name, tree in trees.items() if (taken := FORBIDDEN & set(imported(tree, set())))}
    assert not {name: found for name, tree in trees.items() if (found := _unpickling(tree))}


def _unpickling(tree: ast.Module) -> list[str]:
    """Loads that may unpickle what they read: torch's all of them, numpy's unless `allow_pickle=False` is written."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    plain = {id(c.func) for c in calls if "allow_pickle=False" in map(ast.unparse, c.keywords)}
    paths = [(ast.unparse(node), id(node) in plain) for node in ast.walk(tree) if _is_path(node)]
    return [name for name, is_plain in paths if name == "torch.load" or (name in NUMPY_LOADS and not is_plain)]


def _executing_calls(tree: ast.Module) -> list[str]:
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [f.id for f in calls if isinstance(f, ast.Name) and f.id in ("eval", "exec", "compile", "__import__")]
    return sorted(name for name in names if not _is_own(tree, name))


def _is_path(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)


def _is_own(tree: ast.Module, name: str) -> bool:
    """Is `name` bound by this module (moec.compiler.compile), so that it is not the builtin?"""
    return any(
        (isinstance(node, ast.FunctionDef) and node.name == name)
        or (isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == name for a in node.names))
        for node in ast.walk(tree)
    )
