"""What a step of a few tokens must cost on sm_90 with Qwen3-30B-A3B's layer, and what its kernels are made of.

All from machine code compiled here, without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from moec.codegen.devices import DEVICES, FILL_NS, LAUNCH_US, MEMORY_SHARE
from moec.codegen.expected_rows import even_rows, power_law_rows, random_rows
from moec.codegen.gemm_variant import Projection, RowSource
from moec.codegen.grouped_gemm import specialise
from moec.codegen.kernel_candidates import candidates
from moec.codegen.kernel_select import select
from moec.codegen.kernel_store import Compiled
from moec.codegen.layer_cost import LayerCost, layer_cost, pair_layer_cost
from moec.codegen.machine_code import MachineCode
from moec.codegen.machine_loops import Instruction, MatrixOp, ReadingLoop, reading_loop
from moec.codegen.pair_cost import issue_slots, pair_cost
from moec.codegen.pair_product import PairProduct, compile_pairs, specialise_pairs
from moec.codegen.targets import TARGETS, Dtype, find_target
from moec.compiler_kernels import compile_gemm
from moec.cost.pairs import most_rows
from moec.cost.sizes import sizes_of
from moec.ir.program import op_of
from tests.programs import compiled, moe, plan

pytest.importorskip("triton")

HIDDEN, INNER, EXPERTS, TOP = 2048, 768, 128, 8
H200 = DEVICES["h200"]
UP, DOWN = Projection.GATE_UP, Projection.DOWN
#: Hidden, inner, experts, choices: of the shipped models, and of odd sizes.
SHIPPED: list[tuple[int, ...]] = [(2048, 768, 128, 8), (4096, 14336, 8, 2), (7168, 2048, 257, 9)]
ODD: list[tuple[int, ...]] = [(50, 33, 5, 5), (1025, 33, 8, 1), (33, 1025, 160, 160), (1025, 1025, 64, 12)]


@pytest.fixture(scope="module", autouse=True)
def cold(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing kept from earlier runs, neither here nor by Triton."""
    folder = tmp_path_factory.mktemp("cold")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))
        yield


def product(
    op: Projection, sizes: tuple[int, ...] = SHIPPED[0], dtype: Dtype = Dtype.BF16, target: str = "cuda:90"
) -> tuple[PairProduct, Compiled]:
    hidden, inner, experts, top = sizes
    values = specialise_pairs(op, hidden, inner, experts, experts, top, dtype, TARGETS[target])
    return values, compile_pairs(values)


def layer(tokens: int, rows: np.ndarray | None = None) -> LayerCost:
    drawn = even_rows(EXPERTS, TOP, tokens) if rows is None else rows
    return pair_layer_cost(product(UP), product(DOWN), drawn, tokens, H200)


def sorted_layer(tokens: int, rows: np.ndarray) -> LayerCost:
    found = []
    for op, source in ((UP, RowSource.GATHERED), (DOWN, RowSource.SORTED)):
        wanted = specialise(
            op, HIDDEN, INNER, EXPERTS, Dtype.BF16, find_target("cuda:90"), top=TOP, rows=source, rows_per_expert=1
        )
        choice = select(candidates(wanted), rows, tokens, H200, compile_gemm)
        found.append((choice.values, choice.kernel))
    return layer_cost(found[0], found[1], rows, tokens, H200)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("sizes", [*SHIPPED, *ODD], ids=str)
def test_nothing_spills(sizes: tuple[int, ...], target: str) -> None:
    """Every size on every target in one of the dtypes, each target in all; `test_kernel_gates` has all in bf16."""
    dtype = list(Dtype)[([*SHIPPED, *ODD].index(sizes) + list(TARGETS).index(target)) % len(Dtype)]
    for op in Projection:
        values, kernel = product(op, sizes, dtype, target)
        assert kernel.report.binary.startswith(b"\x7fELF")
        assert kernel.code.spills == 0 and kernel.is_fit(TARGETS[target]), (values.name, target)


def test_weights_are_copied_16_bytes_a_thread_and_stay_ahead() -> None:
    """One step in use and three on their way, of 32 lines of 512 bytes: 8 copies a thread, and those of the rows."""
    for op, rows in ((UP, 0), (DOWN, 2)):
        values, kernel = product(op)
        assert (values.step_bytes, values.stages) == (16384, 4)
        assert kernel.report.assembly.count("cp.async.cg.shared.global") == (8 + rows) * 4
        loop = kernel.code.reading
        assert loop is not None and not kernel.code.loops and loop.loads == values.step_loads == 8 + max(1, rows)


def test_more_is_in_flight_than_memory_takes() -> None:
    """Little: 4.8 TB/s for 0.6 us are 2.9 MB on the whole device; a step of one token asks for ten times that.

    So do all steps together at what a load takes off chip: the loop's waits are hidden.
    """
    for op in Projection:
        values, kernel = product(op)
        cost = pair_cost(values, even_rows(EXPERTS, TOP, 1), 1, H200, kernel.code, kernel.report.shared_bytes)
        assert cost.occupancy is not None
        resident = min(cost.occupancy.blocks * H200.num_sms, values.num_programs(1))
        in_flight = resident * (values.stages - 1) * values.step_bytes
        assert in_flight >= 5 * H200.memory_gbps * FILL_NS
        assert cost.busiest_us < cost.memory_us


