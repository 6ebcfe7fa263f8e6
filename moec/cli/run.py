"""`moec run`: compile or load, start the ranks (or be one of torchrun's), generate.

Everything that can be refused is refused before a rank starts: options, program, weights' headers, prompts.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from moec.runtime.launch.torchrun import Start


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    source: Path
    prompts: tuple[str, ...]
    tokens: tuple[str, ...]
    prompts_file: Path | None
    max_new_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool
    overrides: tuple[str, ...]
    plan: str | None
    kernels: str
    weights: Path | None
    logits: Path | None
    timeline: Path | None
    record: Path | None
    is_emulated: bool
    as_json: bool


def run_command(
    source: Annotated[Path, typer.Argument(metavar="DIR|FILE", help="A compiled folder, or a .moe file.")],
    prompt: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="A prompt; may be repeated.")] = None,
    tokens: Annotated[
        list[str] | None, typer.Option(metavar="1,2,3", help="A prompt as token ids; repeatable.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help='JSONL: {"prompt": ..} or {"tokens": ..}.')
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=0, metavar="N", help="Tokens to generate per prompt.")] = 32,
    temperature: Annotated[float, typer.Option(min=0.0, metavar="T", help="0: always the most likely token.")] = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the draws, where the temperature is not 0.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at the end-of-text token.")] = False,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value.")] = None,
    dtype: Annotated[
        Literal["fp32", "bf16"] | None, typer.Option(help="Compute in this: --set plan.compute=..")
    ] = None,
    plan: Annotated[str | None, typer.Option(metavar="NAME", help="Which plan, where the file has several.")] = None,
    kernels: Annotated[
        Literal["torch", "cpp", "triton", "interpret"],
        typer.Option(help="cpp: C++, built once for the plan; triton: on a GPU; interpret: Triton's, on the CPU."),
    ] = "torch",
    weights: Annotated[Path | None, typer.Option(metavar="DIR", help="Model folder, in place of the file's.")] = None,
    logits: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the prompts' logits (safetensors).")
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write when each rank ran what (Chrome or Perfetto JSON).")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write which experts each token chose (a trace, .npz).")
    ] = None,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="Copy cached experts no faster than the plan's tiers could.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: tokens and text.")] = False,
) -> None:
    """Generate text with a model on the ranks of its mesh. Starts the ranks itself, unless torchrun did.

    Under torchrun: torchrun --nproc-per-node N -m moec run DIR ...
    """
    # torch's own lines about lost connections would bury the one line that says why; read when torch is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from moec.cli.work import prepare, work
    from moec.runtime.launch.job import prepare_fork, run_ranks
    from moec.runtime.launch.torchrun import is_started_by_torchrun, run_as_rank

    if not (prompt or tokens or prompts):
        raise typer.BadParameter("give --prompt TEXT, --tokens 1,2,3 or --prompts FILE")
    if not math.isfinite(temperature):
        raise typer.BadParameter(f"--temperature {temperature} is no finite number")
    changes = (*(overrides or []), *([f"plan.compute={dtype}"] if dtype else []))
    options = Options(
        source, tuple(prompt or ()), tuple(tokens or ()), prompts, max_new_tokens, temperature, seed, ignore_eos,
        changes, plan, kernels, weights, logits, timeline, record, emulate, as_json,
    )  # fmt: skip
    if is_started_by_torchrun():

        def as_rank(start: Start) -> None:
            job = prepare(options)
            mesh = job.artifact.prefill.mesh.describe()
            work(start(job.num_ranks, mesh, job.device_kind, job.digests), job)

        run_as_rank(as_rank)
    prepare_fork()
    job = prepare(options)
    run_ranks(lambda rank: work(rank, job), job.num_ranks, kind=job.device_kind)
