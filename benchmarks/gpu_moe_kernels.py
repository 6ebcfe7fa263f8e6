"""One MoE layer by moec's kernels, by torch's grouped product, and by an fp64 product of the same weights.

Shapes: T tokens, D hidden, I inner, E experts, k choices, X = T * k rows at experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from gpu_moe_layers import Layer
from torch import Tensor

from moec.codegen.gemm_variant import Projection, RowSource, Store
from moec.mesh import Mesh
from moec.placement import Placement
from moec.runtime.context import Context
from moec.runtime.device_flags import raise_faults
from moec.runtime.kernels import triton_quantised as fp8
from moec.runtime.kernels.triton_pairs import multiply_pairs
from moec.runtime.kernels.triton_products import launch_grouped_gemm, specialise_for
from moec.runtime.kernels.triton_rows import sort_pairs, sum_rows
from moec.runtime.launch.status import Status
from moec.runtime.quantise import QuantisedWeights, dequantise, quantise_fp8_blocks
from moec.runtime.step import make_step

TABLE = "routed"
#: Forms of a layer: rows gathered in the product or copied in order before it; sums in fixed order, or added up as they
#: come, which the plan must allow (`sums = any`); pairs multiplied one by one, of which there must be few.
FORMS = ("gathered", "permuted", "accumulated", "paired")
#: Rows up to which the last form is of use.
FEW_TOKENS = 8
Matrix = Tensor | QuantisedWeights


@dataclass(frozen=True, eq=False)
class Experts:
    """Weights of a layer: gate_up [E, 2 I, D], its I lines of gate first, and down [E, D, I]."""

    gate_up: Matrix
    down: Matrix


def make_experts(layer: Layer, device: torch.device, seed: int = 0) -> Experts:
    """Random weights of about unit gain, made expert by expert, so that fp32 copies stay small."""
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(lines: int, depth: int, sides: int) -> Matrix:
        shape = (layer.experts, lines, depth)
        made = torch.empty(shape, dtype=torch.bfloat16, device=device)
        for expert in range(layer.experts):
            made[expert].normal_(0, depth**-0.5, generator=generator)
        return _fp8(made, sides) if layer.is_fp8 else made

    return Experts(matrix(2 * layer.inner, layer.hidden, 2), matrix(layer.hidden, layer.inner, 1))


def _fp8(made: Tensor, sides: int) -> QuantisedWeights:
    parts = [quantise_fp8_blocks(part, sides) for part in torch.split(made, 8)]
    values, scales = torch.cat([part.values for part in parts]), torch.cat([part.scales for part in parts])
    return QuantisedWeights(parts[0].format, values, scales, parts[0].depth, sides)


def one_rank(layer: Layer) -> Context:
    """A context in which one rank holds all experts."""
    placement = Placement((tuple(range(layer.experts)),))
    return Context(make_step([]), Mesh(), 0, {TABLE: placement}, {}, {}, Status(0))


@dataclass(frozen=True, eq=False)
class LayerKernels:
    """The layer from chosen experts to sums, in one of `FORMS`."""

    layer: Layer
    context: Context
    form: str

    def __call__(self, x_TD: Tensor, ids_Tk: Tensor, weights_Tk: Tensor, experts: Experts) -> Tensor:
        """[T, D], in x's dtype."""
        if self.form == "paired":
            gate_up, down = experts.gate_up, experts.down
            assert isinstance(gate_up, Tensor) and isinstance(down, Tensor)
            return multiply_pairs(self.context, x_TD, ids_Tk, weights_Tk, gate_up, down, table=TABLE)
        found = sort_pairs(self.context, x_TD, ids_Tk, table=TABLE, copies=self.form == "permuted")
        if isinstance(experts.gate_up, QuantisedWeights):
            return self._fp8(x_TD, found.rows, found.offsets, found.pairs, found.places, weights_Tk, experts)
        top, gate_up, down = self.layer.top, experts.gate_up, experts.down
        assert isinstance(down, Tensor)
        rows = x_TD if found.rows is None else found.rows
        pairs = found.pairs if found.rows is None else None
        source = RowSource.GATHERED if found.rows is None else RowSource.SORTED
        act_XI = x_TD.new_empty((found.pairs.numel(), self.layer.inner))
        values = specialise_for(None, Projection.GATE_UP, rows, gate_up, act_XI.shape[0], top=top, rows=source)
        launch_grouped_gemm(values, rows, found.offsets, gate_up, act_XI, pairs)
        if self.form == "accumulated":
            sums_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
            values = specialise_for(
                None, Projection.DOWN, act_XI, down, act_XI.shape[0], top=top, store=Store.ACCUMULATED
            )
            launch_grouped_gemm(values, act_XI, found.offsets, down, sums_TD, found.pairs, weights_Tk.flatten())
            return sums_TD.to(x_TD.dtype)
        out_XD = x_TD.new_empty((act_XI.shape[0], self.layer.hidden))
        values = specialise_for(None, Projection.DOWN, act_XI, down, act_XI.shape[0])
        launch_grouped_gemm(values, act_XI, found.offsets, down, out_XD)
        return sum_rows(out_XD, found.places, weights_Tk)

    def _fp8(
        self, x_TD: Tensor, rows_XD: Tensor | None, offsets_E: Tensor, pairs_X: Tensor, places_Tk: Tensor,
        weights_Tk: Tensor, experts: Experts,
    ) -> Tensor:  # fmt: skip
        assert isinstance(experts.gate_up, QuantisedWeights) and isinstance(experts.down, QuantisedWeights)
        rows = fp8.quantise_rows(x_TD if rows_XD is None else rows_XD)
        pairs = pairs_X if rows_XD is None else None
        act_XI = fp8.grouped_gate_up(
            rows, offsets_E, experts.gate_up, pairs_X=pairs, top=self.layer.top, dtype=x_TD.dtype
        )
        out_XD = fp8.grouped_linear(fp8.quantise_rows(act_XI), offsets_E, experts.down, dtype=x_TD.dtype)
        return sum_rows(out_XD, places_Tk, weights_Tk)

    def check(self) -> None:
        """Raise what the kernels have flagged."""
        raise_faults(self.context)


