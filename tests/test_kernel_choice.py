"""Tiles chosen at compile time: as plan.json keeps them, and as the run time takes them."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moec.codegen.gemm_variant import Projection, RowSource
from moec.codegen.grouped_gemm import GroupedGemm, specialise
from moec.codegen.kernel_choice import Chosen, Product, read_choices, with_choice, write_choice
from moec.codegen.targets import TARGETS, Dtype
from moec.codegen.tiles import Form
from moec.runtime.kernels import triton_products as kernels_triton
from tests.contexts import context


def kernel(target: str = "cuda:90", form: Form | None = None, **sizes: Any) -> GroupedGemm:
    given: dict[str, Any] = {"hidden": 64, "inner": 48, "experts": 3} | sizes
    op, dtype = Projection.GATE_UP, Dtype.FP32
    return specialise(op, dtype=dtype, target=TARGETS[target], form=form, rows_per_expert=4, **given)


def narrow(values: GroupedGemm) -> GroupedGemm:
    """With tiles that no default has."""
    return replace(values, tiles=tuple(replace(tile, n=16, k=16, stages=3) for tile in values.tiles), warps=2)


def entry(values: GroupedGemm, target: str = "cuda:90", rows_per_expert: int = 4) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps({"target": target, "choice": write_choice(values, rows_per_expert)}))
    return found


def test_a_choice_reads_back_and_replaces_the_default() -> None:
    wanted = narrow(kernel())
    chosen = read_choices([{"target": "cuda:90"}, entry(wanted)], "cuda:90")
    assert with_choice(kernel(), 4, chosen) == wanted


@pytest.mark.parametrize(
    ("values", "rows_per_expert"),
    [
        (kernel(experts=4), 4),
        (kernel(rows=RowSource.GATHERED), 4),
        (kernel(), 200),
        (kernel(form=Form.POINTER), 4),
    ],
    ids=("other experts", "other rows", "other step", "no descriptors"),
)
def test_other_products_keep_their_default(values: GroupedGemm, rows_per_expert: int) -> None:
    chosen = read_choices([entry(narrow(kernel()))], "cuda:90")
    assert with_choice(values, rows_per_expert, chosen) == values


def test_choices_are_for_their_target() -> None:
    assert read_choices([entry(narrow(kernel()))], "hip:gfx942") == {}


@pytest.mark.parametrize(
    "damage",
    [
        {"op": "sideways"},
        {"warps": 0},
        {"hidden": "64"},
        {"tiles": []},
        {"tiles": [[16, 16, 16]]},
        {"tiles": [[16, 16, 16, 1, 3]]},
        {"tiles": [[16, "16", 16, False, 3]]},
        {"store": None},
    ],
    ids=str,
)
def test_what_is_no_choice_is_refused(damage: dict[str, Any]) -> None:
    damaged = entry(narrow(kernel()))
    damaged["choice"] |= damage
    with pytest.raises(ValueError, match=r"choice|sideways|None"):
        read_choices([damaged], "cuda:90")
    del damaged["choice"]["form"]
    with pytest.raises(ValueError, match=r"choice|sideways|None"):
        read_choices([damaged], "cuda:90")


def test_the_run_time_launches_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, which stands for cuda:90."""
    launched: list[GroupedGemm] = []
    launch = kernels_triton.launch_grouped_gemm

    def watched(values: GroupedGemm, *args: Any) -> None:
        launched.append(values)
        launch(values, *args)

    monkeypatch.setattr(kernels_triton, "launch_grouped_gemm", watched)
    wanted = narrow(kernel())
    chosen: dict[Product, Chosen] = read_choices([entry(wanted)], "cuda:90")
    rows, w = torch.randn(5, 64), torch.randn(3, 96, 64)
    offsets = torch.tensor([2, 2, 5], dtype=torch.int32)
    default, tuned = (
        kernels_triton.grouped_gate_up(ctx, rows, offsets, w) for ctx in (None, replace(context(), chosen=chosen))
    )
    assert launched == [kernel(), wanted]
    assert torch.allclose(default, tuned, atol=1e-4)


@pytest.mark.parametrize(
    ("version", "name", "near"),
    [((8, 0), "cuda:80", "cuda:80"), ((8, 9), "cuda:89", "cuda:80"), ((10, 3), "cuda:103", "cuda:100")],
)
def test_a_device_that_is_no_target_has_the_tiles_of_the_nearest_and_that_is_said(
    version: tuple[int, int], name: str, near: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Tiles that were chosen for an A100 may ask for more shared memory than its smaller kin have."""
    properties = SimpleNamespace(major=version[0], minor=version[1], shared_memory_per_block_optin=101_376)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", None)
    kernels_triton._tell_apart.cache_clear()
    device = torch.device("cuda")
    for _ in range(2):
        assert kernels_triton.target_of(device) == replace(TARGETS[near], shared_limit=101_376)
    assert kernels_triton.architecture_of(device) == name
    assert [name in record.getMessage() for record in caplog.records] == [True] * (name != near)
