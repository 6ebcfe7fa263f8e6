"""The cheapest exchange is chosen, and said why."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moec.checked import Plan
from moec.compiler import compile, compile_phase
from moec.cost.exchange import CANDIDATES, MOST_TOKENS, OPERATIONS, TIE, Comparison
from moec.cost.operations import node_costs, of_operation
from moec.diagnostics import CompileError, SourceFile
from moec.explain.exchange import exchange_lines
from moec.explain.page import explain_plan
from moec.ir.program import Program
from moec.passes import PASSES
from moec.passes.choose_exchange import ChooseExchange
from moec.passes.runner import run_passes
from moec.plan.exchange import table
from moec.semantics.checker import check
from moec.topology import Cluster, Device, Link
from tests.conftest import ROOT
from tests.programs import few, moe, plan, program_of

GOLDEN = ROOT / "tests" / "golden" / "explain"
DGX = Cluster(
    "dgx", 4, 8, Device(None, 3350.0, (("fp32", 60.0),)), Link(450.0, 2.0, 2), Link(50.0, 5.0, 4)
)  # as specs/clusters/dgx_h100.moe
PAIR = replace(DGX, num_nodes=1, devices_per_node=2)


def on(cluster: Cluster, exchange: str = "auto", combine: str = "auto", tokens: int = 4096, **layout: Any) -> Plan:
    """Two layers of 64 experts of which 8 are chosen, one expert group over all devices unless `layout` says else."""
    num_experts, top = layout.pop("experts", 64), layout.pop("top", 8)
    size = cluster.num_devices
    chosen = plan([moe(num_experts, top=top)] * 2, hidden=1024, **(layout or {"dp": size, "ep": size}))
    phases = {
        name: replace(getattr(chosen, name), tokens=rows, exchange=exchange, combine=combine)
        for name, rows in (("prefill", tokens), ("decode", 16))
    }
    return replace(chosen, mesh=replace(chosen.mesh, cluster=cluster), **phases)


def lowered(chosen: Plan, phase: str, stop_after: str | None = None) -> Program:
    program = program_of(chosen, phase)
    run_passes(program, [cls() for cls in PASSES], stop_after=stop_after)
    return program


def comparison(chosen: Plan, phase: str = "prefill") -> Comparison:
    program = lowered(
        replace(chosen, **{phase: replace(getattr(chosen, phase), exchange="flat")}), phase, "shard-experts"
    )
    return ChooseExchange().compare(replace(program, exchange="auto", combine="auto"))


# --- the choice ----------------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "4 nodes": {"cluster": DGX},
    "one node": {"cluster": replace(DGX, num_nodes=1)},
    "2 ranks": {"cluster": PAIR},
    "2 ranks on 2 nodes": {"cluster": replace(DGX, num_nodes=2, devices_per_node=1)},
    "tp beside ep": {"cluster": replace(DGX, num_nodes=2), "dp": 4, "tp": 4, "ep": 16},
    "uneven experts": {"cluster": replace(DGX, num_nodes=3, devices_per_node=2), "dp": 6, "ep": 6, "experts": 13},
    "slow network": {"cluster": replace(DGX, inter=Link(0.05, 200.0))},
    "parts of nodes": {"cluster": replace(DGX, num_nodes=2, devices_per_node=3), "dp": 6, "edp": 3, "ep": 2},
}


def exchange_time(program: Program) -> float:
    """Microseconds of the exchange of one sparse layer, added up here."""
    found = [c.us for body, c in node_costs(program) if body == "sparse" and of_operation(c) in OPERATIONS]
    assert found and None not in found
    return sum(us for us in found if us is not None)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("case", CASES)
def test_auto_is_the_program_of_the_cheapest_exchange_written_out(case: str, phase: str) -> None:
    chosen = lowered(on(**CASES[case]), phase)
    mesh = chosen.mesh
    possible = [c for c in CANDIDATES if not (c[0] in ("two_hop", "aggregate") and mesh.nodes == 0)]
    if phase == "prefill":
        possible.remove(("padded", "reduced"))
    written = {c: lowered(on(exchange=c[0], combine=c[1], **CASES[case]), phase) for c in possible}
    times = {c: exchange_time(program) for c, program in written.items()}
    best = next(c for c, us in times.items() if us <= min(times.values()) * (1 + TIE))
    assert (chosen.exchange, chosen.combine) == best
    assert chosen == written[best]


def test_estimates_are_the_times_of_the_programs() -> None:
    found = comparison(on(DGX))
    for exchange, combine in CANDIDATES:
        program = lowered(on(DGX, exchange, combine), "prefill")
        assert found.estimate((exchange, combine)).us == pytest.approx(exchange_time(program))


def test_two_hops_beat_one_where_many_rows_go_to_few_nodes() -> None:
    """8 of 64 experts on 4 nodes: 3.7 nodes a token against 7.3 ranks, so half the bytes cross."""
    found = comparison(on(DGX))
    flat, two_hop = found.estimate(("flat", "reduced")), found.estimate(("two_hop", "reduced"))
    assert flat.us is not None and two_hop.us is not None and two_hop.us < 0.7 * flat.us
    assert two_hop.bytes[2] < 0.55 * flat.bytes[2] and two_hop.bytes[1] > 3 * flat.bytes[1]
    assert found.cheapest(CANDIDATES) == ("two_hop", "reduced")


def test_aggregate_wins_where_messages_are_dear_and_rows_go_to_one_place() -> None:
    """One expert a token: nothing to share, so few large messages are all there is to gain."""
    slow = replace(DGX, inter=Link(50.0, 100.0))
    found = comparison(on(slow, top=1, experts=32), "decode")
    times = {c[0]: found.estimate(c).us or 0.0 for c in CANDIDATES}
    assert max(times["aggregate"], times["two_hop"]) < 0.5 * times["flat"]


def test_gather_wins_where_every_token_goes_everywhere_and_packing_is_slow() -> None:
    """2 ranks whose memory is no faster than their link: nothing is saved by sorting rows first."""
    slow = replace(PAIR, device=Device(None, 20.0), intra=Link(20.0, 1.0))
    assert comparison(on(slow, top=8, experts=8)).cheapest(CANDIDATES) == ("gather", "reduced")
    assert comparison(on(slow, top=1, experts=8)).cheapest(CANDIDATES)[0] == "flat"


def test_padded_saves_the_counts_of_small_steps_in_decode_only() -> None:
    """Two rounds of messages instead of three, while rows are few."""
    assert comparison(on(PAIR), "decode").cheapest(CANDIDATES) == ("padded", "reduced")
    prefill = comparison(on(PAIR))
    assert not prefill.estimate(("padded", "reduced")).is_eligible
    assert prefill.cheapest(CANDIDATES, tokens=16)[0] != "padded"


@pytest.mark.parametrize("candidate", CANDIDATES)
def test_more_tokens_never_take_less_time(candidate: tuple[str, str]) -> None:
    found = comparison(on(DGX), "decode")
    times = [found.estimate(candidate, tokens).us or 0.0 for tokens in (1, 2, 3, 10, 11, 100, 1000, 65536)]
    assert times == sorted(times) and times[0] > 0


def test_ranges_change_exactly_where_the_cheapest_does() -> None:
    found = comparison(on(PAIR), "decode")
    ranges = found.ranges(CANDIDATES)
    assert len(ranges) > 1 and ranges[0][0] == 1 and ranges[-1][1] == MOST_TOKENS
    for (first, last, candidate), (after, _, other) in itertools.pairwise(ranges):
        assert after == last + 1 and candidate != other
        assert found.cheapest(CANDIDATES, first) == found.cheapest(CANDIDATES, last) == candidate
        assert found.cheapest(CANDIDATES, after) == other


def test_a_plan_that_names_its_exchange_leaves_how_rows_come_back() -> None:
    """`exchange = flat  combine = auto`: with 4 experts a rank two of a token's may share a row home."""
    shared = on(PAIR, "flat", "auto", experts=64)
    assert lowered(shared, "prefill").combine == "reduced"
    one_each = on(PAIR, "flat", "auto", experts=2, top=2)
    assert lowered(one_each, "prefill").combine == "ordered"  # the same bytes: the simpler


