"""The renderer: what may go into generated source, what may come out, and the pages of its errors."""

from __future__ import annotations

import ast
import enum
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jinja2
import pytest

from moec.codegen import renderer
from moec.codegen.renderer import Comment, Text, check_python, literal, render
from moec.diagnostics import MoecError

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "specs" / "errors"


class Form(enum.Enum):
    TMA = "tma"
    BAD = "a-b"


@dataclass(frozen=True)
class Frozen:
    size: object


@dataclass
class Thawed:
    size: int


@pytest.fixture
def template(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Put a template's text in the place of the shipped ones; gives its name."""

    def put(text: str, name: str = "case.py.jinja") -> str:
        shipped = renderer._ENVIRONMENT
        monkeypatch.setattr(renderer, "_ENVIRONMENT", shipped.overlay(loader=jinja2.DictLoader({name: text})))
        return name

    return put


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7, "7"),
        (-0.1, "-0.1"),
        (1e-20, "1e-20"),
        (True, "True"),
        (None, "None"),
        ("attention", "attention"),
        (Form.TMA, "tma"),
        (Text("experts.ep"), '"experts.ep"'),
        ((1, "ep", None), '(1, "ep", None)'),
        (("ep",), '("ep",)'),
        ([1.5, Text("a.b")], '[1.5, "a.b"]'),
        ({"top": 8}, '{"top": 8}'),
    ],
)
def test_values_print_as_source(template: Callable[[str], str], value: object, text: str) -> None:
    assert render(template("x = {{ value }}\n"), value=value) == f"x = {text}\n"


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ("a b", "`value`"),
        ("a\nimport os", "`value`"),
        ("class", "`value`"),
        ("x" * 65, "`value`"),
        ("naïve", "`value`"),
        (float("nan"), "`value`"),
        (float("inf"), "`value`"),
        (b"x", "`value`"),
        (object(), "`value`"),
        (Thawed(1), "`value`"),
        (Form.BAD, "`value.value`"),
        (Frozen("a-b"), "`value.size`"),
        ((1, ("x", "a;b")), "`value[1][1]`"),
        ({"top": "8;"}, "`value[top]`"),
        ({"a-b": 1}, "`a key of value`"),
        (Text('a"b'), "`value`"),
        (Text("a\\"), "`value`"),
        (Text("a\nb"), "`value`"),
        (lambda: 1, "`value`"),
    ],
)
def test_other_values_are_refused_by_name(template: Callable[[str], str], value: object, where: str) -> None:
    with pytest.raises(MoecError) as caught:
        render(template("pass\n"), value=value)
    assert caught.value.diagnostics[0].code == "E0501"
    assert where in caught.value.diagnostics[0].message


def test_deep_values_end_in_an_error_not_in_recursion(template: Callable[[str], str]) -> None:
    nest: object = 1
    for _ in range(10_000):
        nest = (nest,)
    with pytest.raises(MoecError, match="nested deeper than 16"):
        render(template("pass\n"), value=nest)


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "two\nlines\r\x0b\x0c\x85\u2028end",
        '"""; import os',
        "back\\",
        "bell\a bidi\u202e esc\x1b[2J",
        "x" * 500,
        "",
    ],
)
def test_a_comment_cannot_become_code(template: Callable[[str], str], text: str) -> None:
    source = render(template('"""{{ note }}\n{{ note }}"""\nx = 1  # {{ note }}\ny = 2\n'), note=Comment(text))
    names = [type(node).__name__ for node in ast.parse(source).body]
    assert names == ["Expr", "Assign", "Assign"]
    assert all(c.isprintable() or c == "\n" for c in source)


def test_a_value_that_is_not_given_is_an_error(template: Callable[[str], str]) -> None:
    for text in ("x = {{ missing }}\n", "x = {{ missing | literal }}\n", "{% if missing %}{% endif %}\n"):
        with pytest.raises(MoecError) as caught:
            render(template(text), given=1)
        assert caught.value.diagnostics[0].code == "E0502"
        assert "'missing' is undefined" in caught.value.diagnostics[0].message


def test_other_languages_are_not_parsed_as_python(template: Callable[[str], str]) -> None:
    assert render(template("int {{ name }};\n", "case.cpp.jinja"), name="rows") == "int rows;\n"


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import os", "os"),
        ("import torch, subprocess", "subprocess"),
        ("from pathlib import Path", "pathlib"),
        ("from . import x", "None"),
        ("eval('1')", "eval"),
        ("y = open", "open"),
        ("x.__class__", "__class__"),
        ("__import__('os')", "__import__"),
    ],
)
def test_rendered_python_keeps_to_the_allowed_names(source: str, what: str) -> None:
    check_python("import torch\nfrom moec.ir.program import Program\nimport triton.language as tl\n", "case")
    with pytest.raises(MoecError) as caught:
        check_python(f"x = 1\n{source}\n", "case")
    assert caught.value.diagnostics[0].code == "E0504"
    assert f"`{what}` on line 2" in caught.value.diagnostics[0].message


def test_literal_gives_back_what_it_was_given() -> None:
    value = (1, [2.5, None], {"ep": (True,)})
    assert ast.literal_eval(literal(value)) == value


def test_templates_are_shipped() -> None:
    assert "triton/grouped_gemm.py.jinja" in renderer._ENVIRONMENT.list_templates()


def test_codegen_imports_neither_torch_nor_triton() -> None:
    """But for the two modules that read Programs, which are graphs of torch.fx."""
    modules = {file.stem for file in (ROOT / "codegen").glob("[a-z]*.py")} - {"cpp", "phase"}
    assert "offline" in modules
    imports = "; ".join(f"import moec.codegen.{name}" for name in modules)
    code = f"{imports}; import sys; sys.exit(bool({{'torch', 'triton'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd="/", check=False).returncode == 0


def test_pages_show_the_errors_as_printed(template: Callable[[str], str]) -> None:
    calls: dict[str, Callable[[], object]] = {
        "E0501": lambda: render(template("pass\n"), layer="attention block"),
        "E0502": lambda: render(template("heads = {{ heads }}\n"), layers=2),
        "E0503": lambda: render(template("def {{ name }}(:\n"), name="layer"),
        "E0504": lambda: render(template("import os\n")),
    }
    for code, call in calls.items():
        with pytest.raises(MoecError) as caught:
            call()
        page = (PAGES / f"{code}.md").read_text()
        assert page.startswith(f"# {code}: ")
        assert caught.value.render() in page
