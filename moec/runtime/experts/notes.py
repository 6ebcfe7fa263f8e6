"""What expert caches tell: a note once for all ranks of a run, and what they counted."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from dataclasses import asdict

from moec.diagnostics import Diagnostic
from moec.runtime.experts.cache import ExpertCache
from moec.runtime.experts.tiers import print_note
from moec.runtime.generate import Place
from moec.runtime.run_counts import sum_over_ranks


class OneNote:
    """Prints the first note of each code, of whichever rank that was forked after this was made.

    A disk that is full or fails is met by all ranks at once: one line says so, and the counters say how often.
    """

    def __init__(self) -> None:
        self._tokens = {code: _token() for code in ("E0641", "E0642", "E0648")}

    def __enter__(self) -> OneNote:
        return self

    def __exit__(self, *_: object) -> None:
        for token in self._tokens.values():
            os.close(token)

    def __call__(self, note: Diagnostic) -> None:
        if os.read(self._tokens[note.code], 1):
            with suppress(OSError):  # nobody reads standard error: no reason to end the run
                print_note(note)


def _token() -> int:
    """The read end of a pipe with one byte in it, which the first to read gets, in any process, and nobody else."""
    read_end, write_end = os.pipe()
    os.write(write_end, b"1")
    os.close(write_end)
    return read_end


def gather_counts(cache: ExpertCache | None, place: Place) -> dict[str, int]:
    """What the caches of all ranks counted, summed over layers and ranks, on every rank.

    Those of `moec.cache.residency.Counters`, and `late`: hits on a prefetch still under way; `rereads`: experts read
    from the checkpoint because their expert file failed; `host_bytes`, `nvme_bytes`: brought whole from that tier, the
    first filling of the slots left out. Empty where no rank has a cache.
    """
    mine = Counter[str]()
    if cache is not None:
        mine.update({"late": cache.arrivals.late, "rereads": cache.num_rereads})
        mine.update({f"{tier}_bytes": size for tier, size in cache.copied_bytes.items()})
        for layer in cache.residency.counters:
            mine.update(asdict(layer))
    return sum_over_ranks(mine, place)
