"""The parser: trees of right programs, errors of wrong ones, and limits that end in an error instead of a crash."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from lark import Lark

from moec.diagnostics import CompileError, SourceFile
from moec.grammar import ast
from moec.grammar.expected import phrases
from moec.grammar.parser import node_classes, parse, parse_override, read_source
from moec.grammar.tokens import MAX_BYTES, language, reserved_words, tokenise
from moec.semantics.checker import check

GOLDEN = Path(__file__).parent / "golden"
DESIGN = (GOLDEN / "parse" / "design-example.txt").read_text().partition("----\n")[0]


def tree(text: str) -> ast.Program:
    return parse(SourceFile("case.moe", text))


def errors(text: str) -> list[str]:
    with pytest.raises(CompileError) as info:
        tree(text)
    return [f"{d.code} {d.message}" for d in info.value.diagnostics]


def dump(node: object, depth: int = 0) -> str:
    """A tree as indented lines: the class, then what it has; leaves on one line."""
    if not isinstance(node, ast.Node):
        return str(node)
    own = [getattr(node, f.name) for f in fields(node) if f.name != "span"]
    parts = [part for value in own for part in (value if isinstance(value, tuple) else (value,)) if part is not None]
    flat = " ".join(dump(part) for part in parts)
    name = type(node).__name__
    if len(flat) < 90 and "\n" not in flat and not isinstance(node, (ast.Program, ast.Model, ast.Plan)):
        return f"{name}({flat})" if flat else name
    lines = [f"{'  ' * (depth + 1)}{dump(part, depth + 1)}" for part in parts]
    return "\n".join([name, *lines])


@pytest.mark.parametrize("path", sorted((GOLDEN / "parse").glob("*.txt")), ids=lambda p: p.stem)
def test_parse(path: Path, golden: Callable[[Path, str], None]) -> None:
    text = path.read_bytes().decode().partition("----\n")[0]
    golden(path, f"{text}----\n{dump(tree(text))}\n")


def test_grammar_is_strict_lalr() -> None:
    pytest.importorskip("interegular", reason="lark's strict mode needs interegular")
    text = (Path(sys.modules["moec.grammar.parser"].__file__ or "").parent / "moe.lark").read_text()
    assert Lark(text, parser="lalr", lexer="basic", start=["program", "override"], strict=True)


def test_every_rule_has_its_class_and_every_class_its_rule() -> None:
    classes = {c for c in vars(ast).values() if isinstance(c, type) and issubclass(c, ast.Node)} - {ast.Node}
    assert set(node_classes().values()) == classes


def test_every_terminal_has_words_for_the_user() -> None:
    for terminal in language().terminals:
        if terminal.name not in ("COMMENT", "SPACE"):
            assert phrases({terminal.name})[0] != terminal.name


def test_spans_cover_what_was_written() -> None:
    program = tree(DESIGN)
    model = program.declarations[1]
    assert isinstance(model, ast.Model)
    assert model.span.text.startswith("model deepseek_v3 {") and model.span.text.endswith("}")
    attention = next(i for i in model.items if isinstance(i, ast.Attention))
    assert (
        attention.value.span.text
        == "mla(heads = 128, q_rank = 1536, kv_rank = 512, nope = 128, rope = 64, value = 128)"
    )
    assert attention.span.where == "case.moe:9:3"


def test_trees_are_equal_wherever_they_are_written() -> None:
    assert tree("const a = 3") == tree("\n\n  const   a =\t3 // three") != tree("const a = 4")


@pytest.mark.parametrize("word", [*reserved_words(), "GiB", "GB", "us"])
def test_a_reserved_word_is_never_a_name(word: str) -> None:
    assert errors(f"const {word} = 3")[0] == f"E0104 `{word}` is a reserved word and cannot be a name"
    assert tree(f"const {word}x = 3") and tree(f"const x{word} = 3") and tree(f"const {word}_1 = 3")


@pytest.mark.parametrize(
    "name", ["top", "mesh1", "expert", "in_", "topk_router", "experts2", "us_", "e6", "_", "per_rank"]
)
def test_names_near_reserved_words(name: str) -> None:
    constant = tree(f"const {name} = 3").declarations[0]
    assert isinstance(constant, ast.Constant) and constant.name.id == name


def test_each_declaration_reports_its_own_mistake() -> None:
    text = "model a { hidden = = 3 }\nmesh b { attention = dp(2) * }\nplan c { run }\nconst d 3\n"
    assert [e[:5] for e in errors(text)] == ["E0101"] * 4


def test_messages_never_show_terminal_names() -> None:
    names = {t.name for t in language().terminals if t.name.lower() != t.pattern.value} | {"__ANON", "$END"}
    shown = re.compile(r"(?<![`\w])(" + "|".join(sorted(map(re.escape, names))) + r")(?![`\w])")
    for text in _mutants(DESIGN, 300):
        try:
            tree(text)
        except CompileError as error:
            said = [label.text for d in error.diagnostics if d.primary for label in (d.primary, *d.secondary)]
            assert not [s for s in said if shown.search(re.sub("`[^`]*`", "", s))]


BYTES = {
    "E0105": b" " * (MAX_BYTES + 1),
    "E0109": b"const a = 1" + b"+1" * 50_000,
    "E0110": b"// \xff\xfe",
    "E0111": "const a = 1 // \u202e reordered".encode(),
}


@pytest.mark.parametrize("code", BYTES)
def test_files_that_are_no_text(code: str, tmp_path: Path) -> None:
    path = tmp_path / "case.moe"
    path.write_bytes(BYTES[code])
    with pytest.raises(CompileError) as info:
        parse(read_source(path, "case.moe"))
    assert [d.code for d in info.value.diagnostics] == [code]


def test_nul_is_refused_and_escaped_in_the_message() -> None:
    with pytest.raises(CompileError) as info:
        tree("const a\x00 = 3")
    assert "U+0000" in info.value.render() and "\x00" not in info.value.render()


def test_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(CompileError) as info:
        read_source(tmp_path / "none.moe", "none.moe")
    assert (info.value.diagnostics[0].code, info.value.exit_code) == ("E0113", 2)


def test_byte_order_mark_and_windows_line_ends_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "case.moe"
    path.write_bytes(b"\xef\xbb\xbfmodel m {\r\n\thidden = 64 // wide\r\n}\r\n// last")
    assert parse(read_source(path)) == tree("model m { hidden = 64 }")


@pytest.mark.parametrize(
    ("good", "bad", "code"),
    [
        ("const a = " + "(" * 64 + "1" + ")" * 64, "const a = " + "(" * 65 + "1" + ")" * 65, "E0106"),
        ("const a = " + "-" * 64 + "1", "const a = " + "- " * 1000 + "1", "E0106"),
        (f"const {'a' * 64} = 1", f"const {'a' * 65} = 1", "E0107"),
        (f"const a = {'9' * 18}", f"const a = {'9' * 19}", "E0108"),
        ("const a = 1" + "+1" * 10_000, "const a = 1" + "+1" * 60_000, "E0109"),
    ],
)
def test_limits(good: str, bad: str, code: str) -> None:
    assert tree(good).declarations
    assert code in {e[:5] for e in errors(bad)}


def test_override_value_keeps_its_place() -> None:
    value = parse_override(SourceFile("--set", "plan.context=2 * 512"), len("plan.context="))
    assert isinstance(value.value, ast.Product) and value.value.span.text == "2 * 512"


def test_same_tree_with_every_hash_seed(tmp_path: Path) -> None:
    path = tmp_path / "case.moe"
    path.write_text(DESIGN + "model x { experst = = }\n")
    script = (
        "import sys; from moec.grammar.parser import *; s = read_source(sys.argv[1], 'case.moe')\n"
        "try: print(parse(s))\n"
        "except CompileError as e: print(e.render())\n"
        "print(parse(SourceFile('case.moe', s.text.partition('model x')[0])))\n"
    )
    outputs = set()
    for seed in ("0", "1", "4242"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", script, str(path)]
        outputs.add(subprocess.run(command, env=env, capture_output=True, check=True, text=True).stdout)
    assert len(outputs) == 1 and "E0101" in outputs.pop()


def _mutants(text: str, count: int) -> list[str]:
    """Programs with a few tokens dropped, doubled, swapped or replaced by others."""
    source = SourceFile("case.moe", text)
    words = [str(t) for t in tokenise(source)]
    spare = [
        *words,
        "{",
        "}",
        "(",
        ")",
        "..",
        "=",
        "-",
        "/",
        "0",
        "1e9",
        '"x"',
        "@",
        "\x00",
        "999999999999999999",
        "GiB",
    ]
    out = []
    for seed in range(count):
        rng = random.Random(seed)
        mutant = list(words)
        for _ in range(rng.randint(1, 4)):
            i, j = rng.randrange(len(mutant)), rng.randrange(len(mutant))
            action = rng.randrange(4)
            if action == 0:
                del mutant[i]
            elif action == 1:
                mutant.insert(i, mutant[j])
            elif action == 2:
                mutant[i], mutant[j] = mutant[j], mutant[i]
            else:
                mutant[i] = rng.choice(spare)
        out.append("".join(mutant))
    return out


BUILT = """
const nodes = 2 * 1
cluster box {
  devices = 2  memory = 80 GB  compute = peak(bf16 = 1 TFLOP/s)
  intra = link(10 GB/s, latency = 2 us, concurrency = 2)
}
model m {
  hidden = 64  vocab = 100  norm = rms(eps = 1e-6)
  rotary = rope(theta = 1e4, scaling = yarn(factor = 4, original = 64))
  attention a = gqa(heads = 4, kv_heads = 2)
  attention l = mla(heads = 4, q_rank = 8, kv_rank = 8, nope = 4, rope = 4, value = 4)
  router r { score = sigmoid  top = 2  groups = 4 keep 2  bias = frozen  scale = 2.5 }
  experts e = 2 * nodes * swiglu(32)  experts s = 1 * swiglu(16)
  layers 0, 2..4 step 2 { a  swiglu(64) }
  layers 1, 3 { l  moe(r, e, s) }
}
mesh x on box[nodes] { attention = dp(2) * tp(2)  experts = ep(2) * etp(2) }
plan p {
  run m on x  context = 64
  prefill { tokens = 16 }
  decode { batch = 2  exchange = padded  capacity = 1.5 drop }
}
"""


def test_mutated_programs_give_errors_and_never_crash() -> None:
    """Whatever the text, `check` gives a result or a CompileError that can be shown."""
    refused = 0
    for text in [*_mutants(BUILT, 1300), *_mutants(DESIGN, 200)]:
        try:
            check(SourceFile("case.moe", text))
        except CompileError as error:
            refused += 1
            assert error.diagnostics and all(d.code < "E0320" and d.message for d in error.diagnostics)
            assert "error[" in error.render()
    assert 1000 < refused < 1500


def test_a_mistake_in_a_long_line_is_shown_where_it_is() -> None:
    with pytest.raises(CompileError) as info:
        tree("const a = 1" + " + 1" * 500 + " + + 2" + " + 3" * 500)
    lines = info.value.render().split("\n")
    assert max(map(len, lines)) < 200 and lines[3][lines[4].index("^")] == "+"


def test_carets_stand_under_the_mistake_after_escaped_characters() -> None:
    with pytest.raises(CompileError) as info:
        tree('\tuse "\x1b[31m" model m { hidden = = 3 }')
    lines = info.value.render().split("\n")
    assert "\x1b" not in lines[3] and lines[3][lines[4].index("^")] == "=" and lines[3][lines[4].index("^") - 2] == "="
