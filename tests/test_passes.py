"""Each pass against its golden files, and what the pass API promises.

A case in `tests/golden/passes/<pass>/` is an equation: program text, a line `// pass NAME{OPTIONS}`, and what the pass
made of it. So that only what matters is shown, the first half may leave out any header line but `mesh`, and the
prologue, epilogue and runs: they stand in as below. The second half is the header lines, bodies and runs that changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import fx

from moec.diagnostics import CompileError, SourceFile
from moec.ir.build import Builder, input_type
from moec.ir.params import Param
from moec.ir.parse import parse
from moec.ir.program import Body, Loc, Program, Run, Type
from moec.ir.text import print_body, print_program
from moec.ir.verifier.program import verify
from moec.lowering import lower
from moec.passes import PASSES, Pass, parse_pass
from moec.passes.runner import run_passes
from moec.semantics.checker import check
from tests.conftest import ROOT
from tests.programs import moe, plan, program_of

GOLDEN = ROOT / "tests" / "golden"
CASES = sorted((GOLDEN / "passes").glob("*/*"))
LOWERED = sorted((GOLDEN / "lower").glob("*"))

# --- a program around the bodies of a case -------------------------------------------------------------------------

HEADER = {
    "program": 'program decode "toy" from "toy.moe"',
    "mesh": "mesh dp=1 tp=1 edp=1 ep=1 etp=1",
    "cluster": 'cluster "localhost" nodes=1 devices=64',
    "step": "step tokens=8 slots=2 context=16 dtype=fp32 exchange=flat strategy=linear",
    "cache": "",
    "tier": "",
    "experts": "",
    "placement": "",
    "memory": "",
    "done": "done",
}


def whole_program(text: str) -> Program:
    """The program a shortened text stands for."""
    header, start, bodies = text.partition("body ")
    lines = [line for line in header.splitlines() if line and not line.startswith("//")]
    given = {word: [line for line in lines if line.split()[0] == word] for word in HEADER}
    assert sum(map(len, given.values())) == len(lines), f"no header lines: {lines}"
    program = parse("\n".join("\n".join(given[word]) or line for word, line in HEADER.items()) + "\n" + start + bodies)
    inner = dict(program.bodies)
    program.bodies = {"prologue": _prologue(program, inner), **inner}
    program.bodies.setdefault("epilogue", _epilogue(program))
    layers = [name for name in program.bodies if name not in ("prologue", "epilogue")]
    runs = program.runs or [Run(name, range(i, i + 1)) for i, name in enumerate(layers)]
    program.runs = [Run("prologue"), *runs, Run("epilogue")]
    return program


def _width(bodies: dict[str, Body]) -> int:
    """Hidden width of a case: that of its first norm or of its head."""
    found = [
        param.shape[-1]
        for body in bodies.values()
        for name, param in body.params.items()
        if "norm" in name or name == "head"
    ]
    return found[0] if found else 4


def _prologue(program: Program, inner: dict[str, Body]) -> Body:
    body = program.bodies["prologue"] = Body(
        "prologue", params={"embed": Param(("embed",), (6, _width(inner)), "fp32")}
    )
    build = Builder(program, body)
    tokens = build.input("tokens", _type(program, "tokens"))
    body.graph.output(_served(program, build.emit("embed", tokens, build.param("embed"), at=Loc(1, 1))))
    return body


def _epilogue(program: Program) -> Body:
    body = Body("epilogue", params={"head": Param(("head",), (6, program.hidden), "fp32")})
    build = Builder(program, body)
    x = build.input("x", _type(program, "x"))
    body.graph.output(_served(program, build.emit("linear", x, build.param("head"), at=Loc(1, 1))))
    return body


def _type(program: Program, name: str) -> Type | None:
    return input_type(program, name, "shard-attention" in program.done) if program.is_typed else None


def _served(program: Program, node: fx.Node) -> fx.Node:
    if "choose-kernels" in program.done:
        node.meta["kernel"] = "torch"
    return node


def changed(before: Program, after: Program, text: str) -> str:
    """What `after` has and `before` has not: header lines but `done`, bodies that `text` shows, runs."""
    old, new = (print_program(p).partition("\nbody ")[0].splitlines() for p in (before, after))
    header = [line for line in new if line not in old and not line.startswith("done")]
    ran, runs = ([line for line in print_program(p).splitlines() if line.startswith("run ")] for p in (before, after))
    shown = [body for name, body in after.bodies.items() if f"body {name} {{" in text]
    bodies = [print_body(body) for body in shown if print_body(body) != print_body(before.bodies[body.name])]
    blocks = ["\n".join(lines) for lines in (header, *bodies, runs if runs != ran else [])]
    return "\n\n".join(filter(None, blocks)) or "// unchanged"


# --- goldens -----------------------------------------------------------------------------------------------------

SPLIT = re.compile(r"^// pass (.*)\n", re.MULTILINE)


@pytest.mark.parametrize("path", CASES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_pass_gives_what_its_golden_shows(path: Path, golden: Callable[[Path, str], None]) -> None:
    assert path.suffix == ".ir"
    first, spelling, _ = SPLIT.split(path.read_text())
    step = parse_pass(spelling, PASSES)
    assert step.name == path.parent.name and str(step) == spelling
    before, after = whole_program(first), whole_program(first)
    verify(before)
    try:
        step.run(after)
    except CompileError as error:
        golden(path, f"{first}// pass {step}\n// {error.diagnostics[0].message}\n")
        return
    after.done += (step.name,)
    verify(after, str(step))
    assert parse(print_program(after)) == after
    golden(path, f"{first}// pass {step}\n{changed(before, after, first)}\n")


def test_every_pass_has_goldens_and_every_golden_a_pass() -> None:
    assert {path.parent.name for path in CASES} == {cls.name for cls in PASSES}


@pytest.mark.parametrize("path", [p for p in LOWERED if p.suffix == ".moe"], ids=lambda path: path.stem)
def test_a_model_lowers_to_what_its_golden_shows(path: Path, golden: Callable[[Path, str], None]) -> None:
    """The first line of the `.moe` file says which phase: `// lower decode`."""
    text = path.read_text()
    phase = re.match(r"// lower (prefill|decode)\n", text)
    assert phase is not None
    chosen = check(SourceFile(path.name, text)).plan()
    program = lower(chosen, getattr(chosen, phase[1]), path.name)
    verify(program)
    golden(path.with_suffix(".ir"), print_program(program))


def test_every_lowered_text_has_its_model() -> None:
    assert {p.stem for p in LOWERED if p.suffix == ".ir"} == {p.stem for p in LOWERED if p.suffix == ".moe"}
    assert {p.suffix for p in LOWERED} == {".ir", ".moe"}


# --- the pass API ------------------------------------------------------------------------------------------------


def test_names_files_and_spellings_of_passes_agree() -> None:
    """One file `fuse_gate_up.py`, class `FuseGateUp`, name `fuse-gate-up`; the spelling reads back."""
    for cls in PASSES:
        words = cls.name.split("-")
        assert cls.__name__ == "".join(word.capitalize() for word in words)
        assert cls.__module__ == f"moec.passes.{'_'.join(words)}"
        assert cls.__doc__ and "before:" in cls.__doc__ and "after:" in cls.__doc__
        assert parse_pass(cls.name, PASSES) == cls() and str(cls()) == cls.name


def test_options_are_spelled_as_on_the_command_line() -> None:
    step = parse_pass("choose-kernels{prefer=triton}", PASSES)
    assert str(step) == "choose-kernels{prefer=triton}"
    assert str(parse_pass("choose-kernels{prefer=torch}", PASSES)) == "choose-kernels"


@pytest.mark.parametrize(
    ("text", "message", "help"),
    [
        ("choose-kernel", "there is no pass `choose-kernel`", "did you mean `choose-kernels`?"),
        ("", "there is no pass ``", "known passes: split-stages, place-experts, infer-shapes"),
        ("choose-kernels{prefer=triton", "there is no pass `choose-kernels{prefer=triton`", ""),
        ("choose-kernels{speed=9}", "choose-kernels cannot take speed=9", "options of choose-kernels: prefer"),
        ("split-stages{stage=last}", "split-stages cannot take stage=last", "options of split-stages: stage"),
        ("plan-memory{limit=9}", "plan-memory cannot take limit=9", "options of plan-memory: none"),
        ("choose-kernels{prefer}", "choose-kernels cannot take prefer", "options of choose-kernels: prefer"),
    ],
)
def test_a_wrong_spelling_is_refused_by_name(text: str, message: str, help: str) -> None:
    with pytest.raises(CompileError) as refused:
        parse_pass(text, PASSES)
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.code == "E0402" and diagnostic.message == message and help in diagnostic.help


def test_a_kernel_that_nothing_has_is_refused() -> None:
    """A preference that matches no operation would change nothing (B30)."""
    program = program_of(plan([moe()]))
    with pytest.raises(CompileError, match="choose-kernels cannot take prefer=cuda") as refused:
        run_passes(program, [parse_pass("choose-kernels{prefer=cuda}", PASSES)])
    assert refused.value.diagnostics[0].help == "kernels are cpp, torch, triton"


def test_a_pass_that_fails_is_named_with_its_predecessors() -> None:
    """7 heads of width 4 do not fall into 2 ranks: the checker refuses it in a file, here the pass meets it."""
    program = program_of(plan([moe()], tp=2, ep=2))
    body = program.bodies["sparse"]
    body.params["attention.q"] = Param(("attention.q",), (7, 10), "fp32")
    with pytest.raises(CompileError) as refused:
        run_passes(program, [cls() for cls in PASSES])
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.code == "E0404"
    assert diagnostic.message.startswith(
        "pass infer-shapes failed (after split-stages, place-experts): 7 does not divide into heads of 4"
    )


def test_passes_run_as_far_as_asked_and_are_seen() -> None:
    seen: list[tuple[str, tuple[str, ...]]] = []

    def observe(step: Pass, program: Program) -> None:
        seen.append((step.name, program.done))

    program = program_of(plan([moe()]))
    run_passes(program, [cls() for cls in PASSES], [observe], stop_after="shard-attention")
    names = ("split-stages", "place-experts", "infer-shapes", "shard-attention")
    assert seen == [(name, names[: i + 1]) for i, name in enumerate(names)]
    assert program.done == names


#: These start from whole values; run again they are refused by the operations' rules rather than sum or move twice.
ONCE = {"shard-attention", "split-tokens", "shard-experts"}


@pytest.mark.parametrize("cls", PASSES, ids=lambda cls: cls.name)
def test_a_pass_run_twice_changes_nothing_more_or_is_refused(cls: type[Pass]) -> None:
    program = program_of(plan([moe(shared=4)], dp=2, tp=2, ep=2, etp=2))
    run_passes(program, [step() for step in PASSES], stop_after=cls.name)
    if cls.name in ONCE:
        with pytest.raises(CompileError, match=f"pass {cls.name} failed"):
            run_passes(program, [cls()])
    else:
        before = print_program(program)
        cls().run(program)
        assert print_program(program) == before
