"""Batched generation on every rank of a mesh, in lockstep.

1. `make_schedule` says what every dp rank computes when; each rank runs its own part of it.
2. Prefill a wave, then decode one token per live sequence and step, until the wave is done on all ranks.
3. After each decode step all ranks exchange their new tokens: so each knows which sequences have ended, all leave the
   loop together, rank 0 can stream, and ranks that hold the same sequence are held against each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from moec.diagnostics import fail
from moec.mesh import Mesh
from moec.placement import balanced
from moec.runtime.groups import Group
from moec.runtime.launch.status import Status
from moec.runtime.messages import finish, gather, start
from moec.runtime.sampling import Sampling, next_tokens
from moec.runtime.schedule import Chunk, Limits, Wave, check_prompts, make_schedule
from moec.runtime.step import Extent, Piece, Step, make_step

_NONE = -1


class Model(Protocol):
    """A compiled model on one rank: logits fp32 [L, V] of the rows a step selects, by the program of either phase."""

    def prefill(self, step: Step) -> Tensor: ...
    def decode(self, step: Step) -> Tensor: ...


@dataclass(frozen=True)
class Place:
    """Where this process stands: its mesh and rank, the groups it is in, its device and its status."""

    mesh: Mesh = field(default_factory=Mesh)
    rank: int = 0
    groups: Mapping[str, Group] = field(default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    status: Status = field(default_factory=Status)


@dataclass(frozen=True)
class Request:
    """`eos`: token ids that end a sequence. `keep_logits`: keep the logits of every prompt token."""

    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    sampling: Sampling = field(default_factory=Sampling)
    keep_logits: bool = False


#: Called on every rank with a prompt's index, each new token, and whether it is the last one.
OnToken = Callable[[int, int, bool], None]


@dataclass
class Result:
    """New tokens by prompt (EOS included). `logits`: by prompt, fp32 [tokens, V], of this dp rank's prompts."""

    tokens: list[list[int]]
    logits: dict[int, Tensor]


def generate(
    model: Model, request: Request, limits: Limits, place: Place, on_token: OnToken = lambda *_: None
) -> Result:
    """Run a request. Every rank calls it with the same request and gets the tokens of all prompts.

    Raises:
        MoecError: E0611, E0614, E0617 for prompts that cannot run, E0612 for logits that are not finite, E0616 when
            ranks that hold the same sequence disagree.
    """
    check_prompts(request.prompts, request.max_new_tokens, limits)
    run = _Run(model, request, limits, place, on_token)
    for wave in make_schedule([len(prompt) for prompt in request.prompts], place.mesh.dp, limits):
        run.wave(wave)
    return run.result


