"""`moec fmt`: the one layout of a .moe text.

It works on tokens, so comments stay where they are and the tree cannot change. What it decides: indentation, spaces,
at most one blank line, aligned `=`, `{` and comments of neighbours. What it leaves to the writer: which settings share
a line, and whether a bracket is written over several lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise

from lark import Token

from moec.diagnostics import SourceFile
from moec.grammar.parser import DECLARATION_WORDS, parse
from moec.grammar.tokens import tokenise

INDENT = "  "
RANGE = ".."
OPENING = frozenset({"LBRACE", "LPAR", "LSQB"})
CLOSING = frozenset({"RBRACE", "RPAR", "RSQB"})
#: Words that begin an item of a block.
ITEM_WORDS = frozenset({"ATTENTION", "EXPERTS", "ROUTER", "LAYERS", "RUN", "PREFILL", "DECODE"})
#: Items whose one-line blocks are aligned.
BLOCK_WORDS = frozenset({"LAYERS", "PREFILL", "DECODE"})
#: Tokens that end a value; a minus after anything else is a sign.
VALUE_ENDS = frozenset({"NAME", "NUMBER", "UNIT", "STRING", "TRUE", "FALSE", "RPAR", "RSQB"})


def format_text(text: str, name: str = "<text>") -> str:
    """The text in its one layout; formatting that again changes nothing. Raises CompileError (E01)."""
    source = SourceFile(name, text)
    parse(source)
    lines = list(_Layout(tokenise(source)).lines())
    return "".join(f"{line.whole()}\n" for line in _aligned(lines))


@dataclass(frozen=True)
class _Line:
    """One line of output. Neighbours of the same `kind` are aligned at `anchor`, an offset in `text`."""

    indent: int = 0
    text: str = ""
    comment: str = ""
    is_after_blank: bool = False
    kind: str = ""
    anchor: int = 0
    comment_gap: int = 2

    def whole(self) -> str:
        gap = " " * self.comment_gap if self.text and self.comment else ""
        blank = "\n" if self.is_after_blank else ""
        return blank + INDENT * self.indent + self.text + gap + self.comment


@dataclass(frozen=True)
class _Word:
    """A token of a line, with the space before it and how many brackets are open there."""

    token: Token
    gap: str
    depth: int
    is_start: bool
    is_broken: bool


@dataclass
class _Bracket:
    """An open bracket: over several lines or not, and whether it is the body of `layers`."""

    is_round: bool
    is_broken: bool
    is_layers: bool


@dataclass
class _Layout:
    """Cuts tokens into lines."""

    raw: list[Token]
    tokens: list[Token] = field(default_factory=list)
    newlines: list[int] = field(default_factory=list)  # before each token
    broken: set[int] = field(default_factory=set)  # opening tokens of brackets over several lines
    stack: list[_Bracket] = field(default_factory=list)

    def __post_init__(self) -> None:
        waiting = 0
        for token in self.raw:
            if token.type == "SPACE":
                waiting += token.count("\n")
            else:
                self.tokens.append(token)
                self.newlines.append(waiting)
                waiting = 0
        opened: list[int] = []
        lines = list(accumulate(self.newlines))
        for i, token in enumerate(self.tokens):
            if token.type in OPENING:
                opened.append(i)
            elif token.type in CLOSING and lines[opened[-1]] != lines[i]:
                self.broken.add(opened.pop())
            elif token.type in CLOSING:
                opened.pop()

    def lines(self) -> Iterator[_Line]:
        """Lines in order, not yet aligned."""
        row: list[_Word] = []
        indent, is_after_blank = 0, False
        for i, token in enumerate(self.tokens):
            is_start = self._is_start(i)
            if row and self._is_break(i, is_start):
                yield _line(row, indent, is_after_blank)
                row, is_after_blank = [], self._is_blank(i)
            if not row:
                indent = self._indent(token, is_start)
            gap = self._gap(i, is_start) if row else ""
            row.append(_Word(token, gap, len(self.stack), is_start, i in self.broken))
            self._track(i)
        if row:
            yield _line(row, indent, is_after_blank)

    def _is_start(self, i: int) -> bool:
        """Whether token i begins a declaration, a setting or another item of a block."""
        token, before = self.tokens[i], self._before(i)
        if not self.stack:
            return token.type in DECLARATION_WORDS and before != "USE"
        if self.stack[-1].is_round:
            return False
        if self.stack[-1].is_layers:
            return token.type == "NAME"
        is_setting = token.type == "NAME" and self._after(i) == "EQUAL" and before not in ("ATTENTION", "EXPERTS")
        return is_setting or token.type in ITEM_WORDS

    def _neighbour(self, i: int, step: int) -> str:
        i += step
        while 0 <= i < len(self.tokens) and self.tokens[i].type == "COMMENT":
            i += step
        return self.tokens[i].type if 0 <= i < len(self.tokens) else ""

    def _before(self, i: int) -> str:
        return self._neighbour(i, -1)

    def _after(self, i: int) -> str:
        return self._neighbour(i, 1)

    def _is_break(self, i: int, is_start: bool) -> bool:
        """Whether a new line begins before token i."""
        token, previous, has_newline = self.tokens[i], self.tokens[i - 1], self.newlines[i] > 0
        if previous.type == "COMMENT":
            return True
        if token.type == "COMMENT":
            return has_newline
        if previous.type in OPENING:
            return i - 1 in self.broken
        if token.type in CLOSING:
            return self.stack[-1].is_broken
        if is_start:
            return has_newline or not self.stack
        return has_newline and previous.type == "COMMA" and self.stack[-1].is_round and self.stack[-1].is_broken

    def _is_blank(self, i: int) -> bool:
        """Whether a blank line stays before token i: never at the edges of a bracket."""
        previous = self.tokens[i - 1]
        return self.newlines[i] > 1 and previous.type not in OPENING and self.tokens[i].type not in CLOSING

    def _indent(self, token: Token, is_start: bool) -> int:
        depth = sum(bracket.is_broken for bracket in self.stack)
        if token.type in CLOSING:
            return depth - self.stack[-1].is_broken
        in_list = bool(self.stack) and self.stack[-1].is_round and self.stack[-1].is_broken
        return depth + (0 if is_start or in_list or token.type == "COMMENT" else 1)

    def _gap(self, i: int, is_start: bool) -> str:
        """The space between token i and the one before it on the same line."""
        token, previous = self.tokens[i], self.tokens[i - 1]
        if is_start and previous.type != "LBRACE":
            return "  "
        if previous.type in ("LPAR", "LSQB") or token.type in ("RPAR", "RSQB", "COMMA") or RANGE in (token, previous):
            return ""
        if token.type in ("LPAR", "LSQB") and previous.type == "NAME":
            return ""
        if previous.type == "MINUS" and (i < 2 or self._before(i - 1) not in VALUE_ENDS):
            return ""
        return "" if previous.type == "LBRACE" and token.type == "RBRACE" else " "

    def _track(self, i: int) -> None:
        """Keep the stack of open brackets."""
        token = self.tokens[i]
        if token.type in OPENING:
            self.stack.append(_Bracket(token.type != "LBRACE", i in self.broken, self._is_layers_body(i)))
        elif token.type in CLOSING:
            self.stack.pop()

    def _is_layers_body(self, i: int) -> bool:
        """Whether the brace at i opens the body of `layers`: the last word that can have a brace is `layers`."""
        if self.tokens[i].type != "LBRACE":
            return False
        for before in range(i - 1, -1, -1):
            kind = self.tokens[before].type
            if kind in ITEM_WORDS or kind in DECLARATION_WORDS or kind in ("LBRACE", "RBRACE"):
                return kind == "LAYERS"
        return False


def _line(row: Sequence[_Word], indent: int, is_after_blank: bool) -> _Line:
    """One line of words; a comment can only be the last."""
    words = [word for word in row if word.token.type != "COMMENT"]
    comment = row[-1].token.rstrip() if len(words) < len(row) else ""
    kind, anchor = _anchor(words) if words else ("", 0)
    text = "".join(word.gap + word.token for word in words)
    return _Line(indent, text, comment, is_after_blank, kind, anchor)


def _anchor(words: Sequence[_Word]) -> tuple[str, int]:
    """What a line of one item is aligned by, and where: a setting's `=` or the `{` of a block on one line."""
    own = [word for word in words if word.depth == words[0].depth]
    if not words[0].is_start or sum(word.is_start for word in own) > 1:
        return "", 0
    offset = 0
    for i, word in enumerate(words):
        offset += len(word.gap)
        if i == 1 and word.token.type == "EQUAL":
            return "setting", offset
        is_block = word.token.type == "LBRACE" and not word.is_broken
        if is_block and words[0].token.type in BLOCK_WORDS:
            return "block", offset
        offset += len(word.token)
    return "", 0


def _aligned(lines: Sequence[_Line]) -> list[_Line]:
    """Neighbours of one kind get their anchors, then their comments, into one column."""
    out: list[_Line] = []
    numbers = [0]  # of the group each line is in
    if not lines:
        return out
    for before, line in pairwise(lines):
        same = (before.kind, before.indent) == (line.kind, line.indent) and line.kind and not line.is_after_blank
        numbers.append(numbers[-1] + (not same))
    for _, group in groupby(zip(numbers, lines, strict=True), key=lambda pair: pair[0]):
        neighbours = [line for _, line in group]
        column = max(line.anchor for line in neighbours)
        padded = [_pad(line, column) for line in neighbours]
        width = max((len(line.text) for line in padded if line.comment), default=0)
        out += [replace(line, comment_gap=width - len(line.text) + 2) for line in padded]
    return out


def _pad(line: _Line, column: int) -> _Line:
    if not line.kind:
        return line
    return replace(line, text=line.text[: line.anchor] + " " * (column - line.anchor) + line.text[line.anchor :])
