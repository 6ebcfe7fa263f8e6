"""What the ranks of a run counted, added up: rows that padded exchanges left out, and the note that tells of them."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress

from moec.ir.program import Program
from moec.runtime.generate import Place, gather_bytes
from moec.runtime.session import Session


def sum_over_ranks(mine: Mapping[str, int], place: Place) -> dict[str, int]:
    """Counters of all ranks by name, added up, on every rank. A collective over the world."""
    total = Counter[str]()
    for part in gather_bytes(place, json.dumps(mine).encode(), "counts"):
        total.update(json.loads(part))
    return dict(total)


def may_drop(programs: Iterable[Program]) -> bool:
    """Whether a program leaves out rows that do not fit: the same on all ranks, given those of all stages."""
    return any(program.drop for program in programs)


def gather_dropped(session: Session) -> dict[str, int]:
    """Phase -> rows left out of padded exchanges in the run, of all ranks, layers and steps, on every rank.

    A row counts once for each place of the expert group that had no room for it. The ranks of one etp group send the
    same rows, so the first of them counts.
    """
    is_first = session.place.mesh.coordinate(session.place.rank, "etp") == 0
    phases = {"prefill": session.prefill_phase, "decode": session.decode_phase}
    mine = {name: sum(phase.dropped.values()) if is_first else 0 for name, phase in phases.items()}
    return sum_over_ranks(mine, session.place)


def tell_dropped(dropped: Mapping[str, int]) -> None:
    """Say on standard error how many rows did not fit, and what to raise; nothing where all did."""
    short = {phase: rows for phase, rows in dropped.items() if rows}
    if not short:
        return
    rows = sum(short.values())
    where = " and ".join(f"{number} in {phase}" for phase, number in short.items())
    fit = f"{rows} row{'s' * (rows != 1)} did not fit a padded exchange and went on without those experts"
    line = f"moec: note: {fit} ({where}); raise `capacity` in {' and '.join(short)}, or leave it out\n"
    with suppress(OSError):  # nobody reads standard error: no reason to end the run
        sys.stderr.write(line)
        sys.stderr.flush()