def test_capacity_stays_only_with_a_padded_exchange() -> None:
    padded, other = on(PAIR), on(DGX)
    kept, dropped = (
        lowered(replace(p, decode=replace(p.decode, capacity=2.0, drop=True)), "decode") for p in (padded, other)
    )
    assert (kept.exchange, kept.capacity, kept.drop) == ("padded", 2.0, True)
    assert (dropped.exchange, dropped.capacity, dropped.drop) == ("two_hop", None, False)


def explained(chosen: Plan, phase: str = "prefill") -> str:
    """What `moec explain` says of the exchange."""
    program, found = lowered(chosen, phase, "choose-exchange"), comparison(chosen, phase)
    return "\n".join(exchange_lines(table(found, getattr(chosen, phase), (program.exchange, program.combine))))


def test_without_links_rates_the_fewest_bytes_between_nodes_are_taken() -> None:
    text = explained(on(replace(DGX, inter=None)))
    assert "auto chose two_hop: the cluster does not give the rate of its links between nodes, so times are not" in text
    assert "it moves the fewest bytes between nodes" in text
    assert "two_hop moves the fewest bytes between nodes for any number of tokens from 1 to 65536" in text
    assert "cheapest" not in text


def test_without_any_rate_sums_come_home_where_a_rank_has_several_of_a_tokens_experts() -> None:
    unknown = replace(PAIR, intra=None)
    text = explained(on(unknown, top=2))
    assert "auto chose flat reduced: " in text and "it moves the fewest bytes inside nodes" in text
    asked = explained(on(unknown, "flat", "ordered"))
    assert "the plan asks for flat ordered: " in asked and "it moves" not in asked


