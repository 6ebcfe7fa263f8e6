"""`moec kernels`: what the kernels of an artifact use and should take, as tables. No torch, no Triton.

All figures stand in plan.json: those of machine code were read when it was compiled, those of time come from a model.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moec.diagnostics import fail

#: Lines are as long as they are, also on a narrow terminal: folded, figures could not be told apart.
WIDTH = 160
#: Heading, and whether it is a number.
COLUMNS = (
    ("kernel", False), ("launches", True), ("regs", True), ("spills", True), ("KiB", True), ("blocks", True),
    ("matrix instruction", False), ("slots", True), ("MB", True), ("least", True), ("padding", True), ("us", True),
    ("of roof", True),
)  # fmt: skip
LEGEND = """\
regs      registers of a thread (AMD: of a lane, accumulation registers among them)
spills    instructions that store or load registers there was no room for (AMD: such registers)
KiB       shared memory of a block
blocks    that a multiprocessor holds at once; no more for its registers (r), shared memory (s), threads (t), blocks (b)
slots     instructions that a warp issues for each matrix instruction, on the shortest way through its loop
MB        moved by the kernel; least: weights of the experts in use, the layer's rows in and out, each once
padding   rows computed over rows there are
us        predicted: the longest of memory, L2 and the busiest multiprocessor's work, and the launches
of roof   the roof is the larger of the least bytes over the rate of memory and operations over the peak
No time here was measured, but where `tuned` is said. docs/kernels.md says how each figure comes about.
"""

Entry = Mapping[str, Any]


def check_has_kernels(document: Mapping[str, Any], folder: str) -> None:
    """Raises E0534 where an artifact was compiled for the CPU."""
    if document["target"] == "cpu":
        again = f"moec compile {document['source']} --target cuda:90 -o {folder}"
        raise fail("E0534", f"`{folder}` was compiled for the cpu and has no GPU kernels", again)


def kernels_json(document: Mapping[str, Any]) -> dict[str, Any]:
    """What `moec kernels --json` prints."""
    return {"target": document["target"], "kernels": document["kernels"], "phases": totals(document["kernels"])}


def kernels_text(document: Mapping[str, Any]) -> str:
    """One table for each phase, and a legend."""
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, force_terminal=False, highlight=False)
    for phase in phases(document["kernels"]):
        entries = [entry for entry in document["kernels"] if entry["phase"] == phase]
        console.print(_table(phase, entries))
        for line in _notes(entries):
            console.print(Text(line), soft_wrap=True)
        console.print()
    if not document["kernels"]:
        console.print("no operation of this program has a GPU kernel")
    console.print(Text(LEGEND), soft_wrap=True, end="")
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def phases(kernels: Sequence[Entry]) -> list[str]:
    """Names of the phases that have kernels, prefill first."""
    return sorted(dict.fromkeys(entry["phase"] for entry in kernels), key=lambda name: not name.startswith("prefill"))


def totals(kernels: Sequence[Entry]) -> dict[str, dict[str, float]]:
    """By phase, of one layer: launches, bytes, microseconds and roof, over all its kernels."""
    found = {}
    for phase in phases(kernels):
        own = [entry for entry in kernels if entry["phase"] == phase]
        found[phase] = {
            "launches": sum(entry["launches"] for entry in own),
            "moved": sum(entry["bytes"]["moved"] for entry in own),
            "minimum": sum(entry["bytes"]["minimum"] for entry in own),
            "predicted_us": round(sum(entry["us"]["predicted"] for entry in own), 3),
            "roof_us": round(sum(entry["us"]["roof"] for entry in own), 3),
        }
    return found


def _table(phase: str, entries: Sequence[Entry]) -> Table:
    first = entries[0]
    step = f"{first['tokens']} tokens a step, {first['routing']} routing"
    title = f"{phase}: {step}, {first['target']} as {first['device']}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0), show_footer=True)
    whole = totals(entries)[phase]
    share = whole["roof_us"] / whole["predicted_us"] if whole["predicted_us"] else 0.0
    footers = {
        "kernel": "a layer",
        "launches": str(whole["launches"]),
        "MB": _mega(whole["moved"]),
        "least": _mega(whole["minimum"]),
        "us": f"{whole['predicted_us']:.1f}",
        "of roof": f"{share:.2f}",
    }
    for name, is_number in COLUMNS:
        table.add_column(name, footers.get(name, ""), justify="right" if is_number else "left", no_wrap=True)
    for entry in entries:
        for cells in _rows(entry):
            table.add_row(*map(Text, cells))
    return table


def _rows(entry: Entry) -> Iterator[tuple[str, ...]]:
    """The line of a kernel, and one more for each further body it has."""
    matrix = [(one["op"], f"{one['slots']:.1f}") for one in entry["matrix"]] or [("-", "-")]
    blocks, rows = entry["occupancy"], entry["rows"]
    share = entry["us"]["roof"] / entry["us"]["predicted"] if entry["us"]["roof"] else None
    yield (
        entry["op"],
        str(entry["launches"]),
        str(entry["registers"]),
        str(entry["spills"]),
        f"{entry['shared_bytes'] / 1024:.0f}",
        f"{blocks['blocks']} {blocks['limit'][0]}",
        *matrix[0],
        _mega(entry["bytes"]["moved"]),
        _mega(entry["bytes"]["minimum"]) if entry["bytes"]["minimum"] else "-",
        f"{rows['padded'] / rows['useful']:.2f}" if rows and rows["useful"] else "-",
        f"{entry['us']['predicted']:.1f}",
        "-" if share is None else f"{share:.2f}",
    )
    for op, slots in matrix[1:]:
        yield ("", "", "", "", "", "", op, slots, "", "", "", "", "")


def _mega(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f}"


def _notes(entries: Sequence[Entry]) -> Iterator[str]:
    """What each kernel is called, how its tiles are, and where it is not what was wanted."""
    for entry in entries:
        yield f"  {entry['op']}: {entry['name']}" + (f", tiles {entry['tiles']}" if entry["tiles"] else "")
        if entry["fallback"]:
            yield f"    fallback: {entry['fallback']}"
        if (tuned := entry.get("tuned_us")) is not None:
            yield f"    tuned: {tuned:.1f} us measured"
