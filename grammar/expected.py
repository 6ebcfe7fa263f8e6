"""What a syntax error says: the symbols that would have been right, as the user types them; never a terminal's name."""

from __future__ import annotations

from collections.abc import Iterable

from lark import Token

from moec.diagnostics import Diagnostic, Label, SourceFile, Span, did_you_mean
from moec.grammar.tokens import CLOSE, OPEN, is_reserved, language, span_of

PATTERNS = {"NAME": "a name", "NUMBER": "a number", "STRING": "text in quotes", "UNIT": "a unit", "$END": "the end"}
#: Sets of terminals that are said with one phrase when all of them are possible.
GROUPS = (
    (("USE", "CONST", "CLUSTER", "MODEL", "MESH", "CACHE", "PLAN"), "a declaration"),
    (("NAME", "NUMBER", "STRING", "TRUE", "FALSE", "MINUS", "LPAR", "LSQB"), "a value"),
    (("PLUS", "MINUS", "STAR", "SLASH"), "an operator"),
    (("PREFILL", "DECODE"), "`prefill`, `decode`"),
)


def phrases(accepts: set[str]) -> list[str]:
    """The terminals as a user would type them, in a fixed order."""
    left = set(accepts)
    out: list[str] = []
    for names, phrase in GROUPS:
        if left.issuperset(names):
            left -= set(names)
            out.append(phrase)
    literal = {t.name: f"`{t.pattern.value}`" for t in language().terminals if t.pattern.type == "str"}
    return out + sorted((PATTERNS.get(name) or literal[name] for name in left), key=lambda s: (s[0] == "`", s))


def unexpected(
    source: SourceFile, seen: list[Token], token: Token | None, accepts: set[str], is_assigned: bool = False
) -> Diagnostic:
    """The error for `token` (None: the end of the text) after the tokens of `seen`, where `accepts` were possible.

    `is_assigned`: a `=` follows, so that the token is meant as a name and begins no declaration.
    """
    expected = _join(phrases(accepts))
    opened = _unclosed(source, seen)
    secondary = (Label(opened, "opened here"),) if opened and accepts & {"RBRACE", "RPAR", "RSQB"} else ()
    if token is None:
        end = span_of(source, seen[-1]).end if seen else len(source.text)
        here = Label(Span(source, end, end), f"expected {expected}")
        return Diagnostic("E0102", "the text ends too early", here, secondary)
    label = Label(span_of(source, token), f"expected {expected}")
    if is_reserved(token) and "NAME" in accepts and (is_assigned or not (secondary and token.type in _DECLARATIONS)):
        help = f"choose another name: `{token}_1`, for example" if token.type != "UNIT" else "units are reserved"
        message = f"`{token}` is a reserved word and cannot be a name"
        return Diagnostic("E0104", message, label, help=help)
    near = did_you_mean(token, _literals(accepts)) if token.type == "NAME" else ""
    if not near and seen and seen[-1].type == "NAME" and (near := did_you_mean(seen[-1], _literals(ITEM_WORDS))):
        return Diagnostic("E0101", f"unexpected word `{seen[-1]}`", Label(span_of(source, seen[-1])), help=near)
    return Diagnostic("E0101", f"unexpected `{token}`", label, secondary, near)


def _literals(names: Iterable[str]) -> list[str]:
    """The words among the terminals of these names."""
    return [t.pattern.value for t in language().terminals if t.name in names and t.pattern.value.isalpha()]


_DECLARATIONS = frozenset(GROUPS[0][0])
#: Words that begin an item of a block and are followed by a name: what a name before a name may be a slip of.
ITEM_WORDS = frozenset({"ATTENTION", "ROUTER", "EXPERTS", "LAYERS", "RUN", "PREFILL", "DECODE"})


def _join(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " or " + parts[-1]


def _unclosed(source: SourceFile, tokens: list[Token]) -> Span | None:
    """The innermost bracket that is still open."""
    stack: list[Token] = []
    for token in tokens:
        if token in OPEN:
            stack.append(token)
        elif token in CLOSE and stack:
            stack.pop()
    return span_of(source, stack[-1]) if stack else None
