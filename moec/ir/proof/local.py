"""What each operation of an exchange does to the symbols of one rank.

Written from what the operations are said to do, apart from the evaluator and the kernels. Each gives the columns of
its results and refuses what would lose, double or mix up a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from moec.ir.params import Param
from moec.ir.proof.rank import Here
from moec.ir.proof.rows import (
    Column,
    Ids,
    Message,
    Row,
    Term,
    Token,
    Weights,
    Work,
    require,
    same_length,
    same_tokens,
    terms_of,
)
from moec.layout import Placed, Shard
from moec.placement import span

# --- out ---------------------------------------------------------------------------------------------------------


def route(here: Here, logits: Column, bias: Column | None = None, **attrs: Any) -> tuple[Column, Column]:
    return [Ids(row.token, here.table.ids[row.token]) for row in logits], [Weights(row.token) for row in logits]


def fan_out(
    here: Here, rows: Column, ids: Column, weights: Column, table: str, group: str, bound: int | None, drop: bool
) -> tuple[Column, Column, Column]:
    same_tokens("rows, ids and weights", rows, ids, weights)
    blocks: list[list[tuple[int, Message]]] = [[] for _ in here.program.mesh.groups()[group][0]]
    for index, message in enumerate(map(Message, rows, ids, weights)):
        theirs = [here.destination(table, group, e) if e >= 0 else -1 for e in message.ids.experts]
        for there in sorted(set(theirs) - {-1}):
            experts = tuple(e if t == there else -1 for e, t in zip(message.ids.experts, theirs, strict=True))
            blocks[there].append((index, message._replace(ids=Ids(message.ids.token, experts))))
    counts = [len(block) for block in blocks]
    if bound is not None:
        blocks = [_padded(here, block, here.room(bound)) for block in blocks]
    sent = [item for block in blocks for item in block]
    return [message for _, message in sent], counts, [index for index, _ in sent]


def _padded(here: Here, block: list[tuple[int, Message]], room: int) -> list[tuple[int, Message]]:
    for _, message in block[room:]:
        lost = [(message.row.token, choice) for choice, e in enumerate(message.ids.experts) if e >= 0]
        require(here.program.capacity is not None, f"{message.row.token} has no room in {room} rows")
        here.log.dropped.update((token, choice) for token, choice in lost if token is not None)
    empty = Message(Row(None), Ids(None, (-1,) * here.table.top), Weights(None))
    return [*block[:room], *[(-1, empty)] * (room - len(block))]


def open_rows(here: Here, messages: Column, **attrs: Any) -> tuple[Column, ...]:
    return [m.row for m in messages], [m.ids for m in messages], [m.weights for m in messages]


# --- at the experts ----------------------------------------------------------------------------------------------


def group_rows(here: Here, rows: Column, ids: Column, table: str) -> tuple[Column, Column, Column]:
    same_tokens("rows and ids", rows, ids)
    grouped: list[Work] = []
    offsets, pairs = [], []
    for held in here.program.placements[table].slots[here.ep_index]:
        for index, choice in pairs_of(here, ids, held):
            grouped.append(start_work(here, rows[index], choice, held))
            pairs.append(index * here.table.top + choice)
        offsets.append(len(grouped))
    return grouped, offsets, pairs


def pairs_of(here: Here, ids: Column, expert: int) -> list[tuple[int, int]]:
    """(row, choice) of all that chose an expert, in order of arrival."""
    return [(index, choice) for index, row in enumerate(ids) for choice, e in enumerate(row.experts) if e == expert]


def start_work(here: Here, row: Row, choice: int, expert: int) -> Work:
    require(row.token is not None, f"rank {here.rank} takes empty room for a row of expert {expert}")
    assert row.token is not None
    here.log.served.setdefault((row.token, choice), []).append(here.rank)
    return Work(row.token, choice, expert)


def grouped_linear(here: Here, rows: Column, offsets: Column, param: Column, *scales: Column) -> tuple[Column]:
    (weight,) = param
    name = weight.parts[0].rpartition(".")[2]
    require(name in ("gate", "up", "down") and len(weight.parts) == 1, f"{weight.parts} is no product of an expert")
    wanted = "act" if name == "down" else "in"
    return (_product(here, rows, offsets, weight, wanted, "out" if name == "down" else name),)


def grouped_gate_up(here: Here, rows: Column, offsets: Column, param: Column, *scales: Column) -> tuple[Column]:
    return (_product(here, rows, offsets, param[0], "in", "act"),)


def experts_of(here: Here, weight: Param) -> Sequence[int]:
    """The expert of each slot of a parameter, as the loader fills it."""
    place = weight.layout.on("ep")
    if isinstance(place, Placed):
        return here.program.placements[place.table].slots[here.ep_index]
    return range(weight.shape[0])


def _product(here: Here, rows: Column, offsets: Column, weight: Param, stage: str, gives: str) -> Column:
    """Rows up to offsets[m] by the expert in slot m."""
    held = experts_of(here, weight)
    part = here.program.mesh.coordinate(here.rank, "etp") if isinstance(weight.layout.on("etp"), Shard) else None
    require(len(offsets) == len(held), f"{len(offsets)} offsets for {len(held)} experts")
    require([0, *offsets][-1] == len(rows), f"offsets count {[0, *offsets][-1]} of {len(rows)} rows")
    out: Column = []
    for expert, start, end in zip(held, [0, *offsets], offsets, strict=False):
        for work in rows[start:end]:
            require(isinstance(work, Work), "rows enter experts before they are grouped")
            require(work.expert == expert, f"{work}: computed on rank {here.rank} by expert {expert}")
            require(work.stage == stage, f"{work}: {stage} is wanted here, this is {work.stage}")
            out.append(_given(here, work, part) if gives == "out" else work._replace(stage=gives, part=part))
    return out


def _given(here: Here, work: Work, part: int | None) -> Row:
    require(work.part == part, f"{work}: piece {work.part} of the expert's inside meets piece {part}")
    return Row(work.token, (Term(work.token, work.choice, work.expert, here.rank, part),))


def cached_experts(
    here: Here, rows: Column, offsets: Column, slots: Column, gate_up: Column, down: Column, *scales: Column, table: str
) -> tuple[Column]:
    act = _product(here, rows, offsets, gate_up[0], "in", "act")
    return (_product(here, act, offsets, down[0], "act", "out"),)


def prefetch_wait(here: Here, offsets: Column, table: str) -> tuple[Column]:
    return (offsets,)


def no_rows(here: Here, *columns: Column, **attrs: Any) -> tuple[Column]:
    """An operation of a prefetch, which no row depends on."""
    return ([],)


def silu_mul(here: Here, gate: Column, up: Column) -> tuple[Column]:
    same_length(gate, up, "rows of gate and up")
    return ([_activation(a, b) for a, b in zip(gate, up, strict=True)],)


def _activation(gate: Row | Work, up: Row | Work) -> Row | Work:
    if isinstance(gate, Work) and isinstance(up, Work):
        require(gate._replace(stage="up") == up and gate.stage == "gate", f"gate of {gate} meets {up.stage} of {up}")
        return gate._replace(stage="act")
    require(gate.token == up.token, f"gate of {gate.token} meets up of {up.token}")
    return Row(gate.token)


def reduce_rows(here: Here, rows: Column, pairs: Column, weights: Column, table: str) -> tuple[Column]:
    same_length(rows, pairs, "rows and pairs")
    sums: list[list[Term]] = [[] for _ in weights]
    for row, pair in zip(rows, pairs, strict=True):
        index, choice = divmod(pair, here.table.top)
        require(0 <= index < len(weights), f"pair {pair} of {len(weights)} rows")
        sums[index] += [_weighed(here, term, weights[index].token, choice) for term in terms_of(row)]
    return ([Row(w.token, tuple(terms)) for w, terms in zip(weights, sums, strict=True)],)


def _weighed(here: Here, term: Term, token: Token | None, choice: int) -> Term:
    require(term.token == token, f"{term}: summed and weighed as {token}")
    assert token is not None
    theirs = here.table.ids[token][choice]
    require(theirs == term.expert, f"{term}: weighed as choice {choice}, which is expert {theirs}")
    require(not term.weights, f"{term}: its weight is applied twice")
    return term._replace(weights=(*term.weights, (token, choice)))


def return_rows(here: Here, rows: Column, pairs: Column) -> tuple[Column]:
    same_length(rows, pairs, "rows and pairs")
    require(len(set(pairs)) == len(pairs), "a pair stands twice in the order of return")
    return ([rows[i] for i in sorted(range(len(pairs)), key=pairs.__getitem__)],)


def count_pairs(here: Here, ids: Column, recv: Column) -> tuple[Column]:
    require(sum(recv) == len(ids), f"counts speak of {sum(recv)} rows, {len(ids)} are here")
    pairs = [sum(e >= 0 for e in chosen.experts) for chosen in ids]
    return ([sum(pairs[sum(recv[:i]) : sum(recv[: i + 1])]) for i in range(len(recv))],)


# --- back --------------------------------------------------------------------------------------------------------


def fan_in(here: Here, rows: Column, origin: Column, ids: Column, table: str) -> tuple[Column]:
    same_length(rows, origin, "rows and origins")
    sums: list[list[Term]] = [[] for _ in ids]
    for row, index in zip(rows, origin, strict=True):
        require(index < len(ids), f"origin {index} of {len(ids)} rows")
        for term in terms_of(row):
            home = ids[index].token if index >= 0 else None
            require(term.token == home, f"{term}: comes back to {home or 'empty room'}")
            sums[index].append(term)
    return ([Row(chosen.token, tuple(terms)) for chosen, terms in zip(ids, sums, strict=True)],)


def pair_order(here: Here, ids: Column, table: str, group: str) -> tuple[Column, Column]:
    ranks = [here.destination(table, group, e) for chosen in ids for e in chosen.experts]
    counts = [ranks.count(rank) for rank in range(len(here.program.mesh.groups()[group][0]))]
    return sorted(range(len(ranks)), key=lambda pair: (ranks[pair], pair)), counts


def add(here: Here, a: Column, b: Column) -> tuple[Column]:
    same_tokens("rows added", a, b)
    return ([Row(x.token, (*terms_of(x), *terms_of(y))) for x, y in zip(a, b, strict=True)],)


def chunk_rows(here: Here, rows: Column, parts: int, index: int) -> tuple[Column]:
    return (rows[span(len(rows), index, parts)],)


def join_rows(here: Here, *parts: Column) -> tuple[Column]:
    return ([row for part in parts for row in part],)


def attention(here: Here, *columns: Column, chunk: tuple[int, int] = (0, 1), **attrs: Any) -> tuple[Column]:
    """Rows are those that the chunk's place in KV memory is for."""
    rows = opaque(*(column for column in columns if not column or isinstance(column[0], Row)))
    index, parts = chunk
    wanted = here.tokens[span(len(here.tokens), index, parts)]
    require([row.token for row in rows] == wanted, f"it attends rows of others than chunk {index} of {parts}")
    return (rows,)


