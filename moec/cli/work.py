"""What `moec run` prepares before its ranks start, and what each rank then does. Imports torch."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from safetensors.torch import save
from torch import Tensor

from moec.artifact import Artifact, load
from moec.cache.trace import write_trace as write_routing
from moec.cache_files import CacheSettings, find_cache
from moec.cli.errors import cannot_print, say
from moec.cli.run import Options
from moec.cli.timeline import write_timeline
from moec.compiler import compile
from moec.diagnostics import MoecError, fail
from moec.files import cache_folder, check_place, write_whole
from moec.ir.fp8_notes import notes as fp8_notes
from moec.runtime.capturable import notes as graph_notes
from moec.runtime.cpp_library import notes as kernel_notes
from moec.runtime.experts.notes import OneNote, gather_counts
from moec.runtime.generate import Request, collect_logits, generate
from moec.runtime.launch.rank import Rank, device_kind
from moec.runtime.launch.status import Status
from moec.runtime.routing_record import Recorder as RoutingRecorder
from moec.runtime.routing_record import check_recordable, gather_trace, num_routed
from moec.runtime.run_counts import gather_dropped, may_drop, tell_dropped
from moec.runtime.sampling import Sampling
from moec.runtime.schedule import check_prompts
from moec.runtime.session import check_device, check_weights, no_gpu, open_session, read_limits
from moec.runtime.text import Text, TextStream, parse_tokens, read_eos, read_prompts
from moec.runtime.timeline import gather_events, start_recorder
from moec.weights_path import find_weights


@dataclass(frozen=True)
class Job:
    """Everything a rank needs, read and checked."""

    artifact: Artifact
    folder: Path
    text: Text
    request: Request
    logits: Path | None
    timeline: Path | None
    record: Path | None
    cache: CacheSettings
    as_json: bool
    weights_digest: str
    device_kind: str

    @property
    def num_ranks(self) -> int:
        return self.artifact.num_ranks

    @property
    def digests(self) -> dict[str, str]:
        """What must be the same on all ranks: ranks that torchrun starts have read it each for themselves."""
        request = self.request
        asked = [request.prompts, request.max_new_tokens, sorted(request.eos), asdict(request.sampling)]
        outputs = [request.keep_logits, self.timeline is not None, self.record is not None, self.cache.is_emulated]
        return {
            "versions of moec and torch": f"{version('moec')} {torch.__version__}",
            "program": _digest(_programs(self.artifact)),
            "prompts and options": _digest([asked, outputs]),
            "weights": self.weights_digest,
        }


def prepare(options: Options) -> Job:
    """Compile or load the program, find the weights and read the prompts. Raises what is wrong with any of them."""
    kind = _kind_of_device(options)
    is_made = options.source.is_dir()
    artifact = load_artifact(options) if is_made else compile_file(options)
    bases = artifact.bases(options.source) if is_made else options.source.parent
    if options.kernels != "interpret":
        check_device(artifact, kind)
    folder = find_weights(artifact.document["weights"]["path"], bases, options.weights)
    assert folder is not None
    is_compiled = options.weights is None or not options.source.is_dir()
    digest = _digest(check_weights(artifact, folder, is_compiled).to_json())
    text = Text(folder)
    prompts = [text.encode(prompt) for prompt in options.prompts] + [parse_tokens(given) for given in options.tokens]
    prompts += read_prompts(options.prompts_file, text) if options.prompts_file else []
    eos = frozenset[int]() if options.ignore_eos else read_eos(folder)
    sampling = Sampling(options.temperature, options.seed)
    request = Request(prompts, options.max_new_tokens, eos, sampling, options.logits is not None)
    cache = find_cache(artifact.document, artifact.bases(options.source), options.is_emulated)
    cache = replace(cache, warn=OneNote())
    if options.record is not None:
        check_recordable(artifact.programs)
    for path in (options.logits, options.timeline, options.record):
        if path is not None:
            check_place(path)
    check_prompts(prompts, options.max_new_tokens, read_limits(artifact))
    reasons = [*kernel_notes(artifact.programs, kind), *fp8_notes(artifact.programs)]
    notes = [f"{note}; torch's kernels serve" for note in reasons]
    notes += graph_notes(artifact.programs, kind)
    for note in notes:
        if os.environ.get("RANK", "0") == "0":
            say(f"moec: note: {note}")
    outputs = options.logits, options.timeline, options.record
    return Job(artifact, folder, text, request, *outputs, cache, options.as_json, digest, kind)


def _kind_of_device(options: Options) -> str:
    """cuda or cpu. Raises E0537 where Triton's kernels are asked for and there is no GPU."""
    kind = device_kind()
    if options.kernels == "triton" and kind == "cpu":
        raise no_gpu("`--kernels triton` needs a GPU, and PyTorch sees none")
    return "cpu" if options.kernels == "interpret" else kind


def compile_file(options: Options) -> Artifact:
    """Compile the .moe file, and keep the artifact in the cache folder for reading."""
    artifact = _compile(options.source, options.plan, options)
    kept = [artifact.files(), str(options.source.parent.resolve())]  # the saved plan tells the way to that folder
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_folder() / f"{options.source.stem}-{digest}"
    if os.environ.get("RANK", "0") == "0" and not folder.exists():
        try:
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            artifact.save(folder)
        except (MoecError, OSError) as error:
            say(f"moec: note: the compiled program is not kept: {error}")
    return artifact


