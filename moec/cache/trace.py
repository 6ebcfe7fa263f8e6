"""Routing traces: which experts real tokens chose, as `moec run --record` writes them. No pickle, no torch.

A trace is an `.npz` file, a zip of arrays. L sparse layers of the model, N tokens in the order in which they ran,
k experts a token, S steps:

    expert_ids     int   [L, N, k]  in falling order of weight, or in any
    gate_weights   fp32  [L, N, k]  optional; `gate_weight_e4`, ten thousandths in 16 bits, is read too
    predicted_ids  int   [L, N, j]  optional: what a prefetcher guessed for the layer, -1 where it guessed nothing
    seq_lengths    i32   [sequences]
    phase          u8    [N]        optional: 0 prefill, 1 decode; without it all decode
    step_starts    i64   [S + 1]    optional: step i ran tokens step_starts[i]..step_starts[i + 1]; without it one each
    num_experts    int   []         optional; without it one more than the largest id
"""

from __future__ import annotations

import io
import zipfile
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from moec.diagnostics import MoecError, fail
from moec.files import write_whole

PREFILL, DECODE = 0, 1
#: Larger arrays are refused: a small zip file can unpack to a disk full of zeros.
MOST_BYTES = 8 << 30
#: More experts are refused: tables of pairs of experts are made of a trace, and no model has as many.
MOST_EXPERTS = 1 << 14
Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Trace:
    """The choices of real tokens; the arrays are those of the module's table. Raises ValueError where they disagree.

    `is_counted`: the number of experts is the model's; in a file that does not give it, it is a guess from the ids.
    """

    expert_ids: Array
    num_experts: int
    seq_lengths: Array
    phase: Array
    step_starts: Array
    gate_weights: Array | None = None
    predicted_ids: Array | None = None
    is_counted: bool = True

    def __post_init__(self) -> None:
        _check_ids("expert_ids", self.expert_ids, 0, self.num_experts)
        shape = self.expert_ids.shape
        if 0 in shape:
            raise ValueError(f"expert_ids is empty: {_text(shape)}")
        chosen = np.sort(self.expert_ids, axis=2)
        if (chosen[:, :, 1:] == chosen[:, :, :-1]).any():
            raise ValueError("expert_ids names an expert twice for one token")
        if self.gate_weights is not None:
            _check_shape("gate_weights", self.gate_weights, shape, "fiu")
        if self.predicted_ids is not None:
            _check_ids("predicted_ids", self.predicted_ids, -1, self.num_experts)
            if self.predicted_ids.shape[:2] != shape[:2]:
                raise ValueError(f"predicted_ids is {_text(self.predicted_ids.shape)}, expert_ids {_text(shape)}")
        _check_shape("seq_lengths", self.seq_lengths, (self.seq_lengths.size,), "iu")
        if (self.seq_lengths < 0).any():
            raise ValueError(f"seq_lengths has a negative length: {self.seq_lengths.min()}")
        if (total := sum(self.seq_lengths.tolist())) != shape[1]:
            raise ValueError(f"seq_lengths adds up to {total} tokens, expert_ids has {shape[1]}")
        _check_shape("phase", self.phase, (shape[1],), "iu")
        if not np.isin(self.phase, (PREFILL, DECODE)).all():
            raise ValueError("phase is neither 0 nor 1 somewhere")
        _check_steps(self.step_starts, shape[1])

    @property
    def num_layers(self) -> int:
        return int(self.expert_ids.shape[0])

    @property
    def num_tokens(self) -> int:
        return int(self.expert_ids.shape[1])

    @property
    def top(self) -> int:
        """Experts per token."""
        return int(self.expert_ids.shape[2])

    @property
    def num_steps(self) -> int:
        return len(self.step_starts) - 1

    @cached_property
    def step_phases(self) -> Array:
        """[S]: a step with a token of a prompt is a prefill step; one without tokens is neither, -1."""
        starts, ends = self.step_starts[:-1], self.step_starts[1:]
        prompts = np.concatenate([[0], np.cumsum(self.phase == PREFILL)])
        found: Array = np.where(prompts[ends] > prompts[starts], PREFILL, np.where(ends > starts, DECODE, -1))
        return found

    def of_phase(self, phase: int) -> Array:
        """`expert_ids` of the tokens of one phase: [L, n, k], n may be 0."""
        found: Array = self.expert_ids[:, self.phase == phase]
        return found


