"""The syntax tree: one frozen class per rule of moe.lark, with the same name in CamelCase.

Every node carries its span; two trees are equal when they say the same, wherever it is written.
A last field of tuple type takes all further children of the rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from moec.diagnostics import Span


@dataclass(frozen=True)
class Node:
    """What every node has. Spans do not take part in equality."""

    span: Span = field(compare=False, kw_only=True)


@dataclass(frozen=True)
class Name(Node):
    id: str


@dataclass(frozen=True)
class Number(Node):
    """A literal as written: `61`, `0.707`, `1e-6`."""

    literal: str


@dataclass(frozen=True)
class Quantity(Node):
    """A literal with a unit, and `per rank` or `per node` where written: `40 GiB per rank`."""

    literal: str
    unit: str
    per: Name | None


@dataclass(frozen=True)
class Boolean(Node):
    literal: str


@dataclass(frozen=True)
class Text(Node):
    """A text in double quotes; `literal` has the quotes."""

    literal: str

    @property
    def value(self) -> str:
        return self.literal[1:-1]


@dataclass(frozen=True)
class Argument(Node):
    name: Name | None
    value: Expression


@dataclass(frozen=True)
class Call(Node):
    """`gqa(heads = 32)`, `swiglu(2048)`, `dp(4)`."""

    name: Name
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class List(Node):
    """`[0, 3, 17]`: values in order, at least one."""

    items: tuple[Expression, ...]


@dataclass(frozen=True)
class Negative(Node):
    value: Expression


@dataclass(frozen=True)
class Factor(Node):
    """A further operand of a product, with the `*` or `/` before it."""

    operator: str
    value: Expression


@dataclass(frozen=True)
class Product(Node):
    first: Expression
    factors: tuple[Factor, ...]


@dataclass(frozen=True)
class Term(Node):
    """A further operand of a sum, with the `+` or `-` before it."""

    operator: str
    value: Expression


@dataclass(frozen=True)
class Sum(Node):
    first: Expression
    terms: tuple[Term, ...]


Expression = Name | Number | Quantity | Boolean | Text | Call | List | Negative | Product | Sum


@dataclass(frozen=True)
class Setting(Node):
    name: Name
    value: Expression


@dataclass(frozen=True)
class Grouping(Node):
    """`groups = 8 keep 4`: experts in equal groups, of which the best few stay eligible."""

    name: Name
    groups: Expression
    keep: Expression


@dataclass(frozen=True)
class Capped(Node):
    """`capacity = 2.0 drop`: what does not fit is left out."""

    name: Name
    value: Expression


@dataclass(frozen=True)
class Override(Node):
    """The value of one `--set`, with what follows `keep`, and the word `drop`, where written."""

    value: Expression
    keep: Expression | None
    drop: str | None


@dataclass(frozen=True)
class Attention(Node):
    name: Name
    value: Expression


@dataclass(frozen=True)
class Router(Node):
    name: Name
    items: tuple[Setting | Grouping, ...]


@dataclass(frozen=True)
class ExpertGroup(Node):
    """`experts NAME = COUNT * swiglu(INNER)`."""

    name: Name
    value: Expression


@dataclass(frozen=True)
class LayerRange(Node):
    """`4`, `0..2` or `0..58 step 2`; both ends belong to it."""

    first: Expression
    last: Expression | None
    step: Expression | None


@dataclass(frozen=True)
class LayerRanges(Node):
    ranges: tuple[LayerRange, ...]


@dataclass(frozen=True)
class Layers(Node):
    """Which layers, and their blocks in order: an attention's name, then `swiglu(...)` or `moe(...)`."""

    where: LayerRanges
    blocks: tuple[Name | Call, ...]


@dataclass(frozen=True)
class Location(Node):
    """`on CLUSTER[NODES]`."""

    cluster: Name
    nodes: Expression | None


@dataclass(frozen=True)
class View(Node):
    """One way to see the ranks: `kind` is `attention` or `experts`, the value a product of axes."""

    kind: str
    value: Expression


@dataclass(frozen=True)
class Run(Node):
    model: Name
    mesh: Name | None
    cache: Name | None


@dataclass(frozen=True)
class Phase(Node):
    """`kind` is `prefill` or `decode`."""

    kind: str
    items: tuple[Setting | Capped, ...]


@dataclass(frozen=True)
class UseShipped(Node):
    kind: str
    name: Name


@dataclass(frozen=True)
class UseFile(Node):
    path: Text


@dataclass(frozen=True)
class Constant(Node):
    name: Name
    value: Expression


@dataclass(frozen=True)
class Cluster(Node):
    name: Name
    items: tuple[Setting, ...]


@dataclass(frozen=True)
class Model(Node):
    name: Name
    items: tuple[Setting | Attention | Router | ExpertGroup | Layers, ...]


@dataclass(frozen=True)
class Mesh(Node):
    name: Name
    location: Location | None
    items: tuple[View | Setting, ...]


@dataclass(frozen=True)
class Cache(Node):
    name: Name
    items: tuple[Setting, ...]


@dataclass(frozen=True)
class Plan(Node):
    name: Name
    items: tuple[Run | Phase | Setting, ...]


Declaration = UseShipped | UseFile | Constant | Cluster | Model | Mesh | Cache | Plan


@dataclass(frozen=True)
class Program(Node):
    """A whole file."""

    declarations: tuple[Declaration, ...]
