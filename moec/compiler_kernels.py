"""The GPU kernels of an artifact: rendered for the plan's shapes, chosen, and compiled offline for its target."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from moec.codegen.devices import Device
from moec.codegen.expected_rows import Rows
from moec.codegen.gemm_source import grouped_gemm_signature, render_grouped_gemm
from moec.codegen.gemm_variant import Projection, RowSource, Store, Weights
from moec.codegen.grouped_gemm import GroupedGemm, specialise
from moec.codegen.kernel_candidates import candidates
from moec.codegen.kernel_entry import gemm_entry, pair_entry, rows_entry
from moec.codegen.kernel_moves import Moves, Moving, compile_moving, moving_cost, render_moving
from moec.codegen.kernel_route import Score, specialise_route
from moec.codegen.kernel_rows import specialise_group, specialise_reduce
from moec.codegen.kernel_select import Choice, select
from moec.codegen.kernel_store import Compiled, compiled
from moec.codegen.kernel_tune import Measure, tune
from moec.codegen.offline import Launch
from moec.codegen.pair_cost import pair_cost
from moec.codegen.pair_product import PairProduct, compile_pairs, render_pairs, specialise_pairs
from moec.codegen.quantise_rows import has_fp8_products, specialise_quantise_rows
from moec.codegen.quantised import QuantisedGemm, quantised_signature, render_quantised, specialise_quantised
from moec.codegen.renderer import Comment
from moec.codegen.targets import Target, find_target
from moec.compiler_uses import Use, device_of, uses
from moec.ir.ops.scales import has_fp8
from moec.ir.program import Program, op_of

#: Operations that grouped GEMM kernels serve: (projection, where rows come from, what becomes of results).
GEMMS = {
    "grouped_gate_up": (Projection.GATE_UP, RowSource.SORTED, Store.PLAIN),
    "gathered_gate_up": (Projection.GATE_UP, RowSource.GATHERED, Store.PLAIN),
    "grouped_linear": (Projection.DOWN, RowSource.SORTED, Store.PLAIN),
    "reduced_linear": (Projection.DOWN, RowSource.SORTED, Store.ACCUMULATED),
}
#: Parts of `paired_experts` that multiply pair by pair.
PAIRED = {"pair_gate_up": Projection.GATE_UP, "pair_down": Projection.DOWN}
#: Kernels that are the only one of their text.
ALONE = ("grouped_gemm", "route", "quantise_rows", *PAIRED)


Values = GroupedGemm | PairProduct | Moving


@dataclass
class Kernels:
    """Texts and machine code by file name in the artifact, and what `plan.json` keeps: an entry a kernel and phase."""

    sources: dict[str, str] = field(default_factory=dict)
    binaries: dict[str, bytes] = field(default_factory=dict)
    entries: list[dict[str, Any]] = field(default_factory=list)
    _comments: dict[str, list[Comment]] = field(default_factory=dict)
    _values: dict[str, Values] = field(default_factory=dict)

    def add(self, use: Use, values: Values, made: list[tuple[str, Compiled]], entry: dict[str, Any]) -> None:
        """A kernel that serves `use`, made of `values`; one that serves several is kept once."""
        name = self._name(values)
        self._values[name] = values
        comments = self._comments.setdefault(name, [])
        comments += [line for line in [Comment(use.comment)] if line not in comments]
        self.sources[f"kernels/{name}.py"] = render_kernel(values, comments)
        for kernel, result in made:
            stem = f"kernels/{name}" if kernel in ALONE else f"kernels/{name}.{kernel}"
            text, code = ("s", "hsaco") if result.report.target.startswith("hip") else ("ptx", "cubin")
            self.sources[f"{stem}.{text}"] = result.report.assembly
            self.binaries[f"{stem}.{code}"] = result.report.binary
        self.entries.append(_heading(use, name) | entry)

    def _name(self, values: Values) -> str:
        """The name of the values, numbered where others of that name differ in their tiles."""
        number, name = 1, values.name
        while self._values.get(name, values) != values:
            number += 1
            name = f"{values.name}_{number}"
        return name


def _heading(use: Use, name: str) -> dict[str, Any]:
    layers = use.program.layers_of(use.body.name)
    return {
        "name": name,
        "op": use.op,
        "phase": use.phase,
        "body": use.body.name,
        "layers": len(layers),
        "tokens": use.load.routed,
        "routing": use.load.routing,
    }


def render_kernel(values: Values, comments: Iterable[Comment] = ()) -> str:
    """The text of a kernel, with the `.moe` lines it serves."""
    if isinstance(values, QuantisedGemm):
        return render_quantised(values, comments)
    if isinstance(values, GroupedGemm):
        return render_grouped_gemm(values, comments)
    if isinstance(values, PairProduct):
        return render_pairs(values, comments)
    return render_moving(values, comments)


def compile_kernels(programs: Iterable[Program], target: str, measure: Measure | None = None) -> Kernels:
    """The kernels of every operation that was given to Triton; none for the target `cpu`.

    `measure` times grouped products, whose tiles are then chosen by that. Raises E0520 without Triton, E0521 for a
    target that is none, E0523 and E0533 where no tile fits.
    """
    kernels = Kernels()
    if target == "cpu":
        return kernels
    chosen = _Chooser(measure)
    for program in programs:
        for use in uses(program):
            if use.op in GEMMS:
                _add_gemm(kernels, use, find_target(target), chosen)
            elif use.op in PAIRED:
                _add_pairs(kernels, use, find_target(target))
            else:
                _add_moving(kernels, use, find_target(target))
    return kernels


@dataclass
class _Chooser:
    """Chooses kernels, once for each question."""

    measure: Measure | None
    _found: dict[object, Choice] = field(default_factory=dict)

    def __call__(self, wanted: GroupedGemm, rows: Rows, tokens: int, device: Device) -> Choice:
        key = (wanted, rows.tobytes(), tokens, device)
        if key not in self._found:
            given = (candidates(wanted), rows, tokens, device, compile_gemm)
            is_one = len(given[0]) == 1
            self._found[key] = select(*given) if self.measure is None or is_one else tune(*given, self.measure)
        return self._found[key]


def _add_gemm(kernels: Kernels, use: Use, target: Target, choose: _Chooser) -> None:
    """Choose the tiles for each number of experts that a rank may hold."""
    device = device_of(use.program, target)
    if has_fp8(use.node) and has_fp8_products(target):
        _add_quantised_rows(kernels, use, target, device)
    for held in _held(use):
        choice = choose(wanted_gemm(use, target, held), np.resize(use.load.rows, held), use.load.tokens, device)
        kernels.add(use, choice.values, [("grouped_gemm", choice.kernel)], gemm_entry(choice, device, _mean_rows(use)))


def wanted_gemm(use: Use, target: Target, held: int | None = None) -> GroupedGemm:
    """The kernel that a grouped product is given without a search, where a rank holds `held` experts."""
    op, source, store = GEMMS[use.op]
    _, lines, depth = use.shape(_weights_at(use))
    width = int(lines) // op.sides
    hidden, inner = op.turned(int(depth), width)
    experts = held or _held(use)[-1]
    if has_fp8(use.node):
        return specialise_quantised(
            op, hidden, inner, experts, use.dtype, target, Weights.FP8, quantised_rows=has_fp8_products(target),
            top=use.load.top, rows=source, store=store, rows_per_expert=_mean_rows(use),
        )  # fmt: skip
    return specialise(
        op, hidden, inner, experts, use.dtype, target, top=use.load.top, rows=source, store=store,
        rows_per_expert=_mean_rows(use),
    )  # fmt: skip


def _add_quantised_rows(kernels: Kernels, use: Use, target: Target, device: Device) -> None:
    """What makes a product's rows e4m3: rows at their experts, or where they are gathered, as they came."""
    depth = int(use.shape(0)[1])
    values = specialise_quantise_rows(depth, use.dtype, target)
    num_rows = use.load.tokens if use.op == "gathered_gate_up" else int(use.load.rows.sum())
    cost = moving_cost(values, Moves(use.load.tokens, use.load.top, num_rows, depth * use.dtype.num_bytes), device)
    made = compile_moving(values, target)
    entry = rows_entry([kernel for _, kernel in made], values.warps, cost)
    kernels.add(replace(use, part="quantise_rows"), values, made, entry)


