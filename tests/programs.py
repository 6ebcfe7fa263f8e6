"""Plans, weights and steps for tests of the IR and the passes: fixed ones by name, random ones by seed.

Everything follows from its arguments: the same seed gives the same plan, weights and tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from collections.abc import Sequence as Several
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moec.blocks import SCALES
from moec.checked import (
    Cache,
    Experts,
    Gqa,
    Layer,
    MeshSpec,
    Mla,
    Model,
    Moe,
    Phase,
    Plan,
    Rotary,
    Router,
    Swiglu,
    Tier,
    Yarn,
)
from moec.diagnostics import SourceFile, Span
from moec.ir.evaluator.program import Reference, Sequence
from moec.ir.parse import parse
from moec.ir.program import Program
from moec.ir.text import print_program
from moec.lowering import lower
from moec.passes import PASSES
from moec.passes.runner import Observer, run_passes
from moec.topology import Cluster, Device, Link

SPAN = Span(SourceFile("toy.moe", "model toy {}\n"), 0, 5)
HIDDEN, VOCAB = 10, 11

# --- fixed plans -------------------------------------------------------------------------------------------------


def gqa(heads: int = 4, kv_heads: int = 2, bias: bool = False, qk_norm: bool = False) -> Gqa:
    return Gqa("attention", heads, kv_heads, 4, bias, bias, qk_norm, SPAN)


def mla(heads: int = 4, q_rank: int | None = 6) -> Mla:
    return Mla("attention", heads, q_rank, 5, 3, 2, 4, SPAN)


def moe(
    count: int = 8,
    inner: int = 6,
    shared: int = 0,
    top: int = 2,
    score: str = "softmax",
    bias: bool = False,
    **router: Any,
) -> Moe:
    """`shared`: inner width of one shared expert, 0 for none."""
    settings = {"groups": 1, "keep": 1, "renormalize": True, "scale": 1.0} | router
    owner = Router("router", score, top, bias=bias, span=SPAN, **settings)
    beside = Experts("shared", 1, shared, SPAN) if shared else None
    return Moe(owner, Experts("routed", count, inner, SPAN), beside, SPAN)


def few(slots: int, prefetch: str = "none", rate: float | None = None, **changes: Any) -> Cache:
    """A cache of so many slots whose other experts wait in host memory, which gives `rate` bytes a second."""
    host = Tier(None, rate, 0.0, None, SPAN)
    made = Cache(
        name="few", hbm=None, slots=slots, share=None, host=host, nvme=None, evict="layer_lru", evict_trace=None,
        prefetch=prefetch, prefetch_trace=None, ahead=int(prefetch != "none"), pin_shared=False, pinned=(), span=SPAN,
    )  # fmt: skip
    return replace(made, **changes)


def plan(
    ffns: Iterable[Moe | Swiglu],
    attention: Gqa | Mla | None = None,
    exchange: str = "flat",
    placement: str = "linear",
    tied: bool = False,
    rotary: Rotary | None = None,
    hidden: int = HIDDEN,
    vocab: int = VOCAB,
    eps: float = 1e-6,
    combine: str | None = None,
    overlap: str = "off",
    nodes: int = 1,
    cache: Cache | None = None,
    expert_dtype: str | None = None,
    **degrees: int,
) -> Plan:
    """One layer per element of `ffns`. Degrees as for `moec.mesh.Mesh`; what is left out is 1.

    `combine`: as the checker settles it where the plan says nothing.
    """
    attention = attention or gqa()
    layers: dict[int, Layer] = {}
    stack = tuple(layers.setdefault(id(ffn), Layer(attention, ffn, SPAN)) for ffn in ffns)
    model = Model("toy", hidden, vocab, eps, tied, rotary or Rotary(), None, "fp32", stack, SPAN, expert_dtype)
    found = {axis: degrees.get(axis, 1) for axis in ("dp", "tp", "edp", "ep", "etp")}
    pp = degrees.get("pp", 1)
    cluster = Cluster("localhost", nodes, found["dp"] * found["tp"] * pp // nodes)
    mesh = MeshSpec("mesh", cluster, *found.values(), placement, SPAN, pp)
    combine = combine or ("ordered" if exchange == "flat" else "reduced")
    prefill, decode = (
        Phase(name, tokens, exchange, SPAN, combine, overlap=overlap)
        for name, tokens in (("prefill", 16), ("decode", 8))
    )
    return Plan("plan", model, mesh, "fp32", 16, prefill, decode, SPAN, cache)


def program_of(plan: Plan, phase: str = "prefill") -> Program:
    return lower(plan, plan.prefill if phase == "prefill" else plan.decode, "toy.moe")


def compiled(
    plan: Plan, stop_after: str | None = None, observers: Iterable[Observer] = (), phase: str = "prefill"
) -> Program:
    """The plan's program behind `stop_after`, or behind all passes."""
    program = program_of(plan, phase)
    run_passes(program, [cls() for cls in PASSES], observers, stop_after)
    return program


