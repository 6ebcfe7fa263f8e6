"""From measured times to the constants of a cluster, and to the text that declares it. No torch.

A time is that of the slowest rank while all ranks are at work, so rates are those of one device: what the ranks of a
node share (its link to others, the cores of a CPU) is shared out in them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from moec.topology import Cluster, Link

#: Digits that a declaration is written with: more than can be measured.
_DIGITS = 3
#: Of the fit: rounds, and the relative error below which a point weighs no more.
_ROUNDS, _SMALL_ERROR = 60, 1e-4


@dataclass(frozen=True)
class Sample:
    """An exchange in which each rank sent `num_bytes` in all over one class of link, in `messages` messages."""

    messages: int
    num_bytes: int
    us: float


@dataclass(frozen=True)
class Measured:
    """Everything measured. `copied_gbps`: bytes read and written by a copy in device memory; `tflops` by dtype."""

    intra: tuple[Sample, ...]
    inter: tuple[Sample, ...]
    copied_gbps: float
    tflops: tuple[tuple[str, float], ...]


def from_rows(rows: Sequence[Sequence[Any]]) -> Measured:
    """[name, messages, amount, microseconds] as `moec.runtime.calibrate.measure` gives them."""
    links = {
        name: tuple(Sample(int(row[1]), int(row[2]), float(row[3])) for row in rows if row[0] == name)
        for name in ("intra", "inter")
    }
    rates = {str(row[0]): row[2] / row[3] for row in rows if row[0] not in links}
    copied = rates.pop("copy") / 1e3
    return Measured(**links, copied_gbps=copied, tflops=tuple((name, rate / 1e6) for name, rate in rates.items()))


def fit_link(samples: Sequence[Sample]) -> Link | None:
    """The link that explains the times best, None without samples.

    Latency and rate make the sum of relative errors least (not of their squares, so that no single time decides), for
    the number of messages at once with which that is least.
    """
    if not samples:
        return None
    most = max(sample.messages for sample in samples)
    fits = [_line(samples, concurrency) for concurrency in range(1, most + 1)]
    best = min(fits, key=lambda fit: fit.error)
    return Link(1 / max(best.us_per_byte, 1e-12) / 1e3, best.latency_us, fits.index(best) + 1)


def calibrated(cluster: Cluster, measured: Measured) -> Cluster:
    """`cluster` with what was measured in place of what was declared; what was not measured stays."""
    device = replace(cluster.device, memory_gbps=measured.copied_gbps, tflops=measured.tflops)
    intra, inter = fit_link(measured.intra) or cluster.intra, fit_link(measured.inter) or cluster.inter
    return replace(cluster, device=device, intra=intra, inter=inter)


def declaration(cluster: Cluster, notes: Sequence[str] = ()) -> str:
    """The cluster as `.moe` text, with `notes` as comments before it."""
    device = cluster.device
    settings = [("devices", str(cluster.devices_per_node))]
    if device.memory_bytes:
        settings.append(("memory", f"{_number(device.memory_bytes / 1e9, 9)} GB"))
    if device.memory_gbps:
        settings.append(("memory_rate", f"{_number(device.memory_gbps)} GB/s"))
    if device.tflops:
        rates = ", ".join(f"{dtype} = {_number(rate)} TFLOP/s" for dtype, rate in device.tflops)
        settings.append(("compute", f"peak({rates})"))
    for name in ("intra", "inter", "host", "nvme"):
        link: Link | None = getattr(cluster, name)
        if link is not None:
            settings.append((name, _link(link)))
    width = max(len(name) for name, _ in settings)
    lines = [f"  {name:<{width}} = {value}" for name, value in settings]
    return "\n".join([*(f"// {note}" for note in notes), f"cluster {cluster.name} {{", *lines, "}"]) + "\n"


@dataclass(frozen=True)
class _Line:
    """us = latency_us * rounds + us_per_byte * bytes. `error`: the sum of relative errors."""

    latency_us: float
    us_per_byte: float
    error: float


def _line(samples: Sequence[Sample], concurrency: int) -> _Line:
    """The line of least absolute relative errors, by iteratively reweighted least squares."""
    # Relative to the time measured: a * x + b * y should be 1.
    points = [(-(-s.messages // concurrency) / s.us, s.num_bytes / s.us) for s in samples]
    weights = [1.0] * len(points)
    best = _Line(0.0, 0.0, math.inf)
    for _ in range(_ROUNDS):
        a, b = _least_squares(points, weights)
        errors = [abs(a * x + b * y - 1) for x, y in points]
        if sum(errors) < best.error:
            best = _Line(a, b, sum(errors))
        weights = [1 / max(error, _SMALL_ERROR) for error in errors]
    return best


def _least_squares(points: Sequence[tuple[float, float]], weights: Sequence[float]) -> tuple[float, float]:
    """a, b >= 0 for which a * x + b * y is nearest to 1 at all points."""
    xx, xy, yy, x1, y1 = (
        sum(w * value for w, value in zip(weights, values, strict=True))
        for values in zip(*((x * x, x * y, y * y, x, y) for x, y in points), strict=True)
    )
    determinant = xx * yy - xy * xy
    if determinant > 1e-12 * xx * yy:
        a, b = (x1 * yy - y1 * xy) / determinant, (y1 * xx - x1 * xy) / determinant
        if a >= 0 and b >= 0:
            return a, b
    candidates = [(x1 / xx, 0.0), (0.0, y1 / yy)]
    return min(
        candidates,
        key=lambda c: sum(w * (c[0] * x + c[1] * y - 1) ** 2 for w, (x, y) in zip(weights, points, strict=True)),
    )


def _link(link: Link) -> str:
    given = [f"{_number(link.gbps)} GB/s"]
    if link.latency_us:
        given.append(f"latency = {_number(link.latency_us)} us")
    if link.concurrency > 1:
        given.append(f"concurrency = {link.concurrency}")
    return f"link({', '.join(given)})"


def _number(value: float, digits: int = _DIGITS) -> str:
    """At most so many significant digits, never with an exponent that the language does not have."""
    text = f"{value:.{digits}g}"
    return f"{float(text):.12f}".rstrip("0").rstrip(".") if "e" in text else text
