"""What the kernels that route, sort and sum rows refuse, and the flags by which a device tells it to the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moec.diagnostics import MoecError, fail
from moec.runtime import device_flags
from moec.runtime.context import Context
from moec.runtime.kernels import torch_moe, torch_pairs, triton_route, triton_rows
from moec.runtime.kernels.triton_route import route
from moec.runtime.kernels.triton_rows import combine, group_rows, invert_pairs, reduce_rows, sort_pairs, sum_rows
from tests.contexts import context

pytest.importorskip("triton")
#: numpy, in which the interpreter computes, warns of the infinities and NaN that some rows are made of.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

INF, NAN = float("inf"), float("nan")


def choose(logits: Tensor, bias: Tensor | None = None, ctx: Context | None = None, **options: Any) -> tuple:
    defaults = {"score": "softmax", "top": 2, "groups": 1, "keep": 1, "renormalize": True, "scale": 1.0}
    return route(ctx or context(), logits, bias, table="routed", **defaults | options)


@pytest.mark.parametrize("bad", [[0.0, NAN, 0.0, 0.0], [NAN] * 4, [INF, 0.0, 0.0, 0.0], [-INF] * 4])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_bad_row_is_named_and_its_ids_are_experts(
    bad: list[float], groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch's kernel says it; while a graph is captured the flag waits, then is raised once."""
    logits = torch.zeros(70, 4)
    logits[[5, 69]] = torch.tensor(bad)
    bias = torch.zeros(4)
    with pytest.raises(MoecError) as error:
        choose(logits, bias, groups=groups, keep=1)
    assert error.value.diagnostics[0].code == "E0506" and error.value.exit_code == 6
    with pytest.raises(MoecError) as torchs:
        torch_moe.route(
            context(), logits, bias, score="softmax", top=2, groups=groups, keep=1, renormalize=True, scale=1.0,
            table="routed",
        )  # fmt: skip
    assert str(error.value) == str(torchs.value) and "layer 3" in str(error.value) and "row 5" in str(error.value)

    monkeypatch.setattr(triton_route, "is_deferred", lambda _: True)
    ctx = context()
    ids, _ = choose(logits, bias, ctx, groups=groups, keep=1)
    assert ids.min() >= 0 and ids.max() < 4 and (ids[:, 0] != ids[:, 1]).all()
    with pytest.raises(MoecError, match="row 5"):
        device_flags.raise_faults(ctx)
    choose(logits[:5], bias, ctx)
    device_flags.raise_faults(ctx)


def test_a_bias_that_is_no_number_is_refused() -> None:
    with pytest.raises(MoecError, match="row 0"):
        choose(torch.zeros(2, 4), torch.tensor([0.0, NAN, 0.0, 0.0]), score="sigmoid")


def test_flags_are_found_whatever_their_number() -> None:
    """More layers than one block of flags holds; the first that is lowered is raised, and all are reset."""
    flags = device_flags.Flags(torch.device("cpu"))
    made = [flags.flag(n, lambda row, n=n: fail("E0506", f"layer {n}, row {row}")) for n in range(300)]
    made[299].fill_(0)
    made[270].fill_(8)
    assert len(flags.blocks) == 2 and flags.flag(299, flags.faults[299]).data_ptr() == made[299].data_ptr()
    with pytest.raises(MoecError, match="layer 270, row 8"):
        flags.raise_lowered()
    flags.raise_lowered()


@pytest.mark.parametrize(
    ("logits", "bias", "name"),
    [
        (torch.zeros(4), None, "the logits"),
        (torch.zeros(2, 4, dtype=torch.bfloat16), None, "the logits"),
        (torch.zeros(2, 4), torch.zeros(3), "the bias"),
        (torch.zeros(2, 4), torch.zeros(4, dtype=torch.float64), "the bias"),
        (torch.zeros(2, 4), torch.zeros(8)[::2], "the bias"),
    ],
)
def test_logits_that_do_not_fit_are_named(logits: Tensor, bias: Tensor | None, name: str) -> None:
    with pytest.raises(MoecError) as error:
        choose(logits, bias)
    assert error.value.diagnostics[0].code == "E0526" and name in str(error.value)


@pytest.mark.parametrize(("wrong", "pair"), [(8, 7), (-2, 300), (2**31, 0), (-(2**32), 1)])
def test_an_id_that_is_no_expert_is_refused(wrong: int, pair: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """B07: an error as torch's kernel gives it, at once or after a captured graph; never a read out of bounds."""
    ids_Rk = torch.zeros(200, 2, dtype=torch.int64)
    ids_Rk.view(-1)[[pair, 399]] = torch.tensor([wrong, 9])
    ctx = context()
    errors = []
    for kernels in (triton_rows, torch_pairs):
        with pytest.raises(MoecError) as error:
            kernels.group_rows(ctx, torch.zeros(200, 4), ids_Rk, table="routed")
        errors.append(error.value)
    assert errors[0].diagnostics == errors[1].diagnostics
    assert errors[0].diagnostics[0].code == "E0507" and f"expert {wrong} " in str(errors[0])

    monkeypatch.setattr(triton_rows, "is_deferred", lambda _: True)
    monkeypatch.setattr(triton_rows, "INTERPRETED_ROWS", 1)
    _, ends_M, _ = group_rows(ctx, torch.zeros(200, 4), ids_Rk, table="routed")
    assert ends_M.tolist() == [398] * 8
    with pytest.raises(MoecError, match=f"layer 3: the expert of pair {pair} of `routed`"):
        device_flags.raise_faults(ctx)
    device_flags.raise_faults(ctx)


ROWS, IDS = torch.ones(3, 4), torch.zeros(3, 2, dtype=torch.int64)
PLACES = torch.zeros(3, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "code", "says"),
    [
        (lambda ctx: sort_pairs(ctx, ROWS.double(), IDS, table="routed"), "E0526", "the rows"),
        (lambda ctx: sort_pairs(ctx, ROWS[:2], IDS, table="routed"), "E0526", "the rows"),
        (lambda ctx: sort_pairs(ctx, ROWS, IDS.int(), table="routed"), "E0526", "the ids"),
        (lambda ctx: sort_pairs(ctx, ROWS, IDS[0], table="routed"), "E0526", "the ids"),
        (lambda ctx: sum_rows(ROWS[0], PLACES), "E0526", "the rows"),
        (lambda ctx: sum_rows(ROWS, IDS), "E0526", "the places"),
        (lambda ctx: sum_rows(ROWS, PLACES, torch.ones(3, 3)), "E0526", "the weights"),
        (lambda ctx: sum_rows(ROWS, PLACES, torch.ones(3, 2).bfloat16()), "E0526", "the weights"),
        (lambda ctx: invert_pairs(PLACES.flatten(), (3, 2)), "E0526", "the pairs"),
        (lambda ctx: reduce_rows(ctx, ROWS, IDS.flatten(), PLACES.float(), table="routed"), "E0508", "for 6 pairs"),
        (lambda ctx: combine(ctx, ROWS, IDS[:, 0], PLACES.float(), table="routed"), "E0508", "for 6 pairs"),
    ],
)
def test_tensors_that_do_not_fit_are_named(call: Any, code: str, says: str) -> None:
    ctx: Context = context()
    with pytest.raises(MoecError) as error:
        call(ctx)
    assert error.value.diagnostics[0].code == code and says in str(error.value)
