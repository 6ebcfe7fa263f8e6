"""A kernel's context made by hand: one rank's step, mesh, placement table and KV memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from moec.mesh import Mesh
from moec.placement import Placement, linear
from moec.runtime.context import Context
from moec.runtime.launch.status import Status
from moec.runtime.step import Piece, make_step


def context(
    pieces: Sequence[Piece] = (),
    *,
    kv: dict[str, Tensor] | None = None,
    placement: Placement | None = None,
    rank: int = 0,
    layer: int = 3,
    nodes: int = 1,
) -> Context:
    """The context of layer 3; the placement table is named `routed`, and its ranks are an ep group over `nodes`."""
    placement = placement or linear(8, 1)
    ep = len(placement.slots)
    return Context(
        step=make_step(pieces),
        mesh=Mesh(dp=ep, ep=ep, nodes=nodes),
        rank=rank,
        placements={"routed": placement},
        groups={},
        states={layer: kv or {}},
        status=Status(rank),
        layer=layer,
    )


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Every tensor that is allocated and not written holds NaN (or the largest integer)."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
