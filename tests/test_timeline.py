"""The timeline of a run: tracks, arrows, prediction, and a file written by real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moec.diagnostics import MoecError
from moec.ir import is_op, op_of, operands, results_of
from moec.ops_exchange import LEAVES, RETURNS, Hops
from moec.runtime.generate import Request, generate
from moec.runtime.launch import run_ranks
from moec.runtime.launch_rank import Rank
from moec.runtime.session import open_session
from moec.runtime.timeline import (
    Event,
    gather_events,
    predicted_events,
    start_recorder,
    trace,
    write_trace,
)
from tests import checkpoints
from tests.exchange_programs import exchange_plan, exchanged
from tests.parity import compile_checkpoint


def event(
    name: str, start: float, end: float, stream: str = "compute", layer: int = 0, hop: int | None = None
) -> Event:
    return Event(name, stream, start, end, "decode", layer, hop)


@pytest.mark.parametrize("home", [(1, 0), (0, 1)], ids=["two hops nest", "two chunks follow each other"])
def test_arrows_lead_from_what_began_a_hop_to_what_ends_it(home: tuple[int, int]) -> None:
    hops = [event("fan_out", 0, 1, hop=0), event("fan_out", 2, 3, hop=1), event("add", 4, 5)]
    hops += [event("fan_in", 6, 7, hop=home[0]), event("fan_in", 8, 9, hop=home[1])]
    arrows = [e for e in trace([hops])["traceEvents"] if e["ph"] in "sf"]
    left = {0: 1, 1: 3}
    assert [(e["ph"], e["ts"], e["id"]) for e in arrows] == [
        ("s", left[home[0]], "0.0"), ("f", 6, "0.0"), ("s", left[home[1]], "0.1"), ("f", 8, "0.1"),
    ]  # fmt: skip


@pytest.mark.parametrize("overlap", ["1", "2:layer"])
@pytest.mark.parametrize(("exchange", "hops"), [("flat", 1), ("gather", 1), ("two_hop", 2)])
def test_predicted_hops_end_where_they_began(exchange: str, hops: int, overlap: str) -> None:
    """Each begins once and ends once, whatever runs between; of a gather's three collectives the last one counts."""
    program = exchanged(exchange_plan(exchange, dp=4, ep=4, nodes=2), stop_after=None, overlap=overlap)
    body = program.bodies["sparse"]
    numbers, found = Hops(), []
    for node in (node for node in body.graph.nodes if is_op(node)):
        found.append((op_of(node).name, numbers.number(op_of(node).name, operands(node), results_of(node))))
    begun = {hop: name for name, hop in found if name in LEAVES}
    ended = [hop for name, hop in found if name in RETURNS]
    assert len(ended) == len(set(ended)) == hops * (2 if overlap == "2:layer" else 1) and set(ended) <= set(begun)
    assert all(hop is None for name, hop in found if name not in (*LEAVES, *RETURNS))


def test_each_rank_is_a_process_and_the_prediction_another() -> None:
    events = trace([[event("add", 0, 1)], [event("add", 0, 2, "intra")]], [event("add", 0, 3)])["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "predicted"}
    assert [(e["pid"], e["tid"], e["dur"]) for e in events if e["ph"] == "X"] == [(0, 0, 1), (1, 1, 2), (2, 0, 3)]


def test_prediction_repeats_a_body_for_its_layers() -> None:
    phase = {
        "name": "decode",
        "runs": [{"body": "prologue", "layers": None}, {"body": "sparse", "layers": [1, 2]}],
        "timeline": {"prologue": [["embed", "compute", 0, 2, None]], "sparse": [["add", "compute", 0, 3, None]]},
    }
    found = predicted_events({"phases": {"decode": phase}})
    assert [(e.name, e.start, e.end, e.layer) for e in found] == [
        ("embed", 0, 2, None), ("add", 2, 5, 1), ("add", 5, 8, 2),
    ]  # fmt: skip


def test_ranks_record_what_they_run(tmp_path: Path) -> None:
    model = checkpoints.make("mixtral", tmp_path / "weights")
    artifact = compile_checkpoint(tmp_path / "weights", tmp_path, "ep=2")
    prompts = checkpoints.prompts(model.config.vocab_size, (5, 3))

    def main(rank: Rank) -> object:
        session = open_session(artifact, tmp_path / "weights", rank)
        recorder = start_recorder(session.place)
        session.record(recorder)
        generate(session, Request(prompts, 2), session.limits, session.place)
        events = gather_events(recorder, session.place)
        if rank.rank == 0:
            write_trace(tmp_path / "run.json", trace(events))
        return None

    run_ranks(main, 2, threads=1)
    written = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    slices = [e for e in written if e["ph"] == "X"]
    assert {e["pid"] for e in slices} == {0, 1}
    transfers = [e for e in slices if e["name"] == "all_to_all"]
    assert len(transfers) == 2 * 2 * 2 * len(model.model.layers)  # ranks, steps, there and back
    assert {e["tid"] for e in transfers} == {1}
    assert all(e["dur"] >= 0 for e in slices)
    starts, ends = ([e["id"] for e in written if e["ph"] == kind] for kind in "sf")
    assert starts == ends and len(set(starts)) == 2 * 2 * len(model.model.layers)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(MoecError, match="cannot write") as error:
        write_trace(tmp_path / "no" / "run.json", {})
    assert error.value.diagnostics[0].code == "E0618"
    assert not (tmp_path / "no").exists()