def edited(program: Program, *changes: tuple[str, str]) -> Program:
    """The program its text says once each (old, new) is replaced; every old text must be there once."""
    text = print_program(program)
    for old, new in changes:
        assert text.count(old) == 1, f"{text.count(old)} times {old!r} in\n{text}"
        text = text.replace(old, new)
    return parse(text)


# --- random plans ------------------------------------------------------------------------------------------------


def random_plan(seed: int, most_stages: int = 1) -> Plan:
    """1-3 layers of up to two kinds, 1-16 experts, up to 8 ranks a stage on any degrees the checker allows."""
    rng = random.Random(seed)
    degrees = _random_degrees(rng)
    attention = _random_attention(rng, degrees["tp"])
    kinds = [_random_moe(rng, degrees["etp"], "routed"), _random_ffn(rng, degrees["etp"], "other")]
    stack = rng.choices(kinds, weights=(2, 1), k=rng.randint(1, 3))
    yarn = Yarn(4.0, 8, mscale=1.0, mscale_all_dim=rng.choice((0.0, 0.7)))
    rotary = Rotary(rng.choice((100.0, 10000.0)), rng.choice(("halves", "interleaved")), rng.choice((None, None, yarn)))
    placement, tied = rng.choice(("linear", "round_robin")), rng.random() < 0.3
    pp = min(rng.choice((1, 1, 2, 3)), len(stack), most_stages)
    made = plan(stack, attention, placement=placement, tied=tied, rotary=rotary, pp=pp, **degrees)
    return _random_dtype(seed, _random_cache(rng, _random_exchange(rng, made)))


def _random_dtype(seed: int, made: Plan) -> Plan:
    """Some of the plans that etp does not cut inside a block have their experts in fp8."""
    is_fp8 = made.mesh.etp == 1 and random.Random(f"dtype {seed}").random() < 0.3
    return replace(made, model=replace(made.model, expert_dtype="fp8" if is_fp8 else None))


#: Every lowering of an exchange, and what comes back.
LOWERINGS = (
    ("flat", "ordered"),
    ("flat", "reduced"),
    ("padded", "reduced"),
    ("gather", "reduced"),
    ("two_hop", "reduced"),
    ("aggregate", "reduced"),
)
#: Exchange and combine of a phase.
EXCHANGES = (*LOWERINGS, ("auto", "auto"))


