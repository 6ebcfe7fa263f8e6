"""The cost model by hand-made machine code, the rows it expects, selection by it, and kernels kept by content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moec.codegen import kernel_store
from moec.codegen.devices import DEVICES, LAUNCH_US, MEMORY_SHARE
from moec.codegen.expected_rows import even_rows, power_law_rows, random_rows, spread
from moec.codegen.gemm_variant import Projection, RowSource, Store, Weights
from moec.codegen.grouped_gemm import GroupedGemm
from moec.codegen.kernel_cost import body_order, gemm_cost, iterations, match_loops
from moec.codegen.kernel_rows import specialise_group
from moec.codegen.kernel_select import MOST_COMPILED, least_us, select
from moec.codegen.kernel_store import Compiled, compiled
from moec.codegen.layer_cost import PUBLISHED_US, LayerCost, compare, comparison_lines, group_cost, layer_cost
from moec.codegen.machine_code import MachineCode
from moec.codegen.machine_loops import MatrixLoop, MatrixOp
from moec.codegen.offline import Launch, Report, Signature
from moec.codegen.renderer import Comment
from moec.codegen.targets import TARGETS, Dtype
from moec.codegen.tiles import Form, Tile, count_tiles
from moec.diagnostics import MoecError, fail

PAGES = Path(__file__).parent.parent / "specs" / "errors"
H200 = DEVICES["h200"]
#: The layer of Qwen3-30B-A3B: hidden, inner, experts, choices.
HIDDEN, INNER, EXPERTS, TOP = 2048, 768, 128, 8
WIDE = MatrixLoop(MatrixOp("HGMMA", (64, 256, 16)), num_ops=8, slots=98, tile_slots=1500)
TAILS = tuple(
    MatrixLoop(MatrixOp("HGMMA", (64, n, 16)), num_ops=16, slots=160, tile_slots=600) for n in (64, 32, 16, 8)
)
TILES = (Tile(128, 128, 128), *(Tile(m, 128, 128, swapped=True) for m in (64, 32, 16)))


def gemm(
    op: Projection = Projection.GATE_UP, rows: RowSource = RowSource.SORTED, store: Store = Store.PLAIN
) -> GroupedGemm:
    tiles = TILES if op is Projection.GATE_UP else tuple(replace(tile, n=256) for tile in TILES)
    return GroupedGemm(
        op, HIDDEN, INNER, EXPERTS, TOP, Dtype.BF16, Weights.PLAIN, rows, store, Form.TMA, tiles, 8, 132,
        Comment("cuda:90"), Comment(""),
    )  # fmt: skip


def kernel(*loops: MatrixLoop, registers: int = 168, spills: int = 0, shared: int = 196_608) -> Compiled:
    code = MachineCode(registers, spills, 1024, 3000, (("tma", 4),), loops)
    return Compiled(Report("k", "cuda:90", registers, spills, shared, "", b"", ""), code)


ALL = kernel(WIDE, *TAILS)


def layer(tokens: int, up: GroupedGemm, down: GroupedGemm, skew: float = 0.0) -> LayerCost:
    return layer_cost((up, ALL), (down, ALL), random_rows(EXPERTS, TOP, tokens, skew), tokens, H200)


@pytest.mark.parametrize("skew", [0.0, 0.5, 1.0])
def test_rows_are_drawn_without_replacement_and_the_same_each_time(skew: float) -> None:
    rows = random_rows(EXPERTS, TOP, 5000, skew)
    assert rows.sum() == 5000 * TOP and rows.max() <= 5000
    random_rows.cache_clear()
    assert (rows == random_rows(EXPERTS, TOP, 5000, skew)).all()
    assert (rows[0] / rows.mean() > 2) == (skew > 0)


@pytest.mark.parametrize(
    ("tokens", "side", "even", "zipf"),
    [(512, 64, 2.00, 2.39), (1024, 128, 2.00, 2.39), (2048, 128, 1.46, 1.58), (4096, 128, 1.24, 1.22),
     (4096, 64, 1.12, 1.12), (512, 16, 1.23, 1.22), (1024, 16, 1.12, 1.12), (4096, 16, 1.03, 1.03)],
)  # fmt: skip
def test_padding_of_plain_tiles_is_what_was_published(tokens: int, side: int, even: float, zipf: float) -> None:
    for skew, expected in ((0.0, even), (1.0, zipf)):
        rows = random_rows(EXPERTS, TOP, tokens, skew)
        (tiles,) = count_tiles(rows.tolist(), [side])
        assert tiles * side / rows.sum() == pytest.approx(expected, abs=0.06)


def test_even_and_power_law_rows() -> None:
    assert even_rows(128, 8, 4096).tolist() == [256] * 128
    assert even_rows(5, 2, 4).tolist() == [2, 2, 2, 1, 1]
    for tokens in (1, 8, 64, 4096):
        rows = power_law_rows(EXPERTS, TOP, tokens)
        assert rows.sum() == tokens * TOP and rows.min() >= 0 and rows.max() <= tokens
    assert power_law_rows(EXPERTS, TOP, 4096).max() > 4 * 256
    assert spread(np.array([100.0, 1.0, 1.0]), 10, 4).tolist() == [4, 3, 3]


def test_bytes_of_the_layer_by_the_formulas_of_the_field() -> None:
    """T = 4096: 1.208 GB of weights, 16.8 MB of rows; 134 MB of routed rows, 50 MB of activations."""
    rows, routed, inner = 4096 * 2048 * 2, 4096 * 8 * 2048 * 2, 4096 * 8 * 768 * 2
    weights = 128 * 3 * 2048 * 768 * 2
    gathered = layer(4096, gemm(rows=RowSource.GATHERED), gemm(Projection.DOWN))
    assert gathered.minimum == weights + 2 * rows
    lists = gathered.moved - gathered.minimum - 2 * inner - 2 * routed
    assert 0 < lists < 0.002 * gathered.minimum
    permuted = layer(4096, gemm(), gemm(Projection.DOWN))
    assert permuted.moved - gathered.moved == pytest.approx(2 * routed, rel=0.01)
    assert (gathered.launches, permuted.launches) == (6, 6)


def test_rows_gathered_again_are_read_again_where_l2_does_not_hold_them() -> None:
    small = replace(H200, l2_bytes=4096 * 2048)  # half of the rows
    rows, values = random_rows(EXPERTS, TOP, 4096), gemm(rows=RowSource.GATHERED)
    more = gemm_cost(values, rows, 4096, small).traffic.moved - gemm_cost(values, rows, 4096, H200).traffic.moved
    assert more == pytest.approx((TOP - 1) * 4096 * HIDDEN * 2 / 2)


def test_only_experts_in_use_are_read() -> None:
    one = np.zeros(EXPERTS, dtype=np.int64)
    one[5] = 8
    cost = gemm_cost(gemm(), one, 8, H200)
    assert cost.traffic.minimum == 2 * INNER * HIDDEN * 2 + 8 * HIDDEN * 2
    nothing = gemm_cost(gemm(), np.zeros(EXPERTS, dtype=np.int64), 0, H200, ALL.code)
    assert (nothing.tiles, nothing.issue_us, nothing.traffic.minimum) == (0, 0.0, 0.0)


def test_issue_time_by_hand() -> None:
    """256 rows of an expert: 2 x 6 tiles of 16 steps of 98 instructions and 1500 around, 8 warps on 4 schedulers."""
    cost = gemm_cost(gemm(), even_rows(EXPERTS, TOP, 4096), 4096, H200, ALL.code, 196_608)
    instructions = 128 * 2 * 6 * (16 * 98 + 1500) * 8
    assert cost.tiles == 128 * 2 * 6
    assert cost.issue_us == pytest.approx(instructions / (4 * 132 * 1830))
    assert cost.tensor_us == pytest.approx(4 * 4096 * 8 * 2048 * 768 / 989.4e6)
    assert cost.padded_rows == cost.useful_rows == 4096 * 8
    assert cost.busiest_us > max(cost.issue_us, cost.tensor_us)
    assert cost.predicted_us == LAUNCH_US + max(cost.memory_us / MEMORY_SHARE, cost.l2_us, cost.busiest_us)


def test_steps_of_unrolled_and_peeled_loops() -> None:
    assert iterations(gemm(), TILES[0], WIDE) == HIDDEN // 128
    assert iterations(gemm(), TILES[0], replace(WIDE, num_ops=16)) == HIDDEN // 256
    assert iterations(gemm(), TILES[0], replace(WIDE, peeled=8)) == HIDDEN // 128 - 1
    blackwell = MatrixLoop(MatrixOp("UTCHMMA"), num_ops=8, slots=104, peeled=8)
    assert iterations(gemm(), TILES[0], blackwell) == HIDDEN // 128 - 1


def test_loops_are_matched_with_tiles_by_their_instruction() -> None:
    shuffled = [TAILS[2], WIDE, TAILS[0], TAILS[3], TAILS[1]]
    assert match_loops(gemm(), shuffled) == [WIDE, *TAILS]
    assert match_loops(gemm(), []) == [None] * 5
    sm80 = [MatrixLoop(MatrixOp("HMMA", (16, 8, 16)), num_ops=ops, slots=200) for ops in (32, 64, 256, 16, 128)]
    assert [loop.num_ops for loop in match_loops(gemm(), sm80) if loop is not None] == [256, 128, 64, 32, 16]


def test_the_busiest_multiprocessor_counts() -> None:
    rows = np.zeros(EXPERTS, dtype=np.int64)
    rows[0] = 128  # 6 tiles for 132 multiprocessors
    cost = gemm_cost(gemm(), rows, 128, H200, ALL.code, 196_608)
    assert cost.busiest_us > 20 * cost.tensor_us
    assert body_order(gemm(), np.array([144, 8, 0, 33])).tolist() == [0] * 6 + [3] * 6 + [4] * 6 + [2] * 6 + [4] * 6


def test_no_machine_code_beats_the_bound() -> None:
    fastest = kernel(*(replace(loop, slots=loop.num_ops, tile_slots=0) for loop in (WIDE, *TAILS)))
    for tokens in (1, 64, 1024, 16384):
        rows = random_rows(EXPERTS, TOP, tokens)
        for values in (gemm(), gemm(Projection.DOWN)):
            cost = gemm_cost(values, rows, tokens, H200, fastest.code, 196_608)
            assert least_us(values, rows, tokens, H200) <= cost.predicted_us
            assert cost.roof_us <= cost.predicted_us


def narrow(values: GroupedGemm) -> GroupedGemm:
    return replace(values, tiles=tuple(replace(tile, n=64) for tile in values.tiles))


class Compiler:
    """Gives what it is told to, and remembers what it was asked for."""

    def __init__(self, slots: int = WIDE.slots, **spills: int) -> None:
        self.slots, self.spills, self.asked = slots, spills, list[GroupedGemm]()

    def __call__(self, values: GroupedGemm) -> Compiled:
        self.asked.append(values)
        n = values.tiles[0].n
        if (spills := self.spills.get(f"n{n}", 0)) < 0:
            raise fail("E0524", f"{n} does not compile")
        return kernel(replace(WIDE, slots=self.slots), *TAILS, spills=spills)


def choose(compiler: Compiler, *candidates: GroupedGemm, tokens: int = 4096):  # type: ignore[no-untyped-def]
    return select(candidates, even_rows(EXPERTS, TOP, tokens), tokens, H200, compiler)


def test_what_cannot_win_is_never_compiled() -> None:
    """Half as many columns read the rows twice as often from L2."""
    compiler = Compiler()
    choice = choose(compiler, narrow(gemm()), gemm())
    assert compiler.asked == [gemm()]
    assert (choice.values, choice.candidates, choice.compiled) == (gemm(), 2, 1)


WIDTHS = (16, 32, 64, 128, 256)
BY_WIDTH = [replace(gemm(), tiles=tuple(replace(t, n=n) for t in TILES)) for n in WIDTHS]


def test_few_are_compiled_though_many_promise_more() -> None:
    compiler = Compiler(slots=5000)
    assert choose(compiler, *BY_WIDTH).compiled == len(compiler.asked) == MOST_COMPILED


@pytest.mark.parametrize("fit", WIDTHS)
def test_all_are_compiled_before_one_that_spills_is_taken(fit: int) -> None:
    """However many that promise more are not fit."""
    choice = choose(Compiler(**{f"n{n}": 1 for n in WIDTHS if n != fit}), *BY_WIDTH)
    assert choice.values.tiles[0].n == fit and choice.kernel.code.spills == 0


def test_a_kernel_that_spills_is_left_and_that_is_said() -> None:
    choice = choose(Compiler(n128=7), gemm(), narrow(gemm()))
    assert choice.values.tiles == narrow(gemm()).tiles
    said = "128+64+32+16 x 64 x 128, 2 stages, 8 warps instead of 128+64+32+16 x 128 x 128, 2 stages, 8 warps"
    assert choice.values.fallback.text == f"{said}, which spills 7 registers"


def test_where_all_spill_the_least_is_taken_and_that_is_said() -> None:
    choice = choose(Compiler(n128=7, n64=3), gemm(), narrow(gemm()))
    assert choice.values.tiles[0].n == 64
    assert choice.values.fallback.text.endswith("spills 3 registers, and so does every other that was tried")


def test_a_kernel_that_asks_for_too_much_shared_memory_is_left() -> None:
    def compile(values: GroupedGemm) -> Compiled:
        return kernel(WIDE, *TAILS, shared=240_000 if values.tiles[0].n == 128 else 100_000)

    choice = select([gemm(), narrow(gemm())], even_rows(EXPERTS, TOP, 4096), 4096, H200, compile)
    assert "asks for 240000 of 232448 bytes of shared memory" in choice.values.fallback.text


def test_where_nothing_compiles_the_compilers_word_is_passed_on() -> None:
    with pytest.raises(MoecError, match="does not compile"):
        choose(Compiler(n128=-1, n64=-1), gemm(), narrow(gemm()))
    with pytest.raises(MoecError) as caught:
        choose(Compiler())
    assert caught.value.render() in (PAGES / "E0533.md").read_text()


def test_the_wanted_one_wins_where_the_model_sees_no_difference() -> None:
    deeper = replace(gemm(), tiles=tuple(replace(tile, stages=3) for tile in TILES))
    assert choose(Compiler(), deeper, gemm()).values == deeper
    assert choose(Compiler(), gemm(), deeper).values == gemm()


TEXT = """
import triton
import triton.language as tl