def opaque(*columns: Column) -> Column:
    """An operation on rows that are no sums of experts: a row per row."""
    same_tokens("rows", *columns)
    return [Row(row.token) for row in columns[0]]


class Symbolic(NamedTuple):
    """An operation on symbols: kinds of its operands and results; any: whatever it is, same: what it was."""

    run: Callable[..., tuple[Column, ...]]
    takes: tuple[str, ...]
    gives: tuple[str, ...]


LOCAL: dict[str, Symbolic] = {
    "route": Symbolic(route, ("rows", "param"), ("ids", "weights")),
    "fan_out": Symbolic(fan_out, ("rows", "ids", "weights"), ("messages", "numbers", "numbers")),
    "open_rows": Symbolic(open_rows, ("messages",), ("rows", "ids", "weights")),
    "group_rows": Symbolic(group_rows, ("rows", "ids"), ("rows", "numbers", "numbers")),
    "grouped_linear": Symbolic(grouped_linear, ("rows", "numbers", "param"), ("rows",)),
    "grouped_gate_up": Symbolic(grouped_gate_up, ("rows", "numbers", "param"), ("rows",)),
    "cached_experts": Symbolic(cached_experts, ("rows", "numbers", "numbers", "param", "param"), ("rows",)),
    "prefetch.wait": Symbolic(prefetch_wait, ("numbers",), ("numbers",)),
    "prefetch.start": Symbolic(no_rows, ("any",), ("numbers",)),
    "guess": Symbolic(no_rows, ("rows", "param", "param", "param"), ("guesses",)),
    "count_experts": Symbolic(no_rows, ("any",), ("numbers",)),
    "silu_mul": Symbolic(silu_mul, ("rows", "rows"), ("rows",)),
    "reduce_rows": Symbolic(reduce_rows, ("rows", "numbers", "weights"), ("rows",)),
    "combine": Symbolic(reduce_rows, ("rows", "numbers", "weights"), ("rows",)),
    "return_rows": Symbolic(return_rows, ("rows", "numbers"), ("rows",)),
    "count_pairs": Symbolic(count_pairs, ("ids", "numbers"), ("numbers",)),
    "fan_in": Symbolic(fan_in, ("rows", "numbers", "ids"), ("rows",)),
    "pair_order": Symbolic(pair_order, ("ids",), ("numbers", "numbers")),
    "chunk_rows": Symbolic(chunk_rows, ("any",), ("same",)),
    "join_rows": Symbolic(join_rows, ("rows",) * 8, ("rows",)),
    "add": Symbolic(add, ("rows", "rows"), ("rows",)),
    "attention": Symbolic(attention, ("rows",) * 3, ("rows",)),
    "mla_attention": Symbolic(attention, (*("rows",) * 4, "param"), ("rows",)),
}