def test_of_as_many_bytes_the_simpler_is_taken() -> None:
    text = explained(on(replace(PAIR, intra=None), experts=2, top=2))
    assert "auto chose flat ordered: " in text
    assert "flat reduced moves as good as the same bytes inside nodes, and the simpler goes first" in text


# --- what fits -----------------------------------------------------------------------------------------------------


def with_memory(chosen: Plan, limit: int | None) -> Plan:
    """The plan on devices of so many bytes."""
    cluster = chosen.mesh.cluster
    device = replace(cluster.device, memory_bytes=limit)
    return replace(chosen, mesh=replace(chosen.mesh, cluster=replace(cluster, device=device)))


def needs(chosen: Plan) -> dict[str, int]:
    """Bytes on the fullest rank once prefill is compiled, by exchange."""
    written = {c: replace(chosen, prefill=replace(chosen.prefill, exchange=c[0], combine=c[1])) for c in CANDIDATES}
    return {" ".join(c): max(m.total for m in lowered(w, "prefill").memory) for c, w in written.items()}


def test_counts_the_memory_that_the_compiled_plan_takes() -> None:
    large = with_memory(on(DGX), 1 << 50)
    found = comparison(large)
    assert {" ".join(c): found.estimate(c).memory for c in CANDIDATES} == needs(large)


def test_what_does_not_fit_is_not_chosen() -> None:
    need = needs(on(DGX))
    tight = with_memory(on(DGX), need["two_hop reduced"] - 1)
    program = lowered(tight, "prefill")
    assert need[f"{program.exchange} {program.combine}"] < need["two_hop reduced"]
    gib = 2**30
    note = f"does not fit: {need['two_hop reduced'] / gib:.1f} GiB of {(need['two_hop reduced'] - 1) / gib:.1f}"
    (row,) = (line for line in explained(tight).splitlines() if line.startswith("    two_hop"))
    assert row.endswith(note)
    assert "none fits" in explained(tight)  # of steps with many times the tokens
    assert lowered(with_memory(on(DGX), need["two_hop reduced"]), "prefill").exchange == "two_hop"