@triton.jit
def double(x, INTERPRET: tl.constexpr):
    at = x + tl.arange(0, 64)
    tl.store(at, tl.load(at) * 2)
"""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    pytest.importorskip("triton")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield tmp_path / "moec" / "kernels"


def double(text: str = TEXT, warps: int = 1, target: str = "cuda:80") -> Compiled:
    arguments = Signature({"x": "*fp32", "INTERPRET": "constexpr"}, {"INTERPRET": False})
    return compiled(text, "double", arguments, TARGETS[target], Launch("double", warps, 1))


def test_a_kernel_is_compiled_once(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for target in ("cuda:80", "hip:gfx942"):
        first = double(target=target)
        assert not first.was_kept and first.report.binary.startswith(b"\x7fELF")
        with monkeypatch.context() as patch:
            patch.setattr(kernel_store, "compile_kernel", None)
            again = double(target=target)
        assert again == replace(first, was_kept=True)
    assert len(list(store.iterdir())) == 2
    assert not double(TEXT.replace("* 2", "* 3")).was_kept
    assert not double(warps=2).was_kept


def test_a_damaged_kernel_is_made_anew(store: Path) -> None:
    first = double()
    (kept,) = store.iterdir()
    content = kept.read_bytes()
    other_version = hashlib.sha256(b"{}").hexdigest().encode() + b"\n{}"
    for damaged in (content[:-100], content.replace(b"double", b"doubIe", 1), b"", b"\xff\xfe", other_version):
        kept.write_bytes(damaged)
        assert double() == first
        assert kept.read_bytes() == content


def test_where_nothing_can_be_kept_kernels_are_compiled_all_the_same(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert double().report.binary and not double().was_kept


def test_sorting_is_costed_with_the_counts_of_all_programs() -> None:
    """65,536 rows of 8 choices by 256 programs: each reads 256 x 256 counts of 4 bytes, 67 MB out of L2 in 10 us.

    Ids, pairs and places are 14.7 MB more. It was 650 us when each chunk of 32 rows had a program and its counts.
    """
    h200 = DEVICES["h200"]
    prompt = specialise_group(256, 256, 8, 7168, Dtype.BF16, 65536, copies=False)
    cost = group_cost(prompt, 65536, 65536 * 8, 0, h200)
    assert (cost.launches, cost.l2) == (2, 4 * 256 * 256**2)
    assert cost.predicted_us == pytest.approx(2 * LAUNCH_US + 10.2 + 3.4, rel=0.02)
    for tokens in (2**17, 2**20):
        grown = group_cost(prompt, tokens, tokens * 8, 0, h200)
        assert grown.l2 == cost.l2
    few = specialise_group(256, 256, 8, 7168, Dtype.BF16, 8, copies=False)
    assert group_cost(few, 8, 64, 0, h200).predicted_us == pytest.approx(LAUNCH_US, rel=0.01)


def test_the_table_of_published_times() -> None:
    assert [line[0] for line in PUBLISHED_US] == [1, 8, 64, 512, 1024, 2048, 4096, 16384]
    found = []
    for tokens, *_ in PUBLISHED_US:
        cost = layer_cost((gemm(), ALL), (gemm(Projection.DOWN), ALL), even_rows(EXPERTS, TOP, tokens), tokens, H200)
        found.append(compare(tokens, "balanced", cost))
        assert cost.roof_us == pytest.approx(
            {1: 15.7, 8: 125.8, 64: 251.8, 512: 252.5, 1024: 253.4, 2048: 255.2, 4096: 312.6, 16384: 1250}[tokens],
            rel=0.01,
        )
        assert found[-1].predicted_us >= cost.roof_us
        assert 0.5 < found[-1].ratio < 1.5
    assert len(comparison_lines(found)) == 9
    assert comparison_lines(found)[3].split()[:2] == ["64", "balanced"]
