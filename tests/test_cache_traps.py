"""B10 and B21: what is in a slot is the expert that its place says, whoever was guessed, evicted or there before.

Slots are poisoned before the run and before each copy into them: bytes that nobody brought are NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from moec.runtime.experts.cache import ExpertCache
from moec.runtime.experts.copier import Copier
from moec.runtime.experts.file import Key
from moec.runtime.experts.transfer import Room, Transfer
from tests import checkpoints
from tests.cached import Run, compile_cached, run_cached, same_bits
from tests.parity import Outcome, compile_checkpoint, run

FAMILY = "deepseek_v3"
#: As in `tests/test_expert_cache.py`: with few rows a step, prefetches pay.
STEPS = ("plan.decode.batch=1", "plan.prefill.tokens=3")
NAN_BYTE = 0xFF  # a float of any width of such bytes is NaN


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A folder of random weights, and prompts."""
    folder = tmp_path_factory.mktemp("traps") / FAMILY
    made = checkpoints.make(FAMILY, folder)
    return folder, checkpoints.prompts(made.config.vocab_size, (9, 4, 14))


@pytest.fixture(scope="module")
def resident(model: tuple[Path, list[list[int]]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """On two ranks with all experts in device memory, in steps of few rows and of many: experts placed in order."""
    folder, prompts = model
    found = {}
    for name, steps in (("few", STEPS), ("many", ())):
        work = tmp_path_factory.mktemp(name)
        found[name] = run(compile_checkpoint(folder, work, "ep=2", "flat", "torch", *steps), folder, work, prompts, 12)
    return found


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a slot held before is NaN when a copy into it starts, and the whole of it at first."""
    init, start = ExpertCache.__init__, Copier.start

    def opened(self: ExpertCache, *args: Any, **settings: Any) -> None:
        init(self, *args, **settings)
        self.arena.fill_(NAN_BYTE)

    def started(self: Copier, copies: Sequence[tuple[Key, Room]], is_demand: bool) -> Sequence[Transfer]:
        for _, room in copies:
            room.memory.fill_(NAN_BYTE)
        return start(self, copies, is_demand)

    monkeypatch.setattr(ExpertCache, "__init__", opened)
    monkeypatch.setattr(Copier, "start", started)


@pytest.fixture
def audited(model: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch) -> None:
    """At its end, each rank compares its slots with the checkpoint's own tensors, and counts what was copied."""
    close = ExpertCache.close

    def audit(self: ExpertCache) -> None:
        num_checked = sum(check_slots(self, layer, model[0]) for layer in self._index)
        assert num_checked >= len(self._index)
        counted = self.residency.counters
        if not any(layer.prefetches for layer in counted):
            sizes = [self.contents.blob_bytes(index) for index in range(len(counted))]
            first = self.residency.num_slots  # all were filled at the start
            moved = sum(layer.misses * size for layer, size in zip(counted, sizes, strict=True))
            assert len(set(sizes)) == 1
            assert sum(lane.num_bytes for lane in self.copier.lanes) == moved + first * sizes[0]
        close(self)

    monkeypatch.setattr(ExpertCache, "close", audit)


def check_slots(cache: ExpertCache, layer: int, folder: Path) -> int:
    """Compare the slots of a layer with the checkpoint; how many there are that nothing is on its way into."""
    index, views, checked = cache._index[layer], cache.views(layer), 0
    with safe_open(folder / "model.safetensors", "pt") as file:
        for expert in cache.residency.resident(index):
            slot = cache.residency.slot_of(index, expert)
            assert slot is not None
            if slot in cache._moving:
                continue
            gate, up, down = (
                file.get_tensor(f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight")
                for name in ("gate", "up", "down")
            )
            assert torch.equal(views["experts.gate_up"][slot], torch.cat([gate, up])), (layer, expert)
            assert torch.equal(views["experts.down"][slot], down), (layer, expert)
            checked += 1
    return checked


def served(model: tuple[Path, list[list[int]]], work: Path, mesh: str, *overrides: str, **cache: str) -> Run:
    folder, prompts = model
    found = run_cached(compile_cached(folder, work, mesh, *overrides, **cache), folder, work, prompts, 12)
    assert found.total("hits") + found.total("misses") == found.total("lookups")
    assert found.total("misses") > 0
    return found


@pytest.mark.usefixtures("poisoned", "audited")
@pytest.mark.parametrize(
    ("placement", "slots", "steps"), [("round_robin", 1, "many"), ("round_robin", 4, "few"), ("linear", 3, "many")]
)
def test_placement_never_shows(
    model: tuple[Path, list[list[int]]],
    resident: dict[str, Outcome],
    tmp_path: Path,
    placement: str,
    slots: int,
    steps: str,
) -> None:
    """B10: the tokens and logits of experts that lie in order. A step of many rows goes in waves."""
    overrides = (f"ranks.placement={placement}", *(STEPS if steps == "few" else ()))
    found = served(model, tmp_path, "ep=2", *overrides, hbm=f"slots({slots})")
    assert same_bits(found.outcome, resident[steps])


def _wrong(counts: Sequence[int]) -> list[int]:
    """Guesses that no row of the later layer's router chose."""
    return [expert for expert, count in enumerate(counts) if count == 0]


@pytest.mark.usefixtures("poisoned", "audited")
@pytest.mark.parametrize(
    ("evict", "slots"),
    [("lru", 2), ("layer_lru", 2), ("least_stale", 5), ("sweep_lfu", 5)],
    ids=lambda value: str(value),
)
def test_guesses_that_are_always_wrong_cost_time_only(
    model: tuple[Path, list[list[int]]],
    resident: dict[str, Outcome],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    evict: str,
    slots: int,
) -> None:
    """B21."""
    monkeypatch.setattr("moec.runtime.experts.cache.most_rows_first", _wrong)
    cache = {"hbm": f"slots({slots})", "evict": evict, "prefetch": "next_router(ahead = 1)"}
    found = served(model, tmp_path, "ep=2", *STEPS, **cache)
    assert same_bits(found.outcome, resident["few"])
    assert found.total("useless") > found.total("prefetch_hits")