def test_where_nothing_fits_the_smallest_is_said_not_to() -> None:
    need = needs(on(DGX))
    tight = with_memory(on(DGX), min(need.values()) - 1)
    smallest = min(CANDIDATES, key=lambda c: need[" ".join(c)])
    program = lowered(tight, "prefill", "choose-exchange")
    assert (program.exchange, program.combine) == smallest and program.fitting == ()
    with pytest.raises(CompileError, match=r"prefill needs 3\.2 GiB on rank 0, a device of dgx has 3\.2 GiB"):
        lowered(tight, "prefill")


def test_a_plan_too_large_is_told_what_fits() -> None:
    need = needs(on(DGX))
    tight = with_memory(on(DGX, "two_hop", "reduced"), need["two_hop reduced"] - 1)
    with pytest.raises(CompileError) as caught:
        lowered(tight, "prefill")
    help = caught.value.diagnostics[0].help
    assert help.startswith("use `exchange = flat`") and "a smaller `prefill { tokens }`, more devices" in help
    assert "two_hop" not in help
    weights = lowered(on(DGX), "prefill").memory[0].weights
    with pytest.raises(CompileError) as caught:
        lowered(with_memory(tight, weights), "prefill")  # no step is small enough
    help = caught.value.diagnostics[0].help
    assert help.startswith("use more devices") and "exchange" not in help and "tokens" not in help


def test_slots_of_a_cache_are_counted_not_all_experts() -> None:
    """64 experts on 2 devices: 2 of the 32 on each are in slots."""
    cached = replace(on(PAIR), cache=few(2))
    sizes = {" ".join(c): comparison(with_memory(cached, 1 << 50)).estimate(c).memory or 0 for c in CANDIDATES}
    whole = comparison(with_memory(on(PAIR), 1 << 50)).estimate(("flat", "reduced")).memory or 0
    assert sizes["flat reduced"] < whole
    tight = with_memory(cached, sizes["flat reduced"])
    assert lowered(tight, "prefill").memory[0].total <= sizes["flat reduced"]


def test_deepseek_v3_on_8_nodes_has_room_for_two_hops() -> None:
    """Half-way a rank has rows of the ranks that the first hop comes from, not of the whole group."""
    text = """
use model deepseek_v3
use cluster dgx_h200
mesh pod on dgx_h200[8] { attention = dp(8) * tp(8)  experts = ep(64) }
plan serve {
  run deepseek_v3 on pod
  context = 8192
  prefill { tokens = 16384  exchange = auto }
  decode  { batch = 64 }
}
"""
    program = compile_phase(check(SourceFile("pod.moe", text)).plan(), "prefill", "pod.moe")
    assert program.exchange == "two_hop" and program.memory[0].buffers < 36 * 2**30


def test_nothing_to_exchange_is_settled_too() -> None:
    program = lowered(on(replace(PAIR, devices_per_node=1), dp=1), "decode")
    assert (program.exchange, program.combine) == ("flat", "ordered")


# --- what is printed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", ["off", "2"])
def test_a_layers_time_is_that_of_its_schedule(overlap: str, tmp_path: Path) -> None:
    """As the lines of overlap have it, where the transfers that pass under others count once."""
    source = tmp_path / "pod.moe"
    text = SOURCES["deepseek_v3_overlapped_on_4_nodes"].replace("overlap = auto", f"overlap = {overlap}")
    source.write_text(text)
    artifact = compile(source)
    phase = artifact.document["phases"]["prefill"]
    summed = sum(cost.us or 0.0 for body, cost in node_costs(artifact.prefill) if body == "sparse")
    if overlap == "off":
        assert phase["us"]["sparse"] == pytest.approx(summed)
    else:
        assert phase["us"]["sparse"] < 0.95 * summed
        by_chunks = phase["exchanges"]["overlap"]["by_chunks"]
        assert 58 * phase["us"]["sparse"] == pytest.approx(by_chunks[phase["overlap"]], rel=1e-5)


def test_nothing_to_overlap_is_said(tmp_path: Path) -> None:
    source = tmp_path / "alone.moe"
    source.write_text((ROOT / "examples" / "toy.moe").read_text())
    alone = ["mesh.attention=dp(1)", "mesh.experts=ep(1)", "plan.prefill.overlap=auto"]
    text = explain_plan(json.loads(json.dumps(compile(source, overrides=alone).document)))
    assert text.count("overlap off: nothing is exchanged") == 1


