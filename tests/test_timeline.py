"""The timeline of a run: tracks, arrows, prediction, and a file written by real ranks."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from moec.artifact import Artifact, load
from moec.cache_files import find_cache
from moec.cli.timeline import predictions, write_timeline
from moec.compiler import compile
from moec.cost.operations import body_costs
from moec.cost.sizes import sizes_of
from moec.diagnostics import MoecError
from moec.ir.ops.exchange import LEAVES, RETURNS, Hops
from moec.ir.program import is_op, op_of, operands, results_of
from moec.mesh import Mesh
from moec.plan.timeline import predict_step
from moec.runtime.generate import Request, generate
from moec.runtime.launch.job import run_ranks
from moec.runtime.launch.rank import Rank
from moec.runtime.schedule import Limits, first_steps
from moec.runtime.session import open_session
from moec.runtime.timeline import (
    Event,
    gather_events,
    start_recorder,
    trace,
    write_trace,
)
from moec.schedule import makespan
from tests import checkpoints
from tests.cached import compile_cached
from tests.exchange_programs import exchange_plan, exchanged
from tests.parity import compile_checkpoint

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "tiny"
RATES = """cluster desk {
  devices = 4
  memory_rate = 100 GB/s
  compute = peak(bf16 = 1 TFLOP/s)
  intra = link(10 GB/s, latency = 5 us)
}
"""


def event(
    name: str, start: float, end: float, stream: str = "compute", layer: int = 0, hop: int | None = None
) -> Event:
    return Event(name, stream, start, end, "decode", layer, hop)


def slices_by_track(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Slices of each (process, track), in order of time. No two of one track overlap."""
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for slice in sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["ts"], e["dur"])):
        found.setdefault((slice["pid"], slice["tid"]), []).append(slice)
    for track in found.values():
        for before, after in itertools.pairwise(track):
            assert nanoseconds(before["ts"] + before["dur"]) <= nanoseconds(after["ts"]), (before, after)
    return found


def nanoseconds(us: float) -> int:
    return round(us * 1000)


def ends_of_arrows(events: list[dict[str, Any]]) -> list[str]:
    """Names of the slices that the ends of the arrows lie in, on their own tracks."""
    tracks, found = slices_by_track(events), []
    for end in (e for e in events if e["ph"] in "sf"):
        at = nanoseconds(end["ts"])
        (slice,) = (
            s for s in tracks[end["pid"], end["tid"]] if nanoseconds(s["ts"]) <= at < nanoseconds(s["ts"] + s["dur"])
        )
        found.append(slice["name"])
    return found


def names_of_tracks(events: list[dict[str, Any]], pid: int = 0) -> list[str]:
    named = [e for e in events if e["name"] == "thread_name" and e["pid"] == pid]
    assert [e["tid"] for e in named] == list(range(len(named)))
    return [e["args"]["name"] for e in named]


def test_a_stream_has_as_many_tracks_as_are_busy_at_once() -> None:
    """Two chunks on the way at once, one inside the other, one that begins as another ends."""
    spans = [(0, 10), (2, 4), (4, 12), (5.0004, 6), (10, 11), (12, 13)]
    recorded = [event(f"{i}", start, end, "inter") for i, (start, end) in enumerate(spans)] + [
        event("add", 3, 5, "copy")
    ]
    events = trace([sorted(recorded, key=lambda e: e.end)])["traceEvents"]  # transfers are recorded as they end
    names = names_of_tracks(events)
    assert names == ["compute", "intra", "inter", "inter 2", "inter 3", "copy"]
    tracks = {names[tid]: [s["name"] for s in track] for (_, tid), track in slices_by_track(events).items()}
    assert tracks == {"inter": ["0", "4", "5"], "inter 2": ["1", "2"], "inter 3": ["3"], "copy": ["add"]}


