"""What moec's cost model says of the layers that `gpu_moe.py` times, on an H200, from kernels compiled here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from gpu_moe_layers import PUBLISHED, ROUTINGS, TOKENS, WANTED, Layer, expert_loads

from moec.codegen.devices import DEVICES
from moec.codegen.gemm_variant import Projection, RowSource, Store
from moec.codegen.grouped_gemm import specialise
from moec.codegen.kernel_candidates import candidates
from moec.codegen.kernel_select import Choice, select
from moec.codegen.kernel_store import Compiled
from moec.codegen.layer_cost import layer_cost, pair_layer_cost
from moec.codegen.pair_product import PairProduct, compile_pairs, specialise_pairs
from moec.codegen.targets import Dtype, find_target
from moec.compiler_kernels import compile_gemm

DEVICE = DEVICES["h200"]
#: Forms in the order of the table, as in `gpu_moe_kernels`; the first is of at most so many tokens.
FORMS, FEW_TOKENS = ("paired", "gathered", "permuted", "accumulated"), 8


@dataclass(frozen=True)
class Prediction:
    """Microseconds of one case, by form; routing is part of them, as in the published times."""

    layer: str
    tokens: int
    routing: str
    predicted_us: dict[str, float]
    roof_us: float
    published_us: float | None
    wanted_us: float | None


def predictions(layers: Sequence[Layer]) -> Iterator[Prediction]:
    """One prediction a case, printed as it comes. FP8 layers are left out: the model does not know their products."""
    columns = (*FORMS, "roof", "published", "wanted")
    print(f"{'layer':<13}{'T':>6} {'routing':<15}" + "".join(f"{name:>12}" for name in columns))
    for layer in (layer for layer in layers if not layer.is_fp8):
        for tokens in TOKENS:
            for routing in ROUTINGS:
                found = predict(layer, tokens, routing)
                figures = (*map(found.predicted_us.get, FORMS), found.roof_us, found.published_us, found.wanted_us)
                shown = "".join(f"{'-' if us is None else f'{us:.1f}':>12}" for us in figures)
                print(f"{layer.name:<13}{tokens:>6} {routing:<15}{shown}", flush=True)
                yield found


def predict(layer: Layer, tokens: int, routing: str) -> Prediction:
    """The kernels are chosen for this very routing, as the selector chooses for the one that a plan expects."""
    rows = np.array(expert_loads(layer, tokens, routing), dtype=np.int64)

    def chosen(op: Projection, source: RowSource = RowSource.SORTED, store: Store = Store.PLAIN) -> Choice:
        mean = max(1, tokens * layer.top // layer.experts)
        wanted = specialise(
            op, layer.hidden, layer.inner, layer.experts, Dtype.BF16, find_target(DEVICE.target), top=layer.top,
            rows=source, store=store, rows_per_expert=mean,
        )  # fmt: skip
        return select(candidates(wanted), rows, tokens, DEVICE, compile_gemm)

    gathered, permuted = (chosen(Projection.GATE_UP, source) for source in (RowSource.GATHERED, RowSource.SORTED))
    plain, added = (chosen(Projection.DOWN, store=store) for store in (Store.PLAIN, Store.ACCUMULATED))
    forms = {"gathered": (gathered, plain), "permuted": (permuted, plain), "accumulated": (gathered, added)}
    costs = {
        form: layer_cost((up.values, up.kernel), (down.values, down.kernel), rows, tokens, DEVICE)
        for form, (up, down) in forms.items()
    }
    if tokens <= FEW_TOKENS:
        costs["paired"] = pair_layer_cost(
            pair_kernel(layer, Projection.GATE_UP), pair_kernel(layer, Projection.DOWN), rows, tokens, DEVICE
        )
    return Prediction(
        layer.name, tokens, routing, {form: cost.predicted_us for form, cost in costs.items()},
        costs["gathered"].roof_us, PUBLISHED.get((layer.name, routing), {}).get(tokens),
        WANTED.get((layer.name, routing), {}).get(tokens),
    )  # fmt: skip


def pair_kernel(layer: Layer, op: Projection) -> tuple[PairProduct, Compiled]:
    """A projection that is multiplied pair by pair, where one rank holds all experts."""
    experts, target = layer.experts, find_target(DEVICE.target)
    values = specialise_pairs(op, layer.hidden, layer.inner, experts, experts, layer.top, Dtype.BF16, target)
    return values, compile_pairs(values)
