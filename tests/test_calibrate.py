"""Calibration: constants are found again in synthetic times, noise and outliers included; what is written is taken."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from moec.calibrate_fit import Measured, Sample, calibrated, declaration, fit_link, from_rows
from moec.cli.calibrate import _name
from moec.diagnostics import SourceFile
from moec.runtime import calibrate
from moec.runtime.launch.job import run_ranks
from moec.semantics.checker import check
from moec.topology import Cluster, Device, Link
from tests.commands import moec

LINKS = [
    Link(0.0125, 100.0),
    Link(0.0125, 800.0, concurrency=2),
    Link(2.0, 30.0),
    Link(50.0, 5.0, concurrency=4),
    Link(450.0, 2.0, concurrency=3),
]


def times(link: Link, counts: tuple[int, ...] = (1, 7), sizes: tuple[int, ...] = calibrate.SIZES) -> list[Sample]:
    return [Sample(count, size, link.time_us(size, count)) for count in counts for size in sizes]


@pytest.mark.parametrize("link", LINKS, ids=str)
def test_a_link_is_found_again(link: Link) -> None:
    found = fit_link(times(link))
    assert found is not None
    assert found.gbps == pytest.approx(link.gbps, rel=1e-3)
    assert found.latency_us == pytest.approx(link.latency_us, rel=1e-3)
    # Of seven messages only the number of rounds shows.
    assert -(-7 // found.concurrency) == -(-7 // link.concurrency)


@pytest.mark.parametrize("link", LINKS[:3], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_noise_and_outliers_do_not_decide(link: Link, seed: int) -> None:
    """Every time is up to 10% too long; one in six, of any size, takes four times as long."""
    draw = random.Random(seed)
    samples = [Sample(s.messages, s.num_bytes, s.us * draw.uniform(1.0, 1.1)) for s in times(link, (1, 2, 3))]
    for i in draw.sample(range(len(samples)), 3):
        samples[i] = Sample(samples[i].messages, samples[i].num_bytes, 4 * samples[i].us)
    found = fit_link(samples)
    assert found is not None
    assert found.gbps == pytest.approx(link.gbps, rel=0.25)
    for count in (1, 2, 3):
        for size in (64, 4 << 20):
            assert found.time_us(size, count) == pytest.approx(link.time_us(size, count), rel=0.35)


def test_without_samples_there_is_no_link_and_the_declared_one_stays() -> None:
    assert fit_link([]) is None
    cluster = Cluster("box", 1, 2, Device(80 * 10**9), Link(450.0, 2.0), None, Link(64.0), Link(7.0))
    measured = Measured((), (), 2000.0, (("bf16", 700.0),))
    found = calibrated(cluster, measured)
    assert (found.intra, found.host, found.nvme) == (cluster.intra, cluster.host, cluster.nvme)
    assert found.device == Device(80 * 10**9, 2000.0, (("bf16", 700.0),))


def test_rates_of_rows() -> None:
    rows = [["intra", 1, 64, 30.0], ["copy", 0, 2**26, 6400.0], ["fp32", 0, 1e9, 1e4], ["inter", 2, 4096, 90.0]]
    measured = from_rows(rows)
    assert (measured.intra, measured.inter) == ((Sample(1, 64, 30.0),), (Sample(2, 4096, 90.0),))
    assert measured.copied_gbps == pytest.approx(10.48576)
    assert measured.tflops == (("fp32", pytest.approx(0.1)),)


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster(
            "box", 2, 4, Device(80 * 10**9, 1.25, (("bf16", 0.123), ("fp32", 1e-7))), Link(2.0, 33.0), Link(0.0123)
        ),
        Cluster("box", 2, 1, Device(), None, Link(1234.5, 0.001, concurrency=5), Link(64.0), Link(7.0, 80.0)),
    ],
)
def test_what_is_written_is_taken_and_says_the_same(cluster: Cluster) -> None:
    """Three digits of every rate, in the layout of `moec fmt`."""
    model = (
        "model m { hidden = 8 vocab = 8 norm = rms(eps = 1e-6) attention a = gqa(heads = 2) layers 0 { a swiglu(8) } }"
    )
    mesh = f"mesh r on box[{cluster.num_nodes}] {{ attention = dp({cluster.num_devices}) }}"
    text = declaration(cluster, ["A note."])
    found = check(SourceFile("m.moe", "\n".join([text, model, mesh]))).plan().mesh.cluster
    assert found.num_devices == cluster.num_devices
    for name in ("intra", "inter", "host", "nvme"):
        wanted, link = getattr(cluster, name), getattr(found, name)
        assert (link is None) == (wanted is None)
        if wanted is not None:
            assert (link.gbps, link.latency_us) == pytest.approx((wanted.gbps, wanted.latency_us), rel=5e-3)
            assert link.concurrency == wanted.concurrency
    assert found.device.memory_bytes == cluster.device.memory_bytes
    assert dict(found.device.tflops) == pytest.approx(dict(cluster.device.tflops), rel=5e-3)
    if cluster.device.memory_gbps is not None:
        assert found.device.memory_gbps == pytest.approx(cluster.device.memory_gbps, rel=5e-3)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quick, and enough to fit a line: nothing here looks at what is found."""
    monkeypatch.setattr(calibrate, "SIZES", (64, 1 << 17))
    monkeypatch.setattr(calibrate, "_COPY_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(calibrate, "_PRODUCT_WIDTH", {"cpu": 32})


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("nodes", "local", "wanted"), [(1, 1, {}), (2, 1, {"inter": {1}}), (1, 3, {"intra": {1, 2}})])
def test_a_cluster_is_measured_as_far_as_it_has_links(nodes: int, local: int, wanted: dict[str, set[int]]) -> None:
    """And what is printed of it is the same on every rank. `wanted`: numbers of messages by class."""
    found = run_ranks(lambda rank: calibrate.measure(rank, nodes, local, rounds=1), nodes * local, threads=1)
    assert all(rows == found[0] for rows in found)
    assert isinstance(found[0], list)
    assert {row[0] for row in found[0]} == wanted.keys() | {"copy", "bf16", "fp16", "fp32"}
    assert all(row[3] > 0 for row in found[0])
    for name, counts in wanted.items():
        assert {row[1] for row in found[0] if row[0] == name} == counts


