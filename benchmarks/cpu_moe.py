"""Time of one rank on the CPU against transformers: `python benchmarks/cpu_moe.py [--dtype bf16] [--pairs 15]`.

1. A Qwen3-MoE of 430 million parameters (hidden 1024, 4 layers, 64 experts of 512, top 8, vocabulary 8192) is made with
   random weights by transformers, and compiled by moec.
2. transformers' fastest `experts_implementation` is found for each case: decode at batch 1 and 8 behind 64 tokens, and
   prefill of 512 tokens.
3. Then transformers, moec, and a plain sum over 512 MiB run in turn, 15 times or more; each pair has the same tokens,
   new ones every time, so that other experts are read. Figures are medians, `ratio` the median of the pairs' ratios.
   Each turn comes after a rest, so that no thread of another's pool is still waiting awake, and a turn of other
   tokens, so that all that it needs is.
4. With `--compiled`, transformers' layers take a turn whose experts (`grouped_mm`) went through `torch.compile`.

`bandwidth`: bytes of the weights that a decode step at batch 1 reads, over its time, as a share of what the sum read.
Also told: the largest difference of the logits from transformers'.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moec.compiler import compile
from moec.importer.folder import import_model
from moec.runtime.launch.rank import Rank
from moec.runtime.launch.status import Status
from moec.runtime.session import Session, open_session
from moec.runtime.step import Piece, make_step

VOCAB, CONTEXT, CACHED = 8192, 640, 64
SIZES: dict[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 4, "num_experts": 64, "moe_intermediate_size": 512,
    "num_experts_per_tok": 8, "vocab_size": VOCAB, "num_attention_heads": 16, "num_key_value_heads": 4,
    "head_dim": 64, "intermediate_size": 2048, "max_position_embeddings": 2048, "norm_topk_prob": True,
}  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")
COMPILED = "compiled"
REST_SECONDS = 0.02  # GNU OpenMP's threads wait awake for some 5 ms
SUMMED_BYTES = 512 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Case:
    """`batch` sequences of `rows` new tokens each, behind `cached` ones."""

    name: str
    batch: int
    rows: int
    cached: int


CASES = (
    Case("decode 1", 1, 1, CACHED),
    Case("decode 8", 8, 1, CACHED),
    Case("prefill 512", 1, 512, 0),
)


def make_model(folder: Path, dtype: str) -> None:
    """Write the model's config and random weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, tie_word_embeddings=False, eos_token_id=None))
    model.to(DTYPES[dtype]).save_pretrained(folder)


def open_moec(folder: Path, work: Path, dtype: str, kernels: str) -> Session:
    source = work / f"{dtype}-{kernels}.moe"
    source.write_text(import_model(folder, output=source))
    settings = [f"plan.compute={dtype}", f"plan.context={CONTEXT}", "plan.decode.batch=8", "plan.prefill.tokens=512"]
    artifact = compile(source, overrides=settings, kernels=kernels)
    return open_session(artifact, folder, Rank(0, 1, 0, 1, torch.device("cpu"), Status(0)))


