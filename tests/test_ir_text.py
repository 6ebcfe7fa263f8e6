"""The text of a Program: one spelling, read back whole; damaged text gives an error that names the line."""

from __future__ import annotations

import random
import re

import pytest

from moec.diagnostics import CompileError, MoecError
from moec.ir.parse import parse, read_type
from moec.ir.program import Cache, Loc, Program, Tier, Type
from moec.ir.text import print_program
from moec.ir.verifier.program import verify
from moec.topology import Cluster, Device, Link
from tests.planted import BASES
from tests.programs import compiled, edited, moe, plan, program_of

PROGRAM = compiled(plan(**BASES["flat"]))
TEXT = print_program(PROGRAM)


def fault(text: str) -> str:
    """The one line of the error that reading a text gives."""
    with pytest.raises(MoecError) as refused:
        parse(text)
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.code == "E0401" and diagnostic.exit_code == 3
    assert diagnostic.help == "compile the `.moe` file again"
    return diagnostic.message.removeprefix("this is not the text of a program: ")


# --- round trips -------------------------------------------------------------------------------------------------


def same(program: Program) -> None:
    text = print_program(program)
    again = parse(text)
    assert again == program and print_program(again) == text


@pytest.mark.parametrize("base", BASES)
def test_a_program_reads_back_at_every_stage(base: str) -> None:
    same(program_of(plan(**BASES[base])))
    compiled(plan(**BASES[base]), observers=[lambda step, program: same(program)])


def test_every_figure_of_a_cluster_reads_back() -> None:
    program = program_of(plan([moe()]))
    device = Device(80 * 2**30, 3352.0, (("bf16", 989.4), ("fp8", 1978.9)))
    program.cluster = Cluster('a "b" \\ c', 4, 8, device, Link(450.0, 1.5), Link(50.0, 5.0), Link(64.0), Link(7, 80))
    same(program)


@pytest.mark.parametrize(
    "cache",
    [
        Cache("lru", (Tier("host"),), slots=3),
        Cache(
            "trace", (Tier("host", 0, Link(2.0, 10.0)), Tier("nvme", None, Link(0.5))), hbm=1 << 40, pinned=(0, 1, 2, 7)
        ),
        Cache("lfu", (Tier("nvme", None, Link(7, 80.5, 4)),), share=0.25, prefetch="history", ahead=3, hit_rate=0.0),
    ],
    ids=lambda cache: cache.evict,
)
def test_every_figure_of_a_cache_reads_back(cache: Cache) -> None:
    program = program_of(plan([moe()]))
    program.cache = cache
    same(program)
    same(compiled(plan(**BASES["cached"])))


@pytest.mark.parametrize("file", ["", "shared/models.moe", "two words.moe", "a:b!c.moe", 'quo"te\\.moe', "é.moe"])
def test_a_place_in_any_file_reads_back(file: str) -> None:
    program = program_of(plan([moe()]))
    for _, node in program.nodes():
        node.meta["loc"] = Loc(3, 14, file)
    same(program)


@pytest.mark.parametrize("table", ["none", "true", "by", "on", "experts", "pending", "e5"])
def test_experts_of_any_name_read_back(table: str) -> None:
    spec = moe()
    object.__setattr__(spec.routed, "name", table)
    compiled(plan([spec], dp=2, ep=2), observers=[lambda step, program: same(program)])


def test_two_programs_that_differ_are_not_equal() -> None:
    for change in [
        ("slots=8", "slots=9"),
        ("S0x2", "S0"),
        ("!1:1\n  return", "!1:2\n  return"),
        ("dim=0 :", "dim=1 :"),
    ]:
        base = BASES["copies"]
        text = print_program(compiled(plan(**base)))
        assert change[0] in text
        assert parse(text.replace(*change)) != parse(text)