def _mean_rows(use: Use) -> int:
    """Rows of an expert in a full step."""
    rows = use.load.rows
    return max(1, -(-int(rows.sum()) // max(1, len(rows))))


def compile_gemm(values: GroupedGemm) -> Compiled:
    """Machine code of a grouped GEMM, kept or made."""
    launch = Launch(values.name, values.warps, values.stages)
    arguments = quantised_signature(values) if isinstance(values, QuantisedGemm) else grouped_gemm_signature(values)
    return compiled(render_kernel(values), "grouped_gemm", arguments, find_target(values.target.text), launch)


def _held(use: Use) -> list[int]:
    """Numbers of experts that ranks hold of the operation's table: kernels are made for each."""
    counts = {count for table in use.program.placements.values() for count in table.counts if count}
    held = use.shape(_weights_at(use))[0]
    return [held] if isinstance(held, int) else sorted(counts)


def _weights_at(use: Use) -> int:
    """Place of the weights among the operation's operands."""
    if op_of(use.node).name == "paired_experts":
        return 3 if use.op in ("gathered_gate_up", "pair_gate_up") else 4
    return 3 if use.op == "gathered_gate_up" else 2


def _add_pairs(kernels: Kernels, use: Use, target: Target) -> None:
    """A product of pairs, for each number of experts that a rank may hold."""
    device, load = device_of(use.program, target), use.load
    for held in _held(use):
        values = pair_product(use, target, held)
        made = compile_pairs(values)
        shared = made.report.shared_bytes
        cost = pair_cost(values, np.resize(load.rows, held), load.tokens, device, made.code, shared)
        kernels.add(use, values, [(values.kernel, made)], pair_entry(values, made, cost, device))


def pair_product(use: Use, target: Target, held: int | None = None) -> PairProduct:
    """The kernel of a product of pairs, where a rank holds `held` experts."""
    _, hidden, inner = use.shape(4)
    return specialise_pairs(
        PAIRED[use.op], int(hidden), int(inner), use.load.experts, held or _held(use)[-1], use.load.top, use.dtype,
        target,
    )  # fmt: skip


def _add_moving(kernels: Kernels, use: Use, target: Target) -> None:
    load, device = use.load, device_of(use.program, target)
    values = MOVING[use.op](use)
    hidden = getattr(values, "hidden", 0)
    routed = load.routed if use.op in ("route", "combine") else load.tokens
    useful = routed * load.top if use.op == "combine" else int(load.rows.sum())
    moves = Moves(routed, load.top, useful, hidden * use.dtype.num_bytes)
    is_inverting = use.op == "combine"
    cost = moving_cost(values, moves, device, is_inverting)
    made = compile_moving(values, target, is_inverting)
    kernels.add(use, values, made, rows_entry([kernel for _, kernel in made], values.warps, cost))


def _route(use: Use) -> Moving:
    given = use.node.kwargs
    return specialise_route(
        int(use.shape(0)[1]), _int(given["top"]), Score(str(given["score"])), groups=_int(given["groups"]),
        keep=_int(given["keep"]), has_bias=len(use.node.args) > 1, renormalize=bool(given["renormalize"]),
        scale=float(str(given["scale"])), shared=_int(given.get("shared", 0)),
    )  # fmt: skip


def _group(use: Use) -> Moving:
    copies = use.op == "group_rows"
    hidden = int(use.shape(0)[1]) if copies else 1
    load = use.load
    held = max(use.program.placements[str(use.node.kwargs["table"])].counts)
    return specialise_group(load.experts, held, load.top, hidden, use.dtype, load.tokens, copies=copies)


def _reduce(use: Use) -> Moving:
    return specialise_reduce(use.load.top, int(use.shape(0)[1]), use.dtype)


def _int(value: object) -> int:
    return int(str(value))


MOVING: dict[str, Callable[[Use], Moving]] = {
    "route": _route,
    "group_rows": _group,
    "group_pairs": _group,
    "reduce_rows": _reduce,
    "combine": _reduce,
}
