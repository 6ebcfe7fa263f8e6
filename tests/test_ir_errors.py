"""The pages of the errors of programs and passes: each prints what its input really gives."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from moec.compiler import compile_phase
from moec.diagnostics import MoecError, SourceFile
from moec.ir.parse import parse
from moec.ir.verifier.program import verify
from moec.passes import PASSES, parse_pass
from moec.passes.runner import run_passes
from moec.semantics.checker import check
from tests.conftest import ROOT


def compiled(text: str) -> None:
    compile_phase(check(SourceFile("case.moe", text)).plan(), "decode", "case.moe")


#: What each page's input is given to.
RAISING: dict[str, Callable[[str], object]] = {
    "E0330": compiled,
    "E0332": compiled,
    "E0333": compiled,
    "E0401": parse,
    "E0402": lambda text: parse_pass(text.strip(), PASSES),
    "E0403": lambda text: verify(parse(text)),
    "E0404": lambda text: run_passes(parse(text), [cls() for cls in PASSES]),
}


@pytest.mark.parametrize("code", RAISING)
def test_a_page_prints_what_its_input_gives(code: str) -> None:
    page = (ROOT / "specs" / "errors" / f"{code}.md").read_text()
    assert page.startswith(f"# {code}: ") and "\nTo mend it: " in page
    given, printed = re.findall(r"```(?:moe|ir|pass|text)\n(.*?)```", page, re.DOTALL)
    with pytest.raises(MoecError) as refused:
        RAISING[code](given)
    assert {diagnostic.code for diagnostic in refused.value.diagnostics} == {code}
    assert refused.value.render() + "\n" == printed
