"""Folder to `.moe`: exact counts, and a text that is formatted and that the checker reads as the same model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moec.checkpoint.family import family_names, family_of, load_family
from moec.checkpoint.json import parse_json
from moec.diagnostics import MoecError, SourceFile
from moec.grammar.formatter import format_text
from moec.importer.folder import import_config, import_model, model_name
from moec.importer.mesh import Degrees, parse_cluster, parse_mesh
from moec.importer.text import layer_ranges, number
from moec.parameters import count, logical_parameters
from moec.semantics.checker import check
from tests import micro_checkpoint as micro
from tests.small_configs import DEEPSEEK, model_of, plain, refusal

ROOT = Path(__file__).resolve().parent.parent

GOLDEN = ROOT / "tests" / "golden" / "import"

COUNTED = ("mixtral-8x7b", "mixtral-8x22b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3")


@pytest.mark.parametrize("name", COUNTED)
def test_parameters_of_the_public_models_are_exact(name: str, shared: Path) -> None:
    want = json.loads((shared / "data" / "parameter_counts.json").read_text())[name]
    text = import_model(shared / "data" / "models" / f"{name}.json")
    counts = count(check(SourceFile("it.moe", text)).plan().model)
    assert counts.total == want["total"]
    assert counts.active == want["active"]
    assert counts.active_no_input_embed == want["active_no_input_embed"]


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3"])
def test_the_shipped_models_are_the_imported_ones(name: str, shared: Path) -> None:
    shipped = ROOT / "specs" / "models" / f"{name.replace('-', '_')}.moe"
    written = check(SourceFile(str(shipped), shipped.read_text())).plan().model
    path = shared / "data" / "models" / f"{name}.json"
    config = parse_json(path.read_bytes())
    imported = import_config(config, family_of(config, path), path, weights=written.weights)
    assert plain(written) == plain(imported)


def test_models_of_other_families_are_refused(shared: Path) -> None:
    """By name; and what has a family file imports, so that a new family changes no line here."""
    kinds = {path: parse_json(path.read_bytes())["model_type"] for path in (shared / "data" / "models").glob("*.json")}
    assert set(kinds.values()) & set(family_names()) and set(kinds.values()) - set(family_names())
    for path, kind in kinds.items():
        if kind in family_names():
            assert import_model(path)
            continue
        with pytest.raises(MoecError) as caught:
            import_model(path)
        assert caught.value.diagnostics[0].code == "E0720" and f"`{kind}`" in str(caught.value)


@pytest.mark.parametrize("case", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_golden(case: Path, golden: Callable[[Path, str], None]) -> None:
    """A config and the file it becomes, which is formatted, and which the checker reads as the same model."""
    text = import_model(case, mesh="ep=2,etp=2")
    golden(case.with_suffix(".moe"), text)
    assert format_text(text) == text
    config = parse_json(case.read_bytes())
    want = import_config(config, family_of(config, case), case)
    assert plain(check(SourceFile("it.moe", text)).plan().model) == plain(want)


def test_every_golden_has_its_config() -> None:
    assert {path.stem for path in GOLDEN.glob("*.moe")} == {path.stem for path in GOLDEN.glob("*.json")} != set()


@pytest.mark.parametrize("mesh", [None, "ep=2", "tp=2", "dp=2,tp=2", "dp=2,edp=2,ep=1", "ep=3", "ep=2,pp=1"])
def test_a_folder_with_weights_imports_into_a_program_that_checks(mesh: str | None, tmp_path: Path) -> None:
    folder = micro.write(tmp_path / "My Model-v0.1", max_position_embeddings=64, num_attention_heads=2, head_dim=2)
    text = import_model(folder, mesh, output=tmp_path / "out" / "it.moe")
    assert 'huggingface("../My Model-v0.1")' in text or f'huggingface("{folder}")' in text
    plan = check(SourceFile("it.moe", text)).plan()
    assert plan.model.name == "my_model_v0_1"
    assert plan.context == 64
    want = parse_mesh(mesh)
    spec = plan.mesh
    degrees = (want.dp, want.tp, want.edp, want.ep, want.etp, want.pp)
    assert (spec.dp, spec.tp, spec.edp, spec.ep, spec.etp, spec.pp) == degrees


def test_stages_are_written_and_need_as_many_layers(tmp_path: Path) -> None:
    text = import_model(ROOT / "examples" / "tiny" / "config.json", "ep=2,pp=2")
    assert "stages    = pp(2)" in text and format_text(text) == text
    mesh = check(SourceFile("it.moe", text)).plan().mesh
    assert (mesh.pp, mesh.ep, mesh.cluster.num_devices) == (2, 2, 4)
    with pytest.raises(MoecError) as caught:  # of one layer
        check(SourceFile("it.moe", import_model(micro.write(tmp_path), "pp=2")))
    assert caught.value.diagnostics[0].code == "E0310"


def test_the_weights_path_is_relative_to_the_file_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    micro.write(Path("models/a"))
    assert 'huggingface("models/a")' in import_model(Path("models/a"))
    assert 'huggingface("../models/a")' in import_model(Path("models/a"), output=Path("out/a.moe"))
    assert 'huggingface("a")' in import_model(Path("models/a"), output=Path("models/a.moe"))
    absolute = (tmp_path / "models/a").resolve()
    assert f'huggingface("{absolute}")' in import_model(absolute, output=Path("out/a.moe"))


def test_a_config_alone_has_no_weights(tmp_path: Path) -> None:
    folder = micro.write(tmp_path)
    (folder / "model.safetensors").unlink()
    for path in (folder, folder / "config.json"):
        text = import_model(path)
        assert "weights = huggingface(" not in text.replace("`weights = huggingface(", "")
        assert check(SourceFile("it.moe", text)).plan().model.weights is None


def test_weights_that_do_not_fit_are_refused_at_import(tmp_path: Path) -> None:
    with pytest.raises(MoecError) as caught:
        import_model(micro.write(tmp_path, num_local_experts=3))
    assert caught.value.diagnostics[0].code == "E0741"


def test_fp8_is_what_the_config_says_of_all_linear_weights(tmp_path: Path) -> None:
    """A list of what is not converted changes nothing: each tensor's dtype says that. Another format is refused."""
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    for family in ("deepseek_v3", "qwen3_moe"):
        assert model_of(family).expert_dtype is None
        for more in ({}, {"modules_to_not_convert": ["lm_head"]}):
            assert model_of(family, quantization_config=fp8 | more).expert_dtype == "fp8"
    for other in ({"weight_block_size": [64, 64]}, {"activation_scheme": "static"}, {"quant_method": "awq"}):
        words = refusal("deepseek_v3", quantization_config=fp8 | other)
        assert "`quantization_config`" in words and f"weights with `{next(iter(other))}` = " in words


