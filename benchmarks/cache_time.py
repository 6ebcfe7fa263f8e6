"""Time to first token and per token with experts behind emulated tiers, as ratios to all experts resident, in one run.

    python benchmarks/cache_time.py MODEL_FOLDER TEXT_FILE... [--batch N] [--prompt N] [--repeats N] [--tokens N]
        [--slower C] [--json FILE]

1. The resident model gives the time that a decode step spends in its layers, and a routing trace, which plans are
   costed with.
2. The host tier's rate is such that copies of all the experts that a step needs of a layer take as long as the layer
   computes, or C times as long; the nvme tier has a quarter of it (2 GB/s and 500 MB/s in proportion). The plan's
   cluster is told that too.
3. In each repetition every case runs the same prompts, N at once taken from the texts by turns, and greedy tokens
   behind them, case after case. `warm` cases keep their cache from one to the next, `cold` ones start without any
   expert in a slot. `load, then compute` is what on demand is without overlap: a layer waits until all of its experts
   are there (or as many as it has slots); elsewhere those that are there are computed while others come.

`ttft` is the time of the prompts' step, `token` the mean time of the steps behind it. `copied / floor`: bytes that the
prompts' step copied over those of each active expert that had no slot, once. One rank of one thread; every case gives
the resident model's tokens, or the run ends.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from cache_cases import CASES, LONG_PROMPT, ON_DEMAND, PREFETCH, PROMPT, SAME_WAITS, WAITS, Case, Rates, compile_case

from moec.cache.simulate import look_ups
from moec.cache.trace import read_trace, write_trace
from moec.cache_files import CacheSettings
from moec.cache_sizes import layer_bytes
from moec.ir.program import Program
from moec.runtime.experts.cache import ExpertCache
from moec.runtime.generate import Request, generate
from moec.runtime.launch.job import run_ranks
from moec.runtime.launch.rank import Rank
from moec.runtime.routing_record import Recorder, gather_trace
from moec.runtime.session import Session, open_session
from moec.runtime.text import Text

Batch = list[list[int]]
T = TypeVar("T")
TIMES = ("ttft", "token")


@dataclass(frozen=True)
class Sample:
    """Seconds to the first token and per token behind it; bytes copied by the prompt's step and at least needed."""

    ttft: float
    token: float
    copied: int = 0
    floor: int = 0


def measure(session: Session, prompts: Batch, num_tokens: int, active: list[set[int]]) -> tuple[Sample, Batch]:
    """Prompts, whose step needs the experts `active` by layer, and greedy tokens behind them."""
    moments: list[float] = []
    counted: list[int] = []
    floor, before = _floor(session.cache, active), _copied(session.cache)

    def on_token(prompt: int, token: int, is_last: bool) -> None:
        moments.append(time.perf_counter())
        counted.append(_copied(session.cache))

    start = time.perf_counter()
    request = Request(prompts, num_tokens)
    result = generate(session, request, session.limits, session.place, on_token)
    token = (moments[-1] - moments[0]) / (num_tokens - 1)
    return Sample(moments[0] - start, token, counted[0] - before, floor), result.tokens


def _copied(cache: ExpertCache | None) -> int:
    """Bytes of all copies so far."""
    if cache is None:
        return 0
    return sum((c.misses + c.prefetches) * cache.contents.blob_bytes(i) for i, c in enumerate(cache.residency.counters))


def _floor(cache: ExpertCache | None, active: list[set[int]]) -> int:
    """Bytes of the experts that are needed and have no slot."""
    if cache is None:
        return 0
    missing = [len(experts - set(cache.residency.resident(i))) for i, experts in enumerate(active)]
    return sum(count * cache.contents.blob_bytes(i) for i, count in enumerate(missing))


def active_experts(session: Session, recorder: Recorder, prompts: Batch) -> list[set[int]]:
    """Experts that the step of the prompts needs, by sparse layer."""
    recorder.steps.clear()
    generate(session, Request(prompts, 1), session.limits, session.place)
    step = recorder.steps[0]
    return [set(step.ids[layer].ravel().tolist()) for layer in sorted(step.ids)]


