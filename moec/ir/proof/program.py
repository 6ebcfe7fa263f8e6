"""Proof of a Program's exchanges: run symbolically for all ranks, over random and hostile routing tables.

What is proved of every body that routes: each (token, choice) is computed exactly once (once on every member of an etp
group, whose pieces are summed once), by a rank whose weights are that expert's; it returns exactly once to where its
token lives, with its own weight once; empty room of padded rows adds nothing; every rank gets what it expects from whom
it expects it. What a full buffer with a capacity leaves out is excused. Of every body: `order`.

The proof is over the tables tried, a few rows a rank; it has no part in the layout rules that the verifier checks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from moec.diagnostics import CompileError, Diagnostic
from moec.ir.program import Body, Program, is_op, loc_of, op_of, operands, output_of, results_of
from moec.ir.proof.comm import COLLECTIVES, Comm, wait
from moec.ir.proof.fused import FUSED
from moec.ir.proof.local import LOCAL, opaque
from moec.ir.proof.order import events, prove_order
from moec.ir.proof.rank import Here, Log
from moec.ir.proof.rows import Column, Fault, Row, Term, Token, Value, require, terms_of
from moec.ir.proof.tables import Table, Tables


def prove(program: Program) -> None:
    """Raises CompileError E0405 with the first fault of every body. The Program must have passed insert-exchange."""
    faults = []
    for body in program.bodies.values():
        table = None
        try:
            prove_order(program, [events(body)] * program.mesh.size)
            for table in _tables(program, body):
                Execution(program, body, table).prove()
        except Fault as fault:
            faults.append(_diagnostic(program, body, fault, table))
    if faults:
        raise CompileError(*faults)


def _tables(program: Program, body: Body) -> Iterator[Table]:
    """Of the body's router; none where nothing is routed."""
    for node in body.graph.nodes:
        if is_op(node) and op_of(node).name == "route":
            rows = 3 if program.mesh.size <= 8 else 2 if program.mesh.size <= 32 else 1
            placed, shared = program.placements[node.kwargs["table"]], node.kwargs.get("shared", 0)
            yield from Tables(program.mesh, placed, node.kwargs["top"], rows, shared)
            return


def _diagnostic(program: Program, body: Body, fault: Fault, table: Table | None) -> Diagnostic:
    node = fault.node or output_of(body)
    at = ""
    if node.op == "call_function":
        node = node if is_op(node) else node.all_input_nodes[0]
        loc = loc_of(node)
        at = f", {op_of(node).name} at {loc if loc.file else f'{program.source}:{loc}'}"
    routed = f" (routing table: {table.name})" if table is not None else ""
    help = "this is a bug in moec: please report it with the `.moe` file"
    return Diagnostic("E0405", f"the exchange is wrong in body {body.name}{at}: {fault}{routed}", help=help)


