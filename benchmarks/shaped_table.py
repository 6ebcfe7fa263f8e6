"""What `shaped_cluster.py` prints: the cases of each cell, and how good predictions and choices were."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from shaped_layer import Cell

#: The first case of a table, which the others are held against.
BASELINE = "per_expert"


@dataclass(frozen=True)
class Row:
    """A case in a cell. `times_s`: per repetition, first start to last end. `sent_bytes`: by all nodes, medians.

    `predicted_s`: what the cost model says. `is_chosen`: it is what `exchange = auto` takes in this cell.
    """

    cell: Cell
    case: str
    times_s: list[float]
    sent_bytes: int
    bound_bytes: int
    predicted_s: float | None = None
    is_chosen: bool = False

    @property
    def seconds(self) -> float:
        return statistics.median(self.times_s)

    @property
    def error(self) -> float | None:
        """Of the predicted time, relative to the measured one."""
        return self.predicted_s / self.seconds - 1 if self.predicted_s is not None else None


def summarise(table: list[Row]) -> None:
    """How good the model's predictions and choices are."""
    errors = [abs(row.error) for row in table if row.error is not None]
    print(f"\npredicted times: median error {statistics.median(errors):.0%} of {len(errors)}, worst {max(errors):.0%}")
    for cell in dict.fromkeys(row.cell for row in table):
        rows = [row for row in table if row.cell == cell and row.case != BASELINE]
        best = min(rows, key=lambda row: row.seconds)
        for chosen in (row for row in rows if row.is_chosen):
            ratios = [a / b for a, b in zip(chosen.times_s, best.times_s, strict=True)]
            slower = sum(ratio > 1 for ratio in ratios)
            print(
                f"  {cell}: auto takes {chosen.case}, the fastest is {best.case}; {statistics.median(ratios):.2f} of"
                f" its time, slower in {slower} of {len(ratios)} runs"
            )


def show(rows: list[Row]) -> None:
    """Print a cell."""
    print(f"\n{rows[0].cell}, bound {rows[0].bound_bytes / 1e6:.2f} MB between nodes")
    print(f"  {'case':<14}{'ms':>9}  {'least..most':>17}{'faster':>8}{'MB sent':>10}{'/ bound':>9}{'model ms':>10}")
    for row in rows:
        spread = f"{min(row.times_s) * 1e3:.1f}..{max(row.times_s) * 1e3:.1f}"
        faster = statistics.median(a / b for a, b in zip(rows[0].times_s, row.times_s, strict=True))
        bytes_text = f"{row.sent_bytes / 1e6:>10.2f}{row.sent_bytes / row.bound_bytes:>9.3f}"
        model = f"{row.predicted_s * 1e3:>10.1f}{row.error:>+7.0%}" if row.predicted_s and row.error else ""
        chosen = "  auto" if row.is_chosen else ""
        print(
            f"  {row.case:<14}{row.seconds * 1e3:>9.1f}  {spread:>17}{faster:>7.2f}x{bytes_text}{model}{chosen}",
            flush=True,
        )