# --- one run ------------------------------------------------------------------------------------------------------


def size_of(batches: list[Batch]) -> tuple[int, int]:
    """Prompts at once, and tokens of the longest."""
    return len(batches[0]), max(len(prompt) for batch in batches for prompt in batch)


def on_rank(work: Callable[[Rank], T]) -> T:
    """What `work` gives on one forked rank of one thread."""
    (found,) = run_ranks(work, 1, threads=1)
    return found  # type: ignore[return-value]


class LayerClock:
    """Seconds of each decode step from the end of its embedding to that of its last layer."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def watch(self, kernels: SimpleNamespace, program: Program) -> SimpleNamespace:
        """The same kernels: `embed` begins a step, and a layer ends with an `add`."""

        def embed(*args: Any, **attributes: Any) -> Any:
            found = kernels.embed(*args, **attributes)
            self.seconds.append(0.0)
            self._began = time.perf_counter()
            return found

        def add(*args: Any, **attributes: Any) -> Any:
            found = kernels.add(*args, **attributes)
            self.seconds[-1] = time.perf_counter() - self._began
            return found

        is_decode = program.phase == "decode"
        return SimpleNamespace(**vars(kernels) | {"embed": embed, "add": add}) if is_decode else kernels


def settle_rates(folder: Path, work: Path, batches: list[Batch], num_tokens: int, slower: float = 1.0) -> Rates:
    """Rates under which copies of all experts that a step needs of a layer take `slower` times as long as the layer."""
    size, trace = size_of(batches), work / "routing.npz"
    plain = compile_case(folder, work, CASES[0], size, Rates())

    def main(rank: Rank) -> tuple[float, float]:
        session = open_session(plain, folder, rank)
        samples = [measure(session, prompts, num_tokens, [])[0] for prompts in batches]
        recorder = Recorder()
        session.record(recorder)
        generate(session, Request(batches[0], num_tokens), session.limits, session.place)
        found = gather_trace(recorder, session.place, max(plain.prefill.experts.values()))
        assert found is not None
        write_trace(trace, found)
        session.record(clock := LayerClock())
        watched = [measure(session, prompts, num_tokens, [])[0].token for prompts in batches]
        return statistics.median(s.token for s in samples), statistics.fmean(clock.seconds) / statistics.fmean(watched)

    (token, share), program = on_rank(main), plain.decode
    sizes, steps = layer_bytes(program), look_ups(read_trace(trace))[1:]  # the first one is the prompts'
    needed = [statistics.mean(len(step[index]) for step in steps) for index in range(len(sizes))]
    us = compile_case(folder, work, CASES[0], size, Rates(memory=1e9)).document["phases"]["decode"]["us"]
    modelled = sum(us[run.body] * max(1, len(run.layers)) for run in program.runs)
    copied = sum(count * num_bytes for count, num_bytes in zip(needed, sizes.values(), strict=True))
    return Rates(host=copied / (token * share) / slower, memory=1e9 * modelled * 1e-6 / token, trace=trace)


def run(
    folder: Path, work: Path, batches: list[Batch], short: int, num_tokens: int, rates: Rates
) -> dict[str, list[Sample]]:
    """Samples of every case, of the first `short` tokens of each prompt if it is not of long ones.

    The first repetition warms up and is left out.
    """
    artifacts = {case: compile_case(folder, work, case, size_of(batches), rates) for case in CASES}

    def opened(case: Case, rank: Rank) -> Session:
        settings = CacheSettings(nvme=work, is_emulated=case.share < 1.0, is_cold=case.is_cold)
        session = open_session(artifacts[case], folder, rank, settings=settings)
        if session.cache is not None and case.does_wait:
            session.cache.next_of = lambda begun: begun  # type: ignore[method-assign]
        return session

    def main(rank: Rank) -> dict[str, list[dict[str, float]]]:
        sessions = {case: opened(case, rank) for case in CASES if not case.is_cold}
        recorded, recorder = opened(CASES[0], rank), Recorder()
        recorded.record(recorder)
        found: dict[str, list[dict[str, float]]] = {case.name: [] for case in CASES}
        for number, prompts in enumerate(batches):
            tokens: dict[bool, Batch] = {}
            for case in CASES:
                mine = prompts if case.is_long else [prompt[:short] for prompt in prompts]
                active = active_experts(recorded, recorder, mine)
                session = sessions[case] if case in sessions else opened(case, rank)
                sample, given = measure(session, mine, num_tokens, active)
                assert tokens.setdefault(case.is_long, given) == given, f"{case.name} gave other tokens"
                if case not in sessions:
                    session.close()
                if number:
                    found[case.name].append(asdict(sample))
        for session in sessions.values():
            session.close()
        return found

    return {name: [Sample(**sample) for sample in rows] for name, rows in on_rank(main).items()}  # type: ignore[arg-type]


def show(found: dict[str, list[Sample]]) -> None:
    """Medians, and medians of the ratios to the resident case of the same repetition."""
    print(f"{'case':<28}{'ttft ms':>10}{'ratio':>8}{'token ms':>10}{'ratio':>8}{'copied / floor':>16}")
    for case in CASES:
        rows, base = found[case.name], found["resident, long prompt" if case.is_long else "resident"]
        columns = "".join(f"{ms:>10.2f}{ratio:>8.2f}" for ms, ratio in (_compared(rows, base, k) for k in TIMES))
        floor = sum(row.floor for row in rows)
        print(f"{case.name:<28}{columns}" + (f"{sum(row.copied for row in rows) / floor:>16.3f}" if floor else ""))
    for name in (WAITS, SAME_WAITS, ON_DEMAND):
        gain = _compared(found[name], found[PREFETCH], "token")[1]
        print(f"a token of `{PREFETCH}` is {gain:.2f} times as fast as of `{name}`")


def _compared(rows: list[Sample], base: list[Sample], key: str) -> tuple[float, float]:
    """Median in milliseconds, and the median ratio to `base`, repetition by repetition."""
    mine, theirs = ([getattr(row, key) for row in samples] for samples in (rows, base))
    return statistics.median(mine) * 1e3, statistics.median(a / b for a, b in zip(mine, theirs, strict=True))


def _cut(texts: list[list[int]], size: int, length: int, count: int) -> list[Batch] | None:
    """`count` batches of `size` prompts of `length` tokens, no token twice; None where the texts are too short."""
    prompts = [[text[at : at + length] for at in range(0, len(text) - length + 1, length)] for text in texts]
    turns = -(-size // len(texts))
    if min(map(len, prompts)) < turns * count:
        return None
    places = [(number % len(texts), number // len(texts)) for number in range(size)]
    return [[prompts[text][turn * count + batch] for text, turn in places] for batch in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--batch", type=int, help="prompts at once, by turns of each text: one of each if left out")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of a prompt")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--slower", type=float, default=1.0, help="copies take so many times as long as the layer")
    parser.add_argument("--json", type=Path, help="write every sample into this file")
    options = parser.parse_args()
    texts = [Text(options.model).encode(path.read_text()) for path in options.texts]
    longest = max(options.prompt, LONG_PROMPT)
    batches = _cut(texts, options.batch or len(texts), longest, options.repeats + 1)
    if batches is None:
        parser.error(f"the texts are too short: {', '.join(str(len(text)) for text in texts)} tokens")
    short = [[prompt[: options.prompt] for prompt in batch] for batch in batches[:4]]
    with tempfile.TemporaryDirectory() as work:
        rates = settle_rates(options.model, Path(work), short, options.tokens, options.slower)
        assert rates.host is not None
        print(f"host tier {rates.host / 1e6:.0f} MB/s, nvme tier {rates.host / 4e6:.0f} MB/s")
        found = run(options.model, Path(work), batches, options.prompt, options.tokens, rates)
    show(found)
    if options.json is not None:
        options.json.write_text(json.dumps({name: [asdict(s) for s in rows] for name, rows in found.items()}))


if __name__ == "__main__":
    sys.exit(main())