def load_artifact(options: Options) -> Artifact:
    """The artifact in a folder. What changes the program recompiles it from its .moe file.

    Raises:
        MoecError: E0619, the file is gone or does not compile to this artifact, so a change would lose others.
    """
    artifact = load(options.source)
    named = options.plan or artifact.document["plan"]
    if not options.overrides and options.kernels == "torch" and named == artifact.document["plan"]:
        return artifact
    file = Path(artifact.document["source"])
    places = (file, *(base / file.name for base in artifact.bases(options.source)))
    found = next((path for path in places if path.is_file()), None)
    help = f"compile and run the file with these options: moec run {file.name} ..."
    if found is None:
        raise fail("E0619", f"`{options.source}` cannot be recompiled: its source `{file}` is not here", help)
    same = compile(found, artifact.document["plan"], target=artifact.document["target"], weights=options.weights)
    if _programs(same) != _programs(artifact):
        why = f"`{found}` changed since, or it was compiled with other options"
        raise fail("E0619", f"`{options.source}` cannot be recompiled: {why}", help)
    return _compile(found, named, options, artifact.document["target"])


def _compile(file: Path, plan: str | None, options: Options, target: str = "cpu") -> Artifact:
    kernels = "triton" if options.kernels == "interpret" else options.kernels
    return compile(file, plan, options.overrides, target, kernels, weights=options.weights)


def _programs(artifact: Artifact) -> list[str]:
    """The text of every program, but for its first line, which names the source file."""
    return [text.partition("\n")[2] for name, text in artifact.files().items() if name.endswith(".ir")]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def work(rank: Rank, job: Job) -> None:
    """One rank's run. Rank 0 prints and writes."""
    is_first = rank.rank == 0
    with _progress_bar(is_first and not job.as_json and sys.stderr.isatty()) as progress:
        session = open_session(job.artifact, job.folder, rank, progress, job.cache)
    recorder = start_recorder(session.place, session.cache) if job.timeline else None
    routing = RoutingRecorder() if job.record else None
    for watcher in (recorder, routing):
        if watcher is not None:
            session.record(watcher)
    writer = _Writer(job, rank.status) if is_first and not job.as_json else None
    result = generate(session, job.request, session.limits, session.place, writer or _silent)
    logits = collect_logits(job.request, result, session.limits, session.place) if job.logits else []
    events = gather_events(recorder, session.place) if recorder is not None else []
    chosen = gather_trace(routing, session.place, num_routed(job.artifact.programs)) if routing is not None else None
    counted: dict[str, dict[str, int]] = {}
    wants_counts = job.as_json and job.artifact.document.get("cache")
    if wants_counts and (found := gather_counts(session.cache, session.place)):  # none where nothing is cached
        counted["cache"] = found
    if may_drop(job.artifact.programs):
        counted["dropped"] = gather_dropped(session)
    session.close()
    if not is_first:
        return
    rank.status.begin("output")
    if job.timeline is not None:
        write_timeline(job.timeline, events, job.artifact, job.request)
    if job.record is not None:
        assert chosen is not None
        write_routing(job.record, chosen)
    if job.logits is not None:
        save_logits(job.logits, job.request.prompts, logits)
    if job.as_json:
        text = [job.text.decode(tokens) for tokens in result.tokens]
        _print(json.dumps({"tokens": result.tokens, "text": text} | counted) + "\n")
    tell_dropped(counted.get("dropped", {}))


def _print(text: str) -> None:
    """To standard output at once. Raises E0618 where it takes no more; a closed pipe stays a BrokenPipeError."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise cannot_print(error) from error


def save_logits(path: Path, prompts: Sequence[Sequence[int]], logits: Sequence[Tensor]) -> None:
    """`logits` fp32 [batch, tokens, vocab] and `tokens` [batch, tokens], zeros behind shorter prompts; their `lengths`.

    Raises:
        MoecError: E0618, the file cannot be written. An older file is then as it was.
    """
    pad = torch.nn.utils.rnn.pad_sequence
    tensors = {
        "logits": pad([rows.float().cpu() for rows in logits], batch_first=True),
        "tokens": pad([torch.tensor(tokens) for tokens in prompts], batch_first=True),
        "lengths": torch.tensor([len(tokens) for tokens in prompts]),
    }
    write_whole(path, save(tensors))


class _Writer:
    """Shows tokens as they come: one prompt streams, of several each is shown when it ends."""

    def __init__(self, job: Job, status: Status) -> None:
        self.status = status
        self.streams = [TextStream(job.text) for _ in job.request.prompts]
        self.parts: list[list[str]] = [[] for _ in self.streams]

    def __call__(self, prompt: int, token: int, is_last: bool) -> None:
        part = self.streams[prompt].push(token, is_last)
        if len(self.streams) == 1:
            self._write(part + ("\n" if is_last else ""))
            return
        self.parts[prompt].append(part)
        if is_last:
            self._write(f"[{prompt}] {''.join(self.parts[prompt])}\n")

    def _write(self, text: str) -> None:
        """Waits as long as the reader does."""
        with self.status.within("output", "output"):
            _print(text)


def _silent(prompt: int, token: int, is_last: bool) -> None:
    """Ranks other than the first show nothing."""


@contextmanager
def _progress_bar(is_shown: bool) -> Iterator[Callable[[int, int], None] | None]:
    if not is_shown:
        yield None
        return
    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