def test_the_dtype_is_the_configs_or_the_weights(tmp_path: Path) -> None:
    assert model_of("mixtral", torch_dtype="bfloat16").dtype == "bf16"
    assert model_of("mixtral", torch_dtype=None, dtype="float16").dtype == "fp16"
    tensors = {name: ("BF16", shape) for name, (_, shape) in micro.shapes().items()}
    assert "dtype   = bf16" in import_model(micro.write(tmp_path, tensors, torch_dtype=None))

    assert "E0721" in refusal("mixtral", torch_dtype="float8_e4m3fn")


def test_import_does_not_load_torch(tmp_path: Path) -> None:
    folder = micro.write(tmp_path)
    code = "import sys; from pathlib import Path; from moec.importer.folder import import_model"
    code += "; import_model(Path(sys.argv[1]))"
    code += "; sys.exit(any(name.partition('.')[0] in ('torch', 'numpy', 'transformers') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code, str(folder)], check=False).returncode == 0


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([0], "0"),
        ([0, 1], "0..1"),
        ([0, 2], "0, 2"),
        ([0, 2, 4], "0..4 step 2"),
        ([1, 5], "1, 5"),
        ([0, 1, 2, 4, 6, 8, 9], "0..2, 4..8 step 2, 9"),
        ([3, 4, 5, 9], "3..5, 9"),
    ],
)
def test_layer_ranges(indices: list[int], text: str) -> None:
    assert layer_ranges(indices) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(1e-6, "1e-6"), (1e-5, "1e-5"), (2.5, "2.5"), (1e6, "1000000"), (1.5e-10, "1.5e-10"), (0.707, "0.707")],
)
def test_numbers_are_short_and_exact(value: float, text: str) -> None:
    assert number(value) == text and float(text) == value


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (None, Degrees()),
        ("", Degrees()),
        ("ep=2", Degrees(dp=2, ep=2)),
        ("tp=2", Degrees(tp=2, ep=2)),
        ("tp=2,etp=2", Degrees(tp=2, etp=2)),
        ("ep=2,etp=2", Degrees(dp=2, tp=2, ep=2, etp=2)),
        ("dp=2, tp=2", Degrees(dp=2, tp=2, ep=4)),
        ("dp=2,edp=2,ep=1", Degrees(dp=2, edp=2)),
        ("pp=2", Degrees(pp=2)),
        ("pp=3,ep=2", Degrees(dp=2, ep=2, pp=3)),
        ("tp=2,pp=2", Degrees(tp=2, ep=2, pp=2)),
        ("dp=2,ep=2,pp=1", Degrees(dp=2, ep=2)),
    ],
)
def test_meshes(text: str | None, want: Degrees) -> None:
    assert parse_mesh(text) == want
    assert want.dp * want.tp == want.edp * want.ep * want.etp


