"""The settings of a block or the arguments of a call, read by name and type.

Unknown, repeated, missing and mistyped ones are reported here, so that a checker of a declaration reads like its table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from moec.diagnostics import Label, Span, did_you_mean
from moec.grammar import ast
from moec.semantics.values import Amount, Values, say

#: Sizes stay below this: a tensor dimension fits 32 bits.
MAX_SIZE = (1 << 31) - 1


class Fields:
    """Named expressions of one owner. `owner` and `word` are what messages call it and them.

    `span` is where what is missing is missed.
    """

    def __init__(
        self,
        values: Values,
        owner: str,
        span: Span,
        given: Iterable[tuple[ast.Name, ast.Expression]],
        known: Sequence[str],
        unbuilt: Mapping[str, str] | None = None,
        word: str = "setting",
    ) -> None:
        self.values, self.problems, self.owner, self.span = values, values.problems, owner, span
        self._given: dict[str, tuple[ast.Name, ast.Expression]] = {}
        for name, value in given:
            if name.id in (unbuilt or {}):
                self.problems.add("E0219", f"`{name.id}` is not built yet", name.span, help=(unbuilt or {})[name.id])
            elif name.id not in known:
                known_ones = f"{owner} takes {_list(known)}" if known else f"{owner} takes nothing"
                help = did_you_mean(name.id, known) or known_ones
                self.problems.add("E0202", f"{owner} has no {word} `{name.id}`", name.span, help=help)
            elif name.id in self._given:
                also = [Label(self._given[name.id][0].span, "first given here")]
                message = f"`{name.id}` is given twice"
                self.problems.add("E0205", message, name.span, help="remove one of them", also=also)
            else:
                self._given[name.id] = (name, value)

    def has(self, key: str) -> bool:
        return key in self._given

    def at(self, key: str) -> Span:
        """Where the value of `key` is, or the owner where it is left out."""
        return self._given[key][1].span if key in self._given else self.span

    def key_at(self, key: str) -> Span:
        return self._given[key][0].span if key in self._given else self.span

    def need(self, key: str) -> ast.Expression | None:
        """The expression of a setting that has no default."""
        if key in self._given:
            return self._given[key][1]
        self.problems.add("E0204", f"{self.owner} needs `{key}`", self.span, help=f"add `{key} = ...`")
        return None

    def whole(self, key: str, default: int | None = None, low: int = 1, high: int = MAX_SIZE) -> int | None:
        """A whole number in low..high."""
        if default is not None and not self.has(key):
            return default
        node = self.need(key)
        return None if node is None else whole(self.values, node, f"`{key}`", low, high)

    def decimal(self, key: str, default: float | None = None, above_zero: bool = True) -> float | None:
        """A number, whole or not; above zero unless zero makes sense too."""
        if default is not None and not self.has(key):
            return default
        node = self.need(key)
        value = None if node is None else self.values.evaluate(node)
        if value is None or node is None:
            return None
        if isinstance(value, (bool, str, Amount)):
            self._mistyped(key, "a number", value, node.span)
            return None
        if value < 0 or (above_zero and value == 0):
            bound = "more than 0" if above_zero else "at least 0"
            self.problems.add("E0208", f"`{key}` must be {bound}", node.span, f"this is {value}", "use a larger number")
            return None
        return float(value)

    def flag(self, key: str, default: bool) -> bool | None:
        if not self.has(key):
            return default
        node = self._given[key][1]
        value = self.values.evaluate(node) if not isinstance(node, ast.Call) else ""
        if value is None or isinstance(value, bool):
            return value
        self._mistyped(key, "`true` or `false`", value, node.span)
        return None

    def choice(self, key: str, options: Sequence[str], default: str | None = None) -> str | None:
        """One of a few words."""
        if default is not None and not self.has(key):
            return default
        node = self.need(key)
        if node is None:
            return None
        word = node.id if isinstance(node, ast.Name) else node.name.id if isinstance(node, ast.Call) else None
        if isinstance(node, ast.Name) and word in options:
            return word
        help = did_you_mean(word or "", options) or f"write one of {_list(options)}"
        self.problems.add("E0209", f"`{node.span.text[:40]}` is not a value of `{key}`", node.span, help=help)
        return None

    def amount(self, key: str, dimension: str, example: str, above_zero: bool = True) -> float | None:
        """An amount, in the dimension's base unit, above zero unless zero makes sense too; `example`: a right one."""
        found = self.amount_of(key, (dimension,), example, above_zero)
        return None if found is None else found.value

    def amount_of(self, key: str, dimensions: Sequence[str], example: str, above_zero: bool = True) -> Amount | None:
        """An amount of one of a few dimensions, above zero unless zero makes sense too."""
        node = self.need(key)
        value = None if node is None else self.values.evaluate(node)
        if value is None or node is None:
            return None
        if not isinstance(value, Amount) or value.dimension not in dimensions:
            got = value.dimension if isinstance(value, Amount) else say(value)
            message = f"`{key}` takes an amount of {' or '.join(dimensions)}, not {got}"
            self.problems.add("E0210", message, node.span, help=f"write it like `{key} = {example}`")
            return None
        if value.value < 0 or (above_zero and value.value == 0):
            bound = "more than 0" if above_zero else "at least 0"
            self.problems.add("E0208", f"`{key}` must be {bound}", node.span, help="use a larger number")
            return None
        return value

    def text(self, key: str, example: str) -> str | None:
        """A text that is not empty."""
        node = self.need(key)
        if node is not None and (not isinstance(node, ast.Text) or not node.value):
            message = f"`{key}` takes a text that is not empty"
            self.problems.add("E0207", message, node.span, help=f"write it like `{example}`")
        return (node.value or None) if isinstance(node, ast.Text) else None

    def call(self, key: str, *names: str) -> ast.Call | None:
        """A call of one of `names`."""
        node = self.need(key)
        return None if node is None else expect_call(self.values, node, f"`{key}`", names)

    def _mistyped(self, key: str, wanted: str, value: object, span: Span) -> None:
        self.problems.add("E0207", f"`{key}` takes {wanted}, not {say(value)}", span, help=f"write {wanted}")


