"""What a cache lab found, as a table to read and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moec.cache.lab import Case, Floor, Lab, Row, Times, floor, resident_times

MIB = 2**20
#: The policy that the others are measured against, and the bound at the other end, both of each layer's own slots.
BASE, BOUND = "layer_lru", "belady"


@dataclass(frozen=True, eq=False)
class Report:
    """Rows of `sizes` slots each, in the order of the cases. `untimed`: why there are no times, empty where there are.

    `source` is the trace's file name; `learned` says what `trace` and `history` learned from.
    """

    lab: Lab
    source: str
    sizes: Sequence[int]
    rows: Sequence[Row]
    learned: str
    untimed: str

    @property
    def held(self) -> int:
        """Experts of a layer on the rank with the most."""
        return max(len(own) for rank in self.lab.held for own in rank)

    def row(self, case: Case) -> Row:
        return next(row for row in self.rows if row.case == case)

    def gap(self, row: Row) -> float:
        """Part of the hits between `layer_lru` and `belady` that a case gains; can be negative, or above 1."""
        base, bound = (self.row(Case(row.case.slots, policy)).hits for policy in (BASE, BOUND))
        return (row.hits - base) / (bound - base) if bound > base else 0.0


def table(report: Report) -> Iterator[str]:
    """The lines of the table."""
    lab, trace = report.lab, report.lab.trace
    ranks = f" on {len(lab.held)} ranks" if len(lab.held) > 1 else ""
    yield (
        f"{report.source}: {trace.num_tokens:,} tokens in {trace.num_steps:,} steps,"
        f" {trace.num_layers} layers of {trace.num_experts} experts{ranks}, {trace.top} per token"
    )
    yield f"trace and history learned from {report.learned}"
    if lab.machine is not None:
        ttft, token = map(_ms, resident_times(lab))
        yield f"predicted with all experts resident: {ttft} ms to the first token, {token} ms per token"
    else:
        yield f"no times: {report.untimed}"
    for slots in report.sizes:
        yield ""
        yield from _size(report, slots)


def _size(report: Report, slots: int) -> Iterator[str]:
    """One block: a row for each case, then the floor."""
    yield f"{slots} of {report.held} experts of a layer in slots ({slots / report.held:.1%})"
    heads = ("hit rate", "of gap", "demanded", "fetched", "unused", "MiB" if report.lab.expert_bytes else "copied")
    times = ("TTFT ms", "ms/token") if report.lab.machine is not None else ()
    yield f"  {'policy':<13}{'prefetch':<13}" + "".join(f"{head:>10}" for head in (*heads, *times))
    for row in report.rows:
        if row.case.slots == slots:
            yield _line(report, row)
    least = floor(report.lab, slots)
    blank = f"{'':>40}{_copied(report, least.moved_bytes, least.transfers):>20}"
    yield f"  {'floor':<26}{blank}{_timed(report, least.times)}".rstrip()


def _line(report: Report, row: Row) -> str:
    """Counts are per token, over all layers."""
    tokens = report.lab.trace.num_tokens
    per_token = "".join(f"{count / tokens:>10.2f}" for count in (row.demanded, row.fetched))
    unused = f"{row.useless / row.fetched:>10.1%}" if row.fetched else f"{'-':>10}"
    copied = f"{_copied(report, row.moved_bytes, row.transfers):>10}{_timed(report, row.times)}"
    found = f"{row.hit_rate:>10.3f}{report.gap(row):>10.1%}"
    return f"  {row.case.policy:<13}{row.case.prefetch:<13}{found}{per_token}{unused}{copied}"


def _copied(report: Report, moved: int | None, transfers: int) -> str:
    """Per token: MiB, or experts where their size is not known."""
    tokens = report.lab.trace.num_tokens
    return f"{transfers / tokens:.2f}" if moved is None else f"{moved / MIB / tokens:.2f}"


def _timed(report: Report, times: Times) -> str:
    return "".join(f"{_ms(seconds):>10}" for seconds in times) if report.lab.machine is not None else ""


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"


def document(report: Report) -> dict[str, Any]:
    """Everything as JSON: bytes, seconds and hit rates by layer; counts are of the whole trace."""
    lab, trace = report.lab, report.lab.trace
    return {
        "trace": report.source,
        "tokens": trace.num_tokens,
        "steps": trace.num_steps,
        "layers": trace.num_layers,
        "experts": trace.num_experts,
        "experts_per_token": trace.top,
        "ranks": len(lab.held),
        "learned_from": report.learned,
        "expert_bytes": None if lab.expert_bytes is None else list(lab.expert_bytes),
        "untimed": report.untimed or None,
        "resident": _seconds(resident_times(lab)),
        "rows": [_row(report, row) for row in report.rows],
        "floors": [_floor(floor(lab, slots)) for slots in report.sizes],
    }


def _row(report: Report, row: Row) -> dict[str, Any]:
    plain = {key: value for key, value in asdict(row).items() if key not in ("case", "hit_rates", "times")}
    return {
        **asdict(row.case),
        "share": row.case.slots / report.held,
        **plain,
        "transfers": row.transfers,
        "hit_rate": row.hit_rate,
        "gap_closed": report.gap(row),
        "hit_rate_by_layer": list(row.hit_rates),
        **_seconds(row.times),
    }


def _floor(found: Floor) -> dict[str, Any]:
    return {
        "slots": found.slots,
        "transfers": found.transfers,
        "moved_bytes": found.moved_bytes,
        **_seconds(found.times),
    }


def _seconds(times: Times) -> dict[str, float | None]:
    return dict(zip(("ttft_s", "token_s"), times, strict=True))
