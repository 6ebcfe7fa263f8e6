"""The Python module of a phase: what a person reads, and that its names mean what they meant in the program."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from moec.checked import Swiglu
from moec.codegen.phase import name_values, render_phase
from moec.diagnostics import MoecError
from moec.ir.parse import parse
from moec.ir.program import Run, is_op, results_of
from moec.ir.text import print_program
from tests.programs import SPAN, compiled, gqa, mla, moe, plan, random_plan

GOLDEN = Path(__file__).parent / "golden" / "codegen" / "phase"
RENDERED = "// rendered\n"


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda path: path.stem)
def test_golden(path: Path, golden: Callable[[Path, str], None]) -> None:
    """A file holds a program, a line `// rendered`, and the module it gives."""
    text = path.read_text().partition(RENDERED)[0]
    program = parse(text)
    golden(path, print_program(program) + "\n" + RENDERED + render_phase(program))


def test_there_are_goldens() -> None:
    assert list(GOLDEN.glob("*.txt"))


def rendered(*layers: int) -> str:
    """The module of a model whose layers run bodies 0 (dense) and 1 (sparse) in this order."""
    kinds = (Swiglu(12, SPAN), moe(shared=6))
    return render_phase(compiled(plan([kinds[i] for i in layers])))


def test_size_does_not_grow_with_depth() -> None:
    shallow, deep = rendered(0, 1, 1), rendered(*[0] * 3, *[1] * 607)
    assert len(deep.splitlines()) == len(shallow.splitlines())
    assert "for layer in range(3, 610):" in deep


def test_layers_run_in_their_order() -> None:
    body = rendered(0, 1, 0).partition("def forward")[2]
    assert [line.strip() for line in body.splitlines() if "range" in line] == [
        "for layer in range(0, 1):",
        "for layer in range(1, 2):",
        "for layer in range(2, 3):",
    ]
    assert [line.split("(")[0].split()[-1] for line in body.splitlines() if "= " in line] == [
        "prologue",
        "dense",
        "sparse",
        "dense",
        "epilogue",
    ]


def test_the_text_says_nothing_about_the_batch_or_the_machine() -> None:
    """B41: no sizes of a sample, no paths, no times: two renderings are the same bytes, and so is that of the text."""
    program = compiled(plan([moe()]))
    assert render_phase(program) == render_phase(compiled(plan([moe()]))) == render_phase(parse(print_program(program)))
    assert str(Path.cwd()) not in render_phase(program)


PROGRAMS = {
    "gqa": lambda: compiled(plan([Swiglu(12, SPAN), moe(shared=6)], gqa(bias=True, qk_norm=True), dp=2, edp=2)),
    "mla": lambda: compiled(plan([moe()], mla(), dp=2, tp=2, ep=4), phase="decode"),
    "gather": lambda: compiled(plan([moe(shared=6)], exchange="gather", tp=2, ep=2)),
    "padded": lambda: compiled(plan([moe(shared=6)], exchange="padded", dp=2, ep=2)),
    "chunks": lambda: compiled(plan([moe(shared=6)], combine="reduced", overlap="2:layer", dp=2, tp=2, ep=4)),
    **{f"random-{seed}": lambda seed=seed: compiled(random_plan(seed)) for seed in range(24)},
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_name_stands_for_the_value_the_program_means(name: str) -> None:
    """Run the names: each read must find, under its name, the value that the program reads there."""
    for body in PROGRAMS[name]().bodies.values():
        names, bound = name_values(body), {}
        for node in body.graph.nodes:
            if node.op == "placeholder":
                bound[names[node]] = node
            if node.op == "output" or is_op(node):
                for value in node.args:
                    assert value.op == "get_attr" or bound[names[value]] is value
            if is_op(node):
                results = results_of(node)
                assert len({names[r] for r in results}) == len(results)
                bound |= {names[r]: r for r in results}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_weight_is_read_and_every_name_defined(name: str) -> None:
    program = PROGRAMS[name]()
    functions = {node.name: node for node in ast.parse(render_phase(program)).body if isinstance(node, ast.FunctionDef)}
    for body in program.bodies.values():
        function = functions[body.name]
        strings = {n.slice.value for n in ast.walk(function) if isinstance(n, ast.Subscript)}  # type: ignore[attr-defined]
        assert strings == set(body.params)
        known = {argument.arg for argument in function.args.args}
        known |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        assert {n.id for n in ast.walk(function) if isinstance(n, ast.Name)} <= known


@pytest.mark.parametrize("name", ["forward", "x", "range", "weights", "lambda", "k"])
def test_e0505_a_body_named_as_the_module_names_something(name: str) -> None:
    program = compiled(plan([Swiglu(12, SPAN)]))
    program.bodies = {name if b == "dense" else b: body for b, body in program.bodies.items()}
    program.bodies[name].name = name
    program.runs = [Run(name, run.layers) if run.body == "dense" else run for run in program.runs]
    with pytest.raises(MoecError, match=f"the name `{name}` of body `{name}`") as error:
        render_phase(program)
    assert error.value.diagnostics[0].code == "E0505" and error.value.exit_code == 3


def test_e0505_an_input_that_a_step_does_not_give() -> None:
    program = compiled(plan([Swiglu(12, SPAN)]))
    first = next(iter(program.bodies["prologue"].graph.nodes))
    first.target = "words"
    with pytest.raises(MoecError, match="the input `words` of body `prologue`"):
        render_phase(program)


@pytest.mark.parametrize("name", ['x"); import os; ("', "a\nb", "a\\"])
def test_text_of_an_input_cannot_become_code(name: str) -> None:
    """Names of models and files end in one comment or docstring line; a group's name must be plain text."""
    program = compiled(plan([moe(shared=6)], exchange="gather", tp=2, ep=2))
    program.name = program.source = name
    tree = ast.parse(render_phase(program))
    assert [type(node) for node in tree.body] == [ast.Expr, *[ast.FunctionDef] * 4]
    node = next(n for _, n in program.nodes() if "group" in n.kwargs)
    node.kwargs = {**node.kwargs, "group": name}
    with pytest.raises(MoecError, match="cannot be put into generated source"):
        render_phase(program)