def whole(values: Values, node: ast.Expression, what: str, low: int = 1, high: int = MAX_SIZE) -> int | None:
    """A whole number in low..high; `what` is the thing it counts, for messages."""
    value = values.evaluate(node)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        is_quoted = isinstance(value, str) and value.strip().isdigit()
        help = f"write `{value}` without quotes" if is_quoted else "write a whole number"
        values.problems.add("E0207", f"{what} takes a whole number, not {say(value)}", node.span, help=help)
        return None
    if low <= value <= high:
        return value
    bound = f"at least {low}" if value < low else f"at most {high}"
    values.problems.add("E0208", f"{what} must be {bound}", node.span, f"this is {value}", f"use {bound}")
    return None


def expect_call(values: Values, node: ast.Expression, what: str, names: Sequence[str]) -> ast.Call | None:
    """The call itself, if it is one of `names`."""
    if isinstance(node, ast.Call) and node.name.id in names:
        return node
    word = node.name.id if isinstance(node, ast.Call) else node.id if isinstance(node, ast.Name) else ""
    help = did_you_mean(word, names) if isinstance(node, ast.Call) else ""
    help = help or "write " + " or ".join(f"`{n}(...)`" for n in names)
    values.problems.add("E0209", f"`{node.span.text[:40]}` is not a value of {what}", node.span, help=help)
    return None


def arguments(values: Values, call: ast.Call, known: Sequence[str], unbuilt: Mapping[str, str] | None = None) -> Fields:
    """The arguments of a call by name; those without a name take the names in order."""
    given: list[tuple[ast.Name, ast.Expression]] = []
    for i, argument in enumerate(call.arguments):
        if argument.name is not None:
            given.append((argument.name, argument.value))
        elif i < len(known):
            given.append((ast.Name(known[i], span=argument.span), argument.value))
        else:
            message = f"`{call.name.id}(...)` has too many arguments"
            help = f"it takes {_list(known)}"
            values.problems.add("E0214", message, argument.span, help=help)
    return Fields(values, f"`{call.name.id}(...)`", call.span, given, known, unbuilt, "argument")


def settings(items: Iterable[object]) -> list[tuple[ast.Name, ast.Expression]]:
    """The plain settings among the items of a block."""
    return [(item.name, item.value) for item in items if isinstance(item, ast.Setting)]


def _list(names: Sequence[str]) -> str:
    return ", ".join(f"`{n}`" for n in names)
