"""Weights and rows in fewer bits: the formats that the kernels read, and their quantisers and inverses in torch.

Along the summed dimension K everything is in groups of 128, and stored as whole groups: P is K rounded up to a multiple
of 128, and what is stored after K is zero. A checkpoint whose K is a multiple of 128 is taken byte for byte.

FP8   values e4m3 [M, N, P], scales fp32 [M, sides * B, P / 128] with B = ceil(N / sides / 128): one scale for each
      block of 128 rows and 128 columns, w = value * scale. Where N is gate's rows and then up's (sides = 2), each has
      blocks of its own, as when two checkpoint tensors with their `weight_scale_inv` are concatenated.
      Rows have one scale for each token and group (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
INT8  values int8 [M, N, P], scales fp32 [M, N, P / 128]: w = value * scale, symmetric.
INT4  values int32 [M, N, P / 8], scales fp32 [M, N, P / 128]: w = (nibble - 8) * scale, symmetric, and column k is
      nibble k % 8 of word k // 8, lowest bits first: compressed-tensors' `pack-quantized` with group_size 128. Two
      columns are in a byte, the even one in the low half.

Shapes: M experts, N rows of an expert's weights, K columns, P padded columns, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from moec.codegen.gemm_variant import Weights
from moec.diagnostics import fail

#: Columns that share a scale, and rows that do in FP8 blocks.
GROUP = 128
#: Largest finite e4m3 number (OCP 8-bit floating point, table 1).
E4M3_MAX = 448.0
#: Smallest scale: below it a group is all but zero, and quotients by it would overflow.
LEAST_SCALE = 2.0**-126


@dataclass(frozen=True, eq=False)
class QuantisedWeights:
    """Weights of all experts. `depth` is K; `sides` is 2 for gate and up, which have FP8 blocks of their own."""

    format: Weights
    values: Tensor
    scales: Tensor
    depth: int
    sides: int = 1

    def __post_init__(self) -> None:
        """Raise E0531 for FP8 weights that are not numbers: kernels decode e4m3's two codes for NaN as 480."""
        if self.values.dtype is not torch.float8_e4m3fn:
            return
        for expert, codes in enumerate(self.values.view(torch.uint8)):
            if ((codes & 0x7F) == 0x7F).any():
                raise fail(
                    "E0531",
                    f"FP8 weights of expert {expert} are not all numbers",
                    "the checkpoint is damaged, or was quantised from weights that overflowed",
                )


@dataclass(frozen=True, eq=False)
class QuantisedRows:
    """Rows in e4m3 [R, P] with fp32 scales [R, P / 128]; `depth` is K."""

    values: Tensor
    scales: Tensor
    depth: int


def quantise_fp8_blocks(w_MNK: Tensor, sides: int = 1) -> QuantisedWeights:
    """Each block of 128 x 128 over its largest absolute value / 448, rounded to the nearest e4m3, ties to even."""
    blocks = _blocks(w_MNK.float(), sides)  # [M, sides, B, 128, G, 128]
    scales = _scales(blocks.abs().amax(dim=(3, 5)), E4M3_MAX)
    values = (blocks / scales[:, :, :, None, :, None]).to(torch.float8_e4m3fn)
    values_MNP, scales_MBG = _lines(values, w_MNK.shape[1]), scales.flatten(1, 2)
    return QuantisedWeights(Weights.FP8, values_MNP, scales_MBG, w_MNK.shape[2], sides)


def quantise_int8(w_MNK: Tensor, sides: int = 1) -> QuantisedWeights:
    """round(w / scale) to the nearest, ties to even, with scale = largest absolute value of the group / 127."""
    values, scales = _quantise_groups(w_MNK, 127)
    return QuantisedWeights(Weights.INT8, values, scales, w_MNK.shape[2], sides)


def quantise_int4(w_MNK: Tensor, sides: int = 1) -> QuantisedWeights:
    """round(w / scale) to the nearest, ties to even, with scale = largest absolute value of the group / 7."""
    values, scales = _quantise_groups(w_MNK, 7)
    return QuantisedWeights(Weights.INT4, pack_int4(values), scales, w_MNK.shape[2], sides)


