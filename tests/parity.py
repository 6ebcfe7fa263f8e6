"""Runs a compiled model on real ranks inside a test, and what it must equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from moec.artifact import Artifact
from moec.compiler import compile
from moec.importer.folder import import_model
from moec.importer.mesh import parse_mesh
from moec.runtime.generate import Request, collect_logits, generate
from moec.runtime.launch.job import run_ranks
from moec.runtime.launch.rank import Rank
from moec.runtime.session import open_session

#: Every combination of axes the two exchanges must serve; None is one rank.
MESHES = (None, "ep=2", "ep=3", "tp=2", "tp=2,etp=2", "ep=2,etp=2", "dp=2,tp=2", "dp=2,edp=2,ep=1")
EXCHANGES = ("flat", "gather")

#: Meshes whose expert groups span nodes: degrees, nodes.
NODE_MESHES = (
    ("ep=2", 2),
    ("ep=3", 3),
    ("ep=4", 2),
    ("dp=2,tp=2", 2),
    ("ep=2,etp=2", 2),
    ("dp=4,edp=2,ep=2", 2),
    ("ep=2", 1),
)


@dataclass(frozen=True)
class Outcome:
    """Logits fp32 [tokens, V] of each prompt, and the tokens generated behind it."""

    logits: list[torch.Tensor]
    tokens: list[list[int]]


def compile_checkpoint(
    folder: Path,
    work: Path,
    mesh: str | None,
    exchange: str = "flat",
    kernels: str = "torch",
    *overrides: str,
    nodes: int = 1,
) -> Artifact:
    """Import a model folder on a mesh over `nodes` nodes and compile it in fp32."""
    source = work / "model.moe"
    text = import_model(folder, mesh=mesh, output=source)
    if nodes > 1:
        degrees = parse_mesh(mesh)
        num_ranks = degrees.dp * degrees.tp * degrees.pp
        text = f"cluster nodes {{ devices = {num_ranks // nodes} }}\n" + text
        text = text.replace("mesh ranks {", f"mesh ranks on nodes[{nodes}] {{")
    source.write_text(text)
    settings = ["plan.compute=fp32", f"plan.exchange={exchange}", "plan.context=160", *overrides]
    return compile(source, overrides=settings, kernels=kernels)


def run(
    artifact: Artifact, folder: Path, work: Path, prompts: Sequence[Sequence[int]], num_tokens: int = 32
) -> Outcome:
    """Prefill and greedy decoding on forked ranks, not stopping at EOS."""

    def main(rank: Rank) -> object:
        session = open_session(artifact, folder, rank)
        request = Request(prompts, num_tokens, keep_logits=True)
        result = generate(session, request, session.limits, session.place)
        logits = collect_logits(request, result, session.limits, session.place)
        if rank.rank == 0:
            save_file({str(i): t.contiguous() for i, t in enumerate(logits)}, work / "logits.safetensors")
        return result.tokens

    tokens = run_ranks(main, artifact.num_ranks, threads=1)
    assert all(told == tokens[0] for told in tokens), "ranks disagree on the tokens"
    saved = load_file(work / "logits.safetensors")
    return Outcome([saved[str(i)] for i in range(len(prompts))], tokens[0])  # type: ignore[arg-type]


def worst(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Largest absolute difference over all prompts."""
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))
