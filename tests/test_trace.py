"""Trace files: read back as written, faults named with file and array, and never more than arrays in them."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.cache.trace import DECODE, PREFILL, Trace, read_trace, write_trace
from moec.diagnostics import MoecError
from tests.traces import random_ids, trace_of

IDS = np.array([[[0, 1], [2, 0], [3, 1]], [[1, 2], [0, 3], [0, 1]]])
ARRAYS = {"expert_ids": IDS.astype(np.uint8), "seq_lengths": np.array([2, 1], np.int32)}


def saved(path: Path, **arrays: Any) -> Path:
    """A file of the arrays that are not None."""
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})
    return path


def fault(path: Path, code: str = "E0780", exit_code: int = 3) -> str:
    """The one line that a file ends in."""
    with pytest.raises(MoecError) as caught:
        read_trace(path)
    (diagnostic,) = caught.value.diagnostics
    assert (diagnostic.code, diagnostic.exit_code) == (code, exit_code)
    assert str(path) in diagnostic.message
    return diagnostic.message


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).random(IDS.shape).astype(np.float32)
    guessed = np.where(IDS == 0, -1, IDS)
    parts = {"phase": np.array([0, 0, 1], np.uint8), "step_starts": np.array([0, 2, 3]), "gate_weights": weights}
    trace = trace_of(IDS, 300, predicted_ids=guessed, **parts)
    write_trace(tmp_path / "t.npz", trace)
    found = read_trace(tmp_path / "t.npz")
    for name in ("expert_ids", "seq_lengths", "phase", "step_starts", "gate_weights", "predicted_ids"):
        assert np.array_equal(getattr(found, name), getattr(trace, name)), name
    assert (found.num_experts, found.num_layers, found.num_tokens, found.top, found.num_steps) == (300, 2, 3, 2, 2)
    assert found.of_phase(PREFILL).tolist() == IDS[:, :2].tolist()
    assert found.of_phase(DECODE).tolist() == IDS[:, 2:].tolist()


def test_the_same_trace_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.npz", "b.npz"):
        write_trace(tmp_path / name, trace_of(random_ids(3, 50, 4, 16), 16))
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    assert [entry.name for entry in sorted(tmp_path.iterdir())] == ["a.npz", "b.npz"]


def test_what_a_file_leaves_out_is_filled_in(tmp_path: Path) -> None:
    """Three tokens decoded one a step; ten thousandths are weights."""
    scaled = np.full(IDS.shape, 1234, np.uint16)
    found = read_trace(saved(tmp_path / "t.npz", **ARRAYS, gate_weight_e4=scaled))
    assert (found.num_experts, found.num_steps, found.phase.tolist()) == (4, 3, [DECODE] * 3)
    assert found.step_starts.tolist() == [0, 1, 2, 3]
    assert found.gate_weights is not None and np.allclose(found.gate_weights, 0.1234)
    assert found.predicted_ids is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"expert_ids": None}, "no array 'expert_ids'"),
        ({"seq_lengths": None}, "no array 'seq_lengths'"),
        ({"expert_ids": IDS[0]}, "expert_ids is [3, 2] of int64, not whole numbers [layers, tokens, k]"),
        ({"expert_ids": IDS * 0.5}, "expert_ids is [2, 3, 2] of float64"),
        ({"expert_ids": IDS[:, :0]}, "expert_ids is [2, 0, 2]"),
        ({"expert_ids": IDS - 1}, "expert_ids has an id outside 0..2"),
        ({"num_experts": np.array(3)}, "expert_ids has an id outside 0..2"),
        ({"num_experts": np.array([9])}, "num_experts is [1]"),
        ({"num_experts": np.array(1 << 40)}, "num_experts tells of 1099511627776 experts, more than 16384"),
        ({"expert_ids": IDS << 40}, "expert_ids tells of 3298534883329 experts, more than 16384"),
        ({"expert_ids": np.zeros_like(IDS)}, "expert_ids names an expert twice for one token"),
        ({"seq_lengths": np.array([2, 2])}, "seq_lengths adds up to 4 tokens, expert_ids has 3"),
        ({"seq_lengths": np.array([4, -1])}, "seq_lengths has a negative length: -1"),
        ({"seq_lengths": np.array([1 << 62] * 4 + [3])}, f"seq_lengths adds up to {(1 << 64) + 3} tokens"),
        ({"seq_lengths": np.array(3)}, "seq_lengths is [] of int64"),
        ({"phase": np.zeros(2, np.uint8)}, "phase is [2] of uint8, it should be [3]"),
        ({"phase": np.full(3, 2)}, "phase is neither 0 nor 1"),
        ({"step_starts": np.array([0, 2, 1, 3])}, "step_starts does not rise from 0 to 3"),
        ({"step_starts": np.array([0, 2])}, "step_starts does not rise from 0 to 3"),
        ({"step_starts": np.array([[0, 3]])}, "step_starts is [1, 2]"),
        ({"gate_weights": np.ones((2, 3))}, "gate_weights is [2, 3] of float64, it should be [2, 3, 2]"),
        ({"gate_weight_e4": np.ones((2, 3, 1), np.uint16)}, "gate_weight_e4 is [2, 3, 1]"),
        ({"predicted_ids": np.full((2, 2, 2), 1)}, "predicted_ids is [2, 2, 2]"),
        ({"predicted_ids": np.full((2, 3, 1), 4)}, "predicted_ids has an id outside -1..3"),
    ],
)
def test_arrays_that_do_not_fit_are_named(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in fault(saved(tmp_path / "t.npz", **(ARRAYS | changes)))


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    assert "there is no trace" in fault(tmp_path / "absent.npz", "E0783", 2)
    assert "cannot be read: Is a directory" in fault(tmp_path)
    (tmp_path / "text.npz").write_text("no zip")
    assert "it is no archive of arrays" in fault(tmp_path / "text.npz")
    with zipfile.ZipFile(tmp_path / "other.npz", "w") as archive:
        archive.writestr("readme.txt", "no array")
    assert "its array readme.txt cannot be read" in fault(tmp_path / "other.npz")


def test_a_cut_or_flipped_file_is_named(tmp_path: Path) -> None:
    """Every cut, and every byte changed: an error of one line, or the same trace where the byte says nothing."""
    whole = saved(tmp_path / "t.npz", **ARRAYS)
    content, wanted = whole.read_bytes(), read_trace(whole)
    bad = tmp_path / "bad.npz"
    for length in range(0, len(content), 7):
        bad.write_bytes(content[:length])
        fault(bad)
    for place in range(0, len(content), 3):
        bad.write_bytes(content[:place] + bytes([content[place] ^ 0x41]) + content[place + 1 :])
        assert _same_or_fault(bad, wanted), place


def _same_or_fault(path: Path, wanted: Trace) -> bool:
    try:
        found = read_trace(path)
    except MoecError as error:
        return error.diagnostics[0].code == "E0780"
    return np.array_equal(found.expert_ids, wanted.expert_ids)


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", allow_pickle=True, **(ARRAYS | {"extra": np.array([{"a": 1}], dtype=object)}))
    assert "its array extra cannot be read: Object arrays cannot be loaded" in fault(tmp_path / "t.npz")


def test_a_small_file_that_claims_to_be_huge_is_refused(tmp_path: Path) -> None:
    """The header of the array says 8 TiB; the file has 16 bytes of them."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<i8", "fortran_order": False, "shape": (1 << 20, 1 << 10, 1 << 10)}
    )
    with zipfile.ZipFile(tmp_path / "t.npz", "w") as archive:
        archive.writestr("expert_ids.npy", header.getvalue() + bytes(16))
    assert "its array expert_ids cannot be read" in fault(tmp_path / "t.npz")


@pytest.mark.parametrize("name", ["law", "summary"])
def test_recorded_traces_of_others_are_read(name: str, shared: Path) -> None:
    found = read_trace(shared / "data" / "traces" / "deepseek-v2-lite" / f"{name}.npz")
    assert (found.num_layers, found.top, found.num_experts) == (26, 6, 64)
    assert found.num_steps == found.num_tokens > 8000
    assert found.gate_weights is not None and 0 < float(found.gate_weights.max()) <= 1
