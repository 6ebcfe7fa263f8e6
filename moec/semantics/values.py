"""Expressions to values: arithmetic on named constants, units, and the types a setting may ask for.

A value that cannot be had is reported once and is None from there on: whoever reads it stays silent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import add, floordiv, mul, sub, truediv

from moec.diagnostics import Diagnostic, Label, Span, did_you_mean
from moec.grammar import ast

#: Errors after this many are dropped: they help nobody.
MAX_ERRORS = 100
#: Integers stay below this, so that no size can overflow where it is used.
LIMIT = 1 << 63
#: The evaluator recurses: through an expression, and from a constant to those it needs.
MAX_DEPTH = 128

_BINARY = {prefix: 1024 ** (i + 1) for i, prefix in enumerate("KMGT")}
_DECIMAL = {prefix: 1000 ** (i + 1) for i, prefix in enumerate("KMGT")}
#: Unit -> (dimension, factor to the dimension's base: bytes, bytes/s, us, TFLOP/s).
UNITS: dict[str, tuple[str, float]] = {
    **{f"{p}iB": ("bytes", f) for p, f in _BINARY.items()},
    **{f"{p}B": ("bytes", f) for p, f in _DECIMAL.items()},
    **{f"{p}B/s": ("bytes per second", f) for p, f in _DECIMAL.items()},
    "Gbit/s": ("bytes per second", 1e9 / 8),
    "us": ("time", 1),
    "ms": ("time", 1000),
    "TFLOP/s": ("arithmetic rate", 1),
}

#: What may follow `per`.
SHARERS = ("rank", "node")


class Problems:
    """The errors of the checker, all of them."""

    def __init__(self) -> None:
        self.found: list[Diagnostic] = []

    def add(
        self, code: str, message: str, at: Span, label: str = "", help: str = "", also: Sequence[Label] = ()
    ) -> None:
        """One error; a second at the same place with the same code says nothing new."""
        key = (code, at)
        known = any(d.code == key[0] and d.primary and d.primary.span == key[1] for d in self.found)
        if not known and len(self.found) < MAX_ERRORS:
            self.found.append(Diagnostic(code, message, Label(at, label), tuple(also), help))


@dataclass(frozen=True)
class Amount:
    """A number with a dimension, in the dimension's base unit."""

    value: float
    dimension: str


Value = int | float | bool | str | Amount


def say(value: object) -> str:
    """What kind of thing a value is, for messages."""
    if isinstance(value, bool):
        return "`true` or `false`"
    kinds = {int: "a whole number", float: "a decimal number", str: "a text", Amount: "an amount with a unit"}
    return kinds[type(value)]


