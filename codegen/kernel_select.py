"""Choose a grouped GEMM's tiles at compile time: by the cost model, with the offline compiler as judge.

1. Candidates are put in the order of what they cannot beat: bytes, loads of tiles and arithmetic, padding included.
2. The first is compiled and costed with its machine code. One that spills or asks for more shared memory than there is
   is out.
3. A candidate whose bound is not below the best cost so far is never compiled, nor is any after it. Most are memory
   bound with the same bound, so few are.

Nothing is timed; `moec compile --tune` does that where there is a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from moec.codegen.devices import LAUNCH_US, MEMORY_SHARE, Device
from moec.codegen.expected_rows import Rows
from moec.codegen.grouped_gemm import GroupedGemm
from moec.codegen.kernel_cost import GemmCost, gemm_cost
from moec.codegen.kernel_store import Compiled
from moec.codegen.renderer import Comment
from moec.codegen.targets import find_target
from moec.codegen.tiles import Form
from moec.diagnostics import MoecError, fail

#: Candidates that are compiled at most once one of them is fit: each costs seconds, and the first is nearly always it.
MOST_COMPILED = 3
#: A candidate must promise this much less than the best to be worth compiling.
WORTH = 0.03

Build = Callable[[GroupedGemm], Compiled]


@dataclass(frozen=True)
class Choice:
    """The kernel chosen. `candidates` were thought of, `compiled` of them compiled (or found kept).

    `values.fallback` says why it is not what was wanted first, if it is not. `times` are tiles in words and measured
    microseconds of those that were timed, none where the cost model chose.
    """

    values: GroupedGemm
    kernel: Compiled
    cost: GemmCost
    candidates: int
    compiled: int
    times: tuple[tuple[str, float], ...] = ()


def select(candidates: Sequence[GroupedGemm], rows: Rows, tokens: int, device: Device, build: Build) -> Choice:
    """The cheapest of `candidates` (the wanted one first) for `rows` [M] of `tokens` tokens.

    Where all of them spill, the one that spills least is taken, and its `fallback` says so. Raises E0533 where none
    compiles at all.
    """
    best: Choice | None = None
    unfit: list[tuple[int, Choice, str]] = []
    tried, refused = 0, None
    for values in sorted(candidates, key=lambda values: least_us(values, rows, tokens, device)):  # stable
        if tried >= MOST_COMPILED and best:
            break
        if best and least_us(values, rows, tokens, device) > best.cost.predicted_us * (1 - WORTH):
            break
        tried += 1
        try:
            kernel = build(values)
        except MoecError as error:
            refused = error
            continue
        cost = gemm_cost(values, rows, tokens, device, kernel.code, kernel.report.shared_bytes)
        choice = Choice(values, kernel, cost, len(candidates), tried)
        if (why := unfitness(choice)) is not None:
            unfit.append((kernel.code.spills, choice, why))
        elif best is None or cost.predicted_us < best.cost.predicted_us:
            best = choice
    if best is None and not unfit:
        raise refused or fail("E0533", "there is no kernel to choose from", "this is a bug in moec: please report it")
    chosen = best or min(unfit, key=lambda entry: entry[0])[1]
    return replace(chosen, compiled=tried, values=_explained(chosen, candidates[0], unfit))


def least_us(values: GroupedGemm, rows: Rows, tokens: int, device: Device) -> float:
    """Microseconds that no machine code of `values` can beat."""
    cost = gemm_cost(values, rows, tokens, device)
    return LAUNCH_US + max(cost.memory_us / MEMORY_SHARE, cost.l2_us, cost.tensor_us)


def unfitness(choice: Choice) -> str | None:
    """Why a compiled kernel must not be chosen in silence, or None."""
    kernel, target = choice.kernel, find_target(choice.values.target.text)
    if kernel.is_fit(target):
        return None
    if kernel.report.shared_bytes > target.shared_limit:
        return f"asks for {kernel.report.shared_bytes} of {target.shared_limit} bytes of shared memory"
    return f"spills {kernel.code.spills} registers"


def _explained(chosen: Choice, wanted: GroupedGemm, unfit: Sequence[tuple[int, Choice, str]]) -> GroupedGemm:
    """The values, with a word where the wanted ones were refused, or where the chosen ones are not fit themselves."""
    values = chosen.values
    if (own := next((why for _, choice, why in unfit if choice.values == values), None)) is not None:
        return replace(values, fallback=Comment(f"{describe(values)} {own}, and so does every other that was tried"))
    if (why := next((why for _, choice, why in unfit if choice.values == wanted), None)) is not None:
        return replace(values, fallback=Comment(f"{describe(values)} instead of {describe(wanted)}, which {why}"))
    return values


def describe(values: GroupedGemm) -> str:
    """Tiles in words: `128+64+32+16 x 128 x 128, 2 stages, 8 warps, tma`."""
    first, rows = values.tiles[0], "+".join(str(tile.m) for tile in values.tiles)
    form = "" if values.form is Form.TMA else f", {values.form.value} loads"
    return f"{rows} x {first.n} x {first.k}, {values.stages} stages, {values.warps} warps{form}"