@pytest.mark.usefixtures("small")
def test_every_pattern_of_two_nodes_of_two_ranks() -> None:
    found = run_ranks(lambda rank: calibrate.measure(rank, 2, 2, rounds=1), 4, threads=1)[0]
    assert isinstance(found, list)
    counts = {name: {row[1] for row in found if row[0] == name} for name in ("intra", "inter")}
    assert counts == {"intra": {1}, "inter": {1, 2}}
    assert {row[2] for row in found if row[0] == "inter"} == set(calibrate.SIZES)


LAYER = """
model m {
  hidden = 8  vocab = 8  norm = rms(eps = 1e-6)
  attention a = gqa(heads = 2)
  router r { score = softmax  top = 2 }
  experts e = 4 * swiglu(8)
  layers 0 { a  moe(r, e) }
}
"""
PAIR = "cluster pair { devices = 2  memory = 1 GB }\n"
MESH = "mesh ranks on {name} {{ experts = ep(2) }}\nplan p {{ run m on ranks  prefill {{ exchange = auto }} }}\n"


@pytest.mark.usefixtures("small")
def test_the_command_writes_a_cluster_that_a_plan_uses(tmp_path: Path) -> None:
    (tmp_path / "m.moe").write_text(PAIR + LAYER + MESH.format(name="pair"))
    done = moec("calibrate", tmp_path / "m.moe", "-o", tmp_path / "here.moe", "--rounds", "1").wait()
    assert (done.code, done.out, done.err) == (0, "", "")
    text = (tmp_path / "here.moe").read_text()
    assert text.startswith("// Measured by `moec calibrate` with all 1 x 2 ranks on cpu at work")
    assert "cluster here {" in text
    assert "memory      = 1 GB" in text
    (tmp_path / "used.moe").write_text('use "here.moe"\n' + LAYER + MESH.format(name="here"))
    assert moec("fmt", "--check", tmp_path / "here.moe").wait().code == 0
    assert moec("compile", tmp_path / "used.moe").wait().code == 0


@pytest.mark.parametrize(
    ("file", "name"),
    [("pod_1.moe", "pod_1"), ("cluster.moe", "measured"), ("us.moe", "measured"), ("a-b.moe", "measured")],
)
def test_the_cluster_is_named_as_the_file_where_that_is_a_name(file: str, name: str) -> None:
    assert _name(Path("folder", file)) == name
    declared = declaration(Cluster(name, 1, 1))
    check(SourceFile("m.moe", declared))


@pytest.mark.usefixtures("small")
def test_without_a_file_the_cluster_goes_to_standard_output(tmp_path: Path) -> None:
    (tmp_path / "m.moe").write_text(LAYER)
    done = moec("calibrate", tmp_path / "m.moe", "--rounds", "1").wait()
    assert (done.code, done.err) == (0, "")
    assert "cluster measured {\n  devices     = 1\n" in done.out
    assert "intra       = link(10 GB/s, latency = 20 us)" in done.out, "what one rank cannot measure stays"


def test_a_folder_that_is_not_there_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "m.moe").write_text(PAIR + LAYER + MESH.format(name="pair"))
    done = moec("calibrate", tmp_path / "m.moe", "-o", tmp_path / "no" / "where.moe").wait()
    assert (done.code, done.out) == (4, "")
    assert "moec: error[E0618]: cannot write" in done.err
    assert "where.moe`: its folder does not exist" in done.err
