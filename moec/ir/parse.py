"""Program text -> Program: the inverse of `moec.ir.text`, with every line of its grammar below.

The text may come from an artifact somebody edited, so a fault is one `MoecError` with the line, never a traceback; what
the program then means is the verifier's business.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import cast

from lark import Lark, UnexpectedInput

from moec.diagnostics import MoecError, fail
from moec.ir.program import Program, Type
from moec.ir.read import Reader
from moec.ir.read_type import ReadError, TypeReader

GRAMMAR = r"""
start: header mesh cluster step [cache tier*] experts* placement* memory* done body* run*

header: "program" NAME STRING "from" STRING
mesh: "mesh" setting*
cluster: "cluster" STRING (setting | link)*
step: "step" setting*
cache: "cache" setting* [held]
tier: "tier" NAME setting* [rate]
experts: "experts" NAME "=" INT
placement: "placement" NAME held*
held: "[" (INT | RANGE)* "]"
memory: "memory" INT setting*
done: "done" NAME*
setting: NAME "=" (INT | FLOAT | NAME | CHUNKS)
link: NAME "=" (INT | FLOAT) "/" (INT | FLOAT) "/" INT
rate: "link" "=" (INT | FLOAT) "/" (INT | FLOAT) "/" INT

body: "body" NAME "{" (param | state | input | node | returned)* "}"
param: "param" NAME ["=" NAME ("+" NAME)* "dim" "=" INT ["sizes" "=" sequence] [shared]] ":" type
shared: "with" INT "of" NAME ("+" NAME)* "dim" "=" INT
state: "state" NAME ":" type
input: "in" VALUE [":" type]
node: VALUE ("," VALUE)* "=" NAME "(" [argument ("," argument)*] ")" [":" type ("," type)*] ["on" NAME] ["by" NAME] LOC
?argument: operand | attribute
operand: VALUE | PARAM
attribute: NAME "=" (scalar | sequence)
sequence: "(" [scalar ("," scalar)*] ")"
scalar: INT | FLOAT | NAME | STRING
type: TYPE
returned: "return" VALUE
run: "run" NAME [RANGED]

TYPE: /(pending )?\w+\[[^\]\n]*\](<[^>\n]*>)?/
CHUNKS.4: /\d+:layer/
RANGED: /\d+\.\.\d+/
RANGE.2: /\d+-\d+/
VALUE: /%\w+/
PARAM: /@[\w.]+/
LOC: /!(([\w.\/+-]+|"(\\.|[^"\\\n])*"):)?\d+:\d+/
NAME: /[a-zA-Z_][\w.\-]*/
FLOAT.3: /-?\d+(\.\d+)?e[+-]?\d+|-?\d+\.\d+(?!\.)/
INT.1: /-?\d+/
STRING: /"(\\.|[^"\\\n])*"/
%ignore /\s+/
%ignore /\/\/[^\n]*/
"""

#: What TYPE says. Half of a program's text is types, and few are different: each is read once.
TYPE_GRAMMAR = r"""
start: [PENDING] NAME "[" [dim ("," dim)*] "]" [layout]
dim: INT | NAME
layout: "<" NAME place* ">"
place: NAME "=" NAME ["(" NAME ")"]

PENDING: "pending"
NAME: /[a-zA-Z_][\w.\-]*/
INT: /\d+/
%ignore /\s+/
"""


@cache
def _parser() -> Lark:
    return Lark(GRAMMAR, parser="lalr", maybe_placeholders=True, transformer=Reader(read_type))


@lru_cache(maxsize=4096)
def read_type(text: str) -> Type:
    """The type that `fp32[T, 64]<attention dp=S0 tp=R>` says. Raises ReadError."""
    try:
        return cast(Type, _type_parser().parse(text))
    except UnexpectedInput:
        raise ReadError(f"cannot read the type `{text[:80]}`") from None


@cache
def _type_parser() -> Lark:
    return Lark(TYPE_GRAMMAR, parser="lalr", maybe_placeholders=True, transformer=TypeReader())


def parse(text: str) -> Program:
    """The program a text says. Raises MoecError E0401 naming the line or the word at fault."""
    try:
        return cast(Program, _parser().parse(text))
    except UnexpectedInput as error:
        lines = dict(enumerate(text.split("\n"), 1))
        raise _fault(f"line {error.line}: cannot read `{lines.get(error.line, '').strip()[:80]}`") from None
    except ReadError as error:
        raise _fault(str(error)) from None


def _fault(what: str) -> MoecError:
    return fail("E0401", f"this is not the text of a program: {what}", help="compile the `.moe` file again")