@pytest.mark.parametrize(
    "text",
    [
        "ep",
        "ep=0",
        "ep=-1",
        "ep=two",
        "epp=2",
        "ep=2,ep=2",
        "dp=2,ep=3",
        "ep=2;etp=2",
        ",",
        "ep=9999999",
        "pp",
        "pp=0",
        "pp=2,pp=2",
        "stages=2",
    ],
)
def test_meshes_that_are_wrong_usage(text: str) -> None:
    with pytest.raises(MoecError) as caught:
        parse_mesh(text)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("text", ["", "dgx[0]", "dgx h100", "dgx[2", 'a"', "dgx[2]x"])
def test_clusters_that_are_wrong_usage(text: str) -> None:
    with pytest.raises(MoecError) as caught:
        parse_cluster(text)
    assert caught.value.exit_code == 2


def test_a_cluster_needs_a_mesh(tmp_path: Path) -> None:
    with pytest.raises(MoecError, match="without --mesh"):
        import_model(micro.write(tmp_path), cluster="dgx_h100[4]")
    text = import_model(tmp_path, mesh="ep=8", cluster="dgx_h100")
    assert check(SourceFile("it.moe", text)).plan().mesh.ep == 8


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Mixtral-8x7B-v0.1", "mixtral_8x7b_v0_1"),
        ("a/deepseek-v3.json", "deepseek_v3"),
        ("a/Tiny/config.json", "tiny"),
        ("0123456789abcdef", "mixtral_0123456789abcdef"),
        ("model", "model_model"),
        ("模型", "mixtral"),
        ("x" * 200, "x" * 56),
    ],
)
def test_names_of_models(path: str, name: str) -> None:
    assert model_name(Path(path), load_family("mixtral")) == name


@pytest.mark.parametrize(
    ("kind", "told"), [("deepseek_v2", "is `deepseek_v2`"), (["mixtral"], "is not text"), (None, "is missing")]
)
def test_a_model_type_is_never_corrected_to_a_family(kind: object, told: str) -> None:
    """The nearest family is another model, so all are listed."""
    with pytest.raises(MoecError, match=told) as caught:
        family_of({"model_type": kind}, "config.json")
    assert caught.value.diagnostics[0].help.startswith(f"families: {', '.join(family_names())};")


def test_limits_are_named() -> None:
    with pytest.raises(MoecError, match="not a whole number from 1 to 999999"):
        parse_mesh("ep=99999999999")
    assert "not a whole number from 1 to 10^12" in refusal("mixtral", hidden_size=10**30)
    with pytest.raises(MoecError, match="given twice") as caught:
        parse_mesh("ep=2,ep=3")
    assert "mean" not in caught.value.diagnostics[0].help


@pytest.mark.parametrize("rows", [0, 6])
def test_no_shared_experts_leave_empty_tensors_or_none(rows: int, tmp_path: Path) -> None:
    """transformers writes [0, hidden] for them. One with anything in it is still a tensor that nothing uses."""
    config = DEEPSEEK | {"n_shared_experts": 0, "num_hidden_layers": 1, "first_k_dense_replace": 0}
    model = import_config(config, load_family("deepseek_v3"), tmp_path)
    table = load_family("deepseek_v3").tensors
    names = {target.logical[0]: key for key, target in table.items() if not target.one_expert}
    tensors: dict[str, tuple[str, list[int]]] = {}
    for logical, shape in logical_parameters(model).items():
        if ".experts.gate" in logical:
            tensors["model.layers.0.mlp.experts.gate_up_proj"] = ("F32", [shape[0], 2 * shape[1], shape[2]])
        elif ".experts.up" not in logical:
            tensors[names[logical.replace("layers.0", "layers.{l}")].replace("#", "0")] = ("F32", list(shape))
    shared = "model.layers.0.mlp.shared_experts"
    tensors |= {f"{shared}.{name}_proj.weight": ("F32", [rows, 8]) for name in ("gate", "up")}
    tensors[f"{shared}.down_proj.weight"] = ("F32", [8, rows])
    folder = micro.write(tmp_path / "model", tensors)
    (folder / "config.json").write_text(json.dumps(config))
    if rows:
        with pytest.raises(MoecError, match="nothing uses 3 tensors"):
            import_model(folder)
    else:
        assert "experts shared" not in import_model(folder)
