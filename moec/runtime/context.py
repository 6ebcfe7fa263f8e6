"""What a kernel may read beside its arguments: the step, the mesh, this rank's place in it, and its KV memory."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moec.mesh import Mesh
from moec.placement import Placement
from moec.runtime.groups import Group
from moec.runtime.launch.status import Status
from moec.runtime.step import Step

if TYPE_CHECKING:
    from moec.codegen.kernel_choice import Chosen, Product
    from moec.runtime.experts.cache import ExpertCache

#: The torch dtype of each dtype that a Program computes in. Of parameters: `weights_reader.TORCH_DTYPES`.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

#: Where `Context.memo` counts rows left out of padded exchanges, by layer.
DROPPED = "dropped"


@dataclass(frozen=True, eq=False)
class Context:
    """The context of one step, or (after `at`) of one layer in it.

    `states`: layer -> name -> KV memory [slots, context, ...]. `step_memo` and `memo` keep what kernels derive from the
    step alone and from the program alone, so that the layers share it. `phase`: prefill or decode. `cache`: where not
    all experts fit. `chosen`: tiles that Triton kernels have instead of their defaults.
    """

    step: Step
    mesh: Mesh
    rank: int
    placements: Mapping[str, Placement]
    groups: Mapping[str, Group]
    states: Mapping[int, Mapping[str, Tensor]]
    status: Status
    memo: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    step_memo: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    layer: int | None = None
    phase: str = "decode"
    cache: ExpertCache | None = None
    chosen: Mapping[Product, Chosen] = field(default_factory=dict)

    def at(self, layer: int) -> Context:
        """The context of one layer; a rank that dies from here on says so by that layer."""
        self.status.layer = layer
        return replace(self, layer=layer)

    @property
    def kv(self) -> Mapping[str, Tensor]:
        """KV memory of this layer by state name."""
        assert self.layer is not None, "the prologue and the epilogue have no KV memory"
        return self.states[self.layer]

    @property
    def tokens(self) -> Tensor:
        """i64[T]: token ids of this rank's rows."""
        return self.step.tokens

    @property
    def positions(self) -> Tensor:
        """i64[T]: place of each row in its sequence."""
        return self.step.positions

    @property
    def select(self) -> Tensor:
        """i64[L]: rows whose logits are wanted."""
        return self.step.select

    def count_dropped(self, rows: Tensor) -> None:
        """Add `rows` (i64 scalar) to those this layer has left out of padded exchanges since the program was loaded."""
        counted: dict[int | None, Tensor] = self.memo.setdefault(DROPPED, {})
        counted[self.layer] = counted[self.layer] + rows if self.layer in counted else rows

    def held(self, table: str) -> range:
        """Slot numbers that this rank holds under a placement table."""
        found: range | None = self.memo.get(("held", table))
        if found is None:
            counts, index = self.placements[table].counts, self.mesh.coordinate(self.rank, "ep")
            found = self.memo["held", table] = range(sum(counts[:index]), sum(counts[: index + 1]))
        return found

    def held_experts(self, table: str) -> tuple[int, ...]:
        """Ids of the experts that this rank holds under a placement table, in slot order."""
        return self.placements[table].slots[self.mesh.coordinate(self.rank, "ep")]
