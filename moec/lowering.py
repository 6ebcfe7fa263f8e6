"""Checked spec -> the first Program: every value whole on every rank, one body per kind of layer.

What the model computes is written here once, in the operations of `moec.ir.ops.table`; the passes then decide where.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from torch import fx

from moec.blocks import SCALES, scales_shape
from moec.checked import Experts, Gqa, Layer, Mla, Model, Moe, Phase, Plan, Rotary, Swiglu
from moec.diagnostics import Span
from moec.ir.build import Builder
from moec.ir.params import Param, State
from moec.ir.program import Body, Cache, Loc, Program, Run, Tier
from moec.mesh import Mesh
from moec.topology import Link

#: DeepSeek's reference code norms the two low-rank latents with this constant, whatever the model's own eps.
LATENT_EPS = 1e-6


def lower(plan: Plan, phase: Phase, source: str) -> Program:
    """The Program of one phase. `source`: the main `.moe` file as it is shown in errors.

    A Program says where its nodes come from relative to that file, so that it does not depend on the working folder.
    """
    spec = plan.mesh
    program = Program(
        name=plan.model.name,
        phase=phase.name,
        source=os.path.basename(source),
        mesh=Mesh(spec.dp, spec.tp, spec.edp, spec.ep, spec.etp, spec.nodes, spec.pp),
        cluster=spec.cluster,
        tokens=phase.tokens,
        slots=plan.decode.tokens,
        context=plan.context,
        dtype=plan.compute,
        exchange=phase.exchange,
        combine=phase.combine,
        capacity=phase.capacity,
        drop=phase.drop,
        overlap=phase.overlap,
        sums=phase.sums,
        cache=_cache(plan),
        strategy=spec.placement,
    )
    model, lowered = plan.model, _Source(source)
    _prologue(program, model, lowered)
    for name, layer, layers in _kinds(model):
        _LayerLowering(program, model, name, layer, lowered).lower()
        program.runs += [Run(name, run) for run in _consecutive(layers)]
    program.runs.sort(key=lambda run: run.layers.start)
    program.runs.insert(0, Run("prologue"))
    _epilogue(program, model, lowered)
    program.runs.append(Run("epilogue"))
    return program


def _cache(plan: Plan) -> Cache | None:
    """The plan's expert cache. A tier that declares no rate has that of the cluster's link to it."""
    given, cluster = plan.cache, plan.mesh.cluster
    if given is None:
        return None
    tiers = [
        Tier(name, tier.bytes_per_rank, link if tier.bandwidth is None else _link(tier.bandwidth, tier.latency_s))
        for name, tier, link in (("host", given.host, cluster.host), ("nvme", given.nvme, cluster.nvme))
        if tier is not None
    ]
    return Cache(
        evict=given.evict, tiers=tuple(tiers), slots=given.slots, hbm=given.hbm, share=given.share,
        prefetch=given.prefetch, ahead=max(1, given.ahead), pinned=given.pinned,
    )  # fmt: skip


def _link(bandwidth: float, latency_s: float) -> Link:
    """From bytes and seconds to GB and microseconds."""
    return Link(bandwidth / 1e9, latency_s * 1e6)


def _kinds(model: Model) -> list[tuple[str, Layer, list[int]]]:
    """Distinct layers in order of first use: a name for the body, the layer, the depths that use it."""
    found: dict[int, tuple[Layer, list[int]]] = {}
    for depth, layer in enumerate(model.layers):
        found.setdefault(id(layer), (layer, []))[1].append(depth)
    names: dict[str, int] = {}
    out = []
    for layer, depths in found.values():
        kind = "sparse" if isinstance(layer.ffn, Moe) else "dense"
        names[kind] = names.get(kind, 0) + 1
        out.append((kind if names[kind] == 1 else f"{kind}_{names[kind]}", layer, depths))
    return out


def _consecutive(depths: list[int]) -> list[range]:
    out: list[range] = []
    for depth in depths:
        if out and out[-1].stop == depth:
            out[-1] = range(out[-1].start, depth + 1)
        else:
            out.append(range(depth, depth + 1))
    return out


@dataclass(frozen=True)
class _Source:
    """Turns spans into locations relative to the main file."""

    name: str

    def loc(self, span: Span) -> Loc:
        line, column = span.source.position(span.start)
        file = span.source.name
        if file == self.name:
            return Loc(line, column)
        is_shipped = file.startswith("specs/")
        return Loc(line, column, file if is_shipped else os.path.relpath(file, os.path.dirname(self.name) or "."))


def _whole(program: Program, name: str, *shape: int, dtype: str | None = None) -> Param:
    return Param((name,), shape, dtype or program.dtype)


def _prologue(program: Program, model: Model, source: _Source) -> None:
    body = program.bodies["prologue"] = Body("prologue")
    body.params["embed"] = _whole(program, "embed", model.vocab, model.hidden)
    build = Builder(program, body)
    tokens = build.input("tokens")
    body.graph.output(build.emit("embed", tokens, build.param("embed"), at=source.loc(model.span)))


def _epilogue(program: Program, model: Model, source: _Source) -> None:
    """Final norm and head; prefill first keeps only the rows whose logits are wanted."""
    body = program.bodies["epilogue"] = Body("epilogue")
    body.params["norm"] = _whole(program, "norm", model.hidden)
    owner = "embed" if model.tied else "head"
    body.params["head"] = Param((owner,), (model.vocab, model.hidden), program.dtype)
    build, loc = Builder(program, body), source.loc(model.span)
    x = build.input("x")
    if program.phase == "prefill":
        x = build.emit("take", x, build.input("select"), at=loc)
    h = build.emit("rms_norm", x, build.param("norm"), at=loc, eps=model.norm_eps)
    body.graph.output(build.emit("linear", h, build.param("head"), at=loc))


class _LayerLowering:
    """Lowers one kind of layer: x + attention(norm x), then x + ffn(norm x)."""

    def __init__(self, program: Program, model: Model, name: str, layer: Layer, source: _Source) -> None:
        self.program, self.model, self.layer, self.source = program, model, layer, source
        self.body = program.bodies[name] = Body(name)
        self.build = Builder(program, self.body)

    def lower(self) -> None:
        x = self.build.input("x")
        self.positions = self.build.input("positions")
        attention, ffn = self.layer.attention, self.layer.ffn
        loc = self.source.loc(attention.span)
        h = self._norm(x, "attention_norm", self.model.hidden, loc)
        y = self._gqa(attention, h, loc) if isinstance(attention, Gqa) else self._mla(attention, h, loc)
        x = self.build.emit("add", x, y, at=loc)
        loc = self.source.loc(ffn.span)
        h = self._norm(x, "ffn_norm", self.model.hidden, loc)
        y = self._mlp("ffn", ffn.inner, h, loc) if isinstance(ffn, Swiglu) else self._moe(ffn, h)
        self.body.graph.output(self.build.emit("add", x, y, at=loc))

    def _param(self, name: str, *shape: int, dtype: str | None = None) -> fx.Node:
        self.body.params[name] = _whole(self.program, name, *shape, dtype=dtype)
        return self.build.param(name)

    def _norm(self, x: fx.Node, name: str, width: int, loc: Loc, eps: float | None = None) -> fx.Node:
        eps = self.model.norm_eps if eps is None else eps
        node: fx.Node = self.build.emit("rms_norm", x, self._param(name, width), at=loc, eps=eps)
        return node

    def _linear(self, x: fx.Node, name: str, out: int, inner: int, loc: Loc) -> fx.Node:
        node: fx.Node = self.build.emit("linear", x, self._param(name, out, inner), at=loc)
        return node

    def _rope(self, x: fx.Node, loc: Loc) -> fx.Node:
        rotary = self.model.rotary
        node: fx.Node = self.build.emit(
            "rope", x, self.positions, at=loc, theta=rotary.theta, pairs=rotary.pairs, yarn=_yarn(rotary)
        )
        return node

    def _gqa(self, spec: Gqa, h: fx.Node, loc: Loc) -> fx.Node:
        dim, heads = spec.head_dim, {"q": spec.heads, "k": spec.kv_heads, "v": spec.kv_heads}
        found = {}
        for name, count in heads.items():
            y = self._linear(h, f"attention.{name}", count * dim, self.model.hidden, loc)
            if spec.bias:
                y = self.build.emit("add_bias", y, self._param(f"attention.{name}_bias", count * dim), at=loc)
            y = self.build.emit("split_heads", y, at=loc, head_dim=dim)
            if spec.qk_norm and name != "v":
                y = self._norm(y, f"attention.{name}_norm", dim, loc)
            found[name] = self._rope(y, loc) if name != "v" else y
        for name in ("k", "v"):
            self.body.states[name] = State((spec.kv_heads, dim), self.program.dtype)
        o = self.build.emit("attention", found["q"], found["k"], found["v"], at=loc, scale=dim**-0.5)
        y = self._out(o, spec.heads * dim, loc)
        if spec.out_bias:
            y = self.build.emit("add_bias", y, self._param("attention.o_bias", self.model.hidden), at=loc)
        return y

    def _out(self, o: fx.Node, width: int, loc: Loc) -> fx.Node:
        merged = self.build.emit("merge_heads", o, at=loc)
        return self._linear(merged, "attention.o", self.model.hidden, width, loc)

    def _mla(self, spec: Mla, h: fx.Node, loc: Loc) -> fx.Node:
        """Decode keeps the latent as it is (`absorbed`: kv_b is applied to query and output); prefill expands it."""
        width = spec.heads * (spec.nope + spec.rope)
        if spec.q_rank is None:
            q = self._linear(h, "attention.q", width, self.model.hidden, loc)
        else:
            low = self._linear(h, "attention.q_a", spec.q_rank, self.model.hidden, loc)
            low = self._norm(low, "attention.q_a_norm", spec.q_rank, loc, LATENT_EPS)
            q = self._linear(low, "attention.q_b", width, spec.q_rank, loc)
        q = self.build.emit("split_heads", q, at=loc, head_dim=spec.nope + spec.rope)
        q_nope, q_rope = self.build.emit("split", q, at=loc, sizes=(spec.nope, spec.rope))
        kv = self._linear(h, "attention.kv_a", spec.kv_rank + spec.rope, self.model.hidden, loc)
        latent, k_rope = self.build.emit("split", kv, at=loc, sizes=(spec.kv_rank, spec.rope))
        latent = self._norm(latent, "attention.kv_a_norm", spec.kv_rank, loc, LATENT_EPS)
        self.body.states["latent"] = State((spec.kv_rank,), self.program.dtype)
        self.body.states["rope"] = State((spec.rope,), self.program.dtype)
        o = self.build.emit(
            "mla_attention",
            q_nope,
            self._rope(q_rope, loc),
            latent,
            self._rope(k_rope, loc),
            self._param("attention.kv_b", spec.heads * (spec.nope + spec.value), spec.kv_rank),
            at=loc,
            scale=_mla_scale(spec, self.model.rotary),
            value=spec.value,
            form="absorbed" if self.program.phase == "decode" else "expanded",
        )
        return self._out(o, spec.heads * spec.value, loc)

    def _mlp(self, prefix: str, inner: int, h: fx.Node, loc: Loc) -> fx.Node:
        gate = self._linear(h, f"{prefix}.gate", inner, self.model.hidden, loc)
        up = self._linear(h, f"{prefix}.up", inner, self.model.hidden, loc)
        act = self.build.emit("silu_mul", gate, up, at=loc)
        return self._linear(act, f"{prefix}.down", self.model.hidden, inner, loc)

    def _moe(self, spec: Moe, h: fx.Node) -> fx.Node:
        router, routed, loc = spec.router, spec.routed, self.source.loc(spec.router.span)
        logits = self.build.emit(
            "router_logits", h, self._param("router.weight", routed.count, self.model.hidden), at=loc
        )
        bias = [self._param("router.bias", routed.count, dtype="fp32")] if router.bias else []
        ids, weights = self.build.emit(
            "route",
            logits,
            *bias,
            at=loc,
            score=router.score,
            top=router.top,
            groups=router.groups,
            keep=router.keep,
            renormalize=router.renormalize,
            scale=router.scale,
            table=routed.name,
        )
        y = self._experts(routed, h, ids, weights)
        if spec.shared is None:
            return y
        loc = self.source.loc(spec.shared.span)
        shared = self._mlp("shared", spec.shared.count * spec.shared.inner, h, loc)
        total: fx.Node = self.build.emit("add", y, shared, at=loc)
        return total

    def _experts(self, routed: Experts, h: fx.Node, ids: fx.Node, weights: fx.Node) -> fx.Node:
        self.program.experts[routed.name] = routed.count
        wide = (routed.count, routed.inner, self.model.hidden)
        shapes = {"gate": wide, "up": wide, "down": (routed.count, self.model.hidden, routed.inner)}
        dtype = self.model.expert_dtype
        params = [self._param(f"experts.{name}", *shape, dtype=dtype) for name, shape in shapes.items()]
        if dtype == "fp8":
            scales = {f"experts.{name}{SCALES}": scales_shape(shape) for name, shape in shapes.items()}
            params += [self._param(name, *shape, dtype="fp32") for name, shape in scales.items()]
        loc = self.source.loc(routed.span)
        node: fx.Node = self.build.emit("moe", h, ids, weights, *params, at=loc, table=routed.name)
        return node


def _yarn(rotary: Rotary) -> tuple[float, ...] | None:
    y = rotary.yarn
    return None if y is None else (y.factor, y.original, y.beta_fast, y.beta_slow, y.mscale, y.mscale_all_dim)


def _mla_scale(spec: Mla, rotary: Rotary) -> float:
    """DeepSeek-V3's also has the square of YaRN's attention factor, 0.1 * mscale_all_dim * ln(factor) + 1."""
    yarn = rotary.yarn
    factor = 0.1 * yarn.mscale_all_dim * math.log(yarn.factor) + 1.0 if yarn and yarn.factor > 1 else 1.0
    return float((spec.nope + spec.rope) ** -0.5) * factor**2
