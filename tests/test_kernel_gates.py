"""What the kernels of Qwen3-30B-A3B's layer must cost on sm_90, and that every shipped model's compile everywhere.

All from machine code compiled here, without a GPU: figures of issue slots, bytes, padding and launches are gates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from moec.artifact import load
from moec.checked import Plan
from moec.cli.app import app
from moec.codegen.devices import DEVICES
from moec.codegen.expected_rows import even_rows, power_law_rows, random_rows
from moec.codegen.gemm_variant import Projection, RowSource
from moec.codegen.grouped_gemm import GroupedGemm, specialise
from moec.codegen.kernel_candidates import candidates
from moec.codegen.kernel_moves import compile_moving
from moec.codegen.kernel_select import Choice, select
from moec.codegen.kernel_store import Compiled
from moec.codegen.layer_cost import LayerCost, compare, layer_cost, reduce_cost
from moec.codegen.machine_code import read_cubin
from moec.codegen.machine_loops import MatrixLoop
from moec.codegen.pair_product import compile_pairs
from moec.codegen.targets import TARGETS, Dtype, Target
from moec.compiler import checked_plan, compile_phase
from moec.compiler_kernels import GEMMS, MOVING, PAIRED, compile_gemm, pair_product, wanted_gemm
from moec.compiler_uses import Use, uses
from moec.ir.program import Program
from moec.specs import read, shipped

pytest.importorskip("triton")

HIDDEN, INNER, EXPERTS, TOP = 2048, 768, 128, 8
H200, TARGET = DEVICES["h200"], TARGETS["cuda:90"]
GATHERED, SORTED = RowSource.GATHERED, RowSource.SORTED


@pytest.fixture(scope="module", autouse=True)
def cold(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing kept from earlier runs, neither here nor by Triton."""
    folder = tmp_path_factory.mktemp("cold")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))
        yield


