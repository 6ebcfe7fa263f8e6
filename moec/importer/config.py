"""A config.json, read by the rules of its family into the declarations of a `.moe` model.

Every key is mapped, known to change nothing, or refused by name, all refused keys in one error: a setting that is
dropped in silence gives a model that runs and is wrong.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moec.checkpoint.family import Family
from moec.diagnostics import fail

_MISSING = object()


def _fields(kind: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, kind)


#: What a field of a section must be: count >= 1, index >= 0, number finite and > 0, flag, word, or a list of indices.
_KINDS: dict[str, dict[str, str]] = {
    "model": {"hidden": "count", "vocab": "count", "layers": "count", "norm_eps": "number", "tied": "flag"},
    "rotary": {"pairs": "word"},
    "gqa": _fields("count", "heads", "kv_heads", "head_dim") | _fields("flag", "bias", "out_bias", "qk_norm"),
    "mla": _fields("count", "heads", "q_rank", "kv_rank", "nope", "rope", "value"),
    "router": _fields("count", "top", "groups", "keep")
    | {"score": "word", "bias": "flag", "renormalize": "flag", "scale": "number"},
    "experts": {"count": "count", "inner": "count"},
    "shared": {"count": "index", "inner": "count"},
    "dense": {"inner": "count"},
    "layers": {"dense_first": "index", "sparse_step": "count", "sparse_phase": "index", "dense_layers": "indices"},
}
_PHRASE = {
    "count": "a whole number from 1 to 10^12", "index": "a whole number from 0 to 10^12", "number": "a number above 0",
    "flag": "true or false", "word": "a text", "indices": "a list of layer numbers",
}  # fmt: skip
_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass
class ConfigReader:
    """The values of a config by section and field; collects what it must refuse."""

    config: dict[str, Any]
    family: Family
    where: str
    used: set[str] = field(default_factory=set)
    refused: list[str] = field(default_factory=list)

    def section(self, name: str, kind: str = "") -> dict[str, Any]:
        """Values of all fields the family maps in section `name`; a section the family leaves out is empty."""
        kinds = _KINDS[kind or name]
        rules = {key: rule for key, rule in self.family.rules[name].items() if isinstance(rule, dict)}
        if unknown := set(rules) - set(kinds):
            raise fail("E0724", f"family file specs/families/{self.family.name}.toml: [{name}] has no `{min(unknown)}`")
        return {key: self._value(rule, kinds[key]) for key, rule in rules.items()}

    def dtype(self) -> str | None:
        """bf16, fp16 or fp32 where the config says so."""
        key, found = self._find(["dtype", "torch_dtype"])
        name = found.removeprefix("torch.") if isinstance(found, str) else found
        if found in (_MISSING, None, "auto"):
            return None
        if name not in _DTYPES:
            self.refuse(key, f"moec computes in {', '.join(_DTYPES)}")
            return None
        return _DTYPES[name]

    def expert_dtype(self) -> str | None:
        """fp8 where the config says that linear weights are in blocks of it, as the family's own are."""
        found = self._take("quantization_config")
        if found in (_MISSING, None):
            return None
        if not isinstance(found, dict) or self.family.quantization is None:
            self.refuse("quantization_config", "quantised weights of this family are not read")
        elif others := _other_settings(found, self.family.quantization):
            self.refuse("quantization_config", f"weights with {' and '.join(others)} are not read")
        return "fp8"

    def rotary(self) -> dict[str, Any]:
        """`theta`, and with YaRN the keys of its scaling, from transformers 4's or 5's spelling."""
        self.used |= set(_ROPE_KEYS)
        rules = self.family.rules["rotary"]
        scaling = {key: x for key, x in self._rope_table().items() if x is not None}
        default_theta = self.config.get("rope_theta", rules["theta"])
        theta = self._typed("rope_theta", scaling.pop("rope_theta", default_theta), "number")
        kind = scaling.pop("rope_type", scaling.pop("type", "default"))
        scaling.pop("type", None)
        if scaling.pop("partial_rotary_factor", self.config.get("partial_rotary_factor") or 1.0) != 1.0:
            self.refuse("partial_rotary_factor", "all of a head is rotated")
        if kind == "default":
            self._refuse_rope(scaling, ())
            return {"theta": theta}
        if kind != "yarn":
            self.refuse("rope_type", f"rotary scaling `{kind}` is not known; moec has `default` and `yarn`")
            return {"theta": theta}
        self._refuse_rope(scaling, tuple(rules["yarn"]))
        scaling.setdefault("original_max_position_embeddings", self.config.get("max_position_embeddings"))
        names = [key for key in rules["yarn"] if key in scaling or key == "factor"]
        return {"theta": theta} | {key: self._yarn(key, scaling) for key in names}

    def refuse(self, key: str, why: str) -> None:
        value = _brief(self.config[key]) if key in self.config else ""
        self.refused.append(f"`{key}`{' = ' if value else ''}{value} ({why})")

    def finish(self) -> None:
        """Check the keys that map to nothing and refuse what is left. Raises E0721 with every refused key."""
        rules = self.family.rules["config"]
        self._check_architecture()
        for key, allowed in rules.get("only", {}).items():
            value = self._take(key)
            if not all(item in (_MISSING, *allowed) for item in (value if isinstance(value, list) else [value])):
                self.refuse(key, f"only {' or '.join(map(_brief, allowed))} is built")
        for key in rules.get("off", ()):
            if self._take(key) not in (_MISSING, None, False):
                self.refuse(key, "not built")
        for key, other in rules.get("equal", {}).items():
            if self._take(key) not in (_MISSING, None, self.config.get(other)):
                self.refuse(key, f"must equal `{other}`")
        known = self.used | self.family.ignored_keys | set(self.family.extra_layer_keys) | {"architectures"}
        for key in sorted(set(self.config) - known):
            self.refuse(key, "not known to this family")
        if self.refused:
            message = f"`{self.where}` ({self.family.name}) has settings moec cannot honour: {'; '.join(self.refused)}"
            help = f"only what `specs/families/{self.family.name}.toml` maps or lists as harmless is accepted"
            raise fail("E0721", message, help)

    def _value(self, rule: dict[str, Any], kind: str) -> Any:
        if "value" in rule:
            return rule["value"]
        key, found = self._find([rule["key"]] if isinstance(rule["key"], str) else rule["key"])
        if found is _MISSING:
            found = rule.get("default", None if rule.get("optional") else _MISSING)
        if found is _MISSING:
            raise fail(
                "E0722", f"`{self.where}` ({self.family.name}) has no `{key}`", "fetch the model's own config.json"
            )
        if found is None and rule.get("optional"):
            return None
        if "only" in rule and found not in rule["only"]:
            self.refuse(key, f"only {' or '.join(map(_brief, rule['only']))} is built")
            return rule["only"][0]
        if "words" in rule:
            word = _brief(found).strip('"')
            if word not in rule["words"]:
                self.refuse(key, f"one of {', '.join(rule['words'])}")
            return rule["words"].get(word, next(iter(rule["words"].values())))
        return self._typed(key, found, kind)

    def _find(self, keys: list[str]) -> tuple[str, Any]:
        """The first of several spellings that is there and not null; where two are, they must agree."""
        given = [key for key in keys if key in self.config]
        found = [key for key in given if self.config[key] is not None] or given
        self.used |= set(keys)
        if len({_brief(self.config[key]) for key in found}) > 1:
            self.refuse(found[1], f"differs from `{found[0]}`")
        return (found[0], self.config[found[0]]) if found else (keys[0], _MISSING)

    def _take(self, key: str) -> Any:
        self.used.add(key)
        return self.config.get(key, _MISSING)

    def _typed(self, key: str, value: Any, kind: str) -> Any:
        if not _fits(value, kind):
            message = f"`{key}` in `{self.where}` is {_brief(value)}, not {_PHRASE[kind]}"
            raise fail("E0722", message, "fetch the model's own config.json")
        return float(value) if kind == "number" else value

    def _rope_table(self) -> dict[str, Any]:
        """rope_scaling and rope_parameters as one flat table (transformers 5 puts theta there too)."""
        table: dict[str, Any] = {}
        for key in ("rope_scaling", "rope_parameters"):
            value = self.config.get(key)
            if value is not None and not isinstance(value, dict):
                raise fail("E0722", f"`{key}` in `{self.where}` is {_brief(value)}, not a table")
            table |= value or {}
        return table

    def _yarn(self, key: str, scaling: dict[str, Any]) -> Any:
        kind = "count" if key == "original_max_position_embeddings" else "number"
        if key == "mscale_all_dim" and scaling[key] == 0:
            return 0.0
        return self._typed(key, scaling.get(key), kind)

    def _refuse_rope(self, scaling: dict[str, Any], known: tuple[str, ...]) -> None:
        for key in sorted(set(scaling) - set(known)):
            if (key, scaling[key]) != ("truncate", True):  # transformers' default
                self.refuse(key, f"{_brief(scaling[key])} is not a known setting of this rotary embedding")

    def _check_architecture(self) -> None:
        named = self.config.get("architectures")
        if named not in (None, [], [self.family.architecture]):
            self.refuse("architectures", f"this family is {self.family.architecture}")


def _other_settings(found: dict[str, Any], known: Mapping[str, Any]) -> list[str]:
    """Where two descriptions differ in how weights are quantised. Which ones are, the dtype of each tensor says."""
    keys = sorted({*found, *known} - {"modules_to_not_convert"})
    differing = [key for key in keys if found.get(key, _MISSING) != known.get(key, _MISSING)]
    return [f"`{key}` = {_brief(found[key])}" if key in found else f"no `{key}`" for key in differing]


def _fits(value: Any, kind: str) -> bool:
    is_int = type(value) is int and abs(value) <= 10**12
    if kind in ("count", "index"):
        return is_int and value >= (kind == "count")
    if kind == "number":
        return (is_int or type(value) is float) and math.isfinite(value) and value > 0
    if kind == "indices":
        return isinstance(value, list) and all(_fits(x, "index") for x in value)
    return isinstance(value, {"flag": bool, "word": str}[kind])


def _brief(value: Any) -> str:
    """A config value as JSON spells it, cut to one line."""
    shown = json.dumps(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