def test_one_token_takes_three_launches_and_its_bytes() -> None:
    """28.0 us on one H200 by the model with routing, 24.5 from chosen experts on; sorted it is 35.0."""
    cost = layer(1)
    assert cost.launches == 3
    assert cost.traffic_ratio < 1.001
    assert cost.roof_us == pytest.approx(15.7, rel=0.01)
    assert cost.predicted_us == pytest.approx(3 * LAUNCH_US + cost.roof_us / MEMORY_SHARE, rel=0.01)
    assert cost.predicted_us - LAUNCH_US <= 27.0 <= cost.predicted_us <= 28.1
    assert sorted_layer(1, even_rows(EXPERTS, TOP, 1)).predicted_us - cost.predicted_us >= 2 * LAUNCH_US - 0.1


@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_instructions_take_half_of_the_time_of_bytes_at_most(tokens: int) -> None:
    cost = layer(tokens)
    assert 0 < cost.issue_us <= 0.5 * cost.moved / 4.8e6
    assert cost.gate_up.busiest_us < cost.gate_up.memory_us and cost.down.busiest_us < cost.down.memory_us


@pytest.mark.parametrize("draw", [even_rows, power_law_rows, random_rows])
def test_pairs_pay_up_to_the_rows_that_the_compiler_says(draw) -> None:  # type: ignore[no-untyped-def]
    """Also where tokens agree more than those that it counts over; later sorting wins."""
    for tokens in (1, few_rows(EXPERTS, TOP)):
        rows = draw(EXPERTS, TOP, tokens)
        assert layer(tokens, rows).predicted_us < sorted_layer(tokens, rows).predicted_us - 6.0
    many = power_law_rows(EXPERTS, TOP, 64)
    assert layer(64, many).predicted_us > sorted_layer(64, many).predicted_us


def few_rows(experts: int, top: int, bound: int = 512) -> int:
    program = compiled(plan([moe(count=experts, top=top)]), "fuse-gate-up", phase="decode")
    body, _ = next((b, n) for b, n in program.nodes() if op_of(n).name == "route")
    return most_rows(sizes_of(program, body), bound)


def test_up_to_how_many_rows_pairs_are_multiplied_one_by_one() -> None:
    """R k pairs of E (1 - (1 - k/E)^R) experts, at most 1.25 pairs for each: by hand.

    128, 8: 64 pairs of 51.6 at 8 rows (1.24), 72 of 56.4 at 9 (1.28). 8, 2: 4 of 3.5 at 2 (1.14), 6 of 4.6 at 3 (1.30).
    Where every row chooses all experts, a second one reads them all again.
    """
    assert few_rows(128, 8) == 8
    assert few_rows(8, 2) == 2
    assert few_rows(4, 4) == few_rows(1, 1) == 1
    assert few_rows(128, 8, bound=6) == 6


# --- by hand-made machine code -----------------------------------------------------------------------------------


def test_a_loop_that_reads_is_found() -> None:
    """The innermost one with most loads; none with matrix instructions, and no wait that jumps back."""
    names = ["A", "LDGSTS", "LDGSTS", "B", "BRA", "LDG", "BRA", "HGMMA", "LDGSTS", "LDGSTS", "LDGSTS", "BRA", "EXIT"]
    targets = {4: 1, 6: 5, 11: 7}
    code = [
        Instruction(
            i, name, targets.get(i), matrix=MatrixOp("HGMMA") if name == "HGMMA" else None,
            load="cp_async" if name == "LDGSTS" else "global" if name == "LDG" else None,
        )
        for i, name in enumerate(names)
    ]  # fmt: skip
    assert reading_loop(code) == ReadingLoop(slots=4, loads=2)
    assert reading_loop(code[7:]) is None


def test_instructions_of_a_program() -> None:
    """8 steps of 256: the text once, and the loop seven times more; half as often where it holds two steps."""
    values = specialise_pairs(UP, HIDDEN, INNER, EXPERTS, EXPERTS, TOP, Dtype.BF16, TARGETS["cuda:90"])
    code = MachineCode(120, 0, 1024, 700, (("cp_async", 36),), (), reading=ReadingLoop(240, 9))
    assert values.num_steps == 8
    assert issue_slots(values, code) == 700 + 7 * 240
    assert issue_slots(values, replace(code, reading=ReadingLoop(440, 18))) == 700 + 3 * 440
    assert issue_slots(values, replace(code, reading=None)) == 700
    assert issue_slots(values, None) == 0


def test_repeated_experts_are_read_from_memory_once() -> None:
    """Two tokens of the same 8 experts: the bytes of one, but twice as many out of L2."""
    values, _ = product(UP)
    rows = np.zeros(EXPERTS, dtype=np.int64)
    rows[:TOP] = 1
    one, two = pair_cost(values, rows, 1, H200), pair_cost(values, 2 * rows, 2, H200)
    weights = TOP * 2 * INNER * HIDDEN * 2
    assert one.traffic.moved == weights + HIDDEN * 2 + TOP * INNER * 2 + TOP * 8
    assert two.traffic.moved - weights == 2 * (one.traffic.moved - weights)
    assert two.l2_us == 2 * one.l2_us == pytest.approx(2 * weights / 6.6e6)
    assert (one.tiles, two.tiles) == (values.num_programs(1), values.num_programs(2))
