"""Caches: what right ones mean, what a plan makes of their sizes, and which are refused. Errors have goldens too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moec.checked import Cache, Tier
from moec.diagnostics import CompileError, SourceFile
from moec.grammar.formatter import format_text
from moec.grammar.parser import read_source
from moec.semantics.cache import CACHE_SETTINGS, EVICTS, PREFETCHES
from moec.semantics.checker import check

ROOT = Path(__file__).parent.parent
MODEL = """model m {
  hidden = 64  vocab = 100  norm = rms(eps = 1e-6)
  attention a = gqa(heads = 4)
  router r { score = softmax  top = 2 }
  experts e = 11 * swiglu(32)
  experts s = 1 * swiglu(32)
  layers 0, 1  { a  swiglu(96) }
  layers 2..5  { a  moe(r, e, s) }
}
"""


def cache_of(settings: str, *overrides: str, mesh: str = "", model: str = MODEL) -> Cache:
    plan = f"mesh x {mesh or '{ }'}\nplan p {{ run m on x with c }}\n"
    text = f"{model}cache c {{ {settings} }}\n{plan}"
    found = check(SourceFile("case.moe", text), overrides=overrides).plan().cache
    assert found is not None
    return found


def errors(settings: str, *overrides: str, mesh: str = "", model: str = MODEL) -> list[str]:
    with pytest.raises(CompileError) as info:
        cache_of(settings, *overrides, mesh=mesh, model=model)
    return [d.code for d in info.value.diagnostics]


def host_of(cache: Cache) -> Tier:
    assert cache.host is not None
    return cache.host


def test_all_that_is_declared_is_there() -> None:
    nvme = 'tier("/raid/experts", bandwidth = 500 MB/s, latency = 80 us)'
    tiers = f"hbm = 40 GiB per rank  host = 8 GiB per rank  nvme = {nvme}"
    cache = cache_of(f"{tiers}  evict = least_stale  pin = [7, 0, 2 + 1]")
    assert (cache.name, cache.hbm, cache.slots, cache.share) == ("c", 40 << 30, None, None)
    assert (host_of(cache).bytes_per_rank, host_of(cache).bandwidth, host_of(cache).path) == (8 << 30, None, None)
    assert cache.nvme is not None and cache.nvme.path == "/raid/experts" and cache.nvme.bytes_per_rank is None
    assert (cache.nvme.bandwidth, cache.nvme.latency_s) == (5e8, pytest.approx(80e-6))
    assert (cache.evict, cache.evict_trace, cache.pinned, cache.pin_shared) == ("least_stale", None, (0, 3, 7), False)
    assert cache.span.text.startswith("cache c {") and host_of(cache).span.text == "8 GiB per rank"


def test_defaults() -> None:
    cache = cache_of("hbm = slots(4)  host = tier()")
    assert (cache.hbm, cache.slots, cache.share) == (None, 4, None)
    assert (host_of(cache).bytes_per_rank, host_of(cache).bandwidth, host_of(cache).latency_s) == (None, None, 0.0)
    assert (cache.nvme, cache.evict, cache.prefetch, cache.ahead) == (None, "layer_lru", "none", 0)
    assert (cache.evict_trace, cache.prefetch_trace, cache.pin_shared, cache.pinned) == (None, None, False, ())


def test_a_plan_without_a_cache_has_none() -> None:
    assert check(SourceFile("case.moe", MODEL)).plan().cache is None


@pytest.mark.parametrize(
    ("written", "share"), [("share(1)", 1.0), ("share(0.25)", 0.25), ("share(part = 1 / 3)", 1 / 3)]
)
def test_share(written: str, share: float) -> None:
    cache = cache_of(f"hbm = {written}  host = tier()")
    assert (cache.hbm, cache.slots, cache.share) == (None, None, share)


@pytest.mark.parametrize(
    ("host", "on", "per_rank"),
    [
        ("8 MiB per rank", "on box[2] { attention = dp(8) }", 8 << 20),
        ("8 MiB per node", "on box[2] { attention = dp(8) }", 2 << 20),  # 4 ranks in a node
        ("2 * room", "on box { attention = dp(2) * tp(2) }", 2 << 20),
        ("8 MiB per node", "{ attention = dp(8) }", 1 << 20),  # this machine is one node
        ("8 MiB per node", "on box[2] { attention = dp(4)  stages = pp(2) }", 2 << 20),
        ("tier(size = 8 MiB per node, bandwidth = 2 GB/s)", "on box { attention = dp(4) }", 2 << 20),
    ],
)
def test_host_memory_of_a_node_is_shared_by_its_ranks(host: str, on: str, per_rank: int) -> None:
    head = ("const room = 4 MiB per node\n", "cluster box { devices = 4 }\n")
    used = [line for line, word in zip(head, ("room", "box"), strict=True) if word in host + on]
    cache = cache_of(f"hbm = slots(2)  host = {host}", mesh=on, model="".join(used) + MODEL)
    assert host_of(cache).bytes_per_rank == per_rank


@pytest.mark.parametrize("word", sorted({*EVICTS} - {"trace"}))
def test_policies(word: str) -> None:
    assert cache_of(f"hbm = slots(2)  host = tier()  evict = {word}").evict == word


def test_traces_are_found_from_the_file_that_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "law.npz").write_bytes(b"")
    (tmp_path / "here.npz").write_bytes(b"")
    settings = 'hbm = slots(4)  host = tier()  evict = trace("law.npz")  prefetch = history("./law.npz", ahead = 2)'
    (tmp_path / "parts" / "cache.moe").write_text(f"cache c {{ {settings} }}\n")
    main = tmp_path / "main.moe"
    main.write_text(f'use "parts/cache.moe"\n{MODEL}plan p {{ run m with c }}\n')
    cache = check(read_source(main)).plan().cache
    assert cache is not None and (cache.evict, cache.prefetch, cache.ahead) == ("trace", "history", 2)
    assert cache.evict_trace == cache.prefetch_trace == str(tmp_path / "parts" / "law.npz")
    monkeypatch.chdir(tmp_path)
    changed = check(read_source(main), overrides=['c.evict=trace("here.npz")']).plan().cache
    assert changed is not None and changed.evict_trace == "here.npz"
    (tmp_path / "parts" / "law.npz").unlink()
    (tmp_path / "parts" / "law.npz").mkdir()
    with pytest.raises(CompileError) as info:
        check(read_source(main))
    assert [d.code for d in info.value.diagnostics] == ["E0225", "E0225"]


@pytest.mark.parametrize(
    ("ahead", "mesh", "code"),
    [
        (3, "{ }", None),
        (4, "{ }", "E0229"),
        (2, "{ stages = pp(2) }", None),  # layers 0-2 with one sparse layer, then 3-5 with three
        (3, "{ stages = pp(2) }", "E0229"),
        (1, "{ stages = pp(3) }", None),
        (2, "{ stages = pp(3) }", "E0229"),
        (1, "{ stages = pp(6) }", "E0229"),
    ],
)
@pytest.mark.parametrize("word", ["next_router", "history"])
def test_how_far_ahead(word: str, ahead: int, mesh: str, code: str | None, tmp_path: Path) -> None:
    (tmp_path / "t.npz").write_bytes(b"")
    path = f'"{tmp_path}/t.npz", ' if word == "history" else ""
    settings = f"hbm = slots(4)  host = tier()  prefetch = {word}({path}ahead = {ahead})"
    if code is None:
        cache = cache_of(settings, mesh=mesh)
        assert (cache.prefetch, cache.ahead, bool(cache.prefetch_trace)) == (word, ahead, word == "history")
    else:
        assert errors(settings, mesh=mesh) == [code]


@pytest.mark.parametrize(
    ("settings", "codes"),
    [
        ("hbm = slots(0)  host = tier()", ["E0208"]),
        ("hbm = share(0)  host = tier()", ["E0208"]),
        ("hbm = slots(2.5)  host = tier()", ["E0207"]),
        ("hbm = slots(2, 3)  host = tier()", ["E0214"]),
        ("hbm = all  host = tier()", ["E0201"]),
        ("hbm = slots(2)  hbm = share(0.5)  host = tier()", ["E0205"]),
        ("hbm = slots(2)  host = 0 GiB per node", ["E0208"]),
        ("hbm = slots(2)  host = tier(bandwidth = 0 GB/s)", ["E0208"]),
        ("hbm = slots(2)  host = tier(bandwidth = 2 us)", ["E0210"]),
        ('hbm = slots(2)  nvme = ""', ["E0207"]),
        ("hbm = slots(2)  nvme = 4 GiB per rank", ["E0207"]),
        ('hbm = slots(2)  nvme = tier(latency = 3 us, path = "x")', ["E0204"]),
        ("hbm = slots(2)  host = tier()  evict = lru()", ["E0209"]),
        ("hbm = slots(2)  host = tier()  evict = [1]", ["E0209"]),
        ("hbm = slots(2)  host = tier()  evict = trace(3)", ["E0207"]),
        ("hbm = slots(2)  host = tier()  prefetch = history(ahead = 1)", ["E0204"]),
        ("hbm = slots(2)  host = tier()  prefetch = next_router(2, 3)", ["E0214"]),
        ("hbm = slots(2)  host = tier()  pin = 3", ["E0209"]),
        ("hbm = slots(2)  host = tier()  pin = [shared]", ["E0201"]),
        ("hbm = slots(2)  host = tier()  pin = [11]", ["E0227"]),
        ("hbm = slots(2)  host = tier()  pin = [2000000]", ["E0208"]),
        ("hbm = slots(2)  host = tier()  pin = [0 GiB]", ["E0207"]),
        ("hbm = slots(2)  host = tier()  pin = []", ["E0101"]),
    ],
)
def test_what_is_refused(settings: str, codes: list[str]) -> None:
    assert errors(settings) == codes


def test_pinning_shared_experts_needs_some() -> None:
    assert cache_of("hbm = slots(2)  host = tier()  pin = shared").pin_shared
    without = MODEL.replace("moe(r, e, s)", "moe(r, e)").replace("  experts s = 1 * swiglu(32)\n", "")
    assert errors("hbm = slots(2)  host = tier()  pin = shared", model=without) == ["E0227"]


def test_a_pinned_expert_is_in_every_layer() -> None:
    two = MODEL.replace("experts s = 1", "experts four = 4")
    two = two.replace("layers 2..5  { a  moe(r, e, s) }", "layers 2..4 { a  moe(r, e) }  layers 5 { a  moe(r, four) }")
    assert cache_of("hbm = slots(5)  host = tier()  pin = [3]", model=two).pinned == (3,)
    assert errors("hbm = slots(5)  host = tier()  pin = [4]", model=two) == ["E0227"]


def test_a_cache_that_nothing_uses_is_checked_and_refused() -> None:
    library = "cache a { hbm = slots(2)  host = tier() }\ncache b { hbm = slots(-1)  host = tier() }\n"
    with pytest.raises(CompileError) as info:
        check(SourceFile("case.moe", library))
    assert [d.code for d in info.value.diagnostics] == ["E0208"]
    assert not check(SourceFile("case.moe", library.replace("-1", "1"))).plans
    with pytest.raises(CompileError) as info:
        check(SourceFile("case.moe", f"{library.replace('-1', '1')}{MODEL}plan p {{ run m with a }}\n"))
    assert [(d.code, d.message) for d in info.value.diagnostics] == [("E0212", "cache `b` is not used")]


def test_the_default_plan_uses_the_only_cache() -> None:
    plan = check(SourceFile("case.moe", f"{MODEL}cache c {{ hbm = slots(2)  host = tier() }}\n")).plan()
    assert plan.name == "default" and plan.cache is not None and plan.cache.slots == 2


def test_the_errors_of_one_cache_silence_the_plan() -> None:
    assert errors("hbm = slots(0)  host = tier()  pin = [99]") == ["E0208"]


def test_a_cache_of_two_plans_is_put_on_each() -> None:
    plans = "mesh x { attention = dp(2) }\nplan p { run m with c }\nplan q { run m on x with c }\n"
    text = f"{MODEL}cache c {{ hbm = slots(2)  host = 8 MiB per node }}\n{plans}"
    spec = check(SourceFile("case.moe", text))
    sizes = [plan.cache.host.bytes_per_rank for plan in spec.plans.values() if plan.cache and plan.cache.host]
    assert sizes == [8 << 20, 4 << 20]


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("cache.hbm=slots(8)", lambda c: (c.slots, c.hbm) == (8, None)),
        ("cache.hbm=share(0.5)", lambda c: (c.share, c.slots) == (0.5, None)),
        ("c.hbm=2 GiB per rank", lambda c: c.hbm == 2 << 30),
        ("cache.evict=lfu", lambda c: c.evict == "lfu"),
        ("cache.prefetch=next_router(ahead=3)", lambda c: (c.prefetch, c.ahead) == ("next_router", 3)),
        ("cache.pin=[3, 1]", lambda c: c.pinned == (1, 3)),
        ('cache.nvme="/raid"', lambda c: c.nvme.path == "/raid"),
    ],
)
def test_set(override: str, value) -> None:  # type: ignore[no-untyped-def]
    assert value(cache_of("hbm = slots(2)  host = tier()", override))


@pytest.mark.parametrize(
    ("override", "code", "says"),
    [
        ("cache.hbm=slots(0)", "E0208", "at least 1"),
        ("cache.hmb=slots(2)", "E0202", "did you mean `hbm`?"),
        ("cache.hbm.slots=2", "E0222", ""),
        ("cashe.hbm=slots(2)", "E0222", "did you mean `cache`?"),
        ('cache.evict=trace("none.npz")', "E0225", "none.npz"),
        ("cache.pin=[0, 11]", "E0227", "0 to 10"),
    ],
)
def test_bad_set(override: str, code: str, says: str) -> None:
    with pytest.raises(CompileError) as info:
        cache_of("hbm = slots(2)  host = tier()", override)
    first = info.value.diagnostics[0]
    assert first.code == code and says in first.message + first.help
    assert first.primary and first.primary.span.source.name == "--set"


def test_links_of_the_cluster_are_there_for_tiers_without_a_rate() -> None:
    links = "host = link(55 GB/s, latency = 5 us)  nvme = link(14 GB/s, latency = 100 us)"
    text = f"cluster box {{ devices = 1  {links} }}\n{MODEL}mesh x on box {{ }}\n"
    cluster = check(SourceFile("case.moe", text)).plan().mesh.cluster
    assert cluster.host is not None and (cluster.host.gbps, cluster.host.latency_us) == (55.0, 5.0)
    assert cluster.nvme is not None and (cluster.nvme.gbps, cluster.nvme.latency_us) == (14.0, 100.0)


def test_lists_are_formatted_on_one_line_or_over_several() -> None:
    assert format_text("cache c { pin = [ 1,2 , 3 ] }") == "cache c { pin = [1, 2, 3] }\n"
    assert format_text("cache c {\npin = [ 1,\n2 ] }") == "cache c {\n  pin = [\n    1,\n    2\n  ]\n}\n"


def test_the_language_page_names_every_setting_and_word() -> None:
    section = (ROOT / "docs" / "language.md").read_text().partition("### cache")[2].partition("### plan")[0]
    tables = section.rpartition("```")[2]
    words = {word for quoted in re.findall(r"`([^`]+)`", tables) for word in re.findall(r"\w+", quoted)}
    assert words >= {*CACHE_SETTINGS, *EVICTS, *PREFETCHES, "slots", "share", "tier", "shared", "bandwidth", "latency"}