def dequantise(weights: QuantisedWeights, dtype: torch.dtype = torch.float32) -> Tensor:
    """value * scale in `dtype`: [M, N, K]."""
    values, scales = weights.values, weights.scales.to(dtype)
    if weights.format is Weights.FP8:
        experts, lines = values.shape[:2]
        blocks = _blocks(values.to(dtype), weights.sides)
        w_MNP = _lines(blocks * scales.view(experts, weights.sides, -1, 1, scales.shape[2], 1), lines)
    else:
        values = unpack_int4(values) if weights.format is Weights.INT4 else values
        w_MNP = values.to(dtype) * scales.repeat_interleave(GROUP, dim=-1)
    return w_MNP[..., : weights.depth]


def dequantise_blocks(values_NK: Tensor, scales_BG: Tensor, sides: int = 1) -> Tensor:
    """value * scale in fp32 of one FP8 matrix [N, K], which is stored without the zeros after K."""
    lines, depth = values_NK.shape
    scales_SBG = scales_BG.reshape(sides, -1, scales_BG.shape[1])
    scales_NG = scales_SBG.repeat_interleave(GROUP, dim=1)[:, : lines // sides].flatten(0, 1)
    return values_NK.float().mul_(scales_NG.repeat_interleave(GROUP, dim=1)[:, :depth])


def quantise_rows(x_RK: Tensor) -> QuantisedRows:
    """Each group of 128 over its largest absolute value / 448, rounded to the nearest e4m3, ties to even.

    A group of zeros stays zeros. A group with an infinity or a NaN gets a NaN for its scale and NaN everywhere, so that
    its row's products are NaN, never numbers that look right.
    """
    groups_RGK = _whole_groups(x_RK.float())
    largest_RG = groups_RGK.abs().amax(dim=-1)
    scales_RG = _scales(torch.where(largest_RG.isfinite(), largest_RG, torch.nan), E4M3_MAX)
    values_RP = (groups_RGK / scales_RG[..., None]).to(torch.float8_e4m3fn).flatten(1)
    return QuantisedRows(values_RP, scales_RG, x_RK.shape[1])


def dequantise_rows(rows: QuantisedRows, dtype: torch.dtype = torch.float32) -> Tensor:
    """value * scale in `dtype`: [R, K]."""
    return (rows.values.to(dtype) * rows.scales.to(dtype).repeat_interleave(GROUP, dim=-1))[:, : rows.depth]


def pack_int4(values: Tensor) -> Tensor:
    """int8 in [-8, 7], [..., P], to int32 words of eight, [..., P / 8]: column k in bits 4 (k % 8) of its word."""
    nibbles = (values.to(torch.int64) + 8).reshape(*values.shape[:-1], -1, 8)
    words = (nibbles << torch.arange(0, 32, 4, device=values.device)).sum(dim=-1)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)


def unpack_int4(words: Tensor) -> Tensor:
    """The inverse of `pack_int4`: int8 [..., P]."""
    nibbles = words[..., None] >> torch.arange(0, 32, 4, device=words.device, dtype=torch.int32) & 0xF
    return (nibbles - 8).to(torch.int8).flatten(-2)


def _quantise_groups(w_MNK: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    groups = _whole_groups(w_MNK.float())
    scales = _scales(groups.abs().amax(dim=-1), largest)
    return (groups / scales[..., None]).round().clamp(-largest, largest).to(torch.int8).flatten(-2), scales


def _scales(largest: Tensor, top: float) -> Tensor:
    return (largest / top).clamp(min=LEAST_SCALE)


def _whole_groups(x: Tensor) -> Tensor:
    """[..., K] to [..., G, 128], zeros after K."""
    return pad(x, (0, -x.shape[-1] % GROUP)).reshape(*x.shape[:-1], -(-x.shape[-1] // GROUP), GROUP)


def _blocks(w_MNK: Tensor, sides: int) -> Tensor:
    """[M, sides * n, K] to [M, sides, B, 128, G, 128], zeros after n and K."""
    experts, lines, depth = w_MNK.shape
    w_MSnK = w_MNK.reshape(experts, sides, lines // sides, depth)
    padded = _whole_groups(pad(w_MSnK, (0, 0, 0, -w_MSnK.shape[2] % GROUP)))
    return padded.reshape(experts, sides, -1, GROUP, *padded.shape[3:])


def _lines(blocks: Tensor, lines: int) -> Tensor:
    """The inverse of `_blocks`, but for the zeros after K: [M, N, P]."""
    sides = blocks.shape[1]
    return blocks.flatten(4).flatten(2, 3)[:, :, : lines // sides].flatten(1, 2).contiguous()
