"""The checker: what right programs mean, every error it can raise, and that nothing declared is ignored."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from moec.checked import Gqa, MeshSpec, Mla, Moe, Plan, Swiglu, Yarn
from moec.diagnostics import CompileError, MoecError, SourceFile
from moec.grammar.formatter import format_text
from moec.grammar.parser import read_source
from moec.grammar.tokens import reserved_words
from moec.lowering import lower
from moec.passes.insert_exchange import InsertExchange
from moec.semantics.blocks import ROUTER_SETTINGS, YARN_ARGUMENTS
from moec.semantics.checker import Spec, check
from moec.semantics.mesh import CLUSTER_SETTINGS
from moec.semantics.model import SETTINGS
from moec.semantics.plan import COMBINES, EXCHANGES, PHASE_SETTINGS
from moec.semantics.values import UNITS
from moec.specs import read, shipped
from moec.topology import Link

ROOT = Path(__file__).parent.parent
ERRORS = ROOT / "tests" / "golden" / "errors"
CLUSTERS = [name for name in shipped("clusters", ".moe") if name != "localhost"]
CASES = sorted(p for p in ERRORS.glob("E0[123]*.txt") if p.name < "E0320")
#: Codes whose input is no text of a few lines; each has a test of its own, here or in test_grammar.py.
WITHOUT_GOLDEN = {"E0105", "E0109", "E0110", "E0111", "E0113", "E0221", "E0223"}

MODEL = """model m {
  hidden = 64  vocab = 100  norm = rms(eps = 1e-6)
  attention a = gqa(heads = 12, kv_heads = 6, head_dim = 8)
  router r { score = softmax  top = 2 }
  experts e = 8 * swiglu(24)
  layers 0..3 { a  moe(r, e) }
}
"""


def run(text: str, *overrides: str) -> Spec:
    return check(SourceFile("case.moe", text), overrides=overrides)


def plan_of(text: str, *overrides: str) -> Plan:
    return run(text, *overrides).plan()


def mesh_of(body: str, on: str = "", head: str = "") -> MeshSpec:
    return plan_of(f"{head}{MODEL}mesh x{on} {{ {body} }}\n").mesh


def errors(text: str, *overrides: str) -> list[str]:
    with pytest.raises(CompileError) as info:
        run(text, *overrides)
    return [d.code for d in info.value.diagnostics]


def split_case(text: str) -> tuple[str, list[str]]:
    """The program of a golden or a page, and the overrides in the comments it begins with."""
    overrides = re.findall(r"^// --set (.*)$", text, re.M)
    return re.sub(r"^// --set .*\n", "", text, flags=re.M), overrides


def rendered(text: str) -> str:
    program, overrides = split_case(text)
    with pytest.raises(CompileError) as info:
        run(program, *overrides)
    return info.value.render()


@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_error(path: Path, golden: Callable[[Path, str], None]) -> None:
    text = path.read_text().partition("----\n")[0]
    output = rendered(text)
    assert f"error[{path.stem[:5]}]" in output
    golden(path, f"{text}----\n{output}\n")


def pages() -> list[str]:
    return [name for name in shipped("errors", ".md") if name < "E0320"]


@pytest.mark.parametrize("code", pages())
def test_page(code: str) -> None:
    """Each page has the title line, and prints what its input really gives."""
    text = read("errors", f"{code}.md")
    assert text.startswith(f"# {code}: ") and "To mend it: " in text
    program = re.search(r"```moe\n(.*?)```", text, re.S)
    printed = re.search(r"```text\n(.*?)```", text, re.S)
    assert printed and f"error[{code}]" in printed[1]
    if program is not None:
        assert rendered(program[1]) + "\n" == printed[1]
    else:
        assert code in WITHOUT_GOLDEN


def test_every_code_has_a_page_and_a_golden() -> None:
    """And no page or golden is of a code that nothing raises."""
    files = [*(ROOT / "grammar").glob("*.py"), *(ROOT / "moec" / "semantics").glob("*.py")]
    raised = {code for f in files for code in re.findall(r'"(E0\d{3})"', f.read_text())}
    assert raised == set(pages())
    assert raised - {p.stem[:5] for p in CASES} == WITHOUT_GOLDEN
    assert {p.stem[:5] for p in CASES} <= raised


# What programs mean


def test_deepseek_v3_is_the_published_model(shared: Path) -> None:
    config = json.loads((shared / "data" / "models" / "deepseek-v3.json").read_text())
    model = run("use model deepseek_v3\n").plan().model
    assert (model.hidden, model.vocab, len(model.layers)) == (7168, 129280, config["num_hidden_layers"])
    dense, sparse = model.layers[0], model.layers[-1]
    assert isinstance(dense.ffn, Swiglu) and dense.ffn.inner == config["intermediate_size"]
    assert isinstance(sparse.ffn, Moe) and sparse.ffn.shared is not None and sparse.ffn.shared.count == 1
    router = sparse.ffn.router
    assert (router.score, router.top, router.groups, router.keep) == ("sigmoid", 8, 8, 4)
    assert (router.bias, router.renormalize, router.scale) == (True, True, config["routed_scaling_factor"])
    assert isinstance(sparse.attention, Mla) and sparse.attention.q_rank == config["q_lora_rank"]
    assert model.rotary.pairs == "interleaved" and model.rotary.yarn == Yarn(40.0, 4096, 32.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(("name", "file"), [("mixtral_8x7b", "mixtral-8x7b"), ("qwen3_30b_a3b", "qwen3-30b-a3b")])
def test_shipped_models_are_the_published_ones(name: str, file: str, shared: Path) -> None:
    config = json.loads((shared / "data" / "models" / f"{file}.json").read_text())
    model = run(f"use model {name}\n").plan().model
    layer = model.layers[0]
    assert isinstance(layer.attention, Gqa) and isinstance(layer.ffn, Moe)
    experts = config.get("num_local_experts", config.get("num_experts"))
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    assert (layer.ffn.routed.count, layer.ffn.routed.inner) == (experts, inner)
    assert (layer.ffn.router.top, layer.ffn.router.renormalize) == (config["num_experts_per_tok"], True)
    assert (model.hidden, model.vocab, len(model.layers)) == (
        config["hidden_size"],
        config["vocab_size"],
        config["num_hidden_layers"],
    )
    assert (layer.attention.heads, layer.attention.kv_heads) == (
        config["num_attention_heads"],
        config["num_key_value_heads"],
    )
    assert (model.norm_eps, model.rotary.theta) == (config["rms_norm_eps"], config["rope_theta"])
    assert layer.attention.qk_norm == (name == "qwen3_30b_a3b") and layer.attention.head_dim == 128


@pytest.mark.parametrize("name", CLUSTERS)
def test_shipped_clusters_have_the_published_figures(name: str, shared: Path) -> None:
    figures = json.loads((shared / "data" / "hardware.json").read_text())["systems"]
    figure = next(f for f in figures if f["name"].replace("-", "_").removesuffix(".48xlarge") == name)
    domain = figure["scaleup_domain"]  # the node of a cluster is what its fast links join
    cluster = mesh_of(f"attention = dp({2 * domain})", f" on {name}[2]", f"use cluster {name}\n").cluster
    assert (cluster.num_nodes, cluster.devices_per_node) == (2, domain)
    assert cluster.device.memory_bytes == figure["hbm_gb"] * 10**9
    assert cluster.device.memory_gbps == pytest.approx(figure["hbm_tbs"] * 1000)
    rates = dict(cluster.device.tflops)
    for dtype in ("bf16", "fp8", "fp4"):
        assert rates.get(dtype) == figure.get(f"{dtype}_dense_tflops")
    assert cluster.intra and cluster.intra.gbps == figure["scaleup_gbs_per_dir"]
    assert cluster.inter and cluster.inter.gbps == figure["nic_gbps_per_gpu"] / 8
    if figure.get("cpu_gpu_link", "PCIe") == "PCIe":
        assert cluster.host and cluster.host.gbps == figure["pcie_gbs_per_dir"]
    else:
        assert cluster.host is None


def test_every_published_system_is_shipped(shared: Path) -> None:
    assert len(json.loads((shared / "data" / "hardware.json").read_text())["systems"]) == len(CLUSTERS) == 13


@pytest.mark.parametrize(
    ("body", "degrees"),  # dp, tp, edp, ep, etp
    [
        ("", (1, 1, 1, 1, 1)),
        ("attention = dp(2)", (2, 1, 1, 2, 1)),
        ("attention = tp(2)", (1, 2, 1, 2, 1)),
        ("attention = dp(3) * tp(2)", (3, 2, 1, 6, 1)),
        ("experts = ep(2)", (2, 1, 1, 2, 1)),
        ("experts = ep(2) * etp(2)", (2, 2, 1, 2, 2)),
        ("experts = edp(3) * ep(5) * etp(2)", (15, 2, 3, 5, 2)),
        ("attention = dp(2)  experts = edp(2) * ep(1)", (2, 1, 2, 1, 1)),
        ("attention = dp(2) * tp(6)  experts = ep(4) * etp(3)", (2, 6, 1, 4, 3)),
        ("attention = dp(6) * tp(2)  experts = edp(3) * etp(4)", (6, 2, 3, 1, 4)),
        ("attention = tp(12)  experts = ep(12)", (1, 12, 1, 12, 1)),  # twice the KV heads; more ranks than experts
    ],
)
def test_mesh_degrees(body: str, degrees: tuple[int, ...]) -> None:
    mesh = mesh_of(body)
    assert (mesh.dp, mesh.tp, mesh.edp, mesh.ep, mesh.etp) == degrees
    assert (mesh.cluster.name, mesh.cluster.num_devices) == ("localhost", mesh.dp * mesh.tp)
    assert mesh.cluster.device.memory_bytes is None


def test_defaults() -> None:
    spec = run(MODEL)
    plan = spec.plans["default"]
    assert (plan.mesh.name, plan.mesh.cluster.num_devices, plan.context) == ("default", 1, 4096)
    assert (plan.prefill.tokens, plan.prefill.exchange) == (4096, "flat")
    assert (plan.decode.tokens, plan.decode.exchange) == (8, "flat")
    assert plan.compute == plan.model.dtype == "bf16"
    assert plan.model.weights is None and not plan.model.tied and plan.model.rotary.theta == 10000
    router = plan.model.layers[0].ffn
    assert isinstance(router, Moe) and (router.router.groups, router.router.keep, router.router.scale) == (1, 1, 1.0)


def test_compute_follows_the_checkpoint_unless_given() -> None:
    text = MODEL.replace("vocab = 100", "vocab = 100  dtype = fp32")
    assert plan_of(text).compute == "fp32"
    assert plan_of(text + "plan p { run m  compute = fp16 }").compute == "fp16"


@pytest.mark.parametrize(
    ("settings", "combine"),
    [
        ("", "ordered"),
        ("exchange = flat", "ordered"),
        ("exchange = flat  combine = reduced", "reduced"),
        ("combine = auto", "auto"),
        ("exchange = padded", "reduced"),
        ("exchange = gather", "reduced"),
        ("exchange = two_hop  combine = reduced", "reduced"),
        ("exchange = aggregate  combine = auto", "reduced"),
        ("exchange = auto", "auto"),
        ("exchange = auto  combine = auto", "auto"),
        ("sums = any", "reduced"),
        ("exchange = gather  sums = any", "reduced"),
        ("exchange = auto  sums = any", "auto"),
    ],
)
def test_combine_follows_the_exchange_unless_given(settings: str, combine: str) -> None:
    """`auto` stays only where there is something to choose."""
    assert plan_of(MODEL + f"plan p {{ run m  decode {{ {settings} }} }}").decode.combine == combine


def test_only_flat_can_combine_in_order() -> None:
    for exchange in sorted({*EXCHANGES} - {"flat"}):
        phase = f"prefill {{ exchange = {exchange}  combine = ordered }}"
        assert errors(MODEL + f"plan p {{ run m  {phase} }}") == ["E0224"]


@pytest.mark.parametrize(
    ("nodes", "devices", "experts", "spanned"),
    [
        (1, 8, "ep(8)", 1),
        (2, 4, "ep(8)", 2),
        (2, 4, "edp(2) * ep(4)", 1),
        (4, 2, "ep(4) * etp(2)", 4),  # one rank of a group in each node
        (3, 4, "edp(2) * ep(6)", 0),  # 4 + 2 ranks, then 2 + 4
        (3, 4, "edp(3) * ep(4)", 1),
        (3, 4, "edp(4) * ep(3)", 0),
        (3, 2, "ep(3) * etp(2)", 3),
        (2, 3, "ep(3) * etp(2)", 0),  # one tensor half has 2 ranks in the first node, the other 1
    ],
)
def test_nodes_that_an_expert_group_spans(nodes: int, devices: int, experts: str, spanned: int) -> None:
    head = f"cluster box {{ devices = {devices} }}\n"
    mesh = f"{head}{MODEL}mesh x on box[{nodes}] {{ experts = {experts} }}\n"
    assert plan_of(mesh).mesh.nodes == spanned
    if spanned:
        assert plan_of(mesh, "plan.exchange=two_hop").prefill.exchange == "two_hop"
    else:
        assert errors(mesh, "plan.exchange=aggregate") == ["E0309"]


@pytest.mark.parametrize(
    ("nodes", "devices", "spanned"),
    [
        (2, 4, 1),  # a stage on each node
        (4, 2, 2),
        (8, 1, 4),
        (1, 8, 1),
        (5, 2, 0),  # not the right size
        (2, 6, 0),  # ranks 0-3 and 8-11 are in one node, 4-7 in two
    ],
)
def test_nodes_that_an_expert_group_spans_in_every_stage(nodes: int, devices: int, spanned: int) -> None:
    stages = nodes * devices // 4
    mesh_text = f"mesh x on box[{nodes}] {{ experts = ep(4)  stages = pp({stages}) }}"
    text = f"cluster box {{ devices = {devices} }}\n{MODEL}{mesh_text}\n"
    if nodes * devices % 4:
        assert errors(text) == ["E0302"]
        return
    mesh = plan_of(text).mesh
    assert (mesh.nodes, mesh.pp) == (spanned, stages)
    if not spanned:
        assert errors(text, "plan.exchange=two_hop") == ["E0309"]


@pytest.mark.parametrize(
    ("stages", "code"), [(1, None), (4, None), (5, "E0310"), (1 << 14, "E0310"), (1 << 15, "E0302")]
)
def test_stages_are_bounded_by_layers_and_ranks(stages: int, code: str | None) -> None:
    text = f"{MODEL}mesh x {{ attention = dp(4)  stages = pp({stages}) }}\nplan p {{ run m on x }}\n"
    if code is None:
        assert plan_of(text).mesh.cluster.num_devices == 4 * stages
    else:
        assert errors(text) == [code]


@pytest.mark.parametrize(
    ("settings", "overlap"), [("", "off"), ("overlap = off", "off"), ("overlap = auto", "auto"), ("overlap = 2", "2")]
)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_overlap_goes_with_every_exchange_but_chunks_of_a_padded_one(
    settings: str, overlap: str, exchange: str
) -> None:
    mesh = "mesh x { attention = dp(2)  experts = ep(2) }\n"
    text = MODEL + mesh + f"plan p {{ run m on x  decode {{ exchange = {exchange}  {settings} }} }}"
    if (exchange, overlap) == ("padded", "2"):
        assert errors(text) == ["E0224"]
    else:
        assert plan_of(text).decode.overlap == overlap


@pytest.mark.parametrize("mesh", ["", "dp(2)", "tp(2)"])
def test_chunks_where_nothing_is_exchanged_are_refused(mesh: str) -> None:
    on = " on x" if mesh else ""
    text = MODEL + (f"mesh x {{ attention = {mesh}  experts = edp(2) }}\n" if mesh else "")
    assert errors(text + f"plan p {{ run m{on}  decode {{ overlap = 2 }} }}") == ["E0224"]
    assert plan_of(text + f"plan p {{ run m{on}  decode {{ overlap = auto }} }}").decode.overlap == "auto"


def test_chunks_of_a_model_without_experts_are_refused() -> None:
    dense = "".join(line for line in MODEL.splitlines(keepends=True) if line.split()[0] not in ("router", "experts"))
    text = dense.replace("moe(r, e)", "swiglu(24)")
    text += "mesh x { attention = dp(2) }\nplan p { run m on x  prefill { overlap = 3 }  decode { overlap = 2 } }"
    assert errors(text) == ["E0224", "E0224"]


def test_uneven_nodes_are_refused_by_the_pass_too() -> None:
    """A program can come from its own text, which the checker never saw."""
    head = "cluster box { devices = 4 }\n"
    plan = plan_of(f"{head}{MODEL}mesh x on box[3] {{ attention = dp(12)  experts = edp(2) * ep(6) }}\n")
    program = lower(plan, replace(plan.prefill, exchange="two_hop"), "case.moe")
    with pytest.raises(CompileError) as info:
        InsertExchange().run(program)
    assert f"```text\n{info.value.render()}\n```" in read("errors", "E0331.md")


def test_alike_layers_are_one_object() -> None:
    layers = "layers 0, 2 { a  moe(r, e) }\n  layers 1, 3..5 step 2 { a  swiglu(7) }\n  layers 4 { a  moe(r, e) }"
    model = plan_of(MODEL.replace("layers 0..3 { a  moe(r, e) }", layers)).model
    assert [isinstance(layer.ffn, Moe) for layer in model.layers] == [True, False, True, False, True, False]
    assert len({id(layer) for layer in model.layers}) == 2


def test_arithmetic_and_units() -> None:
    head = "const n = (2 + 6) / 4 * 8\nconst g = 1.5 * 2 GiB - 512 MiB\n"
    links = "intra = link(100 GB/s + 800 Gbit/s, latency = 1.5 ms, concurrency = n / 4)  host = link(1 GB/s)"
    cluster = f"cluster c {{ devices = n  memory = g  {links} }}\n"
    mesh = mesh_of("attention = dp(n / 2) * tp(2)", " on c", head + cluster)
    assert mesh.cluster.devices_per_node == 16 and mesh.dp == 8
    assert mesh.cluster.device.memory_bytes == 2560 * 1024**2
    assert (mesh.cluster.intra, mesh.cluster.host) == (Link(200.0, 1500.0, 4), Link(1.0, 0.0, 1))


def test_plain_groups_are_plain_top_k() -> None:
    """Fault B37: one group kept of one, or none given, is the same router."""
    text = MODEL.replace("top = 2", "top = 2  groups = 1 keep 1")
    plain, grouped = plan_of(MODEL).model.layers[0].ffn, plan_of(text).model.layers[0].ffn
    assert isinstance(plain, Moe) and isinstance(grouped, Moe)
    assert (plain.router.groups, plain.router.keep) == (grouped.router.groups, grouped.router.keep) == (1, 1)


@pytest.mark.parametrize(
    ("experts", "settings", "code"),
    [
        (8, "top = 4  groups = 8 keep 4", None),  # one expert a group: the rule is max
        (10, "top = 2  groups = 4 keep 2", "E0213"),
        (8, "top = 2  groups = 4 keep 5", "E0213"),
        (8, "top = 5  groups = 4 keep 2", "E0213"),
        (8, "top = 4  groups = 4 keep 2", None),
        (8, "top = 2  groups = 0 keep 1", "E0208"),
        (3, "top = 4", "E0203"),  # fault B29
        (3, "top = 3", None),
        (8, "top = 0", "E0208"),
        (8, 'top = "2"', "E0207"),
        (8, "top = 2.5", "E0207"),
    ],
)
def test_expert_groups(experts: int, settings: str, code: str | None) -> None:
    text = MODEL.replace("top = 2", settings).replace("8 * swiglu", f"{experts} * swiglu")
    if code is None:
        assert plan_of(text).model
    else:
        assert errors(text) == [code]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("vocab", "vocb"),
        ("norm = rms", "nrom = rms"),
        ("score", "scroe"),
        ("kv_heads", "kv_head"),
        ("experts e", "experst e"),
        ("softmax", "softmx"),
        ("moe(", "mo("),
        ("a  moe", "b  moe"),
    ],
)
def test_a_misspelt_word_is_refused_with_its_place(wrong: str, right: str) -> None:
    """Fault B30: a key that matches nothing changes nothing. Here it is refused, with file, line and column."""
    with pytest.raises(CompileError) as info:
        run(MODEL.replace(wrong, right))
    text = info.value.render()
    assert re.search(r"--> case\.moe:\d+:\d+", text)
    misspelt = right.split()[0].rstrip("(")
    assert f"`{misspelt}" in text or "did you mean" in text


def test_a_broken_value_silences_what_follows_from_it() -> None:
    text = MODEL.replace("8 * swiglu(24)", '"8" * swiglu(24)') + "mesh x { attention = tp(5) }\nplan p { run m on x }\n"
    assert errors(text) == ["E0207"]


def test_all_errors_are_reported_in_order() -> None:
    text = MODEL.replace("hidden = 64", "hidden = 0").replace("top = 2", "top = 9") + "mesh x { attention = ddp(2) }\n"
    with pytest.raises(CompileError) as info:
        run(text)
    found = [(d.code, d.primary.span.start) for d in info.value.diagnostics if d.primary]
    assert [code for code, _ in found] == ["E0208", "E0203", "E0303"] and found == sorted(found, key=lambda x: x[1])


def test_wrong_product_names_axes_product_and_world_size() -> None:
    """Fault B45: axes of pairwise different sizes on a cluster of another size."""
    text = "use cluster dgx_h100\n" + MODEL + "mesh x on dgx_h100[3] { attention = dp(5) * tp(3)  experts = ep(15) }\n"
    with pytest.raises(CompileError) as info:
        run(text)
    message = info.value.diagnostics[0].message
    assert info.value.diagnostics[0].code == "E0302" and "15 ranks" in message and "24" in message
    with pytest.raises(CompileError) as info:
        mesh_of("attention = dp(5) * tp(3)  experts = edp(2) * ep(7) * etp(1)")
    message = info.value.diagnostics[0].message
    assert "dp(5) * tp(3) = 15" in message and "edp(2) * ep(7) * etp(1) = 14" in message


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ("attention = tp(5)", "E0305", "tp can be 1, 2, 3, 4, 6, 12"),
        ("attention = tp(4)", "E0306", "tp can be 1, 2, 3, 6, or a multiple of 6"),
        ("experts = ep(1) * etp(5)", "E0305", "tp can be"),
        ("attention = dp(5)  experts = etp(5)", "E0307", "etp can be 1, 2, 3, 4, 6, 8, 12, 24"),
        ("attention = dp(3) * tp(2)  experts = ep(2) * etp(3)", "E0304", "multiple"),
    ],
)
def test_dimensions_must_fit_the_degrees(body: str, code: str, says: str) -> None:
    with pytest.raises(CompileError) as info:
        mesh_of(body)
    first = info.value.diagnostics[0]
    assert first.code == code and says in first.help


# Several files


def files(**texts: str) -> Callable[[str, SourceFile], SourceFile]:
    return lambda path, user: SourceFile(path, texts[path.removesuffix(".moe")])


def test_use_of_a_file_on_disk(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "model.moe").write_text(MODEL + 'use "../pod.moe"\n')
    (tmp_path / "pod.moe").write_text("const n = 3\nmesh pod { attention = dp(n) }\n")
    (tmp_path / "main.moe").write_text('use "parts/model.moe"\nplan p { run m on pod }\n')
    spec = check(read_source(tmp_path / "main.moe"))
    assert spec.plan().mesh.dp == 3 and [Path(s.name).name for s in spec.sources] == [
        "main.moe",
        "model.moe",
        "pod.moe",
    ]


def test_files_may_use_each_other_and_share_names() -> None:
    load = files(a='use "b.moe"\n' + MODEL, b='use "a.moe"\nmesh x { attention = dp(2) }\n')
    spec = check(SourceFile("main.moe", 'use "a.moe"\nplan p { run m on x }\n'), load)
    assert spec.plan().mesh.dp == 2


def test_constants_belong_to_their_file() -> None:
    load = files(a="const n = 3\nmesh x { attention = dp(n) }\n")
    with pytest.raises(CompileError) as info:
        check(SourceFile("main.moe", 'use "a.moe"\n' + MODEL.replace("8 *", "n *")), load)
    assert [d.code for d in info.value.diagnostics] == ["E0201"]


def test_an_error_in_a_used_file_is_shown_there() -> None:
    load = files(a="model x { hidden = = 3 }\n")
    with pytest.raises(CompileError) as info:
        check(SourceFile("main.moe", 'use "a.moe"\n'), load)
    assert "--> a.moe:1:20" in info.value.render()


def test_a_name_of_two_files_is_refused_with_both_places() -> None:
    with pytest.raises(CompileError) as info:
        check(SourceFile("main.moe", 'use "a.moe"\n' + MODEL), files(a=MODEL))
    text = info.value.render()
    assert info.value.diagnostics[0].code == "E0206" and "a.moe:1:7" in text and "main.moe:2:7" in text


def test_a_chain_of_files_ends() -> None:
    def load(path: str, user: SourceFile) -> SourceFile:
        return SourceFile(path, f'use "{int(path) + 1}"\n')

    with pytest.raises(CompileError) as info:
        check(SourceFile("0", 'use "1"\n'), load)
    assert [d.code for d in info.value.diagnostics] == ["E0221"]


@pytest.mark.parametrize(
    "line",
    [
        "const n = 3",
        "use cluster dgx_h100",
        "use model mixtral_8x7b",
        "mesh y { attention = dp(2) }",
        "cluster c { devices = 2 }",
    ],
)
def test_what_is_declared_and_not_used_is_refused(line: str) -> None:
    assert errors(f"{line}\n{MODEL}mesh x {{ attention = dp(2) }}\nplan p {{ run m on x }}\n") == ["E0212"]


def test_an_unused_file_is_refused_and_a_library_is_not() -> None:
    load = files(a="mesh y { attention = dp(2) }\n")
    with pytest.raises(CompileError) as info:
        check(SourceFile("main.moe", f'use "a.moe"\n{MODEL}mesh x {{ }}\nplan p {{ run m on x }}\n'), load)
    assert [d.code for d in info.value.diagnostics] == ["E0212"]
    library = run("mesh x { attention = dp(2) }\nmesh y { attention = dp(3) }\ncluster c { devices = 2 }\n")
    assert list(library.meshes) == ["x", "y"] and not library.plans


def test_plan_is_chosen_by_name() -> None:
    spec = run(MODEL + "plan a { run m }\nplan b { run m  context = 64 }\n")
    assert spec.plan("b").context == 64
    for name in (None, "c"):
        with pytest.raises(MoecError) as info:
            spec.plan(name)
        assert info.value.diagnostics[0].code == "E0223" and info.value.exit_code == 2
    with pytest.raises(MoecError, match="has no plan"):
        run("cluster c { devices = 2 }\n").plan()


# --set

FULL = MODEL + (
    "const n = 2\nmesh x { attention = dp(n)  placement = linear }\n"
    "plan p { run m on x  context = 64  prefill { tokens = 32  exchange = flat } }\n"
)


@pytest.mark.parametrize(
    ("overrides", "value"),
    [
        (["plan.context=512"], lambda p: p.context == 512),
        (["p.context = 2 * 256"], lambda p: p.context == 512),
        (["plan.compute=fp32"], lambda p: p.compute == "fp32"),
        (["plan.exchange=gather"], lambda p: (p.prefill.exchange, p.decode.exchange) == ("gather", "gather")),
        (["plan.prefill.exchange=gather"], lambda p: (p.prefill.exchange, p.decode.exchange) == ("gather", "flat")),
        (["plan.exchange=two_hop"], lambda p: (p.prefill.exchange, p.decode.combine) == ("two_hop", "reduced")),
        (["plan.combine=reduced"], lambda p: (p.prefill.combine, p.decode.combine) == ("reduced", "reduced")),
        (["plan.decode.sums=any"], lambda p: (p.prefill.sums, p.decode.sums) == ("fixed", "any")),
        (["plan.sums=any"], lambda p: (p.prefill.sums, p.decode.sums) == ("any", "any")),
        (["plan.exchange=padded", "plan.capacity=2"], lambda p: (p.decode.capacity, p.decode.drop) == (2.0, False)),
        (
            ["plan.decode.exchange=padded", "plan.decode.capacity=2.0 drop"],
            lambda p: (p.decode.capacity, p.decode.drop, p.prefill.capacity) == (2.0, True, None),
        ),
        (
            ["plan.exchange=padded", "plan.capacity=1 drop", "plan.capacity=3"],
            lambda p: (p.decode.capacity, p.decode.drop) == (3.0, False),
        ),
        (["plan.decode.batch=4"], lambda p: (p.decode.tokens, p.prefill.tokens) == (4, 32)),
        (["mesh.attention=tp(n)"], lambda p: (p.mesh.dp, p.mesh.tp, p.mesh.ep) == (1, 2, 2)),
        (["x.experts=ep(2)"], lambda p: p.mesh.ep == 2),
        (["mesh.stages=pp(n)"], lambda p: (p.mesh.pp, p.mesh.dp, p.mesh.cluster.num_devices) == (2, 2, 4)),
        (["plan.overlap=auto"], lambda p: (p.prefill.overlap, p.decode.overlap) == ("auto", "auto")),
        (["plan.decode.overlap=8"], lambda p: (p.prefill.overlap, p.decode.overlap) == ("off", "8")),
        (["plan.overlap=2 * n"], lambda p: p.decode.overlap == "4"),
        (["plan.exchange=padded", "plan.overlap=auto"], lambda p: p.decode.overlap == "auto"),
        (["mesh.placement=round_robin"], lambda p: p.mesh.placement == "round_robin"),
        (["const.n=3"], lambda p: p.mesh.dp == 3),
        (["mesh.attention=dp(n)*tp(3)"], lambda p: (p.mesh.dp, p.mesh.tp) == (2, 3)),
        (["model.r.top=3"], lambda p: p.model.layers[0].ffn.router.top == 3),
        (["m.r.groups=4 keep 2"], lambda p: p.model.layers[0].ffn.router.keep == 2),
        (["model.e=16*swiglu(24)"], lambda p: p.model.layers[0].ffn.routed.count == 16),
        (['model.weights=huggingface("a=b")'], lambda p: p.model.weights == "a=b"),
        (["plan.context=1", "plan.context=2"], lambda p: p.context == 2),
    ],
)
def test_set(overrides: Sequence[str], value: Callable[[Plan], bool]) -> None:
    assert value(plan_of(FULL, *overrides))


def test_set_on_the_default_plan_and_mesh() -> None:
    plan = plan_of(MODEL, "mesh.experts=ep(2)", "plan.decode.batch=3", "plan.exchange=gather")
    assert (plan.mesh.ep, plan.decode.tokens, plan.prefill.exchange) == (2, 3, "gather")


@pytest.mark.parametrize(
    ("override", "code", "says"),
    [
        ("context", "E0222", "KEY=VALUE"),
        ("plan.=3", "E0222", "KEY=VALUE"),
        ("plna.context=3", "E0222", "did you mean `plan`?"),
        ("plan.contxt=3", "E0202", "did you mean `context`?"),
        ("plan.decod.batch=3", "E0222", "did you mean `decode`?"),
        ("plan.decode.batsh=3", "E0202", "did you mean `batch`?"),
        ("plan.decode.batch.size=3", "E0222", ""),
        ("mesh.attention=ttp(2)", "E0303", "did you mean `tp`?"),
        ("plan.context=", "E0102", ""),
        ("plan.context=3 4", "E0101", ""),
        ("plan.context=0", "E0208", ""),
        ("plan.context=\x00", "E0111", ""),
        ("plan.overlap=1", "E0208", "at least 2"),
        ("plan.overlap=9", "E0208", "at most 8"),
        ("plan.overlap=2.5", "E0207", ""),
        ("plan.overlap=atuo", "E0209", "did you mean `auto`?"),
        ("mesh.stages=pp(0)", "E0208", "at least 1"),
        ("mesh.stages=2", "E0209", "write `pp(...)`"),
        ("mesh.replicas=2", "E0219", "leave `replicas` out"),
        ("const.n.x=3", "E0222", ""),
        ("plan.run=m", "E0202", ""),
        ("model.attention.heads=3", "E0222", ""),
    ],
)
def test_bad_set_is_refused_where_it_was_written(override: str, code: str, says: str) -> None:
    with pytest.raises(CompileError) as info:
        plan_of(FULL, override)
    first = info.value.diagnostics[0]
    assert first.code == code and says in first.message + first.help
    assert first.primary and first.primary.span.source.name == "--set"
    assert "\x00" not in info.value.render()


def test_the_checker_does_not_import_torch() -> None:
    script = "import sys, moec.semantics.checker, moec.grammar.formatter; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize("number", range(4))
def test_examples_of_the_language_page(number: int) -> None:
    """They check, are formatted, and the page names every setting there is."""
    text = (ROOT / "docs" / "language.md").read_text()
    examples = re.findall(r"```moe\n(.*?)```", text, re.S)
    assert len(examples) == 4
    assert run(examples[number]) and format_text(examples[number]) == examples[number]


def test_the_language_page_names_every_reserved_word_unit_and_setting() -> None:
    words = set(re.findall(r"[\w/]+", (ROOT / "docs" / "language.md").read_text()))
    assert words >= {*reserved_words(), *UNITS, *SETTINGS, *ROUTER_SETTINGS, *CLUSTER_SETTINGS, *YARN_ARGUMENTS}
    assert words >= {*EXCHANGES, *COMBINES, *PHASE_SETTINGS, "placement", "context", "tokens", "batch"}