def _random_exchange(rng: random.Random, made: Plan) -> Plan:
    """The plan on nodes with links of some rates, its rows travelling in any way that these allow."""
    world = made.mesh.cluster.num_devices
    device = Device(memory_gbps=rng.choice((None, 100.0)), tflops=(("fp32", 1.0),))
    links = Link(rng.choice((0.01, 10.0)), rng.choice((0.0, 5.0))), Link(0.001, rng.choice((0.0, 20.0)))
    meshes = [
        replace(made.mesh, cluster=Cluster("cluster", nodes, world // nodes, device, *links))
        for nodes in _divisors(world)
    ]
    two_hops = [mesh for mesh in meshes if 1 < mesh.nodes < mesh.ep]
    mesh = rng.choice(two_hops or [mesh for mesh in meshes if mesh.nodes])
    ((exchange, combine),) = rng.choices(
        EXCHANGES, weights=(1, 1, 1, 1, 5, 5, 2) if two_hops else (2, 2, 2, 2, 1, 1, 1)
    )
    capacity = rng.choice((None, float(mesh.ep))) if exchange == "padded" else None  # room for all in either case
    overlaps = (
        ("off", "auto", "1") if exchange in ("padded", "auto") else ("off", "auto", "1", "2", "2:layer", "3:layer")
    )
    overlap = rng.choice(overlaps)
    phases = (
        replace(phase, tokens=20, exchange=exchange, combine=combine, capacity=capacity, overlap=overlap)
        for phase in (made.prefill, made.decode)
    )
    prefill, decode = phases
    return replace(made, mesh=mesh, prefill=prefill, decode=decode)


def _random_cache(rng: random.Random, made: Plan) -> Plan:
    """The plan with some experts waiting elsewhere, fetched ahead or not, at a rate that is known or not.

    Small steps, in which a prefetch may pay, where no buffer has room for just so many tokens.
    """
    sparse = [layer.ffn.routed.count for layer in made.model.layers if isinstance(layer.ffn, Moe)]
    if not sparse or made.prefill.overlap not in ("off", "auto", "1") or rng.random() < 0.2:
        return made
    pinned = tuple(e for e in range(min(sparse)) if rng.random() < 0.1)
    slots, ahead = len(pinned) + rng.choice((1, 1, 1, 2)), rng.choice((1, 1, 1, 2))
    prefetch = rng.choice(("none", "next_router", "next_router", "next_router", "history"))
    cache = few(slots, prefetch, rng.choice((None, 1e8)), ahead=ahead, pinned=pinned)
    if made.prefill.exchange in ("padded", "auto"):
        return replace(made, cache=cache)
    prefill, decode = (replace(phase, tokens=rng.choice((1, 1, 20))) for phase in (made.prefill, made.decode))
    return replace(made, cache=cache, prefill=prefill, decode=decode)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _random_degrees(rng: random.Random) -> dict[str, int]:
    size = rng.choice((1, 2, 2, 3, 4, 4, 6, 8))
    tp = rng.choice(_divisors(size))
    etp = rng.choice([d for d in _divisors(size) if max(d, tp) % min(d, tp) == 0])
    ep = rng.choice(_divisors(size // etp)[-2:])
    return {"dp": size // tp, "tp": tp, "edp": size // etp // ep, "ep": ep, "etp": etp}


def _random_attention(rng: random.Random, tp: int) -> Gqa | Mla:
    heads = tp * rng.choice((1, 2))
    if rng.random() < 0.4:
        return mla(heads, rng.choice((None, 6)))
    kv_heads = rng.choice([k for k in _divisors(heads) if k % tp == 0 or tp % k == 0])
    return gqa(heads, kv_heads, rng.random() < 0.3, rng.random() < 0.5)


def _random_ffn(rng: random.Random, etp: int, name: str) -> Moe | Swiglu:
    return _random_moe(rng, etp, name) if rng.random() < 0.7 else Swiglu(rng.randint(1, 12), SPAN)


def _random_moe(rng: random.Random, etp: int, name: str) -> Moe:
    count = rng.randint(1, 16)
    groups = rng.choice(_divisors(count))
    keep = rng.randint(1, groups)
    top = rng.randint(1, min(4, count // groups * keep))
    router = Router(
        "router",
        rng.choice(("softmax", "sigmoid")),
        top,
        groups,
        keep,
        rng.random() < 0.5,
        rng.random() < 0.5,
        rng.choice((1.0, 2.5)),
        SPAN,
    )
    shared = Experts("shared", rng.randint(1, 2), rng.randint(1, 5), SPAN) if rng.random() < 0.5 else None
    return Moe(router, Experts(name, count, etp * rng.randint(1, 3), SPAN), shared, SPAN)


# --- weights and steps -------------------------------------------------------------------------------------------

Weights = dict[str, Tensor]


def weights_of(program: Program, seed: int = 0, ties: bool = False) -> Weights:
    """Every logical parameter of a lowered program, fp64, in fp8 one that is there. Scales are some powers of two.

    `ties`: about half of the experts score exactly alike.
    """
    generator = torch.Generator().manual_seed(seed)
    found: Weights = {}
    for body in program.bodies.values():
        for layer in program.layers_of(body.name) or [None]:
            for name, param in body.params.items():
                (part,) = param.parts
                scale = param.shape[-1] ** -0.5 if len(param.shape) > 1 else 1.0
                value = torch.randn(param.shape, generator=generator, dtype=torch.float64) * scale
                if param.is_fp8:
                    value = value.float().to(torch.float8_e4m3fn).double()
                elif name.endswith(SCALES):
                    value = torch.exp2(torch.randint(-1, 2, param.shape, generator=generator).double())
                if name.startswith("router.") and ties:
                    value[torch.rand(param.shape[0], generator=generator) < 0.5] = 0.0
                found.setdefault(part if layer is None else f"layers.{layer}.{part}", value)
    return found


Steps = list[list[Sequence]]

#: Two prompts, then one more token of each.
STEPS: Steps = [[Sequence((1, 2, 3), 0), Sequence((7, 4), 1)], [Sequence((5,), 0, 3), Sequence((6,), 1, 2)]]


def random_steps(seed: int) -> Steps:
    """A prompt step and one that continues it. Often fewer sequences than ranks, some of no row at all."""
    rng = random.Random(seed)
    cached = [0] * rng.choice((0, 1, 1, 2, 3, 5))
    steps: Steps = []
    for longest in (4, 1):
        counts = [rng.randint(0, longest) for _ in cached]
        rows = [tuple(rng.choices(range(VOCAB), k=count)) for count in counts]
        steps.append([Sequence(tokens, slot, cached[slot]) for slot, tokens in enumerate(rows)])
        cached = [before + count for before, count in zip(cached, counts, strict=True)]
    return steps


def evaluate(program: Program | Several[Program], weights: Weights, steps: Steps) -> Tensor:
    """Logits [rows of all steps, V] of the reference evaluator; of several programs as stages of one pipeline."""
    stages = [Reference(p, weights) for p in ([program] if isinstance(program, Program) else program)]
    logits = []
    for step in steps:
        rows: Tensor | None = None
        for stage in stages:
            rows = stage.step(step, rows)
        assert rows is not None
        logits.append(rows)
    return torch.cat(logits)
