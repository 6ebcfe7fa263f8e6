"""The plot of a cache lab: SVG or PNG by matplotlib, which moec itself does not need (`pip install 'moec[plot]'`).

The same rows give the same bytes: no date, and ids that follow from the content.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moec.cache.lab import Row
from moec.cache.lab_table import Report
from moec.diagnostics import fail
from moec.files import write_whole

FORMATS = {".svg": "svg", ".png": "png"}
#: What would differ from day to day or from release to release.
METADATA: dict[str, dict[str, Any]] = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}
SETTINGS: dict[Any, Any] = {"svg.hashsalt": "moec", "svg.fonttype": "none", "axes.grid": True, "grid.alpha": 0.3}
#: A prefetcher is a kind of line, a policy a colour.
LINES = {"none": "-", "history": ":", "next_router": "--"}


def check_plotter() -> None:
    """Raises E0782 where matplotlib is not installed; to be asked before the work."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        message = "a plot needs matplotlib, which is not installed"
        raise fail("E0782", message, "`pip install 'moec[plot]'`, or leave `--plot` out") from None


def write_plot(path: Path, report: Report) -> None:
    """Write the plot, whole or not at all, as the ending of `path` says (`FORMATS`). Raises E0618, E0782."""
    check_plotter()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    kind, trace = FORMATS[path.suffix.lower()], report.lab.trace
    with rc_context(SETTINGS):
        figure = Figure(figsize=(11.0, 4.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        _draw(left, report, "share of look-ups that hit", lambda row: row.hit_rate)
        _draw(right, report, *_cost(report))
        figure.legend(*left.get_legend_handles_labels(), loc="outside right center", fontsize=8)
        figure.suptitle(f"{report.source}: {trace.num_tokens:,} tokens, {trace.num_layers} layers")
        content = io.BytesIO()
        figure.savefig(content, format=kind, metadata=METADATA[kind])
    write_whole(path, content.getvalue())


def _cost(report: Report) -> tuple[str, Callable[[Row], float]]:
    """What the right half shows: time per token, or else to the first one, or else copies."""
    tokens = report.lab.trace.num_tokens
    if all(row.times[1] is not None for row in report.rows):
        return "predicted ms per token", lambda row: (row.times[1] or 0.0) * 1e3
    if all(row.times[0] is not None for row in report.rows):
        return "predicted ms to the first token", lambda row: (row.times[0] or 0.0) * 1e3
    return "experts copied per token", lambda row: row.transfers / tokens


def _draw(axes: Any, report: Report, label: str, value: Callable[[Row], float]) -> None:
    """A line for each policy with each prefetcher over the share of experts that have a slot."""
    series: dict[tuple[str, str], list[Row]] = {}
    for row in report.rows:
        series.setdefault((row.case.policy, row.case.prefetch), []).append(row)
    colours = {policy: f"C{number}" for number, policy in enumerate(dict.fromkeys(policy for policy, _ in series))}
    for (policy, prefetch), rows in series.items():
        ordered = sorted(rows, key=lambda row: row.case.slots)
        name = policy if prefetch == "none" else f"{policy}, {prefetch}"
        shares = [100.0 * row.case.slots / report.held for row in ordered]
        axes.plot(
            shares, [value(row) for row in ordered], LINES[prefetch], color=colours[policy], marker=".", label=name
        )
    axes.set_xlabel("% of a layer's experts in slots")
    axes.set_ylabel(label)
    axes.set_xlim(0.0, 100.0)
    axes.set_ylim(bottom=0.0)
