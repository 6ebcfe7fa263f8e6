"""Runs a model with an expert cache on real ranks inside a test, and what its cache counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from moec.artifact import Artifact
from moec.cache.policies import policy_named
from moec.cache.predictors import History
from moec.cache.residency import Residency
from moec.cache.trace import Trace, read_trace, write_trace
from moec.cache_files import find_cache
from moec.cache_sizes import pinned_keys
from moec.compiler import compile
from moec.importer.folder import import_model
from moec.ir.program import Program
from moec.runtime.experts.cache import ExpertCache
from moec.runtime.experts.copier import Copier
from moec.runtime.experts.file import Key
from moec.runtime.experts.session import fill_order
from moec.runtime.experts.tiers import HostTier
from moec.runtime.generate import Request, collect_logits, generate
from moec.runtime.launch.job import run_ranks
from moec.runtime.launch.rank import Rank
from moec.runtime.routing_record import Recorder, gather_trace
from moec.runtime.session import open_session
from moec.runtime.weights_experts import cached_layers, contents_of
from tests.parity import Outcome

#: What a plan says of its cache where a test does not say it.
USUAL = {"hbm": "slots(3)", "host": "1 GiB per rank", "evict": "layer_lru", "prefetch": "none"}


@dataclass(frozen=True)
class Run:
    """What the prompts gave; counters of every layer, by rank; the routing trace of all ranks."""

    outcome: Outcome
    counters: list[list[dict[str, int]]]
    trace: Trace

    def total(self, name: str) -> int:
        return sum(layer[name] for rank in self.counters for layer in rank)


def compile_cached(folder: Path, work: Path, mesh: str | None, *overrides: str, **cache: str) -> Artifact:
    """Import a model folder and compile it in fp32 with a cache; a setting that is None is left out."""
    source = work / "cached.moe"
    settings = "\n".join(f"  {name} = {value}" for name, value in {**USUAL, **cache}.items())
    text = import_model(folder, mesh=mesh, output=source)
    text = text.replace("plan serve {", f"cache few {{\n{settings}\n}}\n\nplan serve {{").replace(
        "on ranks\n", "on ranks with few\n"
    )
    source.write_text(text)
    return compile(source, overrides=["plan.compute=fp32", "plan.context=160", *overrides])


def run_cached(
    artifact: Artifact,
    folder: Path,
    work: Path,
    prompts: Sequence[Sequence[int]],
    num_tokens: int = 16,
    **settings: bool,
) -> Run:
    """Prefill and greedy decoding on forked ranks, not stopping at EOS. `settings`: fields of `CacheSettings`."""
    files = replace(find_cache(artifact.document, [work]), **settings)

    def main(rank: Rank) -> object:
        session = open_session(artifact, folder, rank, settings=files)
        recorder = Recorder()
        session.record(recorder)
        request = Request(prompts, num_tokens, keep_logits=True)
        result = generate(session, request, session.limits, session.place)
        logits = collect_logits(request, result, session.limits, session.place)
        trace = gather_trace(recorder, session.place, max(artifact.prefill.experts.values()))
        if rank.rank == 0:
            assert trace is not None
            write_trace(work / "run.npz", trace)
            save_file({str(i): t.contiguous() for i, t in enumerate(logits)}, work / "logits.safetensors")
        session.close()
        counted = session.cache.residency.counters if session.cache is not None else []
        return result.tokens, [asdict(layer) for layer in counted]

    ranks = run_ranks(main, artifact.num_ranks, threads=1)
    tokens, counters = zip(*ranks, strict=True)  # type: ignore[call-overload]
    assert all(told == tokens[0] for told in tokens), "ranks disagree on the tokens"
    saved = load_file(work / "logits.safetensors")
    outcome = Outcome([saved[str(i)] for i in range(len(prompts))], tokens[0])
    return Run(outcome, list(counters), read_trace(work / "run.npz"))


def cache_over(program: Program, tensors: Mapping[str, torch.Tensor]) -> ExpertCache | None:
    """The cache of a program of one rank, whose experts come from their whole parameters; None where it has none."""
    layers, cache = cached_layers(program, 0), program.cache
    if not layers or cache is None or cache.slots is None:
        return None
    contents = contents_of(layers, program.mesh, 0, None)

    def read(key: Key, into: torch.Tensor) -> None:
        layer, expert = layers[key[0]], key[1]
        parts = [tensors[f"layers.{layer.number}.{param.name}"][expert].flatten() for param in layer.params]
        into.copy_(torch.cat([part.view(torch.uint8) for part in parts]))

    held = [layer.experts for layer in layers]
    num_experts = max(program.experts.values())
    policy = policy_named(cache.evict, len(layers), num_experts, [[1.0] * num_experts] * len(layers))
    residency = Residency(held, cache.slots, policy, pinned_keys(cache, held))
    past = np.random.default_rng(0).integers(0, num_experts, (len(layers), 50, 1))
    history = History(past, num_experts, cache.ahead) if len(layers) > cache.ahead else None
    copier = Copier([HostTier(contents, contents.keys, read)])
    made = ExpertCache([layer.number for layer in layers], contents, residency, copier, torch.device("cpu"), history)
    made.fill(fill_order(held, None))
    return made


def same_bits(a: Outcome, b: Outcome) -> bool:
    return a.tokens == b.tokens and all(torch.equal(x, y) for x, y in zip(a.logits, b.logits, strict=True))