def forms_of(layer: Layer, tokens: int) -> tuple[str, ...]:
    """The forms that serve so many tokens: FP8 experts are not added as they come, nor multiplied pair by pair."""
    return FORMS[:2] if layer.is_fp8 else FORMS if tokens <= FEW_TOKENS else FORMS[:3]


def peer(x_TD: Tensor, ids_Tk: Tensor, weights_Tk: Tensor, experts: Experts) -> Tensor:
    """The layer by `torch.nn.functional.grouped_mm`, in bf16: rows sorted, two products, sums."""
    gate_up, down = experts.gate_up, experts.down
    assert isinstance(gate_up, Tensor) and isinstance(down, Tensor)
    num_tokens, top = ids_Tk.shape
    sorted_X, order_X = ids_Tk.flatten().sort(stable=True)
    names_E = torch.arange(gate_up.shape[0], device=ids_Tk.device)
    ends_E = torch.searchsorted(sorted_X, names_E, right=True).to(torch.int32)  # bincount would wait for the device
    rows_XD = x_TD.index_select(0, order_X // top)
    gate_XI, up_XI = F.grouped_mm(rows_XD, gate_up.transpose(1, 2), offs=ends_E).chunk(2, dim=-1)
    out_XD = F.grouped_mm(F.silu(gate_XI).mul_(up_XI), down.transpose(1, 2), offs=ends_E)
    home_XD = torch.empty_like(out_XD).index_copy_(0, order_X, out_XD)
    return torch.bmm(weights_Tk.to(x_TD.dtype).unsqueeze(1), home_XD.view(num_tokens, top, -1)).squeeze(1)


def reference(x_TD: Tensor, ids_Tk: Tensor, weights_Tk: Tensor, experts: Experts, tokens: Tensor) -> Tensor:
    """The layer in fp64 for some of the tokens, from what the weights stand for: [len(tokens), D]."""
    sums = torch.zeros((len(tokens), x_TD.shape[1]), dtype=torch.float64, device=x_TD.device)
    for place, token in enumerate(tokens.tolist()):
        for expert, weight in zip(ids_Tk[token].tolist(), weights_Tk[token].tolist(), strict=True):
            gate, up = (_plain(experts.gate_up, expert) @ x_TD[token].double()).chunk(2)
            sums[place] += weight * (_plain(experts.down, expert) @ (F.silu(gate) * up))
    return sums


def _plain(w: Matrix, expert: int) -> Tensor:
    if isinstance(w, Tensor):
        return w[expert].double()
    one = QuantisedWeights(w.format, w.values[expert][None], w.scales[expert][None], w.depth, w.sides)
    return dequantise(one, torch.float64)[0]


Forward = Callable[[Tensor, Tensor, Tensor, Experts], Tensor]
