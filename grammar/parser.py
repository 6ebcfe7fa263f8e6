"""Text to syntax tree.

1. tokens, with their limits (tokens.py);
2. cut before each word that begins a declaration: those words are reserved, so every right program is cut the same way;
3. parse each piece by itself, so that one mistake hides nothing in the next declaration;
4. build the tree: one class per rule, named alike, children in order.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from lark import Token
from lark.exceptions import UnexpectedToken
from lark.tree import Meta
from lark.visitors import Transformer_NonRecursive, v_args

from moec.diagnostics import CompileError, Diagnostic, SourceFile, Span
from moec.grammar import ast
from moec.grammar.expected import unexpected
from moec.grammar.tokens import MAX_BYTES, MAX_ERRORS, language, span_of, tokenise

DECLARATION_WORDS = frozenset({"USE", "CONST", "CLUSTER", "MODEL", "MESH", "CACHE", "PLAN"})
#: Rules of one child, which is all they leave in the tree.
INLINED = frozenset({"expression", "atom"})


def read_source(path: str | Path, name: str | None = None) -> SourceFile:
    """The text of a file, shown in errors as `name` (default: the path as given).

    Raises CompileError: E0113 not readable, E0105 too large, E0110 not UTF-8.
    """
    name = str(path) if name is None else name
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        help = "give the path of a readable .moe file"
        raise CompileError(Diagnostic("E0113", f"cannot read `{name}`: {reason}", help=help)) from None
    if len(data) > MAX_BYTES:
        message = f"`{name}` is larger than {MAX_BYTES} bytes"
        raise CompileError(Diagnostic("E0105", message, help='split it and join the parts with `use "FILE.moe"`'))
    try:
        return SourceFile(name, data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        message = f"`{name}` is not UTF-8 text: byte {data[error.start]:#04x} in line {line}"
        raise CompileError(Diagnostic("E0110", message, help="save the file as UTF-8")) from None


def parse(source: SourceFile) -> ast.Program:
    """The tree of a whole file. Raises CompileError with the first mistake of every declaration (E01)."""
    tokens = [t for t in tokenise(source) if t.type not in ("SPACE", "COMMENT")]
    declarations: list[ast.Declaration] = []
    errors: list[Diagnostic] = []
    pieces = _pieces(tokens)
    skip = False
    for i, piece in enumerate(pieces):
        if skip:
            skip = False
            continue
        after = pieces[i + 1] if i + 1 < len(pieces) else []
        result = _parse_piece(source, piece, after, "program")
        if isinstance(result, Diagnostic):
            errors.append(result)
            # a reserved word used as a name began a piece of its own: that piece is no declaration
            skip = result.code == "E0104" and bool(after) and _starts_at(result, source, after[0])
        else:
            declarations += result.declarations
    if errors:
        raise CompileError(*errors[:MAX_ERRORS])
    return ast.Program(tuple(declarations), span=Span(source, 0, len(source.text)))


def parse_override(source: SourceFile, start: int) -> ast.Override:
    """The tree of a value that begins at offset `start` of the text. Raises CompileError."""
    tokens = [t for t in tokenise(source, start) if t.type not in ("SPACE", "COMMENT")]
    result = _parse_piece(source, tokens, [], "override")
    if isinstance(result, Diagnostic):
        raise CompileError(result)
    assert isinstance(result, ast.Override)
    return result


def _starts_at(diagnostic: Diagnostic, source: SourceFile, token: Token) -> bool:
    return diagnostic.primary is not None and diagnostic.primary.span.start == span_of(source, token).start


def _pieces(tokens: list[Token]) -> list[list[Token]]:
    """Tokens cut before every declaration; what comes before the first is a piece of its own."""
    pieces: list[list[Token]] = []
    for i, token in enumerate(tokens):
        is_start = token.type in DECLARATION_WORDS and not (i and tokens[i - 1].type == "USE")
        if is_start or not pieces:
            pieces.append([])
        pieces[-1].append(token)
    return pieces


def _parse_piece(source: SourceFile, tokens: list[Token], after: list[Token], start: str) -> Any:
    """The tree of one piece, or what is wrong with it. `after`: the tokens of the next piece."""
    parser: Any = language().parse_interactive(start=start)  # lark leaves some of its methods untyped
    for i, token in enumerate(tokens):
        try:
            parser.feed_token(token)
        except UnexpectedToken:
            is_assigned = i + 1 < len(tokens) and tokens[i + 1].type == "EQUAL"
            return unexpected(source, tokens[:i], token, parser.accepts(), is_assigned)
    try:
        tree = parser.feed_eof(tokens[-1] if tokens else None)
    except UnexpectedToken:
        is_assigned = len(after) > 1 and after[1].type == "EQUAL"
        return unexpected(source, tokens, after[0] if after else None, parser.accepts(), is_assigned)
    return _Builder(source).transform(tree)


@cache
def node_classes() -> dict[str, type[ast.Node]]:
    """Rule name -> class: `expert_group` -> ExpertGroup."""
    rules = {str(r.origin.name) for r in language().rules}
    names = {rule: "".join(part.title() for part in rule.split("_")) for rule in rules - INLINED if rule[0] != "_"}
    return {rule: getattr(ast, name) for rule, name in names.items()}


@v_args(meta=True)
class _Builder(Transformer_NonRecursive[Token, Any]):
    """Calls the class of each rule with the children in order; a tuple field takes the rest."""

    def __init__(self, source: SourceFile) -> None:
        super().__init__()
        self.source = source

    def __default__(self, data: str, children: list[Any], meta: Meta) -> Any:
        cls = node_classes()[str(data)]
        values = [str(child) if isinstance(child, Token) else child for child in children]
        own = [f for f in fields(cls) if f.name != "span"]
        if own and str(own[-1].type).startswith("tuple"):
            values = [*values[: len(own) - 1], tuple(values[len(own) - 1 :])]
        span = Span(self.source, getattr(meta, "start_pos", 0), getattr(meta, "end_pos", 0))
        return cls(*values, span=span)
