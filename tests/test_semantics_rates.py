"""What links, tiers and devices may take and give: a latency of 0 is one, a rate of 0 is none."""

from __future__ import annotations

import pytest

from moec.checked import Plan
from moec.diagnostics import CompileError, SourceFile
from moec.semantics.checker import check

PROGRAM = """cluster c {{ devices = 1  {cluster} }}
model m {{
  hidden = 64  vocab = 100  norm = rms(eps = 1e-6)
  attention a = gqa(heads = 4)
  router r {{ score = softmax  top = 2 }}
  experts e = 8 * swiglu(32)
  layers 0..1 {{ a  moe(r, e) }}
}}
mesh x on c[1] {{ }}
cache k {{ hbm = slots(4)  {tiers} }}
plan p {{ run m on x with k }}
"""
HOST = "host = tier(8 GiB per rank)"


def plan_of(cluster: str = "", tiers: str = HOST) -> Plan:
    return check(SourceFile("case.moe", PROGRAM.format(cluster=cluster, tiers=tiers)), overrides=[]).plan()


def fault(cluster: str = "", tiers: str = HOST) -> tuple[str, str]:
    with pytest.raises(CompileError) as caught:
        plan_of(cluster, tiers)
    (first,) = caught.value.diagnostics
    return first.code, first.message


@pytest.mark.parametrize("link", ["intra", "inter", "host", "nvme"])
@pytest.mark.parametrize("latency", ["0 us", "0.0 ms", "2 us - 2 us"])
def test_a_link_may_have_no_latency_and_that_is_the_default(link: str, latency: str) -> None:
    given = plan_of(f"{link} = link(3 GB/s, latency = {latency})")
    assert given.mesh.cluster == plan_of(f"{link} = link(3 GB/s)").mesh.cluster


def test_a_tier_may_have_no_latency_and_that_is_the_default() -> None:
    for settings in ("host = tier(8 GiB per rank, {})", 'nvme = tier("/raid", {})'):
        given, default = (
            plan_of(tiers=settings.format(rate)).cache
            for rate in ("bandwidth = 2 GB/s, latency = 0 us", "bandwidth = 2 GB/s")
        )
        assert given is not None and default is not None
        for mine, theirs in ((given.host, default.host), (given.nvme, default.nvme)):
            assert (mine is None) == (theirs is None)
            if mine is not None and theirs is not None:
                assert (mine.bandwidth, mine.latency_s) == (theirs.bandwidth, theirs.latency_s) == (2e9, 0.0)


@pytest.mark.parametrize(
    ("cluster", "key"),
    [
        ("intra = link(0 GB/s)", "rate"),
        ("intra = link(0 GB/s, latency = 0 us)", "rate"),
        ("memory = 0 GB", "memory"),
        ("memory_rate = 0 GB/s", "memory_rate"),
        ("compute = peak(fp32 = 0 TFLOP/s)", "fp32"),
    ],
)
def test_nothing_else_of_a_cluster_may_be_zero(cluster: str, key: str) -> None:
    assert fault(cluster) == ("E0208", f"`{key}` must be more than 0")


def test_a_bandwidth_of_a_tier_may_not_be_zero() -> None:
    tier = "host = tier(8 GiB per rank, bandwidth = 0 GB/s, latency = 0 us)"
    assert fault(tiers=tier) == ("E0208", "`bandwidth` must be more than 0")


def test_a_latency_may_not_be_negative() -> None:
    assert fault("intra = link(3 GB/s, latency = 2 us - 3 us)") == ("E0208", "`latency` must be at least 0")
    tier = "host = tier(8 GiB per rank, bandwidth = 1 GB/s, latency = 2 us - 3 us)"
    assert fault(tiers=tier) == ("E0208", "`latency` must be at least 0")