def read_trace(path: Path) -> Trace:
    """Read a trace. Raises E0780, naming the file and the array at fault, or E0783 where there is no such file."""
    arrays = _read_arrays(path)
    try:
        return _trace(arrays)
    except KeyError as missing:
        raise _damaged(path, f"it has no array {missing}") from None
    except ValueError as error:
        raise _damaged(path, str(error)) from None


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace, whole or not at all. The same trace gives the same bytes. Raises E0618."""
    smallest = np.min_scalar_type(trace.num_experts)
    arrays: dict[str, Array] = {
        "expert_ids": trace.expert_ids.astype(smallest),
        "seq_lengths": trace.seq_lengths.astype(np.int32),
        "phase": trace.phase.astype(np.uint8),
        "step_starts": trace.step_starts.astype(np.int64),
        "num_experts": np.asarray(trace.num_experts, np.int64),
    }
    if trace.gate_weights is not None:
        arrays["gate_weights"] = trace.gate_weights.astype(np.float32)
    if trace.predicted_ids is not None:
        arrays["predicted_ids"] = trace.predicted_ids.astype(np.int16 if trace.num_experts < 2**15 else np.int32)
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **arrays)
    write_whole(path, content.getvalue())


def _trace(arrays: dict[str, Array]) -> Trace:
    """The trace that arrays of a file say, with what may be left out filled in. Raises KeyError, ValueError."""
    ids, lengths = arrays["expert_ids"], arrays["seq_lengths"]
    if ids.ndim != 3 or ids.size == 0 or ids.dtype.kind not in "iu":
        raise ValueError(f"expert_ids is {_text(ids.shape)} of {ids.dtype}, not whole numbers [layers, tokens, k]")
    weights = arrays.get("gate_weights")
    if weights is None and (scaled := arrays.get("gate_weight_e4")) is not None:
        _check_shape("gate_weight_e4", scaled, ids.shape, "iu")
        weights = scaled / np.float32(1e4)
    tokens = ids.shape[1]
    is_counted = "num_experts" in arrays
    num_experts = _number("num_experts", arrays["num_experts"]) if is_counted else int(ids.max()) + 1
    if num_experts > MOST_EXPERTS:
        name = "num_experts" if is_counted else "expert_ids"
        raise ValueError(f"{name} tells of {num_experts} experts, more than {MOST_EXPERTS}")
    return Trace(
        ids,
        num_experts,
        lengths,
        arrays.get("phase", np.full(tokens, DECODE, np.uint8)),
        arrays.get("step_starts", np.arange(tokens + 1, dtype=np.int64)),
        weights,
        arrays.get("predicted_ids"),
        is_counted,
    )


def _read_arrays(path: Path) -> dict[str, Array]:
    """Every array of the file. What is no array, or would need pickle, is refused."""
    arrays: dict[str, Array] = {}
    place = "it"
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                name = entry.filename.removesuffix(".npy")
                place = f"its array {name}"
                if entry.file_size > MOST_BYTES:
                    raise _damaged(path, f"{place} has {entry.file_size} bytes, more than {MOST_BYTES}")
                arrays[name] = npy.read_array(io.BytesIO(archive.read(entry)), allow_pickle=False)
    except FileNotFoundError:
        raise fail("E0783", f"there is no trace `{path}`", "`moec run --record FILE.npz` writes one") from None
    except zipfile.BadZipFile as error:
        raise _damaged(path, f"{place} is no archive of arrays ({error})") from None
    except OSError as error:
        raise _damaged(path, f"{place} cannot be read: {error.strerror or error}") from None
    except (ValueError, TypeError, EOFError, RuntimeError, NotImplementedError, MemoryError, zlib.error) as error:
        raise _damaged(path, f"{place} cannot be read: {error}") from None
    return arrays


def _damaged(path: Path, reason: str) -> MoecError:
    help = "record it again: `moec run --record FILE.npz`"
    return fail("E0780", f"the trace `{path}` cannot be used: {reason}", help)


def _check_ids(name: str, ids: Array, low: int, high: int) -> None:
    if ids.ndim != 3 or ids.dtype.kind not in "iu":
        raise ValueError(f"{name} is {_text(ids.shape)} of {ids.dtype}, not whole numbers [layers, tokens, k]")
    if ids.size and (ids.min() < low or ids.max() >= high):
        raise ValueError(f"{name} has an id outside {low}..{high - 1}")


def _check_shape(name: str, array: Array, shape: tuple[int, ...], kinds: str) -> None:
    if array.shape != shape or array.dtype.kind not in kinds:
        raise ValueError(f"{name} is {_text(array.shape)} of {array.dtype}, it should be {_text(shape)}")


def _check_steps(starts: Array, num_tokens: int) -> None:
    if starts.ndim != 1 or starts.size < 2 or starts.dtype.kind not in "iu":
        raise ValueError(f"step_starts is {_text(starts.shape)} of {starts.dtype}, not a row of whole numbers")
    ordered = starts.astype(np.int64)
    if ordered[0] != 0 or ordered[-1] != num_tokens or (np.diff(ordered) < 0).any():
        raise ValueError(f"step_starts does not rise from 0 to {num_tokens}, the number of tokens")


def _number(name: str, value: Array) -> int:
    if value.shape != () or value.dtype.kind not in "iu":
        raise ValueError(f"{name} is {_text(value.shape)} of {value.dtype}, not one whole number")
    return int(value)


def _text(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
