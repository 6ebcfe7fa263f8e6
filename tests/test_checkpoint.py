"""Model folders that are damaged, hostile or complete: each fault names its file, before any weight is read."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from moec.checkpoint.folder import Fingerprint, check_unchanged, has_weights, open_checkpoint, read_config
from moec.checkpoint.header import DTYPE_BYTES, read_header
from moec.diagnostics import MoecError
from tests import micro_checkpoint as micro
from tests.checkpoint_faults import CASES, EXPERT, sources_of

PAGES = Path(__file__).resolve().parent.parent / "specs" / "errors"


def fault(folder: Path) -> str:
    """The error that reading `folder` gives, as one line."""
    with pytest.raises(MoecError) as caught:
        open_checkpoint(folder)
    assert caught.value.exit_code == 3
    return caught.value.diagnostics[0].one_line()


@pytest.mark.parametrize("code", CASES)
def test_each_code_has_a_page_that_shows_its_error(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MoecError) as caught:
        CASES[code]()
    assert [diagnostic.code for diagnostic in caught.value.diagnostics] == [code]
    assert caught.value.exit_code == {"E0730": 2, "E0746": 6}.get(code, 3)
    page = (PAGES / f"{code}.md").read_text()
    before, _, rest = page.partition("```\n")
    shown, _, after = rest.partition("```\n")
    if request.config.getoption("--update-golden"):
        (PAGES / f"{code}.md").write_text(f"{before}```\n{caught.value.render()}\n```\n{after}")
        return
    assert page.startswith(f"# {code}: ")
    assert shown == caught.value.render() + "\n"


def test_every_page_of_this_stage_has_a_case() -> None:
    assert {page.stem for page in PAGES.glob("E07*.md") if page.stem < "E0760"} == set(CASES)


def test_a_whole_model_is_read(tmp_path: Path) -> None:
    one, two = open_checkpoint(micro.write(tmp_path / "one")), open_checkpoint(micro.write_sharded(tmp_path / "two"))
    assert set(one.tensors) == set(two.tensors) == set(micro.shapes())
    for name, (_, shape) in micro.shapes().items():
        assert one.tensors[name].shape == two.tensors[name].shape == tuple(shape)
    size = (tmp_path / "one" / "model.safetensors").stat().st_size
    assert max(tensor.offset + tensor.nbytes for tensor in one.tensors.values()) == size
    assert two.tensors[EXPERT].file == "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    ("bytes_kept", "text"),
    [
        (2648, "its header describes 2649 bytes, the file has 2648"),
        (2650, "its header describes 2649 bytes, the file has 2650"),
        (1625, "has 1625 bytes, but its header alone needs 1705"),
        (1324, "has 1324 bytes, but its header alone needs 1705"),
        (7, "has 7 bytes, too few for a header"),
        (0, "is empty"),
    ],
)
def test_a_shard_of_another_size_is_refused(bytes_kept: int, text: str, tmp_path: Path) -> None:
    """Fault F10: cut by a byte, by a kilobyte, by half; a byte too many; nothing."""
    file = micro.write(tmp_path) / "model.safetensors"
    assert file.stat().st_size == 2649
    os.truncate(file, bytes_kept)
    line = fault(tmp_path)
    assert "E0705" in line and "model.safetensors" in line and text in line


def test_a_pointer_and_a_cut_after_1000_bytes_are_told_apart(tmp_path: Path) -> None:
    """Fault B47."""
    file = micro.write(tmp_path) / "model.safetensors"
    os.truncate(file, 1000)
    assert "its header alone needs" in fault(tmp_path)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "git lfs pull" in fault(tmp_path)


def test_missing_shards_are_all_counted(tmp_path: Path) -> None:
    """Fault B02."""
    micro.write_sharded(tmp_path)
    for shard in tmp_path.glob("*.safetensors"):
        shard.unlink()
    line = fault(tmp_path)
    assert "E0712" in line and "2 of the 2 files" in line and "`model-00001-of-00002.safetensors`" in line


def test_a_tensor_that_its_shard_lacks_is_named_with_the_file(tmp_path: Path) -> None:
    micro.write_sharded(tmp_path, {"model.rotary.weight": "model-00002-of-00002.safetensors"})
    line = fault(tmp_path)
    assert "E0713" in line and "1 missing" in line and "model.rotary.weight (model-00002-of-00002.safetensors)" in line


def test_a_tensor_that_the_index_lacks_is_named(tmp_path: Path) -> None:
    index = micro.write_sharded(tmp_path) / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    del table["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(table))
    assert "1 in a file that the index does not name: `model.norm.weight" in fault(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "../evil.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "x\0.safetensors", "a\\b.safetensors",
        "model.bin", "m\n.safetensors", "e" * 300 + ".safetensors", "\u202e.safetensors", ".",
    ],
)  # fmt: skip
def test_an_index_names_only_files_of_its_folder(name: str, tmp_path: Path) -> None:
    micro.write(tmp_path / "outside")
    micro.write_sharded(tmp_path / "model", {"model.norm.weight": name})
    assert "E0711" in fault(tmp_path / "model")


def test_links_stay_in_the_folder_or_in_its_cache(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "0123abc"
    real = micro.write(tmp_path / "real")
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in real.iterdir():
        file.rename(blobs / f"{file.name}.blob")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{file.name}.blob")
    assert set(open_checkpoint(snapshot).tensors) == set(micro.shapes())
    thief = tmp_path / "thief"
    thief.mkdir()
    for file in snapshot.iterdir():
        (thief / file.name).symlink_to(file)
    assert "E0711" in fault(thief)


def test_pipes_and_devices_are_not_opened(tmp_path: Path) -> None:
    file = micro.write(tmp_path) / "model.safetensors"
    file.unlink()
    os.mkfifo(file)
    assert "E0706" in fault(tmp_path)
    file.unlink()
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").symlink_to("/dev/zero")
    assert "E0711" in fault(tmp_path)


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        ({"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}, "dtype 'F31' is not known"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "needs 8 bytes, its range has 4"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "its entry is not"),
        ({"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}, "its entry is not"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}, "data_offsets are"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}, "data_offsets are"),
        ({"dtype": "F32", "shape": [1]}, "its entry is not"),
        ({"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}, "its range has 4"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "leaves a gap before it"),
        ([], "its entry is not"),
    ],
)
def test_entries_that_do_not_add_up(entry: Any, what: str, tmp_path: Path) -> None:
    (micro.write(tmp_path) / "model.safetensors").write_bytes(micro.shard_bytes({"a": entry}, 4))
    line = fault(tmp_path)
    assert "E0708" in line and "tensor `a`" in line and what in line


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b'{"a":1,"a":2}', "E0707"),
        (b"[1]", "E0707"),
        (b"{", "E0707"),
        (b"\xff{}", "E0707"),
        (b'{"\xff":1}', "E0707"),
        (b"{" + b'"a":{' * 5000, "E0707"),
        (b'{"a":NaN}', "E0707"),
        (json.dumps({"a" * 257: {}}).encode(), "E0709"),
        (json.dumps({"a": {"dtype": "F32", "shape": [1] * 9, "data_offsets": [0, 4]}}).encode(), "E0709"),
        (json.dumps(dict.fromkeys(map(str, range(200_001)), 0)).encode(), "E0709"),
    ],
    ids=["twice", "list", "open", "utf8-start", "utf8", "deep", "nan", "long-name", "dims", "tensors"],
)
def test_headers_that_are_no_header(raw: bytes, code: str, tmp_path: Path) -> None:
    (micro.write(tmp_path) / "model.safetensors").write_bytes(micro.shard_bytes(raw, 4))
    assert code in fault(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"a": 1, "a": 2}', "{" + '"a":[' * 100_000, '{"a": NaN}', '{"a": ' + "9" * 5000 + "}", "\ufeff{}", "é"],
)
def test_configs_that_are_damaged(text: str, tmp_path: Path) -> None:
    (micro.write(tmp_path) / "config.json").write_text(text)
    assert "E0714" in fault(tmp_path) and "config.json" in fault(tmp_path)


def test_a_config_of_more_than_a_mebibyte_is_refused(tmp_path: Path) -> None:
    (micro.write(tmp_path) / "config.json").write_text('{"a": "' + "x" * 2**20 + '"}')
    assert "the limit is 1048576" in fault(tmp_path)


def test_a_single_file_beside_an_index_is_ambiguous(tmp_path: Path) -> None:
    micro.write_sharded(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(micro.shard(micro.shapes()))
    assert "E0713" in fault(tmp_path) and "holds both" in fault(tmp_path)


def test_random_damage_never_passes_and_never_crashes(tmp_path: Path) -> None:
    """Any changed byte of a header is refused with a code, or describes another file that is whole in itself."""
    random_byte = random.Random(0)
    file = micro.write(tmp_path) / "model.safetensors"
    good = file.read_bytes()
    before, names = open_checkpoint(tmp_path), set(micro.shapes())
    length = int.from_bytes(good[:8], "little")
    refused = 0
    for _ in range(1000):
        data = bytearray(good)
        at = random_byte.randrange(8 + length)
        data[at] ^= 1 << random_byte.randrange(8)
        file.write_bytes(data)
        try:
            after = open_checkpoint(tmp_path)
        except MoecError as error:
            refused += error.diagnostics[0].code in {f"E070{n}" for n in (4, 5, 7, 8, 9)}
            continue
        assert set(after.tensors) != names, f"a flip at byte {at} went through"
        assert after.fingerprint != before.fingerprint
    assert refused > 300


def test_random_damage_of_the_index_never_crashes(tmp_path: Path) -> None:
    chance = random.Random(1)
    index = micro.write_sharded(tmp_path) / "model.safetensors.index.json"
    good, names = index.read_bytes(), set(micro.shapes())
    before = open_checkpoint(tmp_path).fingerprint
    for _ in range(300):
        data = bytearray(good)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        index.write_bytes(data)
        try:
            after = open_checkpoint(tmp_path)
        except MoecError as error:
            assert error.exit_code == 3
            continue
        assert set(after.tensors) == names and after.fingerprint.index != before.index


def test_the_fingerprint_tells_what_changed(tmp_path: Path) -> None:
    before = open_checkpoint(micro.write_sharded(tmp_path)).fingerprint
    check_unchanged(before, open_checkpoint(tmp_path))
    assert Fingerprint.from_json(json.loads(json.dumps(before.to_json()))) == before
    shard = tmp_path / "model-00002-of-00002.safetensors"
    header = read_header(shard)
    entries = {name: x for name, x in micro.shapes().items() if name in header.tensors}
    shard.write_bytes(micro.shard(dict(reversed(entries.items()))))
    assert before.changes(open_checkpoint(tmp_path).fingerprint) == [shard.name]
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(MoecError, match=r"`config.json`, `model-00002-of-00002.safetensors`"):
        check_unchanged(before, open_checkpoint(tmp_path))


def test_a_folder_without_weights_is_told_from_one_with_pickles(tmp_path: Path) -> None:
    (micro.write(tmp_path) / "model.safetensors").rename(tmp_path / "kept")
    assert not has_weights(tmp_path)
    (tmp_path / "kept").rename(tmp_path / "consolidated.00.pth")
    with pytest.raises(MoecError, match=r"consolidated.00.pth"):
        has_weights(tmp_path)


def test_names_of_a_checkpoint_cannot_steer_a_terminal(tmp_path: Path) -> None:
    micro.write(tmp_path, {"a\x1b[2J": ("F32", [1])})
    assert "\x1b" not in fault(tmp_path)
    (tmp_path / "config.json").write_text('{"a\\u001b[2J": 1, "a\\u001b[2J": 2}')
    with pytest.raises(MoecError) as caught:
        read_config(tmp_path)
    assert "\x1b" not in caught.value.render()


@pytest.mark.parametrize("kind", ["w1", "w2", "w3"])
def test_one_expert_with_another_name_is_told_from_both_sides(kind: str, tmp_path: Path) -> None:
    """Fault B03."""
    old = f"model.layers.0.block_sparse_moe.experts.0.{kind}.weight"
    micro.write(tmp_path, {name.replace(old, old + ".old"): entry for name, entry in micro.shapes().items()})
    with pytest.raises(MoecError) as caught:
        sources_of(tmp_path)
    line = caught.value.diagnostics[0].one_line()
    logical = {"w1": "gate", "w2": "down", "w3": "up"}[kind]
    assert "E0740" in line
    assert f"nothing fills 1 parameter: `layers.0.experts.{logical}[0]`" in line
    assert f"nothing uses 1 tensor: `{old}.old`" in line


def test_leftovers_are_listed_to_five_and_counted(tmp_path: Path) -> None:
    micro.write(tmp_path, micro.shapes() | {f"model.layers.{n}.extra": ("F32", [1]) for n in range(9)})
    with pytest.raises(MoecError, match="nothing uses 9 tensors") as caught:
        sources_of(tmp_path)
    assert str(caught.value).count(".extra`") == 5


@pytest.mark.parametrize(
    ("config", "row"),
    [
        ({"num_local_experts": 3}, "experts of a layer         3            2"),
        ({"num_local_experts": 1}, "experts of a layer         1            2"),
        ({"vocab_size": 5}, "embed      [5, 4]       [3, 4]    model.embed_tokens.weight"),
        ({"intermediate_size": 5}, "layers.0.experts.gate[0]  [5, 4]       [6, 4]"),
    ],
)
def test_config_and_weights_of_different_models(config: dict[str, int], row: str, tmp_path: Path) -> None:
    """Fault F12: a table of what the config says and the file has."""
    with pytest.raises(MoecError) as caught:
        sources_of(micro.write(tmp_path, **config))
    assert caught.value.diagnostics[0].code == "E0741"
    assert row.split() in [line.split()[: len(row.split())] for line in str(caught.value).splitlines()]


def test_a_stack_of_another_number_of_experts(tmp_path: Path) -> None:
    tensors = {name: entry for name, entry in micro.shapes().items() if ".w2." not in name}
    with pytest.raises(MoecError, match=r"\[2, 4, 6\] +\[3, 4, 6\]"):
        sources_of(micro.write(tmp_path, tensors | {"model.layers.0.mlp.experts.down_proj": ("F32", [3, 4, 6])}))


def test_a_layer_too_many_or_too_few(tmp_path: Path) -> None:
    extra = {name.replace("layers.0", "layers.1"): entry for name, entry in micro.shapes().items() if "layers" in name}
    with pytest.raises(MoecError, match="nothing uses 13 tensors"):
        sources_of(micro.write(tmp_path / "many", micro.shapes() | extra))
    with pytest.raises(MoecError, match="nothing fills 10 parameters"):
        sources_of(micro.write(tmp_path / "few", num_hidden_layers=2))


def test_sources_of_stacked_and_single_experts_point_at_the_same_bytes(tmp_path: Path) -> None:
    moe = "model.layers.0.block_sparse_moe.experts"
    rest = {name: entry for name, entry in micro.shapes().items() if ".experts." not in name}
    stacked = {"model.layers.0.mlp.experts.gate_up_proj": ("F32", [2, 12, 4])}
    down = {f"{moe}.{expert}.w2.weight": ("F32", [4, 6]) for expert in range(2)}
    sources = sources_of(micro.write(tmp_path, stacked | rest | down))
    start = sources.block("layers.0.experts.gate", 0).offset
    for expert in range(2):
        gate, up = (sources.block(f"layers.0.experts.{kind}", expert) for kind in ("gate", "up"))
        assert (gate.offset - start, up.offset - start) == (expert * 12 * 16, expert * 12 * 16 + 6 * 16)
        assert gate.shape == up.shape == (6, 4)
        assert sources.block("layers.0.experts.down", expert).tensor == f"{moe}.{expert}.w2.weight"


@pytest.mark.parametrize("dtype", ["F8_E5M2", "I64"])
def test_dtypes_that_are_not_read(dtype: str, tmp_path: Path) -> None:
    micro.write(tmp_path, micro.shapes() | {EXPERT: (dtype, [6, 4])})
    with pytest.raises(MoecError) as caught:
        sources_of(tmp_path)
    assert caught.value.diagnostics[0].code == "E0743" and EXPERT in str(caught.value)
    assert dtype in DTYPE_BYTES and dtype in str(caught.value)
