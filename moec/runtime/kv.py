"""Memory for keys and values: what the states of a Program ask for, on one rank."""

from __future__ import annotations

import torch
from torch import Tensor

from moec.ir.program import Program
from moec.runtime.context import DTYPES


def allocate_kv(program: Program, device: torch.device | str = "cpu") -> dict[int, dict[str, Tensor]]:
    """layer -> state name -> [slots, context, ...] in the state's dtype. Both phases of a plan use the same memory."""
    memory: dict[int, dict[str, Tensor]] = {}
    for run in program.runs:
        states = program.bodies[run.body].states
        for layer in run.layers:
            memory[layer] = {
                name: torch.zeros(
                    (program.slots, program.context, *state.local_shape(program.mesh)),
                    dtype=DTYPES[state.dtype],
                    device=device,
                )
                for name, state in states.items()
            }
    return memory
