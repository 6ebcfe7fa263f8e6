"""A checked model and a mesh as `.moe` text, formatted as `moec fmt` would."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moec.blocks import BLOCK
from moec.checked import Experts, Gqa, Layer, Mla, Model, Moe, Rotary, Router
from moec.importer.mesh import Degrees
from moec.parameters import count

PREFILL_TOKENS, DECODE_BATCH, MAX_CONTEXT = 4096, 8, 4096


def moe_text(model: Model, notes: Sequence[str], mesh: Degrees, cluster: str | None, context: int) -> str:
    """The whole file: model, mesh and plan. `notes` become comments above the model; `cluster` is NAME or NAME[N]."""
    name = cluster.partition("[")[0] if cluster else ""
    counts = count(model)
    head = [*notes, f"{counts.total:,} parameters, {counts.active:,} of them active for a token."]
    parts = [f"use cluster {name}"] if name else []
    parts += ["\n".join(f"// {note}" for note in head) + "\n" + _model(model)]
    parts += [_mesh(mesh, cluster), _plan(model.name, context)]
    return "\n\n".join(parts) + "\n"


def _model(model: Model) -> str:
    settings = [
        f"hidden = {model.hidden}",
        f"vocab = {model.vocab}",
        f"norm = rms(eps = {number(model.norm_eps)})",
        f"head = {'tied' if model.tied else 'untied'}",
        f"dtype = {model.dtype}",
    ]
    if model.expert_dtype is not None:
        settings.append(f"expert_dtype = {model.expert_dtype}(block = {BLOCK})")
    if model.weights is not None:
        settings.append(f'weights = huggingface("{model.weights}")')
    settings.append(f"rotary = {_rotary(model.rotary)}")  # last: with YaRN it takes several lines
    attention = model.layers[0].attention
    blocks = [[f"attention {attention.name} = {_attention(attention)}"], *_moe(model.layers), _layers(model.layers)]
    lines = "\n\n".join(_indent(block) for block in [_aligned(settings), *blocks])
    return f"model {model.name} {{\n{lines}\n}}"


def _rotary(rotary: Rotary) -> str:
    arguments = [f"theta = {number(rotary.theta)}", f"pairs = {rotary.pairs}"]
    if (yarn := rotary.yarn) is None:
        return f"rope({', '.join(arguments)})"
    fields = ("factor", "original", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    scaling = ", ".join(f"{field} = {number(getattr(yarn, field))}" for field in fields)
    lines = [*arguments, f"scaling = yarn({scaling})"]
    return "rope(\n" + "".join(f"    {line},\n" for line in lines) + "  )"


def _attention(attention: Gqa | Mla) -> str:
    if isinstance(attention, Gqa):
        fields = [("heads", attention.heads), ("kv_heads", attention.kv_heads), ("head_dim", attention.head_dim)]
        flags = [flag for flag in ("bias", "out_bias", "qk_norm") if getattr(attention, flag)]
        arguments = [f"{field} = {value}" for field, value in fields] + [f"{flag} = true" for flag in flags]
        return f"gqa({', '.join(arguments)})"
    names = ("heads", "q_rank", "kv_rank", "nope", "rope", "value")
    given = {name: getattr(attention, name) for name in names if getattr(attention, name) is not None}
    return f"mla({', '.join(f'{name} = {value}' for name, value in given.items())})"


def _moe(layers: Iterable[Layer]) -> list[list[str]]:
    """Router and expert groups, as blocks of lines; nothing for a model without sparse layers."""
    moe = next((layer.ffn for layer in layers if isinstance(layer.ffn, Moe)), None)
    if moe is None:
        return []
    experts = [_experts(group) for group in (moe.routed, moe.shared) if group is not None]
    return [_router(moe.router), experts]


def _router(router: Router) -> list[str]:
    settings = [f"score = {router.score}", f"top = {router.top}"]
    if router.groups > 1:
        settings.append(f"groups = {router.groups} keep {router.keep}")
    if router.bias:
        settings.append("bias = frozen")
    settings.append(f"renormalize = {'true' if router.renormalize else 'false'}")
    if router.scale != 1:
        settings.append(f"scale = {number(router.scale)}")
    return [f"router {router.name} {{", *(f"  {setting}" for setting in _aligned(settings)), "}"]


def _experts(experts: Experts) -> str:
    return f"experts {experts.name} = {experts.count} * swiglu({experts.inner})"


def _layers(layers: Sequence[Layer]) -> list[str]:
    """One line for each kind of layer, in order of its first layer."""
    kinds = {id(layer): layer for layer in layers}.values()
    places = [layer_ranges([i for i, other in enumerate(layers) if other is layer]) for layer in kinds]
    width = max(map(len, places))
    blocks = [f"{{ {layer.attention.name}  {_ffn(layer)} }}" for layer in kinds]
    return [f"layers {place:<{width}} {block}" for place, block in zip(places, blocks, strict=True)]


def _ffn(layer: Layer) -> str:
    if not isinstance(layer.ffn, Moe):
        return f"swiglu({layer.ffn.inner})"
    names = [layer.ffn.router.name, layer.ffn.routed.name]
    if layer.ffn.shared is not None:
        names.append(layer.ffn.shared.name)
    return f"moe({', '.join(names)})"


def layer_ranges(indices: Sequence[int]) -> str:
    """`0, 3..5, 7..47 step 2` for sorted indices."""
    words, at = [], 0
    while at < len(indices):
        step = indices[at + 1] - indices[at] if at + 1 < len(indices) else 1
        end = at
        while end + 1 < len(indices) and indices[end + 1] - indices[end] == step:
            end += 1
        if end - at < (1 if step == 1 else 2):
            end = at
        first, last = indices[at], indices[end]
        words.append(str(first) if first == last else f"{first}..{last}" + (f" step {step}" if step > 1 else ""))
        at = end + 1
    return ", ".join(words)


def number(value: float) -> str:
    """The shortest literal of the language for `value`: `1e-6`, `2.5`, `1000000`."""
    if float(value).is_integer() and abs(value) < 1e15:
        return str(int(value))
    return repr(float(value)).replace("e-0", "e-").replace("e+0", "e+")


def _mesh(mesh: Degrees, cluster: str | None) -> str:
    place = f" on {cluster}" if cluster else ""
    attention = f"dp({mesh.dp}) * tp({mesh.tp})"
    experts = f"edp({mesh.edp}) * ep({mesh.ep}) * etp({mesh.etp})"
    stages = f"  stages    = pp({mesh.pp})\n" if mesh.pp > 1 else ""
    return f"mesh ranks{place} {{\n  attention = {attention}\n  experts   = {experts}\n{stages}}}"


def _plan(model: str, context: int) -> str:
    lines = [
        f"run {model} on ranks",
        f"context = {context}",
        f"prefill {{ tokens = {min(context, PREFILL_TOKENS)}  exchange = flat }}",
        f"decode  {{ batch = {DECODE_BATCH}  exchange = flat }}",
    ]
    return "plan serve {\n" + _indent(lines) + "\n}"


def _aligned(settings: Sequence[str]) -> list[str]:
    """`key = value` lines with the `=` under each other."""
    pairs = [setting.split(" = ", 1) for setting in settings]
    width = max(len(key) for key, _ in pairs)
    return [f"{key:<{width}} = {value}" for key, value in pairs]


def _indent(lines: Iterable[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)
