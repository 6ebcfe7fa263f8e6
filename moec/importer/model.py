"""The checked model of a config: blocks put together from what `moec.importer.config` read."""

from __future__ import annotations

from typing import Any

from moec.checked import Experts, Gqa, Layer, Mla, Model, Moe, Rotary, Router, Swiglu, Yarn
from moec.diagnostics import SourceFile, Span, fail
from moec.importer.config import ConfigReader

#: Names of a yarn setting in a config and in `Yarn`.
_YARN = {"original_max_position_embeddings": "original"}


def build_model(reader: ConfigReader, name: str, dtype: str | None, weights: str | None) -> Model:
    """The model `reader` describes. `dtype` stands where the config names none; fp32 if that is None too.

    Raises E0721 to E0724.
    """
    span = Span(SourceFile(reader.where, ""), 0, 0)
    model, experts = reader.section("model"), reader.section("experts")
    attention, rotary = _attention(reader, model["hidden"], span), _rotary(reader)
    ffns = _ffns(reader, experts, span)
    sparse = _sparse_layers(reader, model["layers"])
    layers = {is_sparse: Layer(attention, ffn, span) for is_sparse, ffn in ffns.items()}
    found_dtype, expert_dtype = reader.dtype() or dtype or "fp32", reader.expert_dtype()
    reader.finish()
    if missing := [layer for layer, is_sparse in enumerate(sparse) if is_sparse not in layers]:
        raise _contradiction(reader, f"layer {missing[0]} is dense, and the family has no dense block")
    return Model(
        name=name,
        hidden=model["hidden"],
        vocab=model["vocab"],
        norm_eps=model["norm_eps"],
        tied=model["tied"],
        rotary=rotary,
        weights=weights,
        dtype=found_dtype,
        layers=tuple(layers[is_sparse] for is_sparse in sparse),
        span=span,
        expert_dtype=expert_dtype,
    )


def _attention(reader: ConfigReader, hidden: int, span: Span) -> Gqa | Mla:
    block = reader.family.rules["attention"].get("block")
    if block == "mla":
        mla = reader.section("attention", "mla")
        _hold(reader, mla["rope"] % 2 == 0, f"the rotary part of a head ({mla['rope']}) is odd")
        return Mla(name="latent", span=span, **mla)
    if block != "gqa":
        raise fail("E0724", f"family file specs/families/{reader.family.name}.toml: attention `block` is gqa or mla")
    gqa = reader.section("attention", "gqa")
    heads, kv_heads = gqa["heads"], gqa["kv_heads"] or gqa["heads"]
    if gqa["head_dim"] is None:
        _hold(reader, hidden % heads == 0, f"hidden size {hidden} does not divide by {heads} heads")
        gqa["head_dim"] = hidden // heads
    _hold(reader, heads % kv_heads == 0, f"{heads} heads do not divide by {kv_heads} key-value heads")
    _hold(reader, gqa["head_dim"] % 2 == 0, f"a head's width ({gqa['head_dim']}) is odd")
    return Gqa(name="grouped", span=span, **{**gqa, "kv_heads": kv_heads})


def _rotary(reader: ConfigReader) -> Rotary:
    pairs = reader.section("rotary").get("pairs", "halves")
    found = reader.rotary()
    theta = found.pop("theta")
    yarn: dict[str, Any] = {_YARN.get(key, key): value for key, value in found.items()}
    return Rotary(theta, pairs, Yarn(**yarn) if yarn else None)


def _ffns(reader: ConfigReader, experts: dict[str, Any], span: Span) -> dict[bool, Moe | Swiglu]:
    """The sparse block (True), and the dense one (False) where the family has it."""
    router, shared, dense = reader.section("router"), reader.section("shared"), reader.section("dense")
    count, top, groups, keep = experts["count"], router["top"], router["groups"], router["keep"]
    _hold(reader, top <= count, f"{top} experts are chosen from {count}")
    _hold(reader, count % groups == 0, f"{count} experts do not divide into {groups} groups")
    _hold(reader, keep <= groups, f"{keep} groups are kept of {groups}")
    _hold(reader, top <= count // groups * keep, f"{keep} groups of {count // groups} experts cannot give {top}")
    has_shared = bool(shared and shared["count"])
    moe = Moe(
        Router(name="gate", span=span, **router),
        Experts("routed", count, experts["inner"], span),
        Experts("shared", shared["count"], shared["inner"], span) if has_shared else None,
        span,
    )
    return {True: moe} | ({False: Swiglu(dense["inner"], span)} if dense else {})


def _sparse_layers(reader: ConfigReader, layers: int) -> list[bool]:
    """Which layers have experts: past the first dense ones, on the step, and not listed as dense."""
    rules = reader.section("layers")
    first, step, phase = rules.get("dense_first", 0), rules.get("sparse_step", 1), rules.get("sparse_phase", 0)
    dense = set(rules.get("dense_layers") or ())
    _hold(
        reader, all(layer < layers for layer in dense), f"layer {max(dense, default=0)} is listed, of {layers} layers"
    )
    return [layer >= first and (layer + phase) % step == 0 and layer not in dense for layer in range(layers)]


def _hold(reader: ConfigReader, holds: bool, what: str) -> None:
    if not holds:
        raise _contradiction(reader, what)


def _contradiction(reader: ConfigReader, what: str) -> Exception:
    return fail("E0723", f"`{reader.where}` contradicts itself: {what}", "fetch the model's own config.json")
