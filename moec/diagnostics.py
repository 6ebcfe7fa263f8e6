"""Errors that name the thing at fault: source files, spans, diagnostics and their text.

Standard library only, because every other module imports this one. A stage collects `Diagnostic`s and raises one
`CompileError` with all of them; a fault of an input, of the machine or of a peer rank raises `MoecError` with one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

#: Exit code of a diagnostic by the first three characters of its code (`docs/language.md`, "Exit codes").
EXIT_BY_CLASS = {"E01": 1, "E02": 1, "E03": 1, "E04": 1, "E05": 1, "E06": 4, "E07": 3}
EXIT_USAGE, EXIT_PEER, EXIT_NUMERIC, EXIT_BUG = 2, 5, 6, 70
#: Of a longer source line, this many characters around the label are shown.
MAX_SHOWN = 160
#: Exit codes a diagnostic has whatever its class says: a dead peer, a wrong world size, a numeric fault, a bug.
EXIT_BY_CODE: dict[str, int] = {
    "E0113": 2, "E0222": 2, "E0223": 2,
    "E0401": 3, "E0402": 2, "E0403": 70, "E0404": 70, "E0405": 70, "E0680": 2,
    "E0502": 70, "E0503": 70, "E0504": 70, "E0505": 3, "E0506": 6, "E0507": 70, "E0508": 70, "E0509": 3, "E0510": 70,
    "E0520": 4, "E0537": 4, "E0524": 70, "E0525": 70, "E0526": 70, "E0532": 4, "E0533": 70, "E0534": 2,
    "E0535": 4, "E0536": 4, "E0540": 3, "E0541": 3, "E0542": 3, "E0543": 70,
    "E0601": 5, "E0602": 5, "E0603": 5, "E0607": 5,
    "E0608": 2, "E0610": 70, "E0611": 2, "E0612": 6, "E0613": 3, "E0614": 2, "E0615": 3, "E0616": 6, "E0617": 2,
    "E0619": 3, "E0620": 5, "E0621": 5, "E0622": 3, "E0624": 3, "E0643": 3, "E0645": 3, "E0646": 2, "E0647": 2,
    "E0699": 70,
    "E0730": 2, "E0746": 6, "E0782": 4, "E0783": 2,
}  # fmt: skip


@dataclass(frozen=True)
class SourceFile:
    """A source text and the name it is shown under (as the user wrote it, never made absolute)."""

    name: str
    text: str

    def position(self, offset: int) -> tuple[int, int]:
        """Line and column of a character offset, both from 1."""
        before = self.text[:offset]
        return before.count("\n") + 1, offset - (before.rfind("\n") + 1) + 1

    def line(self, number: int) -> str:
        """The text of line `number` (from 1), without its line end."""
        lines = self.text.split("\n")  # as `position` counts them: splitlines() knows more line ends
        return lines[number - 1].removesuffix("\r") if 0 < number <= len(lines) else ""


@dataclass(frozen=True)
class Span:
    """Half-open range of character offsets [start, end) of one source file."""

    source: SourceFile = field(repr=False)
    start: int
    end: int

    @property
    def text(self) -> str:
        return self.source.text[self.start : self.end]

    @property
    def where(self) -> str:
        """`file:line:column`, as editors follow it."""
        line, column = self.source.position(self.start)
        return f"{self.source.name}:{line}:{column}"


@dataclass(frozen=True)
class Label:
    """A span and what to say about it."""

    span: Span
    text: str = ""


@dataclass(frozen=True)
class Diagnostic:
    """One error: a code, one sentence, where it is, what else matters and the next step.

    `primary` is underlined with carets, `secondary` labels with dashes. `help` says what to do.
    """

    code: str
    message: str
    primary: Label | None = None
    secondary: Sequence[Label] = ()
    help: str = ""

    @property
    def exit_code(self) -> int:
        return EXIT_BY_CODE.get(self.code, EXIT_BY_CLASS.get(self.code[:3], EXIT_BUG))

    def render(self) -> str:
        """The text with source lines, carets and labels."""
        head = f"error[{self.code}]: {printable(self.message)}"
        lines = [head]
        if self.primary is not None:
            lines += _render_labels(self.primary, self.secondary)
        if self.help:
            lines.append(f"  = help: {printable(self.help)}")
        return "\n".join(lines)

    def one_line(self) -> str:
        """The form a failed run prints: `moec: error[CODE]: message; help`."""
        where = f" ({self.primary.span.where})" if self.primary else ""
        tail = f"; {self.help}" if self.help else ""
        return printable(f"moec: error[{self.code}]: {self.message}{where}{tail}".replace("\n", " "))


class MoecError(Exception):
    """One or more diagnostics that end the command. `exit_code` is that of the first."""

    def __init__(self, *diagnostics: Diagnostic) -> None:
        super().__init__("\n".join(d.message for d in diagnostics))
        self.diagnostics = diagnostics

    def __reduce__(self) -> tuple[type[MoecError], tuple[Diagnostic, ...]]:
        return type(self), self.diagnostics

    @property
    def exit_code(self) -> int:
        return self.diagnostics[0].exit_code

    def render(self) -> str:
        return "\n\n".join(d.render() for d in self.diagnostics)


class CompileError(MoecError):
    """What a stage of the compiler found wrong with the program, all of it at once."""


def fail(code: str, message: str, help: str = "", at: Span | None = None) -> MoecError:
    """A `MoecError` of one diagnostic, to be raised by the caller."""
    return MoecError(Diagnostic(code, message, Label(at) if at else None, help=help))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "did you mean `x`?" for the nearest known name, or the empty string."""
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return f"did you mean `{near[0]}`?" if near else ""


def printable(text: str) -> str:
    """`text` with control characters and bidirectional controls escaped, so that no name can steer a terminal."""
    return "".join(c if c == "\n" or c == "\t" or c.isprintable() else f"\\u{ord(c):04x}" for c in text)


def _render_labels(primary: Label, secondary: Sequence[Label]) -> list[str]:
    """Source lines that carry a label, in order, each with its carets or dashes; other files follow."""
    labels = [(label, "-") for label in secondary] + [(primary, "^")]
    gutter = max(len(str(label.span.source.position(label.span.start)[0])) for label, _ in labels)
    out: list[str] = []
    for source in dict.fromkeys([primary.span.source, *(label.span.source for label in secondary)]):
        here = sorted((x for x in labels if x[0].span.source == source), key=lambda x: x[0].span.start)
        first = primary if source == primary.span.source else here[0][0]
        out.append(f"{' ' * gutter}--> {first.span.where}")
        out.append(f"{' ' * gutter} |")
        shown: tuple[int, int] | None = None
        for label, mark in here:
            number, column = source.position(label.span.start)
            line = source.line(number).replace("\t", " ")
            cut = max(0, column - MAX_SHOWN // 2) if len(line) > MAX_SHOWN else 0
            line, column = line[cut : cut + MAX_SHOWN], column - cut
            if (number, cut) != shown:
                if shown and number > shown[0] + 1:
                    out.append("...")
                out.append(f"{number:>{gutter}} | {printable(line)}".rstrip())
                shown = number, cut
            before = printable(line[: column - 1])
            marked = printable(line[column - 1 : column - 1 + label.span.end - label.span.start])
            note = f" {printable(label.text)}" if label.text else ""
            out.append(f"{' ' * gutter} | {' ' * len(before)}{mark * max(1, len(marked))}{note}")
    return out