SOURCES = {
    "deepseek_v3_on_4_nodes": """\
use model deepseek_v3
use cluster dgx_h100
mesh pod on dgx_h100[4] { attention = dp(4) * tp(8)  experts = ep(32) }
plan serve {
  run deepseek_v3 on pod
  prefill { tokens = 4096  exchange = auto }
  decode { batch = 64  exchange = auto }
}
""",
    "deepseek_v3_overlapped_on_4_nodes": """\
use model deepseek_v3
use cluster hgx_h800
mesh pod on hgx_h800[4] { attention = dp(4) * tp(8)  experts = ep(32) }
plan serve {
  run deepseek_v3 on pod
  prefill { tokens = 4096  exchange = auto  overlap = auto }
  decode { batch = 64  exchange = auto  overlap = auto }
}
""",
    "mixtral_on_1_node": """\
use model mixtral_8x7b
use cluster dgx_h100
mesh node on dgx_h100 { attention = dp(4) * tp(2)  experts = ep(8) }
plan serve {
  run mixtral_8x7b on node
  prefill { tokens = 8192  exchange = auto }
  decode { batch = 64  exchange = gather }
}
""",
}


@pytest.mark.parametrize(
    ("phase", "nodes", "batch", "overlap"),
    [("decode", 16, 256, "2:layer"), ("decode", 16, 128, "2"), ("decode", 16, 32, "1"), ("prefill", 4, 64, "2:layer")],
)
def test_micro_batches_of_deepseek_v3(phase: str, nodes: int, batch: int, overlap: str) -> None:
    """Attention of one under the exchange of the other pays once a step is more than the reading of its weights."""
    ranks = 8 * nodes
    text = f"""
use model deepseek_v3
use cluster hgx_h800
mesh pod on hgx_h800[{nodes}] {{ attention = dp({ranks})  experts = ep({ranks}) }}
plan serve {{
  run deepseek_v3 on pod
  prefill {{ tokens = 4096  exchange = auto  overlap = auto }}
  decode {{ batch = {batch}  exchange = two_hop  overlap = auto }}
}}
"""
    chosen = with_memory(check(SourceFile("pod.moe", text)).plan(), None)  # not the question here
    assert compile_phase(chosen, phase, "pod.moe", stop_after="plan-overlap").overlap == overlap


def test_chunks_that_do_not_fit_are_not_chosen() -> None:
    """Chunks of a layer copy its rows; those of its experts alone are next."""
    text = SOURCES["deepseek_v3_overlapped_on_4_nodes"]
    free = with_memory(check(SourceFile("pod.moe", text)).plan(), None)
    program = compile_phase(free, "prefill", "pod.moe")
    assert program.overlap == "2:layer"
    tight = with_memory(free, program.memory[0].total - 1)
    other = compile_phase(tight, "prefill", "pod.moe")
    assert other.overlap == "2" and other.memory[0].total < program.memory[0].total


@pytest.mark.parametrize("name", SOURCES)
def test_explained_plans(name: str, tmp_path: Path, golden: Callable[[Path, str], None]) -> None:
    source = tmp_path / f"{name}.moe"
    source.write_text(SOURCES[name])
    golden(GOLDEN / f"{name}.txt", explain_plan(json.loads(json.dumps(compile(source).document))))


# --- against published figures -------------------------------------------------------------------------------------


def test_published_exchanges_are_predicted(shared: Path) -> None:
    """Within 25% in the median, every row within 40%."""
    command = [sys.executable, "benchmarks/published_all_to_all.py"]
    env = os.environ | {"MOEC_SHARED": str(shared.resolve())}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if " us " in line and "%" in line and "EP" in line]
    errors = [float(word.rstrip("%")) for row in rows for word in row if word[0] in "+-" and word.endswith("%")]
    assert len(errors) == 30 and max(map(abs, errors)) < 40