def test_neighbours_do_not_overlap_when_they_are_rounded() -> None:
    times = [0.0, 0.0014, 0.0028, 0.0042, 0.0056]
    events = trace([[event("add", start, end) for start, end in itertools.pairwise(times)]])["traceEvents"]
    (track,) = slices_by_track(events).values()
    assert len(track) == 4


def test_arrows_are_bound_to_the_track_of_their_operation() -> None:
    hops = [event("other", 0, 4, "intra"), event("all_gather_rows", 0, 5, "intra", hop=0)]
    hops += [event("other", 5, 10, "intra"), event("another", 5, 7, "intra")]
    hops += [event("reduce_scatter_rows", 6, 8, "intra", hop=0)]
    events = trace([hops])["traceEvents"]
    assert [(e["tid"], e["ph"]) for e in events if e["ph"] in "sf"] == [(2, "s"), (3, "f")]
    assert ends_of_arrows(events) == ["all_gather_rows", "reduce_scatter_rows"]


@pytest.mark.parametrize("home", [(1, 0), (0, 1)], ids=["two hops nest", "two chunks follow each other"])
def test_arrows_lead_from_what_began_a_hop_to_what_ends_it(home: tuple[int, int]) -> None:
    hops = [event("fan_out", 0, 1, hop=0), event("fan_out", 2, 3, hop=1), event("add", 4, 5)]
    hops += [event("fan_in", 6, 7, hop=home[0]), event("fan_in", 8, 9, hop=home[1])]
    arrows = [e for e in trace([hops])["traceEvents"] if e["ph"] in "sf"]
    left = {0: 0.999, 1: 2.999}  # what ends a slice lies in it no more
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


def test_each_rank_is_a_process_and_each_prediction_another() -> None:
    predicted = {"predicted: a": [event("add", 0, 3)], "predicted: b": [event("add", 0, 4)]}
    events = trace([[event("add", 0, 1)], [event("add", 0, 2, "intra")]], predicted)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "predicted: a", 3: "predicted: b"}
    found = [(e["pid"], e["tid"], e["dur"]) for e in events if e["ph"] == "X"]
    assert found == [(0, 0, 1), (1, 1, 2), (2, 0, 3), (3, 0, 4)]


def tiny(folder: Path, num_stages: int, *overrides: str, rates: str = RATES) -> Artifact:
    """The example on a cluster with rates, saved and read back."""
    stages = f"  stages = pp({num_stages})\n" if num_stages > 1 else ""
    text = (EXAMPLE / "tiny.moe").read_text().replace("mesh ranks {\n", f"{rates}mesh ranks on desk[1] {{\n{stages}")
    text = text.replace("devices = 4", f"devices = {2 * num_stages}")
    (folder / "tiny.moe").write_text(text.replace('  weights = huggingface(".")\n', ""))
    compile(folder / "tiny.moe", overrides=overrides).save(folder / "made")
    return load(folder / "made")


@pytest.mark.parametrize(
    ("num_stages", "max_new_tokens", "names"),
    [
        (1, 2, ["predicted: prefill of 8 tokens, decode of 2 tokens a dp rank"]),
        (1, 1, ["predicted: prefill of 8 tokens a dp rank"]),
        (2, 2, [f"predicted stage {i}: prefill of 8 tokens, decode of 1 token a dp rank" for i in (0, 1)]),
    ],
)
def test_the_runs_first_steps_are_predicted_for_each_stage(
    num_stages: int, max_new_tokens: int, names: list[str], tmp_path: Path
) -> None:
    """Two of three prompts, of 5 and 3 tokens, are the first dp rank's."""
    artifact = tiny(tmp_path, num_stages)
    found = predictions(artifact, Request([[1] * 5, [1] * 3, [1] * 4], max_new_tokens))
    assert list(found) == names
    phases = ["prefill", "decode"][: 1 + (max_new_tokens > 1)]
    for events, programs in zip(found.values(), artifact.stages, strict=True):
        assert list(dict.fromkeys(e.phase for e in events)) == phases
        layers = sorted({layer for run in programs[0].runs for layer in run.layers})
        for phase in phases:
            assert sorted({e.layer for e in events if e.phase == phase and e.layer is not None}) == layers
        first = [e for e in events if e.phase == "prefill"]
        assert [e.start for e in events if e.phase == "decode"][:1] in ([], [max(e.end for e in first)])
    layers = [e.layer for events in found.values() for e in events if e.layer is not None and e.phase == "prefill"]
    assert layers == sorted(layers) and set(layers) == set(range(5))


