"""What is refused before ranks start: traces of a cache, `--emulate`, `--record`. Pages show each line as printed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moec.artifact import Artifact
from moec.cache.trace import Trace, write_trace
from moec.cache_files import find_cache
from moec.compiler import compile
from moec.diagnostics import MoecError
from moec.runtime.routing_record import check_recordable

ROOT = Path(__file__).resolve().parent.parent
TOY = (
    (ROOT / "examples" / "toy.moe").read_text()
    + """
cluster one { devices = 1 }
mesh alone on one { attention = dp(1)  experts = ep(1) }
"""
)
PLAN = "plan %s { run toy on alone %s  context = 64  prefill { tokens = 16 }  decode { batch = 2 } }\n"


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((2, 12, 6)), axis=2)[:, :, :2]
    steps = np.arange(13, dtype=np.int64)
    for name, chosen in (("past.npz", ids), ("other.npz", ids[:, ::-1])):
        trace = Trace(chosen, 6, np.array([12], np.int32), np.ones(12, np.uint8), steps)
        write_trace(tmp_path / name, trace)
    return tmp_path


def compiled(work: Path, cache: str | None, model: str = TOY) -> Artifact:
    """A plan named `plain`, or `cached` by a cache `few` with these settings."""
    plan = PLAN % (("plain", "") if cache is None else ("cached", "with few"))
    text = model + (f"cache few {{ hbm = slots(3)  {cache} }}\n" if cache is not None else "") + plan
    (work / "toy.moe").write_text(text)
    return compile(work / "toy.moe")


def refused(artifact: Artifact, is_emulated: bool = False) -> tuple[int, str]:
    """Exit code and line of what the plan's files are refused for."""
    with pytest.raises(MoecError) as caught:
        find_cache(artifact.document, [Path()], is_emulated)
    return caught.value.exit_code, caught.value.diagnostics[0].one_line()


def is_shown(line: str) -> bool:
    """Whether the page of its code shows the line as it was printed."""
    page = ROOT / "specs" / "errors" / f"{line.partition('[')[2][:5]}.md"
    return f"\n    {line}\n" in page.read_text()


# --- traces -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting", ['evict = trace("past.npz")', 'prefetch = history("past.npz", ahead = 1)'], ids=["evict", "prefetch"]
)
def test_the_trace_of_a_plan_must_be_the_one_it_was_compiled_with(work: Path, setting: str) -> None:
    artifact = compiled(work, f"host = 1 GiB per rank  {setting}")
    found = find_cache(artifact.document, [work / "elsewhere", work])
    assert (found.popularity is None) == setting.startswith("prefetch")
    assert (found.history is None) == setting.startswith("evict")
    Path("other.npz").replace("past.npz")
    code, line = refused(artifact)
    assert (code, is_shown(line)) == (3, True), line
    Path("past.npz").unlink()
    code, line = refused(artifact)
    assert code == 3
    assert line.startswith("moec: error[E0645]: the trace `past.npz` that the cache goes by is not there; put it back")
    with pytest.raises(MoecError, match=r"trace `elsewhere/past.npz` or `here/past.npz` that the cache goes by"):
        find_cache(artifact.document, [Path("elsewhere"), Path("here"), Path("here")])


def test_a_trace_that_cannot_be_read_is_named(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = compiled(work, 'host = 1 GiB per rank  evict = trace("past.npz")')

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    code, line = refused(artifact)
    assert (code, "E0645" in line) == (3, True)
    assert "`past.npz` that the cache goes by cannot be read: Permission denied; make it readable" in line


# --- emulation ----------------------------------------------------------------------------------------------------


def test_without_a_cache_there_is_nothing_to_emulate(work: Path) -> None:
    code, line = refused(compiled(work, None), is_emulated=True)
    assert (code, is_shown(line), "E0646" in line) == (2, True, True), line


def test_a_tier_without_a_rate_is_not_emulated(work: Path) -> None:
    code, line = refused(compiled(work, "host = 1 GiB per rank"), is_emulated=True)
    assert (code, is_shown(line)) == (2, True), line
    (work / "experts").mkdir()
    both = 'host = 1 GiB per rank  nvme = "experts"'
    line = refused(compiled(work, both), is_emulated=True)[1]
    assert "the tiers host and nvme have no bandwidth to emulate in cache `few`" in line


def test_with_rates_a_run_emulates(work: Path) -> None:
    artifact = compiled(work, "host = tier(1 GiB per rank, bandwidth = 2 GB/s, latency = 10 us)")
    assert find_cache(artifact.document, [work], is_emulated=True).is_emulated
    assert not find_cache(artifact.document, [work]).is_emulated


# --- recording ----------------------------------------------------------------------------------------------------

LAYERS = "layers 0..1 { heads  moe(pick, few) }"
DENSE = "\n".join(
    line.replace(LAYERS, "layers 0..1 { heads  swiglu(96) }")
    for line in TOY.splitlines()
    if not line.lstrip().startswith(("router", "experts few"))
).replace("  experts = ep(1)", "")
UNLIKE = TOY.replace(
    LAYERS,
    "router first { score = softmax  top = 1 }\n  layers 0 { heads  moe(pick, few) }\n"
    "  layers 1 { heads  moe(first, few) }",
)


def test_a_model_that_routes_alike_is_recorded(work: Path) -> None:
    check_recordable(compiled(work, None).programs)


@pytest.mark.parametrize("model", [DENSE, UNLIKE], ids=["dense", "two routers"])
def test_no_trace_is_promised_of_a_model_that_does_not(work: Path, model: str) -> None:
    with pytest.raises(MoecError) as caught:
        check_recordable(compiled(work, None, model).programs)
    line = caught.value.diagnostics[0].one_line()
    assert (caught.value.exit_code, is_shown(line), "E0647" in line) == (2, True, True), line