@cache
def chosen(tokens: int, op: Projection, rows: RowSource = SORTED) -> Choice:
    """The kernel that is chosen for a step of so many tokens."""
    counts = random_rows(EXPERTS, TOP, tokens)
    mean = max(1, tokens * TOP // EXPERTS)
    wanted = specialise(
        op, HIDDEN, INNER, EXPERTS, Dtype.BF16, TARGET, top=TOP, rows=rows, rows_per_expert=mean
    )  # fmt: skip
    return select(candidates(wanted), counts, tokens, H200, compile_gemm)


def layer(tokens: int, rows: RowSource, skew: float = 0.0) -> LayerCost:
    """The layer with rows gathered or copied, and a sum in fixed order."""
    up, down = chosen(tokens, Projection.GATE_UP, rows), chosen(tokens, Projection.DOWN)
    counts = random_rows(EXPERTS, TOP, tokens, skew)
    return layer_cost((up.values, up.kernel), (down.values, down.kernel), counts, tokens, H200)


def expected_loads(values: GroupedGemm, loop: MatrixLoop) -> dict[str, int]:
    """Weights by descriptors: gate and up in one box of a full tile, one after the other in a tail.

    Rows by a descriptor too in sorted full tiles; else by 16 bytes a thread, and nothing but them.
    """
    assert loop.op.shape is not None
    is_wide, depth = loop.op.shape[1] == 256, values.tiles[0].k
    if is_wide and values.rows is SORTED:
        return {"tma": 2}
    rows = 128 if is_wide else loop.op.shape[1]
    copies = max(1, rows * depth * 2 // (values.warps * 32 * 16))
    return {"tma": 1 if is_wide else values.sides, "cp_async": copies}


@pytest.mark.parametrize("tokens", [64, 512, 1024, 4096])
def test_no_spills_and_weights_by_descriptors(tokens: int) -> None:
    kernels = [chosen(tokens, Projection.GATE_UP, rows) for rows in RowSource] + [chosen(tokens, Projection.DOWN)]
    for choice in kernels:
        code = choice.kernel.code
        assert code.spills == 0 and choice.kernel.report.spills == 0
        assert len(code.loops) == len(choice.values.bodies)
        for loop in code.loops:
            assert dict(loop.loads) == expected_loads(choice.values, loop)
        assert choice.values.fallback.text == ""
        assert all(loop.op.name == "HGMMA" for loop in code.loops)


@pytest.mark.parametrize(("rows", "slots", "ratio"), [(GATHERED, 22.0, 1.10), (SORTED, 14.0, 1.30)])
def test_issue_slots_and_traffic_of_prefill(rows: RowSource, slots: float, ratio: float) -> None:
    """A sum in fixed order may add 0.22, which is what its kernel moves beyond the rows that leave the layer."""
    loops = {str(loop.op): loop for loop in chosen(4096, Projection.GATE_UP, rows).kernel.code.loops}
    assert loops["HGMMA 64x256x16"].slots_per_op <= slots
    assert {str(loop.op) for loop in chosen(4096, Projection.DOWN).kernel.code.loops} == set(loops)
    cost = layer(4096, rows)
    row = HIDDEN * 2
    summed = reduce_cost(4096, TOP, 4096 * TOP, row, H200).moved + 4096 * TOP * row - 4096 * row
    assert (cost.moved - summed) / cost.minimum <= ratio
    assert cost.traffic_ratio <= ratio + 0.22
    assert cost.traffic_ratio > 1.0


def test_down_takes_few_slots_too() -> None:
    loops = chosen(4096, Projection.DOWN).kernel.code.loops
    assert max(loop.slots_per_op for loop in loops) <= 14.0


@pytest.mark.parametrize("tokens", [512, 1024])
@pytest.mark.parametrize("rows", RowSource)
@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_issue_time_is_half_of_the_bytes_at_most(tokens: int, rows: RowSource, skew: float) -> None:
    cost = layer(tokens, rows, skew)
    assert 0 < cost.issue_us <= 0.5 * cost.moved / 4.8e6


@pytest.mark.parametrize(("tokens", "ratio"), [(512, 1.25), (1024, 1.15), (2048, 1.06), (4096, 1.06), (16384, 1.06)])
@pytest.mark.parametrize("skew", [0.0, 0.5, 1.0])
def test_rows_are_padded_little_under_any_skew(tokens: int, ratio: float, skew: float) -> None:
    drawn = [random_rows(EXPERTS, TOP, tokens, skew, seed).tolist() for seed in range(5)]
    for op in Projection:
        values = chosen(min(tokens, 4096), op).values
        assert max(values.padded_rows(rows) / sum(rows) for rows in drawn) <= ratio


def test_launches() -> None:
    """3 for both products and the sum, 2 for the permutation, 1 for routing."""
    for rows in RowSource:
        cost = layer(4096, rows)
        assert {one.name: one.launches for one in cost.others if one.name != "route"} in (
            {"group_rows": 2, "reduce_rows": 1},
            {"group_pairs": 2, "reduce_rows": 1},
        )
        assert cost.launches == 6
    up, down = chosen(64, Projection.GATE_UP, GATHERED), chosen(64, Projection.DOWN)
    rows = even_rows(EXPERTS, TOP, 8)
    assert layer_cost((up.values, up.kernel), (down.values, down.kernel), rows, 8, H200).launches == 5


def test_a_step_that_memory_bounds_is_predicted_near_the_roof() -> None:
    """64 tokens: 251.8 us is the roof, 302 the best that was published."""
    up, down = chosen(64, Projection.GATE_UP, GATHERED), chosen(64, Projection.DOWN)
    rows = even_rows(EXPERTS, TOP, 64)
    cost = layer_cost((up.values, up.kernel), (down.values, down.kernel), rows, 64, H200)
    assert cost.roof_us == pytest.approx(251.8, rel=0.005)
    assert cost.roof_us <= cost.predicted_us <= 1.3 * cost.roof_us
    assert cost.gate_up.memory_us > cost.gate_up.busiest_us


@pytest.mark.parametrize("tokens", [1, 64, 512, 4096])
@pytest.mark.parametrize(("routing", "draw"), [("balanced", even_rows), ("power_law", power_law_rows)])
def test_predictions_are_of_the_order_of_published_times(
    tokens: int, routing: str, draw: Callable[[int, int, int], np.ndarray]
) -> None:
    up, down = chosen(max(64, tokens), Projection.GATE_UP, GATHERED), chosen(max(64, tokens), Projection.DOWN)
    rows = draw(EXPERTS, TOP, tokens)
    cost = layer_cost((up.values, up.kernel), (down.values, down.kernel), rows, tokens, H200)
    assert 0.6 < compare(tokens, routing, cost).ratio < 1.4


def plans(folder: Path) -> dict[str, Plan]:
    """A plan of each shipped model, on one rank of a machine without a limit of memory."""
    found = {}
    for name in shipped("models", ".moe"):
        text = read("models", f"{name}.moe")
        path = folder / f"{name}.moe"
        path.write_text(
            f"{text}\nmesh one {{ experts = ep(1) }}\nplan serve {{ run {name} on one  compute = bf16  context = 4096\n"
            "  prefill { tokens = 4096 }  decode { batch = 32 } }\n"
        )
        found[name] = checked_plan(path)[0]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def programs(folder: Path) -> dict[str, list[Program]]:
    return {
        name: [compile_phase(plan, phase, f"{name}.moe", "triton") for phase in ("prefill", "decode")]
        for name, plan in plans(folder).items()
    }


def test_the_shipped_models_are_known(programs: dict[str, list[Program]]) -> None:
    assert set(programs) == {"deepseek_v3", "mixtral_8x7b", "qwen3_30b_a3b"}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral_8x7b", "qwen3_30b_a3b"])
def test_every_kernel_of_every_model_compiles_for_every_target(
    programs: dict[str, list[Program]], name: str, target: str
) -> None:
    """Of both phases, as they are without a search; those of a kind that another phase has too are compiled once."""
    found = [use for program in programs[name] for use in uses(program)]
    paired = () if name == "deepseek_v3" else PAIRED  # experts in fp8 are not multiplied pair by pair
    assert {use.op for use in found} >= {"route", "grouped_linear", "reduce_rows", *paired}
    kernels = [kernel for use in found for kernel in compiled_for(use, TARGETS[target])]
    for kernel in kernels:
        assert kernel.report.binary.startswith(b"\x7fELF") and kernel.report.spills == 0
        assert kernel.code.registers <= (512 if target.startswith("hip") else 255)
        assert kernel.report.shared_bytes <= TARGETS[target].shared_limit
    assert sum(bool(kernel.code.loops) for kernel in kernels) == 4


def compiled_for(use: Use, target: Target) -> list[Compiled]:
    if use.op in GEMMS:
        return [compile_gemm(wanted_gemm(use, target))]
    if use.op in PAIRED:
        return [compile_pairs(pair_product(use, target))]
    return [kernel for _, kernel in compile_moving(MOVING[use.op](use), target)]


def test_a_compiled_folder_has_text_and_machine_code_of_every_kernel(
    folder: Path, programs: dict[str, list[Program]], tmp_path: Path
) -> None:
    """And `moec kernels` shows each. What is known of machine code comes back from the folder, nothing is run."""
    command = ["compile", str(folder / "qwen3_30b_a3b.moe"), "--target", "cuda:90", "-o", str(tmp_path / "build")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.stderr
    assert "gate_up" in done.stderr and "us predicted" in done.stderr
    artifact = load(tmp_path / "build")
    entries = artifact.document["kernels"]
    assert [entry["op"] for entry in entries] == [use.op for p in programs["qwen3_30b_a3b"] for use in uses(p)]
    names = [*artifact.sources, *artifact.binaries]
    for entry in entries:
        files = {Path(name).suffix for name in names if name.startswith(f"kernels/{entry['name']}.")}
        assert files == {".py", ".ptx", ".cubin"}
        assert entry["spills"] == 0 and entry["us"]["roof"] <= entry["us"]["predicted"]
    assert all(read_cubin(code).registers for code in artifact.binaries.values())
    (text,) = [text for name, text in artifact.sources.items() if name.endswith("t16.py") and "gate_up" in name]
    assert "decode, sparse, qwen3_30b_a3b.moe:" in text
    shown = CliRunner().invoke(app, ["kernels", str(tmp_path / "build")])
    assert shown.exit_code == 0 and shown.stdout.count("HGMMA 64x256x16") == 2