@dataclass
class Execution:
    """One body on the symbols of one routing table, on all ranks in step."""

    program: Program
    body: Body
    table: Table
    log: Log = field(default_factory=Log)
    values: dict[fx.Node, Value] = field(default_factory=dict)

    def prove(self) -> None:
        """Raises Fault."""
        for node in self.body.graph.nodes:
            try:
                self._step(node)
            except Fault as fault:
                fault.node = fault.node or node
                raise
        check_served(self)
        check_returned(self, self.values[output_of(self.body)])

    def here(self, rank: int) -> Here:
        return Here(self.program, rank, self.table, self.log)

    @property
    def ranks(self) -> range:
        return range(self.program.mesh.size)

    def _step(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self.values[node] = Value("rows", [[Row(token) for token in self.here(rank).tokens] for rank in self.ranks])
        elif node.op == "get_attr":
            self.values[node] = Value("param", [[self.body.params[str(node.target)]] for _ in self.ranks])
        elif node.op != "output" and is_op(node):
            for result, value in zip(results_of(node), self._operation(node), strict=True):
                self.values[result] = value

    def _operation(self, node: fx.Node) -> tuple[Value, ...]:
        name = op_of(node).name
        for operand in operands(node):
            require(operand in self.values, f"it reads {operand}, which is not there yet")
        args = [self.values[operand] for operand in operands(node)]
        for arg in args:
            require(not arg.pending or name == "all_to_all.wait", "it reads what is still on its way")
        if name == "all_to_all.wait":
            return (wait(args[0]),)
        if name in COLLECTIVES:
            held = tuple(len(self.here(rank).tokens) for rank in self.ranks)
            comm = Comm(self.program.mesh, str(node.kwargs["group"]), dict(node.kwargs), held)
            return (COLLECTIVES[name](comm, *args),)
        return self._local(name, args, dict(node.kwargs), op_of(node).count(node.kwargs))

    def _local(self, name: str, args: list[Value], attrs: dict[str, Any], num_results: int) -> tuple[Value, ...]:
        require(name != "moe", "moe is not lowered yet")
        rules = LOCAL | FUSED
        if name not in rules:
            rows = [arg for arg in args if arg.kind != "param"]
            require(
                bool(rows) and all(arg.kind == "rows" for arg in rows),
                f"{name} reads {', '.join(arg.kind for arg in rows)}",
            )
            given = [opaque(*(arg.columns[rank] for arg in rows)) for rank in self.ranks]
            return (Value("rows", given),) * num_results
        takes, gives = rules[name].takes, rules[name].gives
        gives = tuple(args[0].kind if kind == "same" else kind for kind in gives)
        for wanted, arg in zip(takes, args, strict=False):
            require(wanted in (arg.kind, "any"), f"{name} reads {arg.kind} as {wanted}")
        columns = [rules[name].run(self.here(rank), *(a.columns[rank] for a in args), **attrs) for rank in self.ranks]
        return tuple(Value(kind, list(column)) for kind, column in zip(gives, zip(*columns, strict=True), strict=True))


# --- what must hold in the end -----------------------------------------------------------------------------------


def check_served(run: Execution) -> None:
    """Each (token, choice) once on every member of an etp group."""
    mesh = run.program.mesh
    member = [mesh.coordinate(rank, "etp") for rank in run.ranks]
    for token, experts in run.table.ids.items():
        for choice, expert in enumerate(experts):
            ranks = run.log.served.get((token, choice), [])
            counts = Counter(member[rank] for rank in ranks)
            wanted = 0 if (token, choice) in run.log.dropped else 1
            if any(counts[part] != wanted for part in range(mesh.etp)):
                fault = Fault(f"{token}, choice {choice} (expert {expert}): computed {_times(ranks)}")
                fault.node = next((n for n in run.values if n.op == "call_function" and _groups(n)), None)
                raise fault


def _groups(node: fx.Node) -> bool:
    makers = [maker for maker in (node, *node.all_input_nodes) if is_op(maker)]
    return any(op_of(maker).name in ("group_rows", "group_pairs", "paired_experts") for maker in makers)


def _times(ranks: list[int]) -> str:
    if not ranks:
        return "never"
    times = {1: "once", 2: "twice"}.get(len(ranks), f"{len(ranks)} times")
    return f"{times}, by {_ranks(ranks)}"


def _ranks(ranks: list[int]) -> str:
    """`rank 1`, `ranks 0 and 2`: each once."""
    named = sorted(set(ranks))
    return f"rank{'s' if len(named) > 1 else ''} {' and '.join(map(str, named))}"


def check_returned(run: Execution, value: Value) -> None:
    """What the body returns has each rank's tokens in order, each with the share of every choice once."""
    for rank in run.ranks:
        column: Column = value.columns[rank]
        found, wanted = [row.token for row in column], run.here(rank).tokens
        require(found == wanted, f"rank {rank} returns {_list(found)} for {_list(wanted)}")
        for row in column:
            _check_row(run, rank, row)


def _list(tokens: list[Token]) -> str:
    return ", ".join(map(str, tokens)) or "no row"


def _check_row(run: Execution, rank: int, row: Row) -> None:
    etp, token = run.program.mesh.etp, row.token
    assert token is not None
    by_choice: dict[int, list[Term]] = {}
    for term in terms_of(row):
        require(term.token == token, f"{term}: its share is in the row of {token}")
        require(term.weights == ((token, term.choice),), f"{term}: its weight is applied {len(term.weights)} times")
        by_choice.setdefault(term.choice, []).append(term)
    for choice, expert in enumerate(run.table.ids[token]):
        terms = by_choice.get(choice, [])
        parts = sorted(-1 if term.part is None else term.part for term in terms)
        wanted = [[]] if (token, choice) in run.log.dropped else [[-1], list(range(etp))]
        if parts not in wanted:
            words = f"{token}, choice {choice} (expert {expert}): on rank {rank} "
            raise Fault(words + _returns(terms, etp))


def _returns(terms: list[Term], etp: int) -> str:
    if not terms:
        return "its share never comes home"
    sources = _ranks([term.rank for term in terms])
    if len({term.part for term in terms}) == len(terms):
        return f"only {len(terms)} of {etp} pieces of its share are summed, from {sources}"
    return f"its share comes home {len(terms)} times, from {sources}"
