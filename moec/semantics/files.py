"""The files of a program: the main one and, through `use`, others; each read once."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from moec.diagnostics import CompileError, Label, MoecError, SourceFile, did_you_mean
from moec.grammar import ast
from moec.grammar.parser import parse, read_source
from moec.semantics.values import Problems
from moec.specs import read, shipped

#: (path as written, the file that uses it) -> the text. Raises MoecError.
Load = Callable[[str, SourceFile], SourceFile]
Use = ast.UseShipped | ast.UseFile
MAX_FILES = 64
FOLDERS = {"cluster": "clusters", "model": "models"}


@dataclass
class File:
    """One file: its declarations (which `--set` changes), and the `use` that named it first; None: the main file."""

    source: SourceFile
    declarations: list[ast.Declaration]
    used_by: Use | None


def load_file(path: str, user: SourceFile) -> SourceFile:
    """A used file from disk, relative to the file that uses it. Raises CompileError E0105, E0110, E0113."""
    return read_source(os.path.normpath(os.path.join(os.path.dirname(user.name), path)))


def shipped_file(kind: str, name: str) -> SourceFile:
    """The shipped description of a cluster or a model. Raises FileNotFoundError."""
    folder = FOLDERS[kind]
    return SourceFile(f"specs/{folder}/{name}.moe", read(folder, f"{name}.moe"))


def load_files(source: SourceFile, load: Load, problems: Problems) -> list[File]:
    """The main file and all that it uses, in the order of their `use`. Raises CompileError when one cannot be read."""
    waiting: list[tuple[SourceFile, Use | None]] = [(source, None)]
    files: dict[str, File] = {}
    while waiting:
        current, used_by = waiting.pop(0)
        if current.name in files:
            continue
        if len(files) == MAX_FILES and used_by is not None:
            message = f"more than {MAX_FILES} files are used"
            problems.add("E0221", message, used_by.span, help="join some of them")
            break
        try:
            declarations = list(parse(current).declarations)
        except CompileError as error:
            problems.found += error.diagnostics
            declarations = []
        files[current.name] = File(current, declarations, used_by)
        for use in declarations:
            found = _find(use, current, load, problems) if isinstance(use, (ast.UseShipped, ast.UseFile)) else None
            waiting += [(found, use)] if found is not None and isinstance(use, (ast.UseShipped, ast.UseFile)) else []
    if problems.found:
        raise CompileError(*problems.found)
    return list(files.values())


def _find(use: Use, user: SourceFile, load: Load, problems: Problems) -> SourceFile | None:
    """The text a `use` names, or None after an error at its place."""
    if isinstance(use, ast.UseShipped):
        names = shipped(FOLDERS[use.kind], ".moe")
        if use.name.id in names:
            return shipped_file(use.kind, use.name.id)
        help = did_you_mean(use.name.id, names) or "shipped are " + ", ".join(f"`{n}`" for n in names)
        problems.add("E0201", f"no {use.kind} `{use.name.id}` is shipped with moec", use.name.span, help=help)
        return None
    try:
        return load(use.path.value, user)
    except MoecError as error:
        for diagnostic in error.diagnostics:
            primary = diagnostic.primary or Label(use.path.span, "used here")
            code = "E0220" if diagnostic.code == "E0113" else diagnostic.code
            problems.found.append(replace(diagnostic, code=code, primary=primary))
        return None
