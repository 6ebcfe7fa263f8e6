"""From Programs to the values of `cpp/kernels.cpp.jinja`: one text with a kernel for each shape that a plan's CPU ranks
compute with.

Shapes, dtype and routing are constants of the text; rows, and how many experts a rank holds, are known when it runs.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import fx

from moec.codegen.kernel_route import Score
from moec.codegen.renderer import render
from moec.codegen.targets import Dtype
from moec.ir.program import Program, op_of, type_of


class Pairs(enum.Enum):
    """Which elements a rotary embedding turns together."""

    HALVES = "halves"
    INTERLEAVED = "interleaved"


@dataclass(frozen=True)
class Product:
    """Rows of `inner` elements to rows of `outer`; `is_gated`: by gate and up, with the activation behind them."""

    inner: int
    outer: int
    is_gated: bool = False

    @property
    def name(self) -> str:
        return f"{'gate_up' if self.is_gated else 'product'}_{self.inner}_{self.outer}"


@dataclass(frozen=True)
class Norm:
    width: int

    @property
    def name(self) -> str:
        return f"rms_norm_{self.width}"


@dataclass(frozen=True)
class Rope:
    dim: int
    pairs: Pairs

    @property
    def name(self) -> str:
        return f"rope_{self.dim}_{self.pairs.value}"


@dataclass(frozen=True)
class Attention:
    """`group`: query heads of one KV head."""

    kv_heads: int
    group: int
    dim: int

    @property
    def name(self) -> str:
        return f"attention_{self.kv_heads}_{self.group}_{self.dim}"


@dataclass(frozen=True)
class LatentAttention:
    """The absorbed form: `rank` elements of a latent, `rope` of its rotated part."""

    heads: int
    rank: int
    rope: int

    @property
    def name(self) -> str:
        return f"latent_attention_{self.heads}_{self.rank}_{self.rope}"


@dataclass(frozen=True)
class Router:
    hidden: int
    experts: int

    @property
    def name(self) -> str:
        return f"router_{self.hidden}_{self.experts}"


@dataclass(frozen=True)
class Route:
    experts: int
    top: int
    groups: int
    keep: int
    score: Score
    renormalize: bool

    @property
    def name(self) -> str:
        norm = "_renormalized" if self.renormalize else ""
        return f"route_{self.experts}_{self.top}_{self.groups}_{self.keep}_{self.score.value}{norm}"


Shape = Product | Norm | Rope | Attention | LatentAttention | Router | Route


@dataclass(frozen=True)
class Kernels:
    """Every kernel of one text, each kind sorted by name."""

    dtype: Dtype
    products: tuple[Product, ...] = ()
    norms: tuple[Norm, ...] = ()
    ropes: tuple[Rope, ...] = ()
    attentions: tuple[Attention, ...] = ()
    latent_attentions: tuple[LatentAttention, ...] = ()
    routers: tuple[Router, ...] = ()
    routes: tuple[Route, ...] = ()


def collect(dtype: Dtype, shapes: Iterable[Shape]) -> Kernels:
    """The kernels of these shapes, each once."""
    found = sorted(set(shapes), key=lambda shape: shape.name)
    kinds = (Product, Norm, Rope, Attention, LatentAttention, Router, Route)
    return Kernels(dtype, *(tuple(s for s in found if isinstance(s, kind)) for kind in kinds))  # type: ignore[arg-type]


def kernels_of(program: Program) -> Kernels | None:
    """The kernels that a program's nodes `by cpp` need; None where it has none."""
    nodes = [node for _, node in program.nodes() if node.meta.get("kernel") == "cpp"]
    return collect(Dtype(program.dtype), chain.from_iterable(map(_shapes_of, nodes))) if nodes else None


def render_cpp(kernels: Kernels) -> str:
    """The text of the kernels."""
    return render("cpp/kernels.cpp.jinja", k=kernels)


def _shapes_of(node: fx.Node) -> tuple[Shape, ...]:
    """What an operation's kernel is specialised by: its operands' last dims on one rank, and its attributes."""
    attrs: dict[str, Any] = dict(node.kwargs)
    dims = [tuple(int(d) if isinstance(d, int) else 0 for d in type_of(a).shape) for a in node.all_input_nodes]
    match op_of(node).name:
        case "linear" | "grouped_linear":
            return (Product(dims[-1][-1], dims[-1][-2]),)
        case "merged_linear":  # whole for few rows, part by part for many
            return tuple(Product(dims[-1][-1], outer) for outer in (dims[-1][-2], *attrs["sizes"]))
        case "gate_up" | "grouped_gate_up":
            return (Product(dims[-1][-1], dims[-1][-2] // 2, is_gated=True),)
        case "cached_experts":
            return (Product(dims[3][-1], dims[3][-2] // 2, is_gated=True), Product(dims[4][-1], dims[4][-2]))
        case "rms_norm":
            return (Norm(dims[1][0]),)
        case "rope":
            return (Rope(dims[0][-1], Pairs(attrs["pairs"])),)
        case "attention":
            return (Attention(dims[1][1], dims[0][1] // dims[1][1], dims[0][2]),)
        case "mla_attention":
            return (LatentAttention(dims[0][1], dims[2][1], dims[3][1]),) if attrs["form"] == "absorbed" else ()
        case "router_logits":
            return (Router(dims[1][1], dims[1][0]),)
        case "route":
            choice = (attrs["top"], attrs["groups"], attrs["keep"])
            return (Route(dims[0][1], *choice, score=Score(attrs["score"]), renormalize=attrs["renormalize"]),)
    return ()
