"""The part of `moec explain` that says how rows travel to their experts, what else was possible, and why not that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MIB = 2**20
#: Class of link -> heading of its bytes.
CLASSES = {"inter": "between nodes", "intra": "inside nodes", "memory": "device memory"}
#: Term of a time -> what it is spent on.
SPENT = {
    "latency": "the latency of messages",
    "inter": "bytes between nodes",
    "intra": "bytes inside nodes",
    "memory": "device memory",
    "compute": "arithmetic",
}


def exchange_lines(table: dict[str, Any]) -> Iterator[str]:
    """The table of candidates, and in words why one was taken and where another would be."""
    yield "  the exchange of one sparse layer: MiB on the busiest rank, and time"
    heads = "".join(f"{head:>15}" for head in CLASSES.values())
    yield f"    {'':<18}{heads}{'time':>14}"
    for found in table["candidates"]:
        yield f"    {_row(found, table['chosen'])}".rstrip()
    yield from (f"  {line}" for line in (*_reason(table), _by_tokens(table), *_overlap(table)))


def _overlap(table: dict[str, Any]) -> Iterator[str]:
    """What was decided about overlap, why, and the time of all sparse layers in each number of chunks."""
    if (found := table.get("overlap")) is None:
        return
    yield f"overlap {_chunks(found['chosen'])}: {found['reason']}"
    if found["off_us"] is not None:
        times = [("off", found["off_us"]), *found["by_chunks"].items()]
        shown = ", ".join(f"{_chunks(chunks)} {us:.1f} us" for chunks, us in times)
        yield f"  sparse layers {shown}"


def _chunks(overlap: str) -> str:
    """`in 2 chunks` of what the experts do, or `of the layer`, with its attention."""
    count, _, entry = overlap.partition(":")
    return {"off": "off", "1": "reordered"}.get(count, f"in {count} chunks{' of the layer' * bool(entry)}")


def _row(found: dict[str, Any], chosen: dict[str, str]) -> str:
    sizes = "".join(f"{found['bytes'][name] / MIB:>15.3f}" for name in CLASSES)
    if found["us"] is not None:
        time = f"{found['us']:>11.1f} us"
    elif found["unknown"]:
        time = f"{'unknown':>14}"
    else:
        sizes, time = f"{'':>{15 * len(CLASSES)}}", f"{'not possible':>14}"
    marks = ["chosen"] * (_name(found) == _name(chosen)) + [found["note"]] * bool(found["note"])
    return f"{_name(found):<18}{sizes}{time}   {'; '.join(marks)}"


def _name(candidate: dict[str, Any]) -> str:
    """`two_hop`, `flat ordered`: how rows come back is said only where that is a choice."""
    return (
        f"{candidate['exchange']} {candidate['combine']}" if candidate["exchange"] == "flat" else candidate["exchange"]
    )


def _reason(table: dict[str, Any]) -> Iterator[str]:
    """Who chose; then the best other candidate and what it would spend more on."""
    chosen = next(c for c in table["candidates"] if _name(c) == _name(table["chosen"]))
    by_model = "auto" in table["asked"].values()
    who = f"{'auto chose' if by_model else 'the plan asks for'} {_name(chosen)}"
    if unknown := sorted({link for c in table["candidates"] if c["is_eligible"] for link in c["unknown"]}):
        what = " and ".join(CLASSES[link] for link in unknown)
        yield f"{who}: the cluster does not give the rate of its links {what}, so times are not known"
        if by_model:
            yield f"  {_by_bytes(table, chosen)}"
        return
    others = [c for c in table["candidates"] if c["is_eligible"] and c is not chosen]
    if not others:
        yield f"{who}: no other is possible and fits"
        return
    yield f"{who}{_best_by(chosen, min(others, key=lambda c: float(c['us'])))}"


def _by_bytes(table: dict[str, Any], chosen: dict[str, Any]) -> str:
    """What speaks for the candidate chosen where no time is known."""
    link, asked = table["by"], table["asked"]["exchange"]
    open_ones = [c for c in table["candidates"] if c["is_eligible"] and asked in ("auto", c["exchange"])]
    size = chosen["bytes"][link]
    alike = [c for c in open_ones if c is not chosen and abs(c["bytes"][link] - size) <= 0.01 * size]
    where = CLASSES[link]
    if alike:
        return f"{_name(alike[0])} moves as good as the same bytes {where}, and the simpler goes first"
    return f"it moves the fewest bytes {where}"


def _best_by(chosen: dict[str, Any], other: dict[str, Any]) -> str:
    """The nearest other candidate beside the one chosen, and the term in which they differ most."""
    names = {*chosen["terms"], *other["terms"]}
    more = {name: other["terms"].get(name, 0.0) - chosen["terms"].get(name, 0.0) for name in names}
    if abs(other["us"] - chosen["us"]) <= 0.01 * min(other["us"], chosen["us"]):
        return f": {_name(other)} takes as good as the same time, and the simpler goes first"
    faster = other["us"] < chosen["us"]
    term = (min if faster else max)(sorted(more), key=lambda name: more[name])
    factor = other["us"] / chosen["us"]
    share = f"{factor:.2f} of its time" if faster else f"{factor:.2f} times as long"
    spent = _spent(abs(other["us"] - chosen["us"]), abs(more[term]), SPENT[term], faster)
    return f": {_name(other)}, the best other, would take {share}, {spent}"


def _spent(whole: float, part: float, on: str, is_less: bool) -> str:
    """A difference of `whole` us, and how much of it the largest term is; other terms may take some of that back."""
    word, opposite = ("less", "more") if is_less else ("more", "less")
    if f"{part:.1f}" == f"{whole:.1f}":
        return f"{whole:.1f} us {word}, all of it for {on}"
    if part > whole:
        return f"{whole:.1f} us {word}: {part:.1f} us {word} for {on}, {part - whole:.1f} us {opposite} for the rest"
    share = "most" if part > whole / 2 else "the largest part"
    return f"{whole:.1f} us {word}, {share} of it ({part:.1f} us) for {on}"


def _by_tokens(table: dict[str, Any]) -> str:
    """From which number of tokens on which candidate is cheapest, or moves the fewest bytes where times are unknown."""
    runs, by = table["by_tokens"], table["by"]
    if len(runs) == 1:
        does = "is cheapest" if by == "us" else f"moves the fewest bytes {CLASSES[by]}"
        return f"{_name(runs[0])} {does} for any number of tokens from {runs[0]['first']} to {runs[0]['last']}"
    what = "cheapest" if by == "us" else f"fewest bytes {CLASSES[by]}"
    return f"{what} by tokens of a dp rank: " + ", ".join(f"{r['first']}..{r['last']} {_run(r)}" for r in runs)


def _run(run: dict[str, Any]) -> str:
    return "none fits" if run["exchange"] == "none" else _name(run)
