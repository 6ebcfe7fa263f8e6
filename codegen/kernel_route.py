"""Values of the routing template: which constants a router's kernel is made of, and how its tile is laid out."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from moec.codegen.offline import Launch, Report, Signature, compile_kernel
from moec.codegen.renderer import Comment, render
from moec.codegen.targets import Target
from moec.codegen.tiles import power_of_two
from moec.diagnostics import fail

#: Scores that one warp holds: 4 in each of 32 lanes, so that a row of up to 128 experts is loaded in one go.
SCORES_OF_A_WARP = 128
#: Experts of the largest tile: 128 scores in each lane, all in registers.
MOST_EXPERTS = 4096


class Score(enum.Enum):
    """How a router turns logits into scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True)
class Route:
    """Values of `triton/route.py.jinja`. A program is one warp that serves `rows` tokens."""

    experts: int
    top: int
    groups: int
    keep: int
    score: Score
    has_bias: bool
    renormalize: bool
    scale: float
    rows: int
    shared: int = 0

    @property
    def choices(self) -> int:
        """Experts of a token: those that it chooses, then the shared ones, which follow all others."""
        return self.top + self.shared

    @property
    def group_size(self) -> int:
        return self.experts // self.groups

    @property
    def sums_two(self) -> bool:
        """Whether a group counts by its two best: DeepSeek-V3's gate, where there is a bias and a second expert."""
        return self.has_bias and self.group_size > 1

    @property
    def block_groups(self) -> int:
        return power_of_two(self.groups)

    @property
    def block_group(self) -> int:
        return power_of_two(self.group_size)

    @property
    def block_experts(self) -> int:
        return self.block_groups * self.block_group

    @property
    def block_top(self) -> int:
        return power_of_two(self.choices)

    @property
    def name(self) -> str:
        """File and report name: `route_e256_k8_sigmoid_g8`; with shared experts `route_e256_k8_s1...`."""
        groups = f"_g{self.groups}" if self.groups > 1 else ""
        shared = f"_s{self.shared}" if self.shared else ""
        return f"route_e{self.experts}_k{self.top}{shared}_{self.score.value}{groups}"

    @property
    def warps(self) -> int:
        return 1

    def num_programs(self, num_rows: int) -> int:
        return -(-num_rows // self.rows)


def specialise_route(
    experts: int,
    top: int,
    score: Score,
    *,
    groups: int,
    keep: int,
    has_bias: bool,
    renormalize: bool,
    scale: float,
    shared: int = 0,
) -> Route:
    """The kernel of a router. Raises E0527 for numbers that it cannot serve.

    That `top` experts are eligible and that groups divide them is what the operation's shape check holds.
    """
    block = power_of_two(groups) * power_of_two(experts // groups)
    if not 1 <= top <= experts or not 1 <= keep <= groups or experts % groups or block > MOST_EXPERTS:
        raise fail(
            "E0527",
            f"a routing kernel cannot choose {top} of {experts} experts in {groups} groups of which {keep} are kept",
            f"it chooses 1 to all of up to {MOST_EXPERTS} experts, in equal groups",
        )
    rows = max(1, SCORES_OF_A_WARP // block)
    return Route(experts, top, groups, keep, score, has_bias, renormalize, scale, rows, shared)


def render_route(values: Route, comments: Iterable[Comment] = ()) -> str:
    """The kernel's source text; `comments` are the `.moe` lines it serves, one each."""
    return render("triton/route.py.jinja", k=values, serves=tuple(comments))


def route_signature(values: Route) -> Signature:
    """Argument types of the rendered `route`."""
    types = {"logits": "*fp32", "bias": "*fp32", "ids": "*i64", "weights": "*fp32", "flag": "*i32"}
    if not values.has_bias:
        del types["bias"]
    return Signature(types | {"num_rows": "i32", "INTERPRET": "constexpr"}, {"INTERPRET": False})


def compile_route(values: Route, target: Target) -> Report:
    """Compile a routing kernel offline."""
    launch = Launch(values.name, values.warps, 1)
    return compile_kernel(render_route(values), "route", route_signature(values), target, launch)