class _Run:
    """The state of one request on one rank."""

    def __init__(self, model: Model, request: Request, limits: Limits, place: Place, on_token: OnToken) -> None:
        self.model, self.request, self.limits, self.place, self.on_token = model, request, limits, place, on_token
        self.dp_rank = place.mesh.coordinate(place.rank, "dp")
        self.is_last_stage = place.rank // place.mesh.size == place.mesh.pp - 1
        self.result = Result([[] for _ in request.prompts], {})
        self.num_steps = 0

    def wave(self, wave: Wave) -> None:
        mine = wave.prompts[self.dp_rank]
        first = self._prefill(wave, mine)
        if self.request.max_new_tokens == 0:
            return
        self._take(wave, first)
        while any(self._is_live(prompt) for prompts in wave.prompts for prompt in prompts):
            self._take(wave, self._decode(wave, mine))

    def _prefill(self, wave: Wave, mine: Sequence[int]) -> dict[int, int]:
        """Run the prompts of a wave; the first new token of each of this dp rank's prompts."""
        first: dict[int, int] = {}
        for chunks in wave.steps[self.dp_rank]:
            pieces = [
                Piece(
                    self.request.prompts[mine[chunk.slot]][chunk.start : chunk.stop], chunk.slot, chunk.start,
                    "all" if self.request.keep_logits else "last" if chunk.is_last else "none",
                )
                for chunk in chunks
            ]  # fmt: skip
            logits = self._forward(self.model.prefill, pieces)
            if not self.is_last_stage:
                continue
            if self.request.keep_logits:
                logits = self._keep(logits, [mine[chunk.slot] for chunk in chunks], chunks)
            first |= self._sample(logits, [mine[chunk.slot] for chunk in chunks if chunk.is_last])
        return first

    def _keep(self, logits: Tensor, prompts: Sequence[int], chunks: Sequence[Chunk]) -> Tensor:
        """Keep the logits of all rows; the rows that end a prompt are returned."""
        ends = []
        for prompt, chunk, block in zip(
            prompts, chunks, _pieces(logits, [c.stop - c.start for c in chunks]), strict=True
        ):
            before = [self.result.logits[prompt]] if chunk.start else []
            self.result.logits[prompt] = torch.cat([*before, block])
            ends += [block[-1:]] if chunk.is_last else []
        return torch.cat([logits[:0], *ends])

    def _decode(self, wave: Wave, mine: Sequence[int]) -> dict[int, int]:
        """One step of this dp rank's live sequences; the new token of each, on the last stage.

        The sequences go in as many micro-batches as there are stages, so that the stages compute at the same time.
        """
        live = [(slot, prompt) for slot, prompt in enumerate(mine) if self._is_live(prompt)]
        new: dict[int, int] = {}
        first = 0
        for size in balanced(len(live), self.place.mesh.pp):
            batch, first = live[first : first + size], first + size
            pieces = [Piece(self.result.tokens[prompt][-1:], slot, self._length(prompt) - 1) for slot, prompt in batch]
            logits = self._forward(self.model.decode, pieces, self._extent(wave))
            if self.is_last_stage:
                new |= self._sample(logits, [prompt for _, prompt in batch])
        return new

    def _extent(self, wave: Wave) -> Extent | None:
        """Of the decode step that comes next; none where sequences go in several micro-batches."""
        if self.place.mesh.pp > 1:
            return None
        live = [(slot, p) for prompts in wave.prompts for slot, p in enumerate(prompts) if self._is_live(p)]
        return Extent(max(slot for slot, _ in live) + 1, max(self._length(prompt) for _, prompt in live))

    def _forward(
        self, phase: Callable[[Step], Tensor], pieces: Sequence[Piece], extent: Extent | None = None
    ) -> Tensor:
        self.place.status.step, self.place.status.layer = self.num_steps, None
        self.place.status.begin("step")
        self.num_steps += 1
        return phase(make_step(pieces, self.place.device, extent))

    def _sample(self, logits: Tensor, prompts: Sequence[int]) -> dict[int, int]:
        rows = [(prompt, self._length(prompt)) for prompt in prompts]
        return dict(zip(prompts, next_tokens(logits, rows, self.request.sampling), strict=True))

    def _length(self, prompt: int) -> int:
        return len(self.request.prompts[prompt]) + len(self.result.tokens[prompt])

    def _is_live(self, prompt: int) -> bool:
        tokens = self.result.tokens[prompt]
        return len(tokens) < self.request.max_new_tokens and not (tokens and tokens[-1] in self.request.eos)

    def _take(self, wave: Wave, new: Mapping[int, int]) -> None:
        """Add the new tokens of all ranks, this one's being `new`."""
        self.place.status.layer = None
        for prompt, token in self._shared(wave, new):
            self.result.tokens[prompt].append(token)
            self.on_token(prompt, token, not self._is_live(prompt))

    def _shared(self, wave: Wave, new: Mapping[int, int]) -> Iterator[tuple[int, int]]:
        """(prompt, token) of all live sequences of the wave. Raises E0616 when two ranks disagree on a token."""
        if self.place.mesh.world == 1:
            yield from new.items()
            return
        width = max(map(len, wave.prompts))
        mine = [new.get(prompt, _NONE) for prompt in wave.prompts[self.dp_rank]]
        told = torch.tensor([mine + [_NONE] * (width - len(mine))], device=self.place.device)
        rows = gather(self.place.groups["world"], told, [1] * self.place.mesh.world, "exchange_tokens").tolist()
        sampling = _last_stage(self.place.mesh)
        leaders = {self.place.mesh.coordinate(rank, "dp"): rank for rank in reversed(sampling)}
        for rank in sampling:
            leader = leaders[self.place.mesh.coordinate(rank, "dp")]
            if rows[rank] != rows[leader]:
                message = f"ranks {leader} and {rank} hold the same sequences and chose different tokens"
                raise fail("E0616", message, "this is a bug in moec or faulty hardware: please report it")
        for dp_rank, prompts in enumerate(wave.prompts):
            for prompt, token in zip(prompts, rows[leaders[dp_rank]], strict=False):
                if token != _NONE:
                    yield prompt, token


def gather_bytes(place: Place, mine: bytes, op: str) -> list[bytes]:
    """What each rank gives, in rank order, on every rank."""
    if place.mesh.world == 1:
        return [mine]
    world = place.groups["world"]
    sizes = gather(world, torch.tensor([len(mine)], device=place.device), [1] * world.size, op).tolist()
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(place.device)
    data, ends = gather(world, sent, sizes, op).cpu().numpy().tobytes(), itertools.accumulate(sizes)
    return [data[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def collect_logits(request: Request, result: Result, limits: Limits, place: Place) -> list[Tensor]:
    """On rank 0: the kept logits of all prompts, fp32 [tokens, V] each; an empty list on the other ranks."""
    lengths = [len(prompt) for prompt in request.prompts]
    mine = [result.logits[prompt] for prompt in sorted(result.logits)]
    mesh = place.mesh
    if mesh.world == 1:
        return mine
    is_leader = mesh.coordinate(place.rank, "tp") == 0
    empty = torch.empty((0, limits.vocab), dtype=torch.float32, device=place.device)
    rows = torch.cat([empty, *(mine if is_leader else [])])
    sizes = [0] * mesh.world
    first = _last_stage(mesh).start
    for wave in make_schedule(lengths, mesh.dp, limits):
        for dp_rank, prompts in enumerate(wave.prompts):
            sizes[first + dp_rank * mesh.tp] += sum(lengths[prompt] for prompt in prompts)
    sends = [len(rows)] + [0] * (mesh.world - 1)
    receives = sizes if place.rank == 0 else [0] * mesh.world
    whole = finish(start(place.groups["world"], rows, sends, receives, "collect_logits"))
    return _pieces(whole, lengths) if place.rank == 0 else []


def _last_stage(mesh: Mesh) -> range:
    """The ranks that compute logits."""
    return range(mesh.world - mesh.size, mesh.world)


def _pieces(rows: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The first sizes[0] rows, the next sizes[1], and so on."""
    ends = list(itertools.accumulate(sizes))
    return [rows[end - size : end] for size, end in zip(sizes, ends, strict=True)]
