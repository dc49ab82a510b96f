"""Quantize a matrix to codes and scales in plain torch: the reference that every runtime meets.

Nothing here is fast, and all of it is torch's own operations by element, in the order in which
torchao has them, so that codes are equal to torchao's bit for bit.

Shapes: R rows, C columns, G groups of a row, K numbers of a group.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.compress.spec import CODE_RANGE, ROW_INT8, NumberFormat

TINY = torch.finfo(torch.float32).smallest_normal
"""Least scale of a group, so that one of zeros divides by something; torchao's."""
LEAST = torch.finfo(torch.float32).eps
"""Least scale of a token whose codes are symmetric; torchao has another one there."""
TOKEN_INT8 = NumberFormat(dtype="int8", symmetric=False)
"""Codes of what a matmul reads, each token of which has its own range."""


class Codes(NamedTuple):
    """Hold a quantized matrix of whole numbers."""

    codes_RC: Tensor
    """int8, whatever the bits of the format."""
    scales_RG: Tensor
    """fp32; rounded to bf16 where the format says so."""
    zeros_RG: Tensor
    """int8: the code of zero; 0 where the format is symmetric."""

    def dequantize(self) -> Tensor:
        """Return the fp32 matrix [R, C] that the codes stand for."""
        codes_RGK = self.codes_RC.unflatten(1, (self.scales_RG.size(1), -1)).float()
        zeros_RG1, scales_RG1 = self.zeros_RG.float().unsqueeze(-1), self.scales_RG.unsqueeze(-1)
        return ((codes_RGK - zeros_RG1) * scales_RG1).flatten(1)


def grid_of(
    values_RGK: Tensor, kind: NumberFormat, least_scale: float = TINY
) -> tuple[Tensor, Tensor]:
    """Return the scale and the zero point of each group, fp32 [R, G] both.

    Args:
        values_RGK: the numbers of each group.
        kind: an integer format.
        least_scale: no scale is below it.
    """
    least, most = CODE_RANGE[kind.dtype]
    low_RG = values_RGK.amin(-1).clamp(max=0)
    high_RG = values_RGK.amax(-1).clamp(min=0)
    if kind.symmetric:
        scales_RG = torch.maximum(-low_RG, high_RG) / ((most - least) / 2)
    else:
        scales_RG = (high_RG - low_RG) / (most - least)
    scales_RG = scales_RG.clamp(min=least_scale)
    if kind.scales == "bf16":
        scales_RG = scales_RG.bfloat16().float()
    if kind.symmetric:
        return scales_RG, torch.zeros_like(scales_RG)
    return scales_RG, (least - (low_RG / scales_RG).round()).clamp(least, most)


def nearest_codes(values_RGK: Tensor, scales_RG: Tensor, zeros_RG: Tensor, dtype: str) -> Tensor:
    """Return the nearest code of each number, fp32 [R, G, K]."""
    least, most = CODE_RANGE[dtype]
    scaled_RGK = (values_RGK * (1.0 / scales_RG.unsqueeze(-1))).round()
    return (scaled_RGK + zeros_RG.unsqueeze(-1)).clamp(least, most)


def quantize_nearest(weight_RC: Tensor, kind: NumberFormat) -> Codes:
    """Round each number of a matrix to its nearest code.

    Args:
        weight_RC: the matrix, whose columns the groups divide.
        kind: an integer format.
    """
    weight_RGK = weight_RC.detach().float().unflatten(1, (kind.groups_of(weight_RC.size(1)), -1))
    scales_RG, zeros_RG = grid_of(weight_RGK, kind)
    codes_RGK = nearest_codes(weight_RGK, scales_RG, zeros_RG, kind.dtype)
    return Codes(codes_RGK.flatten(1).to(torch.int8), scales_RG, zeros_RG.to(torch.int8))


def activation_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return symmetric 8-bit codes in fp32 [..., C], and the scale of each token [..., 1].

    Args:
        x: what a matmul reads, fp32.
    """
    scales_N1, zeros_N1 = grid_of(tokens_N1C := x.reshape(-1, 1, x.size(-1)), ROW_INT8, LEAST)
    codes_N1C = nearest_codes(tokens_N1C, scales_N1, zeros_N1, "int8")
    return codes_N1C.view_as(x), scales_N1.view(*x.shape[:-1], 1)


def fake_activations(x: Tensor) -> Tensor:
    """Return what asymmetric 8-bit codes of activations stand for; each token has its own range.

    Args:
        x: what a matmul reads, fp32 [..., C].
    """
    tokens_N1C = x.reshape(-1, 1, x.size(-1))
    scales_N1, zeros_N1 = grid_of(tokens_N1C, TOKEN_INT8)
    codes_N1C = nearest_codes(tokens_N1C, scales_N1, zeros_N1, "int8")
    return ((codes_N1C - zeros_N1.unsqueeze(-1)) * scales_N1.unsqueeze(-1)).view_as(x)


def pack_int4(codes_RC: Tensor) -> Tensor:
    """Return codes of 4 bits two a byte, the first in the low bits; uint8 [R, ceil(C / 2)]."""
    even_RC = torch.nn.functional.pad(codes_RC, (0, codes_RC.size(1) % 2)).to(torch.uint8) & 15
    return even_RC[:, ::2] | even_RC[:, 1::2] << 4


def unpack_int4(packed: Tensor, columns: int) -> Tensor:
    """Return the codes int8 [R, C] of `pack_int4`."""
    both = torch.stack((packed & 15, packed >> 4), -1).flatten(1)[:, :columns].to(torch.int8)
    return torch.where(both > 7, both - 16, both)
