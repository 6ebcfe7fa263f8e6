"""Read rows once for all the products that take them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from moec.ir.build import Builder, drop_unused_params, erase
from moec.ir.params import Param
from moec.ir.program import Body, Program, is_op, op_of, operands
from moec.layout import Layout
from moec.passes.base import Pass


@dataclass(frozen=True)
class MergeLinears(Pass):
    """Join `linear`s of the same rows into one product, and what they multiply by into one parameter.

    Only parameters that lie alike and have one dtype: under tp, KV heads that ranks share stay apart from the query's.
    Every sum keeps its order here; torch may choose another one for a wider product.

    before: %1 = linear(%0, @attention.q); %2 = linear(%0, @attention.k); %3 = linear(%0, @attention.v)
    after:  %1, %2, %3 = merged_linear(%0, @attention.q_k_v, sizes=(64, 32, 32))
            param attention.q_k_v = attention.q+attention.k+attention.v dim=0 sizes=(64, 32, 32)
    """

    name: ClassVar[str] = "merge-linears"

    def run(self, program: Program) -> None:
        for body in program.bodies.values():
            for products in _mergeable(body):
                _merge(program, body, products)
            drop_unused_params(body)


def _mergeable(body: Body) -> list[list[fx.Node]]:
    """Products of the same rows, in order. Chunks of the tokens may each have theirs, with the same parameters."""
    alike: dict[tuple[fx.Node, Layout, str], list[fx.Node]] = {}
    for node in body.graph.nodes:
        if is_op(node) and op_of(node).name == "linear":
            rows, weight = operands(node)
            param = body.params[str(weight.target)]
            alike.setdefault((rows, param.layout, param.dtype), []).append(node)
    read = Counter(map(_weights, alike.values()))
    return [
        products
        for products in alike.values()
        if len(products) > 1 and all(len(weight.users) == read[_weights(products)] for weight in _weights(products))
    ]


def _weights(products: list[fx.Node]) -> tuple[fx.Node, ...]:
    return tuple(operands(product)[1] for product in products)


def _merge(program: Program, body: Body, products: list[fx.Node]) -> None:
    first, params = products[0], [body.params[str(weight.target)] for weight in _weights(products)]
    sizes = tuple(param.local_shape(program.mesh, program.placements)[0] for param in params)
    joined = _join(params)
    name = "_".join([joined.parts[0], *(part.rpartition(".")[2] for part in joined.parts[1:])])
    body.params[name] = joined
    build = Builder(program, body)
    with build.before(first):
        merged = build.emit("merged_linear", operands(first)[0], build.param(name), at=first, sizes=sizes)
    for product, result in zip(products, merged, strict=True):
        product.replace_all_uses_with(result)
        erase(body, product)


def _join(params: list[Param]) -> Param:
    parts = tuple(part for param in params for part in param.parts)
    sizes = tuple(param.shape[0] for param in params)
    return replace(params[0], parts=parts, shape=(sum(sizes), *params[0].shape[1:]), sizes=sizes)
