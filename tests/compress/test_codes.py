"""Codes, scales and what they stand for are torchao's bit for bit, and take the bytes they say."""

import itertools
from typing import Any

import pytest
import torch

from headrace.compress.codes import (
    activation_codes,
    fake_activations,
    pack_int4,
    quantize_nearest,
    unpack_int4,
)
from headrace.compress.spec import PRESETS, NumberFormat, QuantizationSpec

FORMATS = [
    NumberFormat(dtype=dtype, group=group, symmetric=symmetric)
    for dtype, group, symmetric in itertools.product(("int8", "int4"), (0, 32), (True, False))
]


def matrix() -> torch.Tensor:
    """Return rows of very different sizes, one of zeros, one of positive numbers alone."""
    torch.manual_seed(0)
    weight_RC = torch.randn(24, 96) * torch.logspace(-9, 3, 24)[:, None]
    weight_RC[3], weight_RC[4] = 0, weight_RC[4].abs()
    return weight_RC


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: f"{kind.dtype}-{kind.group}")
def test_codes_are_torchaos(kind: NumberFormat) -> None:
    pytest.importorskip("torchao")
    from torchao.quantization.quant_primitives import MappingType
    from torchao.quantization.quantize_.workflows.intx import intx_unpacked_to_int8_tensor as intx

    block: Any = (1, kind.group or 96)
    theirs = intx.IntxUnpackedToInt8Tensor.from_hp(
        matrix(),
        block,
        getattr(torch, kind.dtype),
        mapping_type=MappingType.SYMMETRIC if kind.symmetric else MappingType.ASYMMETRIC,
    )
    codes = quantize_nearest(matrix(), kind)
    assert torch.equal(codes.codes_RC, theirs.qdata)
    assert torch.equal(codes.scales_RG, theirs.scale)
    assert torch.equal(codes.zeros_RG, theirs.zero_point)
    assert torch.equal(codes.dequantize(), theirs.dequantize())


def test_activations_are_torchaos_for_each_token() -> None:
    pytest.importorskip("torchao")
    from torchao.quantization import PerRow
    from torchao.quantization.quantize_.workflows.int8.int8_tensor import Int8Tensor
    from torchao.quantization.quantize_.workflows.intx import intx_unpacked_to_int8_tensor as intx

    x = matrix().view(4, 6, 96)
    theirs = intx._apply_int8_act_asym_per_token_quant_dequant(x)
    assert torch.equal(fake_activations(x), theirs)
    symmetric = Int8Tensor.from_hp(x, PerRow())
    codes, scales = activation_codes(x)
    assert torch.equal(codes, symmetric.qdata.float()) and torch.equal(scales, symmetric.scale)


def test_scales_of_bf16_are_rounded_before_codes_are_chosen() -> None:
    kind = NumberFormat(dtype="int4", group=32, scales="bf16")
    codes = quantize_nearest(matrix(), kind)
    assert torch.equal(codes.scales_RG, codes.scales_RG.bfloat16().float())
    exact = quantize_nearest(matrix(), NumberFormat(dtype="int4", group=32))
    assert not torch.equal(codes.scales_RG, exact.scales_RG)
    error = (codes.dequantize() - matrix()).abs().unflatten(1, (-1, 32)).amax(-1)
    assert bool((error <= codes.scales_RG * 0.5 + 8e-3 * 8 * codes.scales_RG).all())


@pytest.mark.parametrize("columns", [1, 6, 7])
def test_four_bits_pack_two_a_byte(columns: int) -> None:
    codes_RC = torch.arange(-8, 8, dtype=torch.int8).repeat(7)[: 5 * columns].view(5, columns)
    packed = pack_int4(codes_RC)
    assert packed.nbytes == 5 * -(-columns // 2)
    assert torch.equal(unpack_int4(packed, columns), codes_RC)


def test_a_spec_tells_formats_by_role_and_by_name() -> None:
    low, high = PRESETS["int4"], NumberFormat(dtype="int8")
    name = "blocks.0.mlp.down.weight"
    mixed = low.model_copy(update={"exceptions": {name: high}})
    assert mixed.format_of(name, "matrices") == high
    assert mixed.format_of("blocks.1.mlp.down.weight", "matrices") == low.matrices
    assert not mixed.format_of("norm.weight", "vectors").is_quantized
    assert QuantizationSpec.model_validate_json(mixed.model_dump_json()) == mixed
    assert low.with_group(16).matrices.group == 16
    assert low.with_group(16).head == low.head


def test_bytes_are_those_of_codes_scales_and_zero_points() -> None:
    assert NumberFormat(dtype="int8").stored_bytes(10, 64) == 10 * (64 + 4)
    assert NumberFormat(dtype="int4", group=32).stored_bytes(10, 64) == 10 * (32 + 2 * 4)
    assert NumberFormat(dtype="int4", group=32, scales="bf16").stored_bytes(10, 64) == 360
    assert NumberFormat(dtype="int4", symmetric=False).stored_bytes(10, 7) == 10 * (4 + 4 + 1)
