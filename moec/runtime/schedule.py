"""Which prompts run where and when. Every rank computes the whole schedule, so all of them take the same steps.

1. Prompts are dealt to the dp ranks, neighbours together, as evenly as they go.
2. A dp rank with more prompts than KV slots takes them in waves.
3. In a wave, prompts are cut into prefill steps of at most `budget` tokens; a long prompt continues in the next step.
   A dp rank that is done steps along with no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moec.diagnostics import fail
from moec.mesh import Mesh
from moec.placement import balanced


@dataclass(frozen=True)
class Limits:
    """What a plan allows: tokens of a sequence, prefill rows per step, sequences at once, and the vocabulary."""

    context: int
    prefill_tokens: int
    slots: int
    vocab: int


@dataclass(frozen=True)
class Chunk:
    """Tokens start..stop of the sequence in a slot. `is_last`: the prompt ends here."""

    slot: int
    start: int
    stop: int
    is_last: bool


@dataclass(frozen=True)
class Wave:
    """For each dp rank: the prompts in its slots, and its prefill steps (as many on every dp rank)."""

    prompts: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[tuple[Chunk, ...], ...], ...]


def check_prompts(prompts: Sequence[Sequence[int]], max_new_tokens: int, limits: Limits) -> None:
    """Refuse prompts that cannot run.

    Raises:
        MoecError: E0617, a prompt has no tokens; E0614, an id outside the vocabulary; E0611, longer than the context.
    """
    for index, tokens in enumerate(prompts):
        if not tokens:
            raise fail("E0617", f"prompt {index} has no tokens", "give it at least one")
        for token in tokens:
            if not 0 <= token < limits.vocab:
                message = f"token {token} of prompt {index} is outside the vocabulary of {limits.vocab}"
                raise fail("E0614", message, f"ids go from 0 to {limits.vocab - 1}")
        if len(tokens) + max_new_tokens > limits.context:
            message = (
                f"prompt {index} has {len(tokens)} tokens and {max_new_tokens} are to follow,"
                f" but the plan's context is {limits.context}"
            )
            raise fail("E0611", message, "lower --max-new-tokens or compile with --set plan.context=N")


def make_schedule(lengths: Sequence[int], dp: int, limits: Limits) -> list[Wave]:
    """The waves for prompts of the given lengths."""
    first, dealt = 0, []
    for count in balanced(len(lengths), dp):
        dealt.append(range(first, first + count))
        first += count
    num_waves = -(-len(dealt[0]) // limits.slots)
    return [
        _wave([tuple(mine[n * limits.slots : (n + 1) * limits.slots]) for mine in dealt], lengths, limits)
        for n in range(num_waves)
    ]


def first_steps(lengths: Sequence[int], max_new_tokens: int, mesh: Mesh, limits: Limits) -> dict[str, int]:
    """By phase: rows of the dp rank that has the most, in the first step. A phase that does not run is left out.

    Sequences decode in as many micro-batches as there are pipeline stages; the first one is the largest.
    """
    wave = make_schedule(lengths, mesh.dp, limits)[0]
    rows = {"prefill": max(sum(chunk.stop - chunk.start for chunk in steps[0]) for steps in wave.steps)}
    if max_new_tokens > 1:
        rows["decode"] = max(balanced(len(prompts), mesh.pp)[0] for prompts in wave.prompts)
    return rows


def _wave(prompts: list[tuple[int, ...]], lengths: Sequence[int], limits: Limits) -> Wave:
    steps = [_prefill_steps([lengths[p] for p in mine], limits.prefill_tokens) for mine in prompts]
    longest = max(map(len, steps))
    return Wave(tuple(prompts), tuple(tuple(mine + [()] * (longest - len(mine))) for mine in steps))


def _prefill_steps(lengths: Sequence[int], budget: int) -> list[tuple[Chunk, ...]]:
    """Sequences in slot order, packed into steps of `budget` tokens."""
    steps: list[list[Chunk]] = []
    room = 0
    for slot, length in enumerate(lengths):
        start = 0
        while start < length:
            if room == 0:
                steps.append([])
                room = budget
            stop = min(length, start + room)
            steps[-1].append(Chunk(slot, start, stop, stop == length))
            room -= stop - start
            start = stop
    return [tuple(step) for step in steps]
