"""What cache_time.py compares: plans of one model with some of its experts resident, and their rates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moec.artifact import Artifact
from moec.compiler import compile
from moec.importer.folder import import_model

#: Tokens of a prompt, if not told otherwise, and least tokens of a long one.
PROMPT, LONG_PROMPT = 32, 128


@dataclass(frozen=True)
class Case:
    """`share` of each layer's experts that have a slot, 1: no cache at all."""

    name: str
    share: float = 1.0
    prefetch: str = "none"
    tier: str = "host"
    is_cold: bool = False
    is_long: bool = False  # its prompts
    evict: str = "lfu"
    does_wait: bool = False


GUESS = "next_router(ahead = 1)"
PREFETCH, ON_DEMAND = "warm 25% prefetch", "warm 25% on demand"
WAITS, SAME_WAITS = "warm 25% load, then compute", "the same by sweep_lfu"
CASES = (
    Case("resident"),
    Case("warm 50% prefetch", 0.5, GUESS, evict="sweep_lfu"),
    Case("warm 50% on demand", 0.5),
    Case(PREFETCH, 0.25, GUESS, evict="sweep_lfu"),
    Case(ON_DEMAND, 0.25),
    Case(WAITS, 0.25, does_wait=True),
    Case(SAME_WAITS, 0.25, evict="sweep_lfu", does_wait=True),
    Case("warm 25% nvme", 0.25, GUESS, "nvme"),
    Case("cold 25% load, then compute", 0.25, is_cold=True, does_wait=True),
    Case("cold 25% on demand", 0.25, is_cold=True),
    Case("cold 25% prefetch", 0.25, GUESS, is_cold=True, evict="sweep_lfu"),
    Case("resident, long prompt", is_long=True),
    Case("streamed 50%, long prompt", 0.5, GUESS, is_long=True),
    Case("streamed 25%, long prompt", 0.25, GUESS, is_long=True),
)


@dataclass(frozen=True)
class Rates:
    """Bytes per second of the tiers, and of device memory as the plan's cluster has it; None: not known yet.

    `trace`: real routing, None: random.
    """

    host: float | None = None
    memory: float | None = None
    trace: Path | None = None


def compile_case(folder: Path, work: Path, case: Case, size: tuple[int, int], rates: Rates) -> Artifact:
    """The model of `folder` under the cache of a case, for so many prompts at once of so many tokens at most."""
    source = work / f"{case.name.replace(' ', '-')}.moe"
    text = import_model(folder, output=source)
    if rates.memory is not None:
        memory = f"memory_rate = {rates.memory / 1e6:.3f} MB/s  compute = peak(fp32 = 1 TFLOP/s)"
        text = f"cluster here {{ devices = 1  {memory} }}\n" + text
        text = text.replace("mesh ranks {", "mesh ranks on here[1] {")
    if case.share < 1.0:
        rate = "" if rates.host is None else f", bandwidth = {_rate(case, rates.host):.3f} MB/s, latency = 5 us"
        where = "1 GiB per rank" if case.tier == "host" else f'"{work}"'
        tier, policy = f"{case.tier} = tier({where}{rate})", f"evict = {case.evict}  prefetch = {case.prefetch}"
        cache = f"hbm = share({case.share})  {tier}  {policy}"
        text = text.replace("plan serve {", f"cache few {{ {cache} }}\nplan serve {{")
        text = text.replace("on ranks\n", "on ranks with few\n")
    source.write_text(text)
    batch, longest = size
    sizes = (f"plan.decode.batch={batch}", f"plan.prefill.tokens={batch * longest}")
    return compile(source, overrides=("plan.compute=fp32", *sizes), trace=rates.trace)


def _rate(case: Case, host: float) -> float:
    return host / 1e6 / (4 if case.tier == "nvme" else 1)
