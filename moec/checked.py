"""The checked spec: what a `.moe` file means once names, units, ranges and arithmetic are resolved.

Plain frozen values, made by `moec.semantics.checker` and `moec.importer.folder`, read by `moec.lowering`. No torch.
D hidden, V vocabulary, E routed experts, I inner width of one expert.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from moec.diagnostics import Span
from moec.topology import Cluster


@dataclass(frozen=True)
class Yarn:
    """YaRN scaling of rotary frequencies, with DeepSeek-V3's two attention-scale factors."""

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding. `pairs`: `halves` rotates (i, i + d/2), `interleaved` rotates (2i, 2i + 1)."""

    theta: float = 10000.0
    pairs: str = "halves"
    yarn: Yarn | None = None


@dataclass(frozen=True)
class Gqa:
    """Grouped-query attention. `bias`: on q, k and v; `out_bias`: on o; `qk_norm`: RMS norm of each head's q and k."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    bias: bool
    out_bias: bool
    qk_norm: bool
    span: Span


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention. `q_rank` None: q comes straight from the hidden state."""

    name: str
    heads: int
    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int
    span: Span


@dataclass(frozen=True)
class Swiglu:
    """Gated MLP: down(silu(gate x) * (up x))."""

    inner: int
    span: Span


@dataclass(frozen=True)
class Router:
    """Top-k selection. `bias` is added for the selection only; `scale` multiplies the weights, once, here.

    `groups`/`keep`: experts in equal groups, of which the best `keep` stay eligible (1/1: plain top-k).
    """

    name: str
    score: str  # softmax | sigmoid
    top: int
    groups: int
    keep: int
    bias: bool
    renormalize: bool
    scale: float
    span: Span


@dataclass(frozen=True)
class Experts:
    """`count` equal gated MLPs."""

    name: str
    count: int
    inner: int
    span: Span


@dataclass(frozen=True)
class Moe:
    router: Router
    routed: Experts
    shared: Experts | None
    span: Span


@dataclass(frozen=True)
class Layer:
    attention: Gqa | Mla
    ffn: Swiglu | Moe
    span: Span


@dataclass(frozen=True)
class Model:
    """A decoder. `layers` holds one `Layer` per depth; alike layers are the same object, so `is` groups them."""

    name: str
    hidden: int
    vocab: int
    norm_eps: float
    tied: bool
    rotary: Rotary
    weights: str | None  # path or hub name as written; None: no weights
    dtype: str  # the checkpoint's: bf16 | fp16 | fp32
    layers: tuple[Layer, ...]
    span: Span
    expert_dtype: str | None = None  # fp8: routed experts stay in blocks with scales (`moec.blocks`); None: `dtype`


@dataclass(frozen=True)
class MeshSpec:
    """Parallel degrees: dp * tp == edp * ep * etp, and times pp the devices. `placement`: linear | round_robin."""

    name: str
    cluster: Cluster
    dp: int
    tp: int
    edp: int
    ep: int
    etp: int
    placement: str
    span: Span
    pp: int = 1

    @property
    def nodes(self) -> int:
        """Nodes that each ep group of every stage spans with the same number of its ranks in each; 0: not all do."""
        block = self.ep * self.etp
        found = set()
        for start in range(0, self.pp * self.edp * block, block):
            for etp_i in range(self.etp):
                in_node = Counter(self.cluster.node_of(rank) for rank in range(start + etp_i, start + block, self.etp))
                found.add(len(in_node) if len(set(in_node.values())) == 1 else 0)
        return found.pop() if len(found) == 1 else 0


@dataclass(frozen=True)
class Phase:
    """`tokens`: prefill rows per dp rank and step; decode: sequences per dp rank (`batch`).

    `exchange`: flat, padded, gather, two_hop or aggregate. `combine`: ordered (a row per choice comes home) or reduced
    (sums do). Either is auto where the compiler is to choose. `capacity`: room of a padded exchange in even shares,
    None for every token; `drop` what does not fit. `overlap`: off, auto, or the number of chunks. `sums`: fixed, or any
    order in which a rank adds what its experts give.
    """

    name: str  # prefill | decode
    tokens: int
    exchange: str
    span: Span
    combine: str = "ordered"
    capacity: float | None = None
    drop: bool = False
    overlap: str = "off"
    sums: str = "fixed"


@dataclass(frozen=True)
class Tier:
    """Where experts wait that are not in device memory. A rate of None is the cluster's link, where it has one."""

    bytes_per_rank: int | None  # None: no limit
    bandwidth: float | None  # bytes per second, per rank
    latency_s: float  # seconds of one transfer besides its bytes; 0 where `bandwidth` is None
    path: str | None  # the folder of the nvme tier, as written; None: this is host memory
    span: Span


@dataclass(frozen=True)
class Cache:
    """Which of the experts a rank holds are in its device memory, and how the others come there.

    Exactly one of `hbm` (bytes per rank), `slots` (experts per layer and rank) and `share` (part of each layer's
    experts on the rank, above 0, at most 1) is set. Trace files are paths as `moec.semantics.checker` resolved them.
    """

    name: str
    hbm: int | None
    slots: int | None
    share: float | None
    host: Tier | None  # at least one of `host` and `nvme` is set
    nvme: Tier | None
    evict: str  # lru | lfu | layer_lru | least_stale | trace
    evict_trace: str | None  # set where `evict` is trace
    prefetch: str  # none | next_router | history
    prefetch_trace: str | None  # set where `prefetch` is history
    ahead: int  # layers that a prefetch looks ahead; 0 where `prefetch` is none
    pin_shared: bool  # the shared experts stay in device memory: so they do without a `pin`, which only says it
    pinned: tuple[int, ...]  # routed experts of every layer that never leave device memory, ascending
    span: Span


@dataclass(frozen=True)
class Plan:
    name: str
    model: Model
    mesh: MeshSpec
    compute: str  # bf16 | fp16 | fp32
    context: int
    prefill: Phase
    decode: Phase
    span: Span
    cache: Cache | None = None  # None: every expert stays in device memory
