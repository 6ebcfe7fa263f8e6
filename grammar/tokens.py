"""Text to tokens, and the limits a text must keep; every limit is an error of its own and never a crash."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib import resources
from itertools import islice

from lark import Lark, Token
from lark.exceptions import UnexpectedCharacters

from moec.diagnostics import CompileError, Diagnostic, Label, SourceFile, Span

MAX_BYTES = 1 << 20
MAX_TOKENS = 100_000
MAX_NESTING = 64
MAX_NAME = 64
MAX_DIGITS = 18
#: Errors after this many are not looked for: they help nobody.
MAX_ERRORS = 20

#: NUL, and the characters that reorder text on a screen so that it reads as something else.
FORBIDDEN = re.compile("[\x00\u202a-\u202e\u2066-\u2069]")
OPEN, CLOSE = {"{": "}", "(": ")", "[": "]"}, {"}", ")", "]"}
HINTS = {
    "#": "comments start with `//`",
    ";": "settings need no separator: a space or a new line is enough",
    ":": "a setting is written `name = value`",
    "'": 'text is written in double quotes: "text"',
    ".": "a range is written `0..2`, a decimal number with digits on both sides of its point",
}


@cache
def language() -> Lark:
    """The parser tables of moe.lark. A test builds them with `strict=True` too, which needs a package users do not."""
    return Lark(_grammar(), parser="lalr", lexer="basic", start=["program", "override"], propagate_positions=True)


@cache
def _lexer() -> Lark:
    """The same terminals without a parser, and with nothing ignored: the formatter needs comments and line ends."""
    return Lark(re.sub("^%ignore.*$", "", _grammar(), flags=re.M), parser=None, lexer="basic", start=["program"])


def _grammar() -> str:
    return resources.files("moec.grammar").joinpath("moe.lark").read_text("utf-8")


@cache
def reserved_words() -> dict[str, str]:
    """Words that are never names -> their terminal. Units are reserved as well, by `is_reserved`."""
    plain = [t for t in language().terminals if t.pattern.type == "str" and t.pattern.value.isalpha()]
    return {t.pattern.value: t.name for t in plain}


def is_reserved(token: Token) -> bool:
    return token.type == "UNIT" or str(token) in reserved_words()


def span_of(source: SourceFile, token: Token) -> Span:
    start = token.start_pos or 0
    return Span(source, start, start + len(token))


def tokenise(source: SourceFile, start: int = 0) -> list[Token]:
    """All tokens from offset `start`, white space and comments among them.

    Raises CompileError with every fault found: E0105 to E0109, E0111, E0112, E0103, E0114.
    """
    if len(source.text) > MAX_BYTES or len(source.text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise CompileError(Diagnostic("E0105", f"`{source.name}` is larger than {MAX_BYTES} bytes", help=_SPLIT))
    errors = [
        _error("E0111", f"character U+{ord(m[0]):04X} is not allowed", source, m.start(), m.end(), "remove it")
        for m in islice(FORBIDDEN.finditer(source.text), MAX_ERRORS)
    ]
    if errors:
        raise CompileError(*errors)
    tokens = list(islice(_lex(source, start, errors), MAX_TOKENS + 1))
    if len(tokens) > MAX_TOKENS:
        span = span_of(source, tokens[-1])
        message = f"more than {MAX_TOKENS} words and symbols in one file"
        raise CompileError(*errors, Diagnostic("E0109", message, Label(span), help=_SPLIT))
    errors += _limits(source, tokens)
    if errors:
        raise CompileError(*sorted(errors, key=lambda d: d.primary.span.start if d.primary else 0)[:MAX_ERRORS])
    return tokens


_SPLIT = 'split it and join the parts with `use "FILE.moe"`'


def _error(code: str, message: str, source: SourceFile, start: int, end: int, help: str = "") -> Diagnostic:
    return Diagnostic(code, message, Label(Span(source, start, end)), help=help)


def _lex(source: SourceFile, start: int, errors: list[Diagnostic]) -> Iterator[Token]:
    """Tokens of the text; a character that begins no token is reported and stepped over."""
    text, position = source.text, start
    while position < len(text) and len(errors) < MAX_ERRORS:
        base = position
        try:
            for token in _lexer().lex(text[base:]):
                token.start_pos = base + (token.start_pos or 0)
                token.end_pos = position = token.start_pos + len(token)
                yield token
            return
        except UnexpectedCharacters as error:
            position = base + (error.pos_in_stream or 0)
            errors.append(_bad_character(source, position))
            position = errors[-1].primary.span.end if errors[-1].primary else position + 1


def _bad_character(source: SourceFile, at: int) -> Diagnostic:
    character = source.text[at]
    if character == '"':
        end = re.compile(r"[\r\n]|\Z").search(source.text, at)
        stop = end.start() if end else len(source.text)
        return _error("E0112", "a text is not closed", source, at, stop, 'close it with `"` on the same line')
    shown = f"`{character}`" if character.isprintable() else f"U+{ord(character):04X}"
    return _error("E0103", f"unexpected character {shown}", source, at, at + 1, HINTS.get(character, ""))


def _limits(source: SourceFile, tokens: list[Token]) -> Iterator[Diagnostic]:
    """Names, numbers and nesting within their limits, and no number glued to a name."""
    depth = signs = 0
    for i, token in enumerate(tokens):
        signs = signs + 1 if token == "-" else signs if token.type == "SPACE" else 0
        depth += (token in OPEN) - (token in CLOSE)
        if (token in OPEN and depth == MAX_NESTING + 1) or (token == "-" and signs == MAX_NESTING + 1):
            message = f"nested deeper than {MAX_NESTING} levels"
            yield Diagnostic("E0106", message, Label(span_of(source, token)), help="name a part with `const`")
        if token.type == "NAME" and len(token) > MAX_NAME:
            message = f"a name of {len(token)} characters"
            yield Diagnostic("E0107", message, Label(span_of(source, token)), help=f"use at most {MAX_NAME} characters")
        if token.type == "NUMBER":
            if any(len(part) > MAX_DIGITS for part in re.split(r"\D+", token)):
                help = f"use at most {MAX_DIGITS} digits"
                yield Diagnostic("E0108", "a number has too many digits", Label(span_of(source, token)), help=help)
            after = tokens[i + 1] if i + 1 < len(tokens) else None
            if after is not None and after.type != "UNIT" and (after.type == "NAME" or is_reserved(after)):
                span = Span(source, token.start_pos or 0, span_of(source, after).end)
                help = "names start with a letter; put a space between two things"
                yield Diagnostic("E0114", f"`{span.text}` is neither a number nor a name", Label(span), help=help)
