"""`moec fmt`: goldens, and the two laws: formatting twice is formatting once, and the tree stays the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moec.diagnostics import CompileError, SourceFile
from moec.grammar.formatter import format_text
from moec.grammar.parser import parse
from moec.grammar.tokens import tokenise
from moec.specs import read, shipped

GOLDEN = Path(__file__).parent / "golden"
CORPUS = [p.read_bytes().decode().partition("----\n")[0] for k in ("fmt", "parse") for p in (GOLDEN / k).glob("*.txt")]
SPACES = ["", " ", "\n", "\n\n\n", "\t", "\r\n", "  ", " // note\n", "\n// alone\n"]


@pytest.mark.parametrize("path", sorted((GOLDEN / "fmt").glob("*.txt")), ids=lambda p: p.stem)
def test_format(path: Path, golden: Callable[[Path, str], None]) -> None:
    text = path.read_bytes().decode().partition("----\n")[0]
    golden(path, f"{text}----\n{format_text(text)}")


def comments(text: str) -> list[str]:
    return [t.rstrip() for t in tokenise(SourceFile("case.moe", text)) if t.type == "COMMENT"]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(CORPUS)), st.randoms(use_true_random=False))
def test_laws(text: str, rng) -> None:  # type: ignore[no-untyped-def]
    """On texts whose white space was shuffled, with comments put in anywhere."""
    tokens = tokenise(SourceFile("case.moe", text))
    words = [rng.choice(SPACES) or " " if t.type == "SPACE" else str(t) for t in tokens]
    words = [w if t.type != "COMMENT" else w + "\n" for w, t in zip(words, tokens, strict=True)]
    mutated = "".join(words)
    once = format_text(mutated)
    assert format_text(once) == once
    assert parse(SourceFile("a", once)) == parse(SourceFile("b", text)) == parse(SourceFile("c", mutated))
    assert comments(once) == comments(mutated)
    assert all(line == line.rstrip() and "\t" not in line.partition("//")[0] for line in once.split("\n"))


@pytest.mark.parametrize("folder", ["clusters", "models"])
def test_shipped_descriptions_are_formatted(folder: str) -> None:
    for name in shipped(folder, ".moe"):
        assert format_text(read(folder, f"{name}.moe")) == read(folder, f"{name}.moe")


def test_what_does_not_parse_is_not_formatted() -> None:
    with pytest.raises(CompileError):
        format_text("model { }")
