"""The one Jinja environment: checked values and a shipped template in, source text out.

Templates ship inside the package and never come from a `.moe` file or a checkpoint. What goes into them is checked
here, so that no name or text of an input can become code:

1. every value is an int, a finite float, a bool, None, an enum, a checked identifier, a `Text`, a `Comment`, or a
   tuple, list, dict or frozen dataclass of these (E0501);
2. a value that the template needs and is not given is an error, never an empty string (E0502);
3. rendered Python is parsed (E0503), and may import only what `ALLOWED_IMPORTS` lists and reach for no private or
   code-running name (E0504).
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import keyword
import math
from dataclasses import dataclass

import jinja2

from moec.diagnostics import fail

MAX_IDENTIFIER = 64
MAX_TEXT = 160
MAX_DEPTH = 16
BUG = "this is a bug in moec: please report it with the input"
#: First part of the module names a rendered Python file may import.
ALLOWED_IMPORTS = frozenset({"__future__", "math", "moec", "torch", "triton"})
#: Builtins that run code, read files or reach objects by a computed name.
REFUSED_NAMES = frozenset(
    {"breakpoint", "compile", "delattr", "eval", "exec", "getattr", "globals", "locals", "open", "setattr", "vars"}
)


@dataclass(frozen=True)
class Comment:
    """Free text for a comment or docstring; printed on one line with nothing that could end either."""

    text: str

    def __str__(self) -> str:
        line = "".join(c if c.isprintable() else " " for c in self.text.replace("\\", "/").replace('"', "'"))
        line = " ".join(line.split())
        return line if len(line) <= MAX_TEXT else line[: MAX_TEXT - 3] + "..."


@dataclass(frozen=True)
class Text:
    """A name with dots or dashes (`attention.q`), printed as a double-quoted string; plain printable ASCII only."""

    text: str

    def __str__(self) -> str:
        return f'"{self.text}"'


def render(template: str, /, **values: object) -> str:
    """The text of `templates/<template>` with `values`; a template named `*.py.jinja` must give allowed Python.

    Raises `MoecError` E0501 (a value of a kind not allowed), E0502 (template missing, broken or short of a value),
    E0503 (not Python) or E0504 (Python that is not allowed).
    """
    for name, value in values.items():
        _check(value, name)
    try:
        text = _ENVIRONMENT.get_template(template).render(**values)
    except jinja2.TemplateNotFound as error:
        raise fail("E0502", f"template `{template}` is not shipped", "reinstall moec") from error
    except jinja2.TemplateError as error:
        raise fail("E0502", f"template `{template}` cannot be rendered: {error}", BUG) from error
    if template.endswith(".py.jinja"):
        check_python(text, template)
    return text


def check_python(text: str, name: str) -> None:
    """Raise E0503 unless `text` is Python and E0504 unless it keeps to the allowed imports and names."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise fail("E0503", f"the source rendered from `{name}` is not Python: {error}", BUG) from error
    for node in ast.walk(tree):
        if (refused := _refused(node)) is not None:
            line = getattr(node, "lineno", 0)
            raise fail("E0504", f"the source rendered from `{name}` uses `{refused}` on line {line}", BUG)


def _refused(node: ast.AST) -> str | None:
    """The name a syntax node must not use, or None."""
    match node:
        case ast.Import(names=names):
            return next((a.name for a in names if a.name.split(".")[0] not in ALLOWED_IMPORTS), None)
        case ast.ImportFrom(module=module, level=level):
            return None if module and not level and module.split(".")[0] in ALLOWED_IMPORTS else str(module)
        case ast.Name(id=name) if name in REFUSED_NAMES or name.startswith("__"):
            return name
        case ast.Attribute(attr=name) if name.startswith("_"):
            return name
    return None


def is_identifier(name: str) -> bool:
    """Whether `name` may be printed bare in generated source: ASCII, not a keyword, at most 64 characters."""
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name) and len(name) <= MAX_IDENTIFIER


def _check(value: object, where: str, depth: int = 0) -> None:
    """Raise E0501 unless `value` is of an allowed kind; `where` names the value as the template sees it."""
    if depth > MAX_DEPTH:
        raise fail("E0501", f"`{where}` is nested deeper than {MAX_DEPTH} levels", BUG)
    match value:
        case enum.Enum():
            _check(value.value, f"{where}.value", depth + 1)
        case None | bool() | int() | Comment():
            pass
        case float():
            _require(math.isfinite(value), where, value)
        case str():
            _require(is_identifier(value), where, value)
        case Text(text=text):
            plain = text.isascii() and text.isprintable() and not set('"\\') & set(text) and len(text) <= MAX_TEXT
            _require(plain, where, text)
        case tuple() | list():
            for i, item in enumerate(value):
                _check(item, f"{where}[{i}]", depth + 1)
        case dict():
            for key, item in value.items():
                _check(key, f"a key of {where}", depth + 1)
                _check(item, f"{where}[{key}]", depth + 1)
        case _:
            _require(_is_frozen(value), where, value)
            for part in dataclasses.fields(value):  # type: ignore[arg-type]
                _check(getattr(value, part.name), f"{where}.{part.name}", depth + 1)


def _is_frozen(value: object) -> bool:
    parameters = getattr(type(value), "__dataclass_params__", None)
    return parameters is not None and parameters.frozen


def _require(allowed: bool, where: str, value: object) -> None:
    if not allowed:
        shown = repr(value)[:MAX_IDENTIFIER]
        raise fail(
            "E0501",
            f"`{where}` = {shown} ({type(value).__name__}) cannot be put into generated source",
            "use a name of at most 64 ASCII letters, digits and underscores that is no Python keyword",
        )


def literal(value: object) -> str:
    """A checked value as a Python expression, with double-quoted strings: `(1, "ep", None)`."""
    match value:
        case enum.Enum():
            return literal(value.value)
        case str():
            return f'"{value}"'
        case Text():
            return str(value)
        case tuple():
            return "(" + ", ".join(map(literal, value)) + (",)" if len(value) == 1 else ")")
        case list():
            return "[" + ", ".join(map(literal, value)) + "]"
        case jinja2.Undefined():
            return str(value)  # raises
        case dict():
            return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}"
    return repr(value)


def _finalize(value: object) -> object:
    """What `{{ value }}` prints: a bare identifier for a name or enum, a Python literal for the rest."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (str, Comment, jinja2.Undefined)):
        return value
    return literal(value)


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("moec.codegen", "templates"),
    undefined=jinja2.StrictUndefined,
    finalize=_finalize,
    autoescape=False,  # the output is source code; `_check` is what keeps it safe
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.filters["literal"] = literal
