"""A model of one sparse layer whose logits show exactly what its experts gave: no tolerance to argue about.

Token t has the embedding 2 at dim t and at the last three dims, so that its mean square is 1 and a norm keeps it as it
is. Attention gives 0. Each unit of an expert gives exactly 1 for every token, and its down rows share out the value the
expert is to have. The head is the identity and the final norm is taken out, so logits minus embedding are the sparse
layer's sum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from moec.ir.build import drop_unused_params, erase
from moec.ir.evaluator.program import Sequence
from moec.ir.program import Program, is_op, op_of
from moec.passes import PASSES
from moec.passes.place_experts import PlaceExperts
from moec.passes.runner import run_passes
from moec.placement import Placement
from tests.programs import Weights, evaluate, gqa, moe, plan, program_of, weights_of

DIM = 16
CONSTANT = (13, 14, 15)  # dims that every token has
Routing = list[tuple[int, ...]]


def known_program(num_experts: int, top: int, shared_inner: int, exchange: str, **degrees: int) -> Program:
    """The lowered program; token t may be 0 to 12."""
    sparse = moe(num_experts, 4, shared_inner, top)
    spec = plan([sparse], gqa(4, 4), exchange, hidden=DIM, vocab=DIM, eps=1e-300, **degrees)
    program = program_of(spec)
    body = program.bodies["epilogue"]
    norm = next(node for node in body.graph.nodes if is_op(node) and op_of(node).name == "rms_norm")
    norm.replace_all_uses_with(norm.args[0])
    erase(body, norm)
    drop_unused_params(body)
    return program


def known_weights(program: Program, routing: Routing, value: Callable[[int], float], shared: float) -> Weights:
    """Weights by which token t goes to the experts `routing[t]`, expert e gives value(e), the shared one `shared`."""
    found = weights_of(program)
    for name, w in found.items():
        w.fill_(1.0 if "norm" in name else 0.0)
        if name.endswith(".gate"):
            w[..., CONSTANT[0]] = 512.0  # silu(1024) is 1024 exactly
        elif name.endswith(".up"):
            w[..., CONSTANT[1]] = 2.0**-11
    tokens = torch.arange(CONSTANT[0])
    found["embed"][tokens, tokens] = 2.0
    found["embed"][:, CONSTANT] = 2.0
    found["head"] = torch.eye(DIM, dtype=torch.float64)
    for token, experts in enumerate(routing):
        found["layers.0.router.weight"][list(experts), token] = 100.0
    for expert, down in enumerate(found["layers.0.experts.down"]):
        down[:] = value(expert) / down.shape[1]
    if "layers.0.shared.down" in found:
        down = found["layers.0.shared.down"]
        units = down.shape[1] & -down.shape[1]  # a power of two, so that the shares are exact
        down[:, :units] = shared / units
    return found


def sparse_sums(
    routing: Routing,
    value: Callable[[int], float],
    num_experts: int = 8,
    shared: float = 0.0,
    shared_inner: int = 0,
    exchange: str = "flat",
    placement: Placement | None = None,
    **degrees: int,
) -> list[float]:
    """What the sparse layer gives for tokens 0, 1, ..., each a sequence of its own, compiled for the given mesh.

    `placement` stands in for the table that place-experts writes.
    """
    program = known_program(num_experts, len(routing[0]) if routing else 1, shared_inner, exchange, **degrees)
    weights = known_weights(program, routing, value, shared)
    placed = PASSES.index(PlaceExperts) + 1
    run_passes(program, [cls() for cls in PASSES[:placed]])
    if placement is not None:
        program.placements["routed"] = placement
    run_passes(program, [cls() for cls in PASSES[placed:]])
    sequences = [Sequence((token,), token) for token in range(len(routing))]
    sums = evaluate(program, weights, [sequences]) - weights["embed"][: len(routing)]
    assert all(len(set(row.tolist())) == 1 for row in sums), sums
    return sums[:, 0].tolist()
