"""`moec explain`: the page of an error code, or a compiled plan in words and numbers. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moec.diagnostics import MoecError, did_you_mean, fail
from moec.explain.cache import cache_lines, phase_lines
from moec.explain.exchange import exchange_lines
from moec.specs import read, shipped

GIB = 2**30


def explain_code(code: str) -> str:
    """The page of an error code. Raises E0680 for a code that moec does not have, and for what is no code at all."""
    known = shipped("errors", ".md")
    if code.upper() not in known:
        raise _unknown(code, did_you_mean(code.upper(), known))
    return read("errors", f"{code.upper()}.md")


def _unknown(what: str, near: str) -> MoecError:
    """Why there is nothing to explain: a file in place of a folder, a folder that is not there, or no such code."""
    compiled = "moec compile FILE.moe -o DIR"
    path = Path(what)
    if path.is_file() and path.suffix == ".moe":
        help = f"compile it first: moec compile {what} -o DIR"
        return fail("E0680", f"`{what}` is a source file, not a compiled folder", help)
    if path.exists():
        return fail("E0680", f"`{what}` is no compiled folder", f"give the folder that `{compiled}` wrote")
    if near or re.fullmatch(r"[A-Za-z]?\d+", what):
        return fail("E0680", f"there is no error code `{what}`", near or "codes look like E0203")
    return fail("E0680", f"there is no folder `{what}`", f"`{compiled}` writes one; error codes look like E0203")


def explain_plan(document: dict[str, Any]) -> str:
    """The plan of an artifact: model, ranks, memory, and what each phase sends."""
    parts = (_head(document), [""], _memory(document), _cache(document), _phases(document), _kernels(document))
    return "\n".join(line for part in parts for line in part) + "\n"


def _head(document: dict[str, Any]) -> Iterator[str]:
    model, params, mesh, cluster = (document[key] for key in ("model", "parameters", "mesh", "cluster"))
    dtype = document["expert_dtype"]
    computed = document["compute"] + (f", experts in {dtype}" if dtype is not None else "")
    yield f"plan {document['plan']}: {model['name']} in {computed}, from {document['source']}"
    yield (
        f"parameters  {params['total']:,} in total, {params['active']:,} active"
        f" ({params['active_no_input_embed']:,} without the input embedding)"
    )
    attention = f"dp={mesh['dp']} tp={mesh['tp']}"
    experts = f"edp={mesh['edp']} ep={mesh['ep']} etp={mesh['etp']}"
    where = f"{cluster['name']}, {cluster['nodes']} x {cluster['devices_per_node']} device"
    where += _s(cluster["devices_per_node"])
    yield f"mesh        {mesh['ranks']} rank{_s(mesh['ranks'])} on {where}: attention {attention}, experts {experts}"
    for table, slots in document["placement"].items():
        counts = sorted({len(held) for held in slots}, reverse=True)
        yield f"experts     {table}: {sum(map(len, slots))}, {' or '.join(map(str, counts))} on a rank"
    if (trace := document["trace"]) is not None:
        counted = _traced(trace["tokens"])
        yield f"routing     as traced in {trace['file']} (sha256 {trace['sha256'][:16]}): {counted}"
    for why in document["left_to_torch"]:
        yield f"fallback    {why}; torch's kernels serve"
    weights = document["weights"]["path"]
    yield f"weights     {weights or 'none: the plan compiles, it cannot run'}"


def _traced(tokens: dict[str, int]) -> str:
    """Tokens of each phase in a trace; a phase without any of its own is costed with those of the other."""
    own = [(phase, count) for phase, count in sorted(tokens.items(), reverse=True) if count]
    parts = [f"{count:,} token{_s(count)} in {phase}" for phase, count in own]
    lacking = [phase for phase, count in tokens.items() if not count]
    borrowed = f"; none in {lacking[0]}, which is costed with the same ones" if lacking else ""
    return " and ".join(parts) + borrowed


def _s(count: int) -> str:
    return "s" * (count != 1)


def _cache(document: dict[str, Any]) -> Iterator[str]:
    if (cache := document["cache"]) is not None:
        yield ""
        yield from cache_lines(cache)


def _memory(document: dict[str, Any]) -> Iterator[str]:
    """Ranks that hold the same are one line."""
    lines: dict[tuple[int, ...], list[int]] = {}
    for rank, entry in enumerate(document["memory"]):
        lines.setdefault(tuple(entry[k] for k in ("weights", "kv", "buffers", "slots", "total")), []).append(rank)
    limit = document["cluster"]["memory_bytes"]
    of = f" of {limit / GIB:.1f}" if limit else ""
    yield f"memory, GiB per rank (context {document['context']})"
    for (weights, kv, buffers, slots, total), ranks in lines.items():
        parts = f"weights {weights / GIB:.3f}  kv {kv / GIB:.3f}  buffers {buffers / GIB:.3f}"
        parts += f"  slots {slots / GIB:.3f}" if slots else ""
        yield f"  {_ranks(ranks):<12} {parts}  total {total / GIB:.3f}{of}"


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"{len(ranks)} ranks"


def _phases(document: dict[str, Any]) -> Iterator[str]:
    for name in sorted(document["phases"], key=_place):
        phase = document["phases"][name]
        yield ""
        rows = f"{'token' if name.startswith('prefill') else 'sequence'}{_s(phase['tokens'])}"
        yield f"{name}: up to {phase['tokens']} {rows} a step on each dp rank, exchange {phase['exchange']}"
        if phase["sums"] == "any":
            yield "  sums in any order: last digits may differ from run to run"
        if phase["exchanges"] is not None:
            yield from exchange_lines(phase["exchanges"])
        elif phase["overlap_asked"] == "auto":
            yield "  overlap off: nothing is exchanged"
        if document["cache"] is not None and (cached := document["cache"]["phases"].get(name)) is not None:
            yield from (f"  {line}" for line in phase_lines(cached))
        for run in phase["runs"]:
            yield from _run(phase, run)


def _run(phase: dict[str, Any], run: dict[str, Any]) -> Iterator[str]:
    """One body: how long it takes once, and what it sends."""
    yield f"  {run['body']}{_layers(run['layers'])}: {_time(phase['us'][run['body']])}"
    if (why := phase["shared"].get(run["body"])) is not None:
        yield f"    shared experts {f'by themselves: {why}' if why else 'in the products of the routed ones'}"
    yield from (f"    {_traffic(t)}" for t in phase["traffic"] if t["body"] == run["body"])


def _place(name: str) -> tuple[bool, int, str]:
    """plan.json has the phases in the order of the alphabet; here prefill comes first, then stage by stage."""
    return not name.startswith("prefill"), len(name), name


def _layers(layers: list[int] | None) -> str:
    if layers is None:
        return ""
    first, last = layers
    return f" for layer {first}" if first == last else f" for each of layers {first}..{last}"


def _traffic(item: dict[str, Any]) -> str:
    """Bytes that leave or reach the busiest rank."""
    where = {"inter": "between nodes", "intra": "inside nodes"}
    sizes = [f"{_size(item['bytes'][name])} {text}" for name, text in where.items() if item["bytes"][name]]
    return f"{item['op']:<20} over {item['group']} ({item['num_ranks']} ranks): {', '.join(sizes)}, {_time(item['us'])}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.3f} MiB" if num_bytes >= 10 * 2**10 else f"{num_bytes} bytes"


def _time(us: float | None) -> str:
    return "time unknown" if us is None else f"{us:.1f} us"


def _kernels(document: dict[str, Any]) -> Iterator[str]:
    for kernel in document["kernels"]:
        yield ""
        yield (
            f"kernel {kernel['name']} for {kernel['target']}, {kernel['phase']}: {kernel['registers']} registers,"
            f" {kernel['spills']} spilled, {kernel['shared_bytes']} bytes of shared memory,"
            f" {kernel['us']['predicted']:.1f} us predicted"
        )
        if kernel["fallback"]:
            yield f"  fallback: {kernel['fallback']}"
