"""What a whole MoE layer costs on one device, kernel by kernel: bytes, launches, microseconds, and the published times.

Kernels that move rows do nothing but that: bytes over the rate of memory, and their launches. T tokens of D hidden each
choose k of E experts; X rows are served here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moec.codegen.devices import LAUNCH_US, MEMORY_SHARE, Device
from moec.codegen.expected_rows import Rows
from moec.codegen.gemm_variant import RowSource, Store
from moec.codegen.grouped_gemm import GroupedGemm
from moec.codegen.kernel_cost import GemmCost, gemm_cost
from moec.codegen.kernel_rows import GroupRows, group_signatures, specialise_group
from moec.codegen.kernel_store import Compiled
from moec.codegen.pair_cost import pair_cost
from moec.codegen.pair_product import PairProduct

#: Microseconds that aiconfigurator (NVIDIA, commit 095f58a) measured for the layer of Qwen3-30B-A3B, bf16, one H200, by
#: CUDA graph without flushing L2: (tokens, SGLang, TRT-LLM, vLLM) with even routing, then with `power_law_1.01`.
PUBLISHED_US = (
    (1, (36.6, 41.8, 40.3), (36.4, 43.8, 41.2)),
    (8, (165.1, 164.1, 171.8), (134.0, 133.0, 150.0)),
    (64, (301.9, 307.0, 316.0), (278.0, 283.0, 292.0)),
    (512, (338.2, 358.2, 349.6), (342.0, 385.0, 357.0)),
    (1024, (388.7, 407.9, 406.1), (421.0, 441.0, 437.0)),
    (2048, (436.1, 478.9, 461.6), (545.0, 566.0, 563.0)),
    (4096, (660.1, 712.0, 691.2), (816.0, 839.0, 834.0)),
    (16384, (2377.0, 2483.0, 2463.0), (2559.0, 2549.0, 2647.0)),
)


@dataclass(frozen=True)
class RowsCost:
    """A kernel that moves rows: `moved` bytes of memory, and `l2` bytes out of cache, in `launches` launches."""

    name: str
    moved: float
    launches: int
    device: Device
    l2: float = 0.0

    @property
    def predicted_us(self) -> float:
        moving = self.moved / (self.device.memory_gbps * 1e3 * MEMORY_SHARE)
        return self.launches * LAUNCH_US + moving + self.l2 / (self.device.l2_gbps * 1e3)


@dataclass(frozen=True)
class LayerCost:
    """All kernels of a layer. `traffic_ratio`: bytes moved over the least; `padding`: rows computed over those served.

    Bytes are those of rows and weights: the router's own results, which routing reads, are in neither.
    """

    gate_up: GemmCost
    down: GemmCost
    others: tuple[RowsCost, ...]
    roof_us: float

    @property
    def launches(self) -> int:
        return 2 + sum(cost.launches for cost in self.others)

    @property
    def moved(self) -> float:
        moving = sum(cost.moved for cost in self.others if cost.name != "route")
        return self.gate_up.traffic.moved + self.down.traffic.moved + moving

    @property
    def minimum(self) -> float:
        return self.gate_up.traffic.minimum + self.down.traffic.minimum

    @property
    def traffic_ratio(self) -> float:
        return self.moved / self.minimum

    @property
    def padding(self) -> float:
        return self.gate_up.padded_rows / max(1, self.gate_up.useful_rows)

    @property
    def issue_us(self) -> float:
        return self.gate_up.issue_us + self.down.issue_us

    @property
    def predicted_us(self) -> float:
        return self.gate_up.predicted_us + self.down.predicted_us + sum(cost.predicted_us for cost in self.others)


def layer_cost(
    gate_up: tuple[GroupedGemm, Compiled], down: tuple[GroupedGemm, Compiled], rows: Rows, tokens: int, device: Device
) -> LayerCost:
    """The layer of two compiled kernels on one rank that holds all experts, for `rows` [E] of `tokens` tokens.

    Rows are copied where `gate_up` wants them sorted, and summed by a kernel of its own where `down` does not.
    """
    (up, up_kernel), (values, kernel) = gate_up, down
    useful, width = int(rows.sum()), values.dtype.num_bytes
    others = [
        RowsCost("route", route_bytes(tokens, len(rows), up.top), 1, device),
        _group_cost(up, tokens, useful, device),
    ]
    if values.store is not Store.ACCUMULATED:
        others.append(reduce_cost(tokens, up.top, useful, up.hidden * width, device))
    costs = [
        gemm_cost(of, rows, tokens, device, compiled.code, compiled.report.shared_bytes)
        for of, compiled in ((up, up_kernel), (values, kernel))
    ]
    minimum = sum(cost.traffic.minimum for cost in costs)
    roof = device.roof_us(minimum, 6.0 * useful * up.hidden * up.inner, up.dtype)
    return LayerCost(costs[0], costs[1], tuple(others), roof)


def pair_layer_cost(
    gate_up: tuple[PairProduct, Compiled], down: tuple[PairProduct, Compiled], rows: Rows, tokens: int, device: Device
) -> LayerCost:
    """The layer of two compiled kernels that multiply pair by pair, for `rows` [E] of `tokens` tokens."""
    costs = [
        pair_cost(values, rows, tokens, device, kernel.code, kernel.report.shared_bytes)
        for values, kernel in (gate_up, down)
    ]
    values = gate_up[0]
    route = RowsCost("route", route_bytes(tokens, len(rows), values.top), 1, device)
    flops = 6.0 * int(rows.sum()) * values.hidden * values.inner
    roof = device.roof_us(sum(cost.traffic.minimum for cost in costs), flops, values.dtype)
    return LayerCost(costs[0], costs[1], (route,), roof)


def route_bytes(tokens: int, experts: int, top: int) -> float:
    """fp32 logits in; i64 ids and fp32 weights out."""
    return tokens * (4.0 * experts + 12.0 * top)


def _group_cost(up: GroupedGemm, tokens: int, useful: int, device: Device) -> RowsCost:
    copies = up.rows is RowSource.SORTED
    values = specialise_group(up.experts, up.experts, up.top, up.hidden, up.dtype, tokens, copies=copies)
    row_bytes = up.hidden * up.dtype.num_bytes * copies
    return group_cost(values, tokens, useful, row_bytes, device)


def group_cost(values: GroupRows, tokens: int, useful: int, row_bytes: int, device: Device) -> RowsCost:
    """Ids are read, pairs and places written, and rows copied, where `row_bytes` is not 0.

    Where there are two launches, each program of the second reads the counts of all programs, out of cache.
    """
    lists = 2.0 * 8 * tokens * values.top + 8.0 * useful + 4.0 * tokens * values.top
    copied = float(row_bytes) * (min(tokens, useful) + useful)
    counts = 0.0 if values.alone else 4.0 * values.held * values.num_programs(tokens) ** 2
    launches = len(group_signatures(values))
    return RowsCost("group_rows" if row_bytes else "group_pairs", lists + copied, launches, device, counts)


def reduce_cost(tokens: int, top: int, useful: int, row_bytes: int, device: Device) -> RowsCost:
    """Rows, places and weights in, one row of each token out."""
    return RowsCost("reduce_rows", float(row_bytes) * (useful + tokens) + 8.0 * tokens * top, 1, device)


@dataclass(frozen=True)
class Comparison:
    """One line of the table of published times: `predicted_us` against the best and all of `published_us`."""

    tokens: int
    routing: str
    roof_us: float
    predicted_us: float
    published_us: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Predicted over the best published: below 1 is faster."""
        return self.predicted_us / min(self.published_us)


def compare(tokens: int, routing: str, cost: LayerCost) -> Comparison:
    """A predicted layer beside what was published for it; `routing` is `balanced` or `power_law`."""
    _, balanced, skewed = next(line for line in PUBLISHED_US if line[0] == tokens)
    return Comparison(tokens, routing, cost.roof_us, cost.predicted_us, balanced if routing == "balanced" else skewed)


def comparison_lines(found: Sequence[Comparison]) -> list[str]:
    """The table as text: one line for each size and routing."""
    head = (
        f"{'T':>6} {'routing':<10} {'roof':>7} {'predicted':>9} {'of roof':>7} {'SGLang':>7} {'TRT-LLM':>7} {'vLLM':>7}"
    )
    lines = [f"{head} {'to best':>7}"]
    for one in found:
        times = " ".join(f"{us:>7.0f}" for us in one.published_us)
        share = one.roof_us / one.predicted_us
        line = f"{one.tokens:>6} {one.routing:<10} {one.roof_us:>7.1f} {one.predicted_us:>9.1f} {share:>7.2f} {times}"
        lines.append(f"{line} {one.ratio:>7.2f}")
    return lines
