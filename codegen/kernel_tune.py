"""Choose a grouped GEMM's tiles by timing them, where somebody can: `moec compile --tune`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from moec.codegen.devices import Device
from moec.codegen.expected_rows import Rows
from moec.codegen.grouped_gemm import GroupedGemm
from moec.codegen.kernel_cost import gemm_cost
from moec.codegen.kernel_select import Build, Choice, describe, least_us, select, unfitness
from moec.diagnostics import MoecError

#: Candidates that are timed at most: the ones of the least bounds.
MOST_TIMED = 6

#: Microseconds of a kernel for rows [M] of so many tokens, measured.
Measure = Callable[[GroupedGemm, Rows, int], float]


def tune(
    candidates: Sequence[GroupedGemm], rows: Rows, tokens: int, device: Device, build: Build, measure: Measure
) -> Choice:
    """The fastest of `candidates` that compile without spills, with the `times` of all that were timed.

    Where none does, it is chosen by the cost model. Raises what `select` does.
    """
    timed: list[tuple[float, Choice]] = []
    ordered = sorted(candidates, key=lambda values: least_us(values, rows, tokens, device))
    for values in ordered[:MOST_TIMED]:
        try:
            kernel = build(values)
        except MoecError:
            continue  # one that does not compile is none to choose; `select` tells where all are like this
        cost = gemm_cost(values, rows, tokens, device, kernel.code, kernel.report.shared_bytes)
        choice = Choice(values, kernel, cost, len(candidates), len(timed) + 1)
        if unfitness(choice) is None:
            timed.append((measure(values, rows, tokens), choice))
    if not timed:
        return select(candidates, rows, tokens, device, build)
    _, best = min(timed, key=lambda entry: entry[0])
    times = tuple((describe(choice.values), round(us, 3)) for us, choice in timed)
    return replace(best, compiled=len(timed), times=times)