def test_comments_and_space_say_nothing() -> None:
    spaced = "// a golden starts with what it shows\n" + TEXT.replace("\n", "  // here\n\n").replace(", ", " ,  ")
    assert parse(spaced) == PROGRAM
    assert parse(TEXT.replace('from "toy.moe"', 'from "a//b"')).source == "a//b"


def test_the_text_says_no_object_addresses_and_no_names_of_this_machine() -> None:
    assert not re.search(r"0x[0-9a-f]{6}|/tmp|/home", TEXT)


def test_values_are_numbered_in_order_and_keywords_sorted() -> None:
    for body in TEXT.split("body ")[1:]:
        numbers = [int(n) for line in body.splitlines() if "=" in line for n in re.findall(r"%(\d+)(?=.*= )", line)]
        assert numbers == list(range(len(numbers)))
    for call in re.findall(r"= [\w.]+\((.*?)\) :", TEXT):
        keys = re.findall(r"(\w+)=", call)
        assert keys == sorted(keys)


def test_a_type_reads_as_written() -> None:
    found = read_type("pending bf16[R, 64]<experts ep=expert(routed) etp=S1x2>")
    assert isinstance(found, Type) and found.pending and found.shape == ("R", 64)
    assert [str(place) for _, place in found.layout.places] == ["expert(routed)", "S1x2"]


# --- damaged text ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("body prologue {", "body prologue", "line 14: cannot read `param embed"),
        ("program prefill", "program training", "there is no phase training"),
        ("dp=2 tp=2", "dp=2", "`mesh` has the settings dp, tp, edp, ep, etp"),
        ("dp=2 tp=2", "dp=0 tp=2", "a mesh of 0 and 4 ranks"),
        ("dp=2 tp=2", "dp=999999 tp=999999", "a mesh of 999998000001 and 4 ranks"),
        ("slots=8", "slots=many", "`step`: slots=many"),
        ("slots=8", "slots=8 overlap=9:layer", "overlap=9:layer"),
        ("slots=8", "slots=8 overlap=1:layer", "overlap=1:layer"),
        ("slots=8", "slots=8 slots=9", "`step` has the settings"),
        ("experts routed=8", "experts routed=99999999", "99999999 experts"),
        ("[0-3] [4-7]", "[0-3] [4-7777777]", "expert ids 4-7777777"),
        ("[0-3] [4-7]", "[0-3] [7-4]", "expert ids 7-4"),
        ("run sparse 0..0", "run sparse 0..999999999", "layers 0..999999999"),
        ("memory 1 ", "memory 2 ", "memory lines count the ranks in order"),
        ("param embed : fp32[11, 10]", "param embed : fp32[V, 10]", "embed has the shape ['V', 10]"),
        ("embed(%tokens, @embed)", "embedding(%tokens, @embed)", "there is no operation embedding"),
        ("embed(%tokens, @embed)", "embed(%token, @embed)", "%token is used before it is made"),
        ("embed(%tokens, @embed)", "embed(%tokens, @wte)", "@wte is used before it is made"),
        ("%0 = embed", "%0, %1 = embed", "embed has 1 results"),
        ("%1, %2, %3 = merged", "%1, %2 = merged", "merged_linear has 3 results"),
        ("sizes=(8, 4, 4)) :", "sizes=8) :", "merged_linear has 0 results"),
        ("sizes=(16, 8, 8) :", "sizes=(16, 8) :", "dim 0 of [32, 10] cannot join 3 parts"),
        ("sizes=(16, 8, 8) :", "sizes=(16, 8, 8.0) :", "parameter attention.q_k_v of parts of (16, 8, 8.0)"),
        ("sizes=(16, 8, 8) :", "sizes=(16, 8, 9) :", "dim 0 of [32, 10] cannot join 3 parts"),
        ("state v :", "state k :", "sparse has two states k"),
        ("attention tp=S1 dp", "attention tp=Q dp", "there is no placement Q"),
        ("nodes=1", "nodes=0", "a cluster of {'nodes': 0, 'devices': 4}"),
    ],
)
def test_a_damaged_text_is_refused_by_name(old: str, new: str, message: str) -> None:
    text = TEXT.replace("<attention dp=S0 tp=S1>", "<attention tp=S1 dp=S0>", 1)
    assert old in text
    assert message in fault(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("evict=layer_lru ", "", "`cache` has the settings evict, slots, hbm, share, hit_rate, prefetch, ahead"),
        ("slots=1 prefetch", "slots=few prefetch", "`cache`: slots=few"),
        ("slots=1 prefetch", "slots=1 room=2 prefetch", "`cache` has the settings"),
        ("prefetch=next_router\n", "prefetch=next_router [3-1]\n", "expert ids 3-1"),
        ("tier host", "tier disk", "there is no tier disk"),
        ("tier host", "tier host bytes=-1", "`tier host`: bytes=-1"),
        ("tier host", "tier host slots=1", "`tier host` has the settings bytes"),
        ("tier host", "tier host link=1.0/0.0/0", "a tier carries 0 messages at once"),
        ("tier host", "tier host\ntier host", "tier"),
    ],
)
def test_a_damaged_cache_is_refused_by_name(old: str, new: str, message: str) -> None:
    text = print_program(compiled(plan(**BASES["cached"]), "cache-experts"))
    assert text.count(old) == 1
    assert message in fault(text.replace(old, new))