class Values:
    """Evaluates the expressions of one file; remembers which constants were used."""

    def __init__(self, constants: Iterable[ast.Constant], problems: Problems) -> None:
        self.problems = problems
        self.constants: dict[str, ast.Constant] = {}
        for constant in constants:
            first = self.constants.setdefault(constant.name.id, constant)
            if first is not constant:
                also = [Label(first.name.span, "first declared here")]
                message = f"constant `{constant.name.id}` is declared twice"
                problems.add("E0206", message, constant.name.span, help="rename or remove one of them", also=also)
        self.used: set[str] = set()
        self._known: dict[str, Value | None] = {}
        self._active: list[str] = []
        self._depth = 0

    def evaluate(self, node: ast.Expression) -> Value | None:
        """The value of an expression, or None after an error was reported."""
        if self._depth == MAX_DEPTH:
            message = f"an expression and the constants it needs nest deeper than {MAX_DEPTH} levels"
            self.problems.add("E0106", message, node.span, help="write some of the values as numbers")
            return None
        self._depth += 1
        value = self._evaluate(node)
        self._depth -= 1
        return value

    def _evaluate(self, node: ast.Expression) -> Value | None:
        match node:
            case ast.Number(literal):
                return self._number(literal, node.span)
            case ast.Quantity(literal, unit, per):
                dimension, factor = UNITS[unit]
                number = self._number(literal, node.span)
                if per is not None and not self._is_shared(per):
                    return None
                return None if number is None else Amount(float(number * factor), dimension + _per(per))
            case ast.Boolean(literal):
                return literal == "true"
            case ast.Text():
                return node.value
            case ast.Name():
                return self._constant(node)
            case ast.Call(name):
                message = f"`{name.id}(...)` is not a number"
                self.problems.add("E0207", message, node.span, help="only numbers and amounts can be computed with")
                return None
            case ast.List():
                help = "a list stands alone, as in `pin = [0, 3, 17]`"
                self.problems.add("E0207", "a list is not a number", node.span, help=help)
                return None
            case ast.Negative(value):
                return self._combine("-", 0, self.evaluate(value), node.span)
            case ast.Sum(first, parts) | ast.Product(first, parts):
                total = self.evaluate(first)
                for part in parts:
                    total = self._combine(part.operator, total, self.evaluate(part.value), node.span)
                return total

    def _is_shared(self, per: ast.Name) -> bool:
        """Whether what follows `per` is something amounts are counted by."""
        if per.id not in SHARERS:
            help = did_you_mean(per.id, SHARERS) or "amounts are `per rank` or `per node`"
            self.problems.add("E0209", f"`{per.id}` is not a value of `per`", per.span, help=help)
        return per.id in SHARERS

    def _number(self, literal: str, span: Span) -> int | float | None:
        number = int(literal) if literal.isdigit() else float(literal)
        return self._in_range(number, span)

    def _in_range(self, number: int | float, span: Span) -> int | float | None:
        if abs(number) < LIMIT:
            return number
        self.problems.add("E0211", "the number is too large", span, help="numbers stay below 2^63")
        return None

    def _constant(self, node: ast.Name) -> Value | None:
        """The value of the constant a name stands for."""
        name = node.id
        if name not in self.constants:
            help = did_you_mean(name, self.constants) or f"declare it: `const {name} = ...`"
            self.problems.add("E0201", f"unknown constant `{name}`", node.span, help=help)
            return None
        self.used.add(name)
        return self._value_of(name, node.span)

    def check_constants(self) -> None:
        """Report what is wrong with constants that nothing needs."""
        for name, constant in self.constants.items():
            self._value_of(name, constant.name.span)

    def _value_of(self, name: str, at: Span) -> Value | None:
        """The value of a declared constant, computed once. One that needs itself is an error."""
        if name in self._active:
            chain = " -> ".join([*self._active[self._active.index(name) :], name])
            self.problems.add("E0217", f"constant `{name}` needs itself: {chain}", at, help="break the circle")
            return None
        if name not in self._known:
            self._active.append(name)
            self._known[name] = self.evaluate(self.constants[name].value)
            self._active.pop()
        return self._known[name]

    def _combine(self, operator: str, a: Value | None, b: Value | None, span: Span) -> Value | None:
        """Arithmetic of numbers and amounts. Whole numbers stay whole; a division that is not exact gives a decimal."""
        if a is None or b is None:
            return None
        for value in (a, b):
            if isinstance(value, (bool, str)):
                help = "only numbers and amounts can be computed with"
                self.problems.add("E0207", f"{say(value)} cannot be computed with", span, help=help)
                return None
        assert not isinstance(a, (bool, str)) and not isinstance(b, (bool, str))
        dimension = _dimension(operator, a, b)
        if dimension is None:
            both = f"{_dimension_of(a) or 'a plain number'} {operator} {_dimension_of(b) or 'a plain number'}"
            self.problems.add("E0210", f"the units do not fit: {both}", span, help="use the same kind of unit")
            return None
        x, y = (v.value if isinstance(v, Amount) else v for v in (a, b))
        if operator == "/" and y == 0:
            self.problems.add("E0211", "division by zero", span, help="divide by another number")
            return None
        result = self._in_range(_compute(operator, x, y), span)
        return Amount(float(result), dimension) if result is not None and dimension else result


def _per(per: ast.Name | None) -> str:
    """What `per rank` adds to a dimension: amounts per rank, per node and of the whole do not mix."""
    return "" if per is None else f" per {per.id}"


def _dimension_of(value: Value) -> str:
    return value.dimension if isinstance(value, Amount) else ""


def _dimension(operator: str, a: Value, b: Value) -> str | None:
    """The dimension of a result, "" for a plain number, None where the two do not fit."""
    x, y = _dimension_of(a), _dimension_of(b)
    if operator in "+-":
        zero = operator == "-" and a == 0  # a sign: 0 - b
        return y if x == y or zero else None
    if operator == "*":
        return (x or y) if not (x and y) else None
    return x if not y else "" if x == y else None


def _compute(operator: str, x: int | float, y: int | float) -> int | float:
    is_exact = isinstance(x, int) and isinstance(y, int) and operator == "/" and x % y == 0
    compute: Callable[[float, float], float] = {"+": add, "-": sub, "*": mul, "/": floordiv if is_exact else truediv}[
        operator
    ]
    try:
        return compute(x, y)
    except OverflowError:
        return LIMIT
