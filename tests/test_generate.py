"""Generation over a fake model: schedules, lockstep, sampling, stops, streaming text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

from moec.diagnostics import MoecError
from moec.ir.params import State
from moec.ir.program import Body, Program, Run
from moec.layout import Layout, Shard
from moec.mesh import Mesh
from moec.runtime.generate import Model, Place, Request, Result, collect_logits, generate
from moec.runtime.groups import make_groups
from moec.runtime.kv import allocate_kv
from moec.runtime.launch.job import run_ranks
from moec.runtime.launch.rank import Rank
from moec.runtime.sampling import Sampling, draw, next_tokens
from moec.runtime.schedule import Chunk, Limits, make_schedule
from moec.runtime.step import Piece, Step, make_step
from moec.runtime.text import Text, TextStream, parse_tokens, read_eos, read_prompts
from moec.topology import Cluster

VOCAB = 11
LIMITS = Limits(context=40, prefill_tokens=8, slots=3, vocab=VOCAB)


class Fake(Model):
    """The next token is (sum of the sequence so far) mod VOCAB, read from KV memory as a real model would.

    Keeps `steps` so that a test can see what ran, and fails on rows that do not continue their sequence.
    """

    def __init__(self, slots: int = 3) -> None:
        self.memory: list[list[int]] = [[] for _ in range(slots)]
        self.steps: list[tuple[str, int]] = []

    def prefill(self, step: Step) -> Tensor:
        return self._run("prefill", step)

    def decode(self, step: Step) -> Tensor:
        return self._run("decode", step)

    def _run(self, phase: str, step: Step) -> Tensor:
        self.steps.append((phase, step.num_tokens))
        logits = torch.zeros(step.num_tokens, VOCAB)
        for slot, cached, first, last in zip(step.slots, step.cached, step.starts, step.starts[1:], strict=False):
            held = self.memory[slot] = self.memory[slot][:cached]
            assert len(held) == cached, "a row was skipped"
            for row in range(first, last):
                assert int(step.positions[row]) == len(held)
                held.append(int(step.tokens[row]))
                logits[row, sum(held) % VOCAB] = 1.0
        return logits[step.select]


def expected(prompt: Sequence[int], count: int, eos: frozenset[int] = frozenset()) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum(tokens) % VOCAB)
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


PROMPTS = [[1, 2, 3], [4], list(range(10)) * 2, [5, 5], [7, 1, 1, 1, 1, 1, 1, 1, 1], [2], [9, 3]]


def test_prompts_of_any_length_continue_right_in_waves_and_chunks() -> None:
    fake = Fake()
    result = generate(fake, Request(PROMPTS, 6), LIMITS, Place())
    assert result.tokens == [expected(prompt, 6) for prompt in PROMPTS]
    assert max(rows for phase, rows in fake.steps if phase == "prefill") == LIMITS.prefill_tokens
    assert max(rows for phase, rows in fake.steps if phase == "decode") == LIMITS.slots
    assert sum(rows for phase, rows in fake.steps if phase == "prefill") == sum(map(len, PROMPTS))


@pytest.mark.parametrize("mesh", [Mesh(dp=2, ep=2), Mesh(dp=3, ep=3), Mesh(dp=2, tp=2, ep=4), Mesh(tp=2, ep=2)])
@pytest.mark.parametrize("num_prompts", [1, 7])
def test_all_meshes_give_the_same_tokens_in_equally_many_steps(mesh: Mesh, num_prompts: int) -> None:
    """B36: with one prompt, all dp ranks but one step along without tokens."""
    request = Request(PROMPTS[:num_prompts], 6, eos=frozenset([0]))

    def main(rank: Rank) -> dict[str, object]:
        fake, streamed = Fake(), []
        place = Place(mesh, rank.rank, make_groups(mesh, rank), rank.device, rank.status)
        result = generate(fake, request, LIMITS, place, lambda *token: streamed.append(token))
        ends = sorted(prompt for prompt, _, is_last in streamed if is_last)
        return {"tokens": result.tokens, "phases": [phase for phase, _ in fake.steps], "ends": ends}

    ranks = run_ranks(main, mesh.size, threads=1)
    for told in ranks:
        assert told["tokens"] == [expected(prompt, 6, request.eos) for prompt in request.prompts]
        assert told["phases"] == ranks[0]["phases"]
        assert told["ends"] == list(range(num_prompts))


def test_logits_of_all_prompt_tokens_reach_rank_0_in_order() -> None:
    mesh = Mesh(dp=2, tp=2, ep=4)
    request = Request(PROMPTS, 2, keep_logits=True)

    def main(rank: Rank) -> list[list[int]]:
        place = Place(mesh, rank.rank, make_groups(mesh, rank), rank.device, rank.status)
        result = generate(Fake(), request, LIMITS, place)
        assert result.tokens == [expected(prompt, 2) for prompt in PROMPTS]
        return [rows.argmax(-1).tolist() for rows in collect_logits(request, result, LIMITS, place)]

    first, *others = run_ranks(main, 4, threads=1)
    assert first == [[sum(prompt[: n + 1]) % VOCAB for n in range(len(prompt))] for prompt in PROMPTS]
    assert others == [[], [], []]


def test_ranks_that_disagree_on_a_token_are_an_error() -> None:
    mesh = Mesh(tp=2, ep=2)

    class Wrong(Fake):
        def decode(self, step: Step) -> Tensor:
            return super().decode(step).roll(1, dims=-1)

    def main(rank: Rank) -> object:
        place = Place(mesh, rank.rank, make_groups(mesh, rank), rank.device, rank.status)
        return generate(Wrong() if rank.rank else Fake(), Request([[1]], 4), LIMITS, place).tokens

    with pytest.raises(MoecError, match="ranks 0 and 1 hold the same sequences and chose different tokens") as error:
        run_ranks(main, 2, threads=1)
    assert (error.value.diagnostics[0].code, error.value.exit_code) == ("E0616", 6)


def test_no_new_tokens_still_computes_the_prompts() -> None:
    fake = Fake()
    assert generate(fake, Request([[1, 2]], 0), LIMITS, Place()) == Result([[]], {})
    assert fake.steps == [("prefill", 2)]


@pytest.mark.parametrize(
    ("prompt", "count", "code", "words"),
    [
        ([1] * 30, 11, "E0611", "prompt 1 has 30 tokens and 11 are to follow, but the plan's context is 40"),
        ([1, 11], 1, "E0614", "token 11 of prompt 1 is outside the vocabulary of 11"),
        ([-1], 1, "E0614", "token -1 of prompt 1"),
        ([], 1, "E0617", "prompt 1 has no tokens"),
    ],
)
def test_prompts_that_cannot_run_are_refused(prompt: list[int], count: int, code: str, words: str) -> None:
    with pytest.raises(MoecError) as error:
        generate(Fake(), Request([[1], prompt], count), LIMITS, Place())
    assert (error.value.diagnostics[0].code, error.value.exit_code) == (code, 2)
    assert words in str(error.value)


def test_a_sequence_may_fill_the_context_to_the_last_token() -> None:
    assert generate(Fake(), Request([[1] * 30], 10), LIMITS, Place()).tokens == [expected([1] * 30, 10)]


# --- schedule, step, kv -------------------------------------------------------------------------------------------


def test_a_long_prompt_is_cut_and_its_neighbours_fill_the_step() -> None:
    (wave,) = make_schedule([3, 12, 2], 1, LIMITS)
    assert wave.steps[0] == (
        (Chunk(0, 0, 3, True), Chunk(1, 0, 5, False)),
        (Chunk(1, 5, 12, True), Chunk(2, 0, 1, False)),
        (Chunk(2, 1, 2, True),),
    )


def test_dp_ranks_get_neighbours_and_equally_many_steps() -> None:
    waves = make_schedule([1, 9, 1, 1, 1], 2, Limits(40, 4, 2, VOCAB))
    assert [wave.prompts for wave in waves] == [((0, 1), (3, 4)), ((2,), ())]
    assert [[len(steps) for steps in wave.steps] for wave in waves] == [[3, 3], [1, 1]]
    assert waves[0].steps[1][1:] == ((), ())


def test_a_step_knows_its_rows() -> None:
    step = make_step([Piece([5, 6], slot=2, cached=4), Piece([7], 0, 9, "none"), Piece([8, 9], 1, select="all")])
    assert step.tokens.tolist() == [5, 6, 7, 8, 9]
    assert step.positions.tolist() == [4, 5, 9, 0, 1]
    assert step.select.tolist() == [1, 3, 4]
    assert (step.slots, step.starts, step.cached) == ((2, 0, 1), (0, 2, 3, 5), (4, 9, 0))
    empty = make_step([])
    assert (empty.num_tokens, empty.num_sequences, empty.select.tolist(), empty.starts) == (0, 0, [], (0,))


def test_a_chunk_of_a_step_is_a_step() -> None:
    """7 rows in 3: a sequence that is cut continues behind its rows in the chunks before."""
    step = make_step([Piece([5, 6, 1, 2], slot=2, cached=4), Piece([], 3), Piece([7], 0, 9, "none"), Piece([8, 9], 1)])
    chunks = [step.chunk(index, 3) for index in range(3)]
    assert [chunk.tokens.tolist() for chunk in chunks] == [[5, 6, 1], [2, 7], [8, 9]]
    assert [chunk.positions.tolist() for chunk in chunks] == [[4, 5, 6], [7, 9], [0, 1]]
    assert [chunk.slots for chunk in chunks] == [(2,), (2, 0), (1,)]
    assert [chunk.starts for chunk in chunks] == [(0, 3), (0, 1, 2), (0, 2)]
    assert [chunk.cached for chunk in chunks] == [(4,), (7, 9), (0,)]
    assert all(chunk.select.tolist() == [] for chunk in chunks)
    last = make_step([Piece([5], 0)]).chunk(1, 2)
    assert (last.num_tokens, last.num_sequences, last.starts) == (0, 0, (0,))


def test_kv_memory_has_the_ranks_part_of_each_state() -> None:
    heads = Layout("attention", (("tp", Shard(0)),))
    body = Body("layer", states={"k": State((6, 8), "bf16", heads), "latent": State((5,), "fp32")})
    program = Program("m", "decode", "m.moe", Mesh(tp=2, ep=2), Cluster("c", 1, 2), 4, 3, 40, "bf16", "flat", "linear")
    program.bodies, program.runs = {"layer": body}, [Run("layer", range(2, 4))]
    memory = allocate_kv(program)
    assert sorted(memory) == [2, 3]
    assert (tuple(memory[2]["k"].shape), memory[2]["k"].dtype) == ((3, 40, 3, 8), torch.bfloat16)
    assert (tuple(memory[3]["latent"].shape), memory[3]["latent"].dtype) == ((3, 40, 5), torch.float32)
    assert memory[2]["k"].data_ptr() != memory[3]["k"].data_ptr()


# --- sampling -----------------------------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [3.0, -1.0, 3.0]])
    assert next_tokens(logits, [(0, 0), (1, 0)], Sampling()) == [1, 0]


def test_draws_follow_the_distribution() -> None:
    """4,000 draws of a known distribution at temperature 2; 0.03 is four standard deviations."""
    share = torch.tensor([0.5, 0.3, 0.0, 0.2])
    logits = (share.log() * 2).nan_to_num(neginf=-1e4).expand(4000, 4)
    drawn = torch.tensor(next_tokens(logits, [(0, n) for n in range(4000)], Sampling(2.0, seed=5)))
    found = torch.bincount(drawn, minlength=4) / 4000
    assert found[2] == 0
    assert (found - share).abs().max() < 0.03


def test_a_draw_depends_on_seed_prompt_and_position_alone() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    rows = [(prompt, position) for prompt in range(2) for position in range(3)]
    sampling = Sampling(1.0, seed=3)
    together = next_tokens(logits, rows, sampling)
    assert together == [next_tokens(logits[n : n + 1], [row], sampling)[0] for n, row in enumerate(rows)]
    assert len({draw(*key) for key in [(3, 0, 0), (4, 0, 0), (3, 1, 0), (3, 0, 1), (3, 10, 0)]}) == 5
    assert 0 <= draw(0, 0, 0) < 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(value: float, temperature: float) -> None:
    logits = torch.zeros(2, 5)
    logits[1, 3] = value
    with pytest.raises(MoecError, match="the logits of prompt 4 at position 9 hold NaN or infinity") as error:
        next_tokens(logits, [(3, 8), (4, 9)], Sampling(temperature))
    assert (error.value.diagnostics[0].code, error.value.exit_code) == ("E0612", 6)


def test_nothing_to_sample_is_nothing() -> None:
    assert next_tokens(torch.empty(0, 5), [], Sampling(1.0)) == []


# --- text ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A byte-level tokenizer whose post-processor adds a BOS token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(alphabet)} | {"<s>": 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_bos_is_added_as_the_tokenizer_says_and_not_shown(folder: Path) -> None:
    text = Text(folder)
    tokens = text.encode("aé")
    assert tokens[0] == 256
    assert len(tokens) == 4
    assert text.decode(tokens) == "aé"


def test_a_character_in_several_tokens_streams_when_it_is_whole(folder: Path) -> None:
    text = Text(folder)
    tokens = text.encode("x€ y")[1:]
    stream = TextStream(text)
    parts = [stream.push(token) for token in tokens]
    assert parts == ["x", "", "", "€", " ", "y"]
    cut = TextStream(text)
    assert [cut.push(token, is_last=n == 1) for n, token in enumerate(tokens[1:3])] == ["", "\ufffd"]


def test_without_a_tokenizer_tokens_are_shown_and_text_is_refused(tmp_path: Path) -> None:
    text = Text(tmp_path)
    assert text.decode([1]) is None
    assert TextStream(text).push(17) == "17 "
    with pytest.raises(MoecError, match="there is no tokenizer") as error:
        text.encode("a")
    assert (error.value.diagnostics[0].code, error.value.exit_code) == ("E0613", 3)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(MoecError, match="is not a tokenizer"):
        Text(tmp_path)


@pytest.mark.parametrize(
    ("generation", "config", "eos"),
    [
        ({"eos_token_id": [3, 5]}, {"eos_token_id": 1}, {3, 5}),
        ({"eos_token_id": None}, {"eos_token_id": 1}, {1}),
        (None, {"eos_token_id": 0}, {0}),
        (None, {}, set()),
    ],
)
def test_eos_may_be_a_number_or_a_list(tmp_path: Path, generation: object, config: object, eos: set[int]) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_eos(tmp_path) == eos


@pytest.mark.parametrize("found", ["x", [1, "x"], True, 1.5, {}, -1])
def test_an_end_token_that_is_none_is_refused(tmp_path: Path, found: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": found}))
    with pytest.raises(MoecError, match="eos_token_id") as caught:
        read_eos(tmp_path)
    assert (caught.value.diagnostics[0].code, caught.value.exit_code) == ("E0624", 3)


def test_prompts_are_read_from_lines(folder: Path) -> None:
    file = folder / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"tokens": [1, 2]}\n')
    assert read_prompts(file, Text(folder)) == [Text(folder).encode("a"), [1, 2]]


@pytest.mark.parametrize(
    "line", ["{", "3", "[" * 100_000, '{"tokens": [1.5]}', '{"tokens": [true]}', '{"text": "a"}', '{"prompt": 1}', "{}"]
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"tokens": [1]}\n' + line)
    with pytest.raises(MoecError, match=r"p\.jsonl:2 is no prompt") as error:
        read_prompts(file, Text(tmp_path))
    assert (error.value.diagnostics[0].code, error.value.exit_code) == ("E0615", 3)


def test_files_of_prompts_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b'{"prompt": "\xe9"}')
    for name, words in (("absent", "No such file"), ("latin", "not UTF-8"), (".", "Is a directory")):
        with pytest.raises(MoecError, match=words):
            read_prompts(tmp_path / name, Text(tmp_path))


def test_token_lists_are_parsed_or_refused() -> None:
    assert parse_tokens("1, 2,3") == [1, 2, 3]
    for text in ("1,,2", "a", "1.5", "-1", "9" * 5000, "²"):
        with pytest.raises(MoecError, match="is not a list of token ids"):
            parse_tokens(text)


def test_world_exchange_is_skipped_on_one_rank() -> None:
    """B18: a program of one rank has no groups to exchange in."""
    place = Place(groups=SimpleNamespace())  # type: ignore[arg-type]
    assert generate(Fake(), Request([[1]], 2), LIMITS, place).tokens == [expected([1], 2)]