def test_a_prediction_is_of_its_number_of_tokens(tmp_path: Path) -> None:
    program = tiny(tmp_path, 1).prefill

    def rates(tokens: int) -> float:
        """Bytes of the layers' all-to-alls are in proportion to the tokens, their latency is not."""
        return sum(op.end - op.start for op in predict_step(program, tokens) if op.name == "all_to_all.start")

    few, more, most = rates(8), rates(16), rates(24)
    assert 0 < few < more < most
    assert most - more == pytest.approx(more - few, rel=1e-3)
    costs = {body.name: list(body_costs(sizes_of(program, body))) for body in program.bodies.values()}
    times = {cost.node: cost.us or 0.0 for found in costs.values() for cost in found}
    whole = sum(makespan(program.bodies[run.body], times.__getitem__) * (len(run.layers) or 1) for run in program.runs)
    assert max(op.end for op in predict_step(program, program.tokens)) == pytest.approx(whole)


def test_a_padded_exchange_is_predicted_at_its_fixed_size(tmp_path: Path) -> None:
    program = tiny(tmp_path, 1, "plan.decode.exchange=padded").decode
    steps = [predict_step(program, tokens) for tokens in (1, program.tokens)]
    few, most = (sum(op.end - op.start for op in step if op.name == "all_to_all.start") for step in steps)
    assert 0 < few == pytest.approx(most)
    assert max(op.end for op in steps[0]) < max(op.end for op in steps[1])


def test_missing_rates_are_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    artifact = tiny(tmp_path, 1, rates="cluster desk { devices = 2 }\n")
    write_timeline(tmp_path / "run.json", [[event("add", 0, 1)]], artifact, Request([[1]], 1))
    assert capsys.readouterr().err == (
        "moec: note: the timeline has no prediction: cluster `desk` gives no rate for compute, intra, memory;"
        " `moec calibrate` measures rates\n"
    )
    written = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in written if e["name"] == "process_name"] == ["rank 0"]


@pytest.mark.parametrize(("prompts", "max_new_tokens", "pp", "wanted"), [
    ([100, 1], 5, 1, {"prefill": 64, "decode": 1}),  # cut into steps
    ([3] * 9, 5, 1, {"prefill": 12, "decode": 4}),  # more than the slots take at once
    ([3] * 9, 5, 2, {"prefill": 12, "decode": 2}),
    ([3], 5, 2, {"prefill": 3, "decode": 1}),
    ([3], 0, 1, {"prefill": 3}),
])  # fmt: skip
def test_first_steps(prompts: list[int], max_new_tokens: int, pp: int, wanted: dict[str, int]) -> None:
    limits = Limits(context=128, prefill_tokens=64, slots=4, vocab=10)
    assert first_steps(prompts, max_new_tokens, Mesh(dp=2, pp=pp), limits) == wanted