@pytest.mark.parametrize("text", ["", "\n", "program", "\0", "moec", "{" * 1000, "(" * 100_000], ids=range(7))
def test_what_is_no_program_at_all_is_refused(text: str) -> None:
    assert fault(text)


def test_a_value_is_made_once() -> None:
    lines = TEXT.splitlines()
    line = next(i for i, text in enumerate(lines) if "%1 = " in text)
    assert fault("\n".join([*lines[: line + 1], lines[line], *lines[line + 1 :]])) == "%1 is made twice"


def test_an_edited_attribute_is_refused_by_the_verifier() -> None:
    with pytest.raises(CompileError, match="head_dim is None, not a count"):
        verify(
            edited(
                compiled(plan(**BASES["dense"])),
                ("%4 = split_heads(%1, head_dim=4)", "%4 = split_heads(%1, head_dim=none)"),
            )
        )


def mutated(rng: random.Random, words: list[str]) -> str:
    """The text with a word or two dropped, doubled, exchanged or taken from elsewhere."""
    found = list(words)
    for _ in range(rng.randint(1, 2)):
        i, j = (rng.choice([n for n, word in enumerate(found) if word.isalnum()]) for _ in range(2))
        kind = rng.randrange(5)
        if kind == 0:
            del found[i]
        elif kind == 1:
            found.insert(i, found[j])
        elif kind == 2:
            found[i], found[j] = found[j], found[i]
        elif kind == 3:
            found[i] = found[j]
        else:
            found[i] = rng.choice(
                ("0", "1", "2", "-1", "9" * 30, "none", "R", "experts", "1e400", '"', "//", "%x", "T", "fp32")
            )
    return "".join(found)


@pytest.mark.parametrize("base", ["flat", "gather", "copies", "cached"])
def test_damaged_words_never_end_in_a_traceback(base: str) -> None:
    """Each is read or refused with MoecError, and what is read is accepted or refused with CompileError."""
    rng = random.Random(base)
    texts = [print_program(compiled(plan(**BASES[base]), stop)) for stop in ("place-experts", None)]
    read = refused = accepted = 0
    for i in range(150):
        words = re.findall(r"\w+|\s+|[^\w\s]", texts[i % 2])
        try:
            program = parse(mutated(rng, words))
        except MoecError:
            refused += 1
            continue
        read += 1
        try:
            verify(program)
            accepted += 1
            assert parse(print_program(program)) == program
        except CompileError:
            pass
    assert refused > 20 and read > 10 and accepted < read, (refused, read, accepted)
