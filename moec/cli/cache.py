"""`moec cache`: a routing trace through every policy and prefetcher. No torch."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moec.files import check_place

if TYPE_CHECKING:
    from moec.cache.lab import Lab
    from moec.cache.lab_table import Report
    from moec.cache.trace import Trace
    from moec.checked import Plan

#: Sizes that are measured where none is asked for.
DEFAULT_SLOTS = "12.5%,25%,50%"


def cache_command(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A .npz file of `moec run --record`.")],
    model: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A .moe file: adds bytes, and times by its cluster and cache.")
    ] = None,
    plan: Annotated[str | None, typer.Option(metavar="NAME", help="Which plan, where the file has several.")] = None,
    slots: Annotated[
        str | None, typer.Option(metavar="N,N%", help=f"Of a layer on a rank. Default: the plan's, or {DEFAULT_SLOTS}.")
    ] = None,
    learn: Annotated[
        Path | None, typer.Option(metavar="TRACE", help="`trace` and `history` learn from this one, not in hindsight.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="OUT.svg", help="Draw it too: .svg or .png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with hit rates by layer.")] = False,
) -> None:
    """Say what an expert cache would do with recorded routing: misses, bytes and times beside what nothing can beat."""
    from moec.cache.lab_table import document, table
    from moec.cache.plot import FORMATS, check_plotter, write_plot

    if plot is not None:
        if plot.suffix.lower() not in FORMATS:
            raise typer.BadParameter(f"--plot {plot}: its name must end in {' or '.join(FORMATS)}")
        check_place(plot)
        check_plotter()
    report = _measure(trace, model, plan, slots, learn)
    if plot is not None:
        write_plot(plot, report)
    if as_json:
        sys.stdout.write(json.dumps(document(report), sort_keys=True) + "\n")
    else:
        sys.stdout.write("\n".join(table(report)) + "\n")


def _measure(path: Path, model: Path | None, plan: str | None, slots: str | None, learn: Path | None) -> Report:
    from moec.cache.lab import measure
    from moec.cache.lab_table import Report
    from moec.cache.trace import read_trace

    recorded = read_trace(path)
    chosen = _checked(model, plan) if model is not None else None
    lab, declared, untimed = _bare(recorded) if chosen is None else _planned(recorded, path, chosen)
    lab, learned = _taught(lab, chosen, learn)
    sizes = _sizes(slots or declared or DEFAULT_SLOTS, lab)
    with _bar() as show:
        rows = measure(lab, sizes, show)
    return Report(lab, path.name, sizes, rows, learned, untimed)


def _checked(model: Path, plan: str | None) -> Plan:
    from moec.grammar.parser import read_source
    from moec.semantics.checker import check

    return check(read_source(model), overrides=[]).plan(plan)


def _bare(recorded: Trace) -> tuple[Lab, str | None, str]:
    """One rank that holds all experts, of unknown size."""
    from moec.cache.lab import Lab

    held = [[range(recorded.num_experts)] * recorded.num_layers]
    return Lab(recorded, held), None, "`--model FILE` gives sizes and rates"


def _planned(recorded: Trace, path: Path, plan: Plan) -> tuple[Lab, str | None, str]:
    """The ranks of a plan; the slots of its cache; why there are no times. Raises E0781."""
    from moec.cache.lab import Lab
    from moec.cli.cache_model import read_plan
    from moec.plan.trace import check_fit

    recorded = check_fit(recorded, path, plan.model)
    found, cache = read_plan(plan), plan.cache
    pinned, ahead = (cache.pinned, max(1, cache.ahead)) if cache is not None else ((), 1)
    lab = Lab(recorded, found.held, pinned, ahead, expert_bytes=found.expert_bytes, machine=found.machine)
    return lab, None if found.slots is None else str(found.slots), found.untimed


def _taught(lab: Lab, plan: Plan | None, learn: Path | None) -> tuple[Lab, str]:
    """What `trace` and `history` learn from: the trace asked for, else those that the plan's cache names."""
    cache = plan.cache if plan is not None else None
    named = (cache.evict_trace, cache.prefetch_trace) if cache is not None else (None, None)
    files = [learn or (Path(file) if file is not None else None) for file in named]
    read = {file: _read_alike(file, lab.trace) for file in files if file is not None}
    popularity, history = (read[file] if file is not None else None for file in files)
    words = [file.name if file is not None else "this trace, in hindsight" for file in files]
    said = words[0] if words[0] == words[1] else f"{words[0]} and {words[1]}"
    return replace(lab, popularity=popularity, history=history), said


def _read_alike(path: Path, trace: Trace) -> Trace:
    """A trace of the same model. Raises E0780, E0781."""
    from moec.cache.trace import read_trace
    from moec.diagnostics import fail

    found = read_trace(path)
    is_larger, are_counted = found.num_experts > trace.num_experts, found.is_counted and trace.is_counted
    is_other = is_larger or (are_counted and found.num_experts != trace.num_experts)
    if found.num_layers != trace.num_layers or is_other:
        theirs, mine = (f"{t.num_layers} layers of {t.num_experts} experts" for t in (found, trace))
        message = f"the trace `{path}` has {theirs}, the one measured {mine}"
        raise fail("E0781", message, "learn from a trace of the same model")
    return replace(found, num_experts=trace.num_experts)


def _sizes(text: str, lab: Lab) -> list[int]:
    """Slots per layer and rank: whole numbers, or shares of the experts that the fullest rank holds of a layer."""
    from moec.cache.lab import least_size

    held, least = max(len(own) for rank in lab.held for own in rank), least_size(lab)
    found = []
    for part in text.split(","):
        word = part.strip()
        try:
            number = float(word.removesuffix("%")) * held / 100 if word.endswith("%") else int(word)
        except ValueError:
            raise typer.BadParameter(f"--slots {part}: give numbers such as 8, or shares such as 25%") from None
        size = math.floor(number + 1e-9) if math.isfinite(number) else 0
        if not least <= size <= held:
            have = f"a rank has {held} experts of a layer"
            raise typer.BadParameter(f"--slots {word}: {have}, {least} to {held} slots work")
        found.append(size)
    return sorted(set(found))


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