@pytest.mark.parametrize("overlap", ["off", "2"])
def test_ranks_record_what_they_run(overlap: str, tmp_path: Path) -> None:
    model = checkpoints.make("mixtral", tmp_path / "weights")
    overlaps = f"plan.prefill.overlap={overlap}", f"plan.decode.overlap={overlap}"
    artifact = compile_checkpoint(tmp_path / "weights", tmp_path, "ep=2", "flat", "torch", *overlaps)
    num_chunks = 1 if overlap == "off" else 2
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
    assert len(transfers) == 2 * 2 * 2 * num_chunks * len(model.model.layers)  # ranks, steps, there and back
    for pid in (0, 1):
        names = names_of_tracks(written, pid)
        assert {names[e["tid"]].split()[0] for e in transfers if e["pid"] == pid} == {"intra"}
        assert names == ["compute", "intra", *["intra 2"] * (num_chunks - 1), "inter", "copy"]
    slices_by_track(written)
    assert all(e["dur"] >= 0 for e in slices)
    assert ends_of_arrows(written) == ["fan_out", "combine"] * (2 * 2 * num_chunks * len(model.model.layers))
    starts, ends = ([e["id"] for e in written if e["ph"] == kind] for kind in "sf")
    assert starts == ends and len(set(starts)) == 2 * 2 * num_chunks * len(model.model.layers)


@pytest.mark.parametrize("is_emulated", [False, True], ids=["as fast as it goes", "at the pace of a tier"])
def test_copies_of_cached_experts_are_on_their_track(is_emulated: bool, tmp_path: Path) -> None:
    """One for each that was fetched, whose layer's compute that needed it ends behind it."""
    model = checkpoints.make("deepseek_v3", tmp_path / "weights")
    steps = "plan.decode.batch=1", "plan.prefill.tokens=3"  # larger ones need every expert: nothing to guess
    host = "tier(1 GiB per rank, bandwidth = 1 GB/s, latency = 20 us)"
    cache = {"hbm": "slots(4)", "host": host, "prefetch": "next_router(ahead = 1)"}
    artifact = compile_cached(tmp_path / "weights", tmp_path, None, *steps, **cache)
    prompts = checkpoints.prompts(model.config.vocab_size, (5, 3))

    def main(rank: Rank) -> object:
        files = replace(find_cache(artifact.document, [tmp_path]), is_emulated=is_emulated)
        session = open_session(artifact, tmp_path / "weights", rank, settings=files)
        assert session.cache is not None
        before = [asdict(layer) for layer in session.cache.residency.counters]
        recorder = start_recorder(session.place, session.cache)
        session.record(recorder)
        generate(session, Request(prompts, 3), session.limits, session.place)
        write_trace(tmp_path / "run.json", trace(gather_events(recorder, session.place)))
        session.close()
        return before, [asdict(layer) for layer in session.cache.residency.counters]

    before, after = run_ranks(main, 1, threads=1)[0]  # type: ignore[misc]
    written = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    slices_by_track(written)
    names = names_of_tracks(written)
    slices = [e for e in written if e["ph"] == "X"]
    copies = [e for e in slices if names[e["tid"]].split()[0] == "copy"]
    count = {by: sum(e["args"]["by"] == by for e in copies) for by in ("demand", "prefetch")}
    total = {name: sum(b[name] - a[name] for a, b in zip(before, after, strict=True)) for name in after[0]}
    assert count["demand"] == total["misses"] > 0
    assert 0 < count["prefetch"] <= total["prefetches"]
    assert {e["name"] for e in copies} <= {f"expert {i}" for i in range(model.config.n_routed_experts)}
    for copy in (e for e in copies if e["args"]["by"] == "demand"):
        layer = [e for e in slices if e["args"]["layer"] == copy["args"]["layer"] and e["cat"] == copy["cat"]]
        asked = [e["ts"] for e in layer if e["name"] == "prefetch_wait" and e["ts"] <= copy["ts"]]
        served = [e["ts"] + e["dur"] for e in layer if e["name"] == "cached_experts"]
        assert asked and any(copy["ts"] + copy["dur"] <= end for end in served if end >= max(asked))
    if is_emulated:
        assert min(e["dur"] for e in copies) >= 20


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(MoecError, match="cannot write") as error:
        write_trace(tmp_path / "no" / "run.json", {})
    assert error.value.diagnostics[0].code == "E0618"
    assert not (tmp_path / "no").exists()
