"""A program runs only with weights whose config.json describes the same mathematics."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from moec.checkpoint.json import parse_json
from moec.compiler import compile
from moec.declared import declared
from moec.diagnostics import MoecError, SourceFile
from moec.importer.folder import import_model
from moec.importer.match import check_declared, differences
from moec.runtime.session import check_weights
from moec.semantics.checker import check
from tests.small_configs import CONFIGS, model_of

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "tiny"
GOLDEN = Path(__file__).resolve().parent / "golden" / "import"

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

#: Family, changed keys, and what the refusal names.
CHANGES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("deepseek_v3", {"num_experts_per_tok": 1}, ["router top of layers 1..3: config says 1, program has 2"]),
    ("deepseek_v3", {"routed_scaling_factor": 1.0}, ["router scale of layers 1..3: config says 1, program has 2.5"]),
    ("deepseek_v3", {"topk_group": 2}, ["router groups of layers 1..3: config says 1, program has 2"]),
    ("deepseek_v3", {"norm_topk_prob": False}, ["router renormalize of layers 1..3: config says false"]),
    ("deepseek_v3", {"rms_norm_eps": 1e-5}, ["norm eps: config says 1e-5, program has 1e-6"]),
    ("deepseek_v3", {"rope_theta": 500000}, ["rope theta: config says 500000, program has 10000"]),
    ("deepseek_v3", {"rope_interleave": False}, ["rope pairs: config says halves, program has interleaved"]),
    ("deepseek_v3", {"rope_scaling": YARN}, ["yarn: config says true, program has false"]),
    ("deepseek_v3", {"qk_nope_head_dim": 2, "v_head_dim": 6}, ["mla nope of layers 0..3", "mla value of layers 0..3"]),
    ("deepseek_v3", {"n_shared_experts": 0}, ["shared width of layers 1..3: config says 0, program has 6"]),
    ("deepseek_v3", {"first_k_dense_replace": 2}, ["ffn of layer 1: config says dense, program has moe"]),
    ("deepseek_v3", {"num_hidden_layers": 3}, ["layers: config says 3, program has 4"]),
    (
        "qwen3_moe",
        {"num_attention_heads": 4, "head_dim": 4},
        ["gqa heads of layers 0..3", "gqa kv_heads of layers 0..3"],
    ),
    ("qwen3_moe", {"tie_word_embeddings": True}, ["tied head: config says true, program has false"]),
]  # fmt: skip


def folder_of(path: Path, family: str, **changes: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIGS[family] | changes))
    return path


@pytest.mark.parametrize(
    ("family", "changes", "named"), CHANGES, ids=lambda x: "+".join(x) if isinstance(x, dict) else ""
)
def test_every_change_of_the_mathematics_is_refused_by_name(
    family: str, changes: dict[str, Any], named: list[str], tmp_path: Path
) -> None:
    table = json.loads(json.dumps(declared(model_of(family))))
    check_declared(table, folder_of(tmp_path, family))
    with pytest.raises(MoecError) as caught:
        check_declared(table, folder_of(tmp_path, family, **changes))
    assert (caught.value.diagnostics[0].code, caught.value.exit_code) == ("E0747", 3)
    assert [text for text in named if text not in str(caught.value)] == []
    assert str(caught.value).count("config says") == len(named)


def test_a_config_whose_settings_cannot_be_honoured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MoecError, match="attention_bias"):
        check_declared(declared(model_of("deepseek_v3")), folder_of(tmp_path, "deepseek_v3", attention_bias=True))


def test_a_program_that_does_not_say_its_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MoecError, match="does not say which model"):
        check_declared(None, folder_of(tmp_path, "mixtral"))


@pytest.mark.parametrize("case", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_an_imported_file_agrees_with_its_config(case: Path, tmp_path: Path) -> None:
    shutil.copyfile(case, tmp_path / "config.json")
    check_declared(declared(check(SourceFile("it.moe", import_model(case))).plan().model), tmp_path)


def test_what_changes_no_result_is_no_difference() -> None:
    text = (EXAMPLE / "tiny.moe").read_text()
    same = text.replace("groups      = 4 keep 2", "groups      = 4 keep 4").replace("gate", "choice")
    alike = same.replace("groups      = 4 keep 4", "groups      = 1 keep 1").replace("bf16", "fp32")
    tables = [declared(check(SourceFile("it.moe", x)).plan().model) for x in (same, alike)]
    assert differences(*tables) == []


def test_weights_of_another_config_are_refused_before_a_run(tmp_path: Path) -> None:
    artifact = compile(EXAMPLE / "tiny.moe")
    folder = shutil.copytree(EXAMPLE, tmp_path / "d")
    check_weights(artifact, folder, is_compiled=False)
    config = parse_json((folder / "config.json").read_bytes()) | {"num_experts_per_tok": 2, "rms_norm_eps": 1e-5}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(MoecError, match=r"norm eps: .*; router top of layers 1\.\.4: config says 2, program has 4"):
        check_weights(artifact, folder, is_compiled=False)
    edited = tmp_path / "edited.moe"
    edited.write_text((EXAMPLE / "tiny.moe").read_text().replace("top         = 4", "top         = 3"))
    with pytest.raises(MoecError, match="config says 4, program has 3"):
        check_weights(compile(edited, weights=EXAMPLE), EXAMPLE, is_compiled=True)
