"""The experts of one rank that do not all fit: which slot holds whom, and what is on its way there.

1. `prefetch` starts copies of what a later layer is guessed to need.
2. `demand` claims a slot for each expert that a layer's rows need, and starts the copies that are missing, ahead of all
   guesses.
3. `serve` hands the experts out, those that are there first. Where a layer needs more experts than it has slots, a slot
   is filled again once its expert has been served: so the layer goes in waves.

Who is evicted follows from the order of these calls alone (`moec.cache.residency`), never from when a copy arrives.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moec.cache.predictors import History, most_rows_first
from moec.cache.residency import Load, Residency, Use
from moec.cache_sizes import SLOT_ALIGNMENT
from moec.runtime.experts.copier import Copier
from moec.runtime.experts.file import Contents, Key
from moec.runtime.experts.tiers import NvmeTier
from moec.runtime.experts.transfer import Room, Transfer
from moec.runtime.launch.status import Status
from moec.runtime.weights_reader import TORCH_DTYPES


@dataclass
class Arrivals:
    """How copies met the layers that needed them. `late`: hits on a prefetch that was still under way."""

    late: int = 0
    waited: int = 0


@dataclass(frozen=True)
class Copy:
    """A transfer as it was started: of an expert of a model layer, in a phase, because rows need it or by a guess."""

    layer: int
    expert: int
    phase: str
    is_demand: bool
    transfer: Transfer


class ExpertCache:
    """Slots, and the copies into them. Layers are model layer numbers here, and counted from 0 in `residency`."""

    def __init__(
        self,
        layers: Sequence[int],
        contents: Contents,
        residency: Residency,
        copier: Copier,
        device: torch.device,
        history: History | None = None,
        status: Status | None = None,
    ) -> None:
        """`status`: who waits for a copy says so there, for a tier may be slow without being stuck."""
        self._status = status or Status()
        self.residency, self.copier, self.contents, self._history = residency, copier, contents, history
        self.arrivals = Arrivals()
        self.copies: list[Copy] | None = None  # every one that is started, where somebody wants to know
        self._layers = list(layers)
        self._index = {layer: index for index, layer in enumerate(layers)}
        slot_bytes = max(contents.blob_bytes(index) for index in range(len(layers)))
        stride = -(-slot_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        self.arena = torch.empty(residency.num_slots, stride, dtype=torch.uint8, device=device)
        self._moving: dict[int, Transfer] = {}  # slot -> the copy into it that nobody has waited for yet
        self._uses: dict[int, list[Use]] = {}
        self._rooms: list[dict[int, Room]] = [{} for _ in layers]  # layer -> slot -> where a blob of the layer goes
        self._experts = [frozenset(blobs.experts) for blobs in contents.layers]
        self._filled: dict[str, int] = {}

    def views(self, layer: int) -> dict[str, Tensor]:
        """The parameters of a layer's experts, [slots, ...]: row s is the expert in slot s."""
        found, start = {}, 0
        for name, dtype, shape in self.contents.layers[self._index[layer]].parameters:
            size = torch.Size(shape).numel() * TORCH_DTYPES[dtype].itemsize
            found[name] = self.arena[:, start : start + size].view(TORCH_DTYPES[dtype]).view(-1, *shape)
            start += size
        return found

    def fill(self, order: Sequence[Key]) -> None:
        """Give free slots to the first of `order`, and wait until they and the pinned ones are there."""
        self.residency.fill(order)
        for index in self._index.values():
            for expert in self.residency.resident(index):
                slot = self.residency.slot_of(index, expert)
                assert slot is not None
                self._begin(index, [Load(expert, slot, None)], is_demand=True)
        for transfer in self._moving.values():
            transfer.wait()
            self._status.progressed()
        self._moving.clear()
        self._filled = {lane.tier.name: lane.num_bytes for lane in self.copier.lanes}

    def prefetch(self, layer: int, later: int, counts: Sequence[int], most: int, by: str) -> None:
        """Start copies of at most `most` experts of layer `later` that are in no slot, the best guess first.

        `counts`: rows per expert, as the later layer's router would have them, or by `history` those of `layer`.
        """
        index = self._index[later]
        if by == "history":
            assert self._history is not None
            guessed = self._history.guess(0, self._index[layer], np.asarray(counts), self._history.ahead)
        else:
            guessed = most_rows_first(counts)
        held = self._experts[index]
        mine = [expert for expert in guessed if expert in held]
        self._begin(index, self.residency.prefetch(index, mine, most), is_demand=False)

    def bring_back(self, layer: int, most: int) -> None:
        """Start copies of at most `most` experts of `layer` that are in no slot, those first that it has used most."""
        index = self._index[layer]
        loads = self.residency.prefetch(index, self.residency.most_used(index), most)
        self._begin(index, loads, is_demand=False)

    def demand(self, layer: int, experts: Sequence[int], of_prompts: bool = False) -> Sequence[Use]:
        """Claim a slot for each of `experts`. What is missing is on its way when this returns.

        An expert whose slot another one of them leaves to it is not: `serve` starts it. `of_prompts`: in a step of the
        prefill phase.
        """
        index = self._index[layer]
        uses = self._uses[layer] = self.residency.demand(index, experts, of_prompts)
        if moving := self._moving:
            for use in uses:
                if not use.is_loaded and (guess := moving.get(use.slot)) is not None and not guess.is_done:
                    self.arrivals.late += 1
                    guess.promote()
        if uses and uses[-1].is_loaded:  # loads are last
            begun, _ = _one_of_each_slot(uses)
            self._begin(index, [use for use in begun if use.is_loaded], is_demand=True)
        return uses

    def serve(self, layer: int) -> Iterator[Sequence[Use]]:
        """The experts that `demand` claimed: those that are there together, then the others as they come.

        Each is in its slot until the next ones are asked for.

        Raises:
            MoecError: an expert could not be read.
        """
        begun, later = _one_of_each_slot(self._uses.pop(layer))
        while begun:
            ready = self.next_of(begun)
            for use in ready:
                if (transfer := self._moving.pop(use.slot, None)) is not None:
                    self._wait(transfer)
            yield ready
            served = {use.slot for use in ready}
            begun = [use for use in begun if use.slot not in served]
            if later:
                begun_now, later = _one_of_each_slot(later, but={use.slot for use in begun})
                self._begin(self._index[layer], begun_now, is_demand=True)
                begun = [*begun, *begun_now]
        self.residency.served()

    def next_of(self, begun: Sequence[Use]) -> Sequence[Use]:
        """Which of the experts that have a slot or are on their way are served next: those that are there, else one."""
        moving = self._moving
        return [u for u in begun if (copy := moving.get(u.slot)) is None or copy.is_done] or begun[:1]

    def _wait(self, transfer: Transfer) -> None:
        if transfer.is_done:
            transfer.wait()
            return
        self.arrivals.waited += 1
        with self._status.within("load", "copy experts"):
            transfer.wait()

    @property
    def copied_bytes(self) -> dict[str, int]:
        """Bytes brought whole from each tier, by its name, without those of `fill`."""
        return {lane.tier.name: lane.num_bytes - self._filled.get(lane.tier.name, 0) for lane in self.copier.lanes}

    @property
    def num_rereads(self) -> int:
        """Experts that were read from the checkpoint because the expert file failed."""
        return sum(lane.tier.num_rereads for lane in self.copier.lanes if isinstance(lane.tier, NvmeTier))

    def close(self) -> None:
        """End the copies under way, then close the expert file."""
        self.copier.close()
        for lane in self.copier.lanes:
            if isinstance(lane.tier, NvmeTier):
                lane.tier.close()

    def _begin(self, index: int, loads: Sequence[Use | Load], is_demand: bool) -> None:
        """Copy experts into their slots. A guess that was still on its way there is not wanted any more."""
        moving, rooms, copies = self._moving, self._rooms[index], list[tuple[Key, Room]]()
        for load in loads:
            slot = load.slot
            if (before := moving.get(slot)) is not None:
                before.cancel()
            if (room := rooms.get(slot)) is None:
                room = rooms[slot] = Room.of(self.arena[slot, : self.contents.blob_bytes(index)])
            copies.append(((index, load.expert), room))
        transfers = self.copier.start(copies, is_demand)
        moving.update(zip([load.slot for load in loads], transfers, strict=True))
        if self.copies is not None:
            layer, phase = self._layers[index], self._status.phase
            self.copies += [Copy(layer, transfer.key[1], phase, is_demand, transfer) for transfer in transfers]


def _one_of_each_slot(uses: Sequence[Use], but: Collection[int] = ()) -> tuple[Sequence[Use], Sequence[Use]]:
    """The first use of each slot, of slots not in `but`, and the uses left over."""
    if not but and len({use.slot for use in uses}) == len(uses):
        return uses, ()
    first: dict[int, Use] = {}
    rest = [use for use in uses if use.slot in but or first.setdefault(use.slot, use) is not use]
    return list(first.values()), rest