class Peer:
    """transformers' model and its KV cache of each case."""

    def __init__(self, folder: Path, dtype: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).eval()
        self.caches: dict[str, Any] = {}
        self.blocks = [layer.mlp for layer in self.model.model.layers]
        self.plain = [block.forward for block in self.blocks]
        self.compiled = [torch.compile(forward, dynamic=False) for forward in self.plain]

    def use(self, implementation: str) -> None:
        """Have steps from now on compute experts by one of `IMPLEMENTATIONS`, or `COMPILED`."""
        is_compiled = implementation == COMPILED
        self.model.set_experts_implementation("grouped_mm" if is_compiled else implementation)
        for block, forward in zip(self.blocks, self.compiled if is_compiled else self.plain, strict=True):
            block.forward = forward

    @torch.inference_mode()
    def fill(self, case: Case, prompts: torch.Tensor) -> None:
        self.caches[case.name] = self.model(prompts, use_cache=True).past_key_values

    @torch.inference_mode()
    def step(self, case: Case, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the last token of each sequence."""
        if not case.cached:
            return self.model(tokens, use_cache=True, logits_to_keep=1).logits[:, -1]
        cache = self.caches[case.name]
        logits = self.model(tokens, past_key_values=cache, use_cache=True).logits[:, -1]
        cache.crop(-case.rows)
        return logits


def moec_step(session: Session, case: Case, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of the last token of each sequence."""
    pieces = [Piece(row, slot, case.cached) for slot, row in enumerate(tokens.tolist())]
    return (session.decode if case.cached else session.prefill)(make_step(pieces))


def timed(work: Callable[..., Any], *tokens: torch.Tensor) -> tuple[float, Any]:
    """Seconds of a turn, after a rest and a turn that nobody times, and what it gave.

    `tokens`: of the turn, and of the one before it, which wakes the threads and the processor's clock: after 20 ms of
    rest alone, steps of 6 ms took 9 here.
    """
    time.sleep(REST_SECONDS)
    work(*tokens[1:])
    start = time.perf_counter()
    found = work(*tokens[:1])
    return time.perf_counter() - start, found


def draw(case: Case, generator: torch.Generator, rows: int | None = None) -> torch.Tensor:
    return torch.randint(VOCAB, (case.batch, rows or case.rows), generator=generator)


def gathered_bytes(case: Case, dtype: torch.dtype) -> int:
    """Bytes of the weights that `batched_mm` copies: an expert's for each pair of a row and an expert."""
    pairs = case.batch * case.rows * SIZES["num_experts_per_tok"]
    return pairs * 3 * SIZES["hidden_size"] * SIZES["moe_intermediate_size"] * dtype.itemsize


def choose(peer: Peer, case: Case, generator: torch.Generator) -> str:
    """transformers' fastest implementation of a case."""
    found = {}
    for name in IMPLEMENTATIONS:
        if name == "batched_mm" and gathered_bytes(case, peer.model.dtype) > 0.5 * os.sysconf("SC_AVPHYS_PAGES") * PAGE:
            continue
        peer.use(name)
        tries = [(draw(case, generator), draw(case, generator)) for _ in range(4)]
        found[name] = min(timed(partial(peer.step, case), *tokens)[0] for tokens in tries)
    return min(found, key=lambda name: found[name])


def measure(
    peer: Peer, sessions: dict[str, Session], case: Case, options: argparse.Namespace, generator: torch.Generator
) -> dict[str, Any]:
    fill(peer, sessions, case, generator)
    implementation = choose(peer, case, generator)
    peers = {"transformers": implementation} | ({COMPILED: COMPILED} if options.compiled else {})
    data = torch.ones(SUMMED_BYTES // 4)
    times: dict[str, list[float]] = {name: [] for name in (*peers, *sessions, "read")}
    worst = 0.0
    for _ in range(options.pairs + 2):
        tokens, wanted = (draw(case, generator), draw(case, generator)), torch.empty(0)
        for name, chosen in reversed(peers.items()):
            peer.use(chosen)
            taken, wanted = timed(partial(peer.step, case), *tokens)
            times[name].append(taken)
        for name, session in sessions.items():
            taken, found = timed(partial(moec_step, session, case), *tokens)
            times[name].append(taken)
            worst = max(worst, float((found - wanted.float()).abs().max()))
        times["read"].append(timed(data.sum)[0])
    result = {"case": case.name, "implementation": implementation, "difference": worst}
    return result | figures({name: values[2:] for name, values in times.items()}, case, options.dtype)


def fill(peer: Peer, sessions: dict[str, Session], case: Case, generator: torch.Generator) -> None:
    """Give everyone the tokens that are cached before the case's steps."""
    if case.cached:
        prompts = draw(case, generator, case.cached)
        peer.use(IMPLEMENTATIONS[0])
        peer.fill(case, prompts)
        for session in sessions.values():
            session.prefill(make_step([Piece(row, slot) for slot, row in enumerate(prompts.tolist())]))


def figures(times: dict[str, list[float]], case: Case, dtype: str) -> dict[str, float]:
    """Medians, ratios to each peer, and at batch 1 the share of the read bandwidth."""
    result = {f"{name} ms": 1e3 * statistics.median(values) for name, values in times.items()}
    peers = [name for name in ("transformers", COMPILED) if name in times]
    for name in [name for name in times if name not in (*peers, "read")]:
        for peer in peers:
            result[f"{name} over {peer}"] = median_ratio(times[peer], times[name])
        if case.batch * case.rows == 1:
            share = read_bytes(DTYPES[dtype]) / SUMMED_BYTES
            result[f"{name} bandwidth"] = share * median_ratio(times["read"], times[name])
    return result


def median_ratio(others: list[float], own: list[float]) -> float:
    return statistics.median(map(float.__truediv__, others, own))


def read_bytes(dtype: torch.dtype) -> int:
    """Bytes of weights that one token needs."""
    d, heads = SIZES["hidden_size"], (2 * SIZES["num_attention_heads"] + 2 * SIZES["num_key_value_heads"]) * 64
    experts = SIZES["num_experts_per_tok"] * 3 * SIZES["moe_intermediate_size"]
    rows = SIZES["num_hidden_layers"] * (heads + SIZES["num_experts"] + experts) + VOCAB
    return int(rows * d * dtype.itemsize)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kernels", nargs="+", default=["torch", "cpp"])
    parser.add_argument("--cases", nargs="+", default=[case.name for case in CASES])
    parser.add_argument("--compiled", action="store_true", help="also against experts through torch.compile")
    parser.add_argument("--model", type=Path, help="folder of the model, made there when it is not")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(1)
    with tempfile.TemporaryDirectory() as made:
        work = Path(made)
        folder = options.model or work / "model"
        if not (folder / "config.json").exists():
            make_model(folder, options.dtype)
        sessions = {kernels: open_moec(folder, work, options.dtype, kernels) for kernels in options.kernels}
        peer = Peer(folder, options.dtype)
        for case in CASES:
            if case.name in options.cases:
                found = {"dtype": options.dtype, "cpus": os.cpu_count(), "pairs": options.pairs}
                found |= measure(peer, sessions, case, options, generator)
                print(
                    json.dumps(found) if options.json else "  ".join(_shown(k, v) for k, v in found.items()), flush=True
                )


def _shown(key: str, value: object) -> str:
    return f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"


if __name__ == "__main__":
    main()
