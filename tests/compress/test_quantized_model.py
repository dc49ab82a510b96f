"""Logits by torchao are those of the reference, and GPTQ and mixed bits are better than none."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace.compress.codes import quantize_nearest
from headrace.compress.gptq import DAMPING, gptq, gptq_model
from headrace.compress.quantized_model import (
    Stored,
    computing,
    faking,
    formats_of,
    quantize_model,
    stored_bytes,
)
from headrace.compress.sensitivity import (
    logits_on,
    ranked,
    sensitivities,
    with_higher,
    within_budget,
)
from headrace.compress.spec import PRESETS, NumberFormat, QuantizationSpec
from headrace.core.errors import ConfigError
from headrace.core.model_config import ModelConfig
from headrace.model.decoder import Decoder, baseline_parts
from headrace.model.mask import MaskSpec

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 2, "ffn": 96},
    "gpt2": {
        "ffn": 128,
        "norm": "layer_norm",
        "activation": "gelu_tanh",
        "position": "learned",
        "context": 32,
        "bias": True,
        "tied_embeddings": True,
    },
    "qwen3": {"kv_heads": 2, "head_dim": 32, "ffn": 96, "qk_norm": True, "tied_embeddings": True},
}


def decoder(family: str = "llama") -> Decoder:
    """Return a small model of a family with random weights."""
    config = ModelConfig(dim=64, layers=2, heads=4, vocab=160, **FAMILIES[family])
    model = Decoder(config, baseline_parts(config), MaskSpec())
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, float("norm.weight" in name), 0.1)
    return model


def text(rows: int = 2) -> Tensor:
    """Return rows of tokens."""
    return torch.randint(0, 160, (rows, 24), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("family", FAMILIES)
def test_torchao_computes_what_the_reference_does(family: str) -> None:
    pytest.importorskip("torchao")
    model, ids_BT = decoder(family), text()
    whole = logits_on(model, ids_BT)
    for spec in PRESETS.values():
        stored = quantize_model(model, spec)
        with faking(model, spec, stored):
            fake = logits_on(model, ids_BT)
        with computing(model, spec, stored):
            real = logits_on(model, ids_BT)
        assert float((fake - real).abs().max()) < 1e-5, spec.name
        assert float((fake - whole).abs().max()) > 1e-2, f"{spec.name} rounds nothing"
        assert torch.equal(logits_on(model, ids_BT), whole), "the model is as it was"


@pytest.mark.parametrize("name", ["int8", "int8-dynamic", "8da4w", "int4"])
def test_the_linears_are_those_of_torchaos_own_quantize(name: str) -> None:
    pytest.importorskip("torchao")
    import torchao.quantization as ao

    four: Any = getattr(torch, "int4")  # noqa: B009  (torch's stubs lack it)
    config = {
        "int8": ao.Int8WeightOnlyConfig(),
        "int8-dynamic": ao.Int8DynamicActivationInt8WeightConfig(),
        "8da4w": ao.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=four, weight_granularity=ao.PerGroup(32)
        ),
        "int4": ao.IntxWeightOnlyConfig(weight_dtype=four, granularity=ao.PerGroup(32)),
    }[name]
    none = NumberFormat()
    whole = PRESETS[name].matrices.model_copy(update={"scales": "fp32"})  # as torchao keeps them
    update = {"matrices": whole, "embeddings": none, "head": none}
    spec = PRESETS[name].model_copy(update=update)
    model, ids_BT = decoder(), text()
    theirs = copy.deepcopy(model)
    ao.quantize_(theirs, config)
    stored = quantize_model(model, spec)
    assert len(stored) == 8
    with faking(model, spec, stored):
        ours = logits_on(model, ids_BT)
    assert float((ours - logits_on(theirs, ids_BT)).abs().max()) < 1e-5


def plain_gptq(weight: Tensor, hessian: Tensor, kind: NumberFormat) -> Tensor:
    """Return what GPTQ gives, one column at a time with the inverse of H itself; groups of 8."""
    left, group = weight.double().clone(), kind.group
    damped = hessian.double() + DAMPING * hessian.double().diagonal().mean() * torch.eye(
        len(hessian)
    )
    inverse, found = damped.inverse(), torch.empty_like(left)
    for at in range(left.size(1)):
        if at % group == 0:
            scale = left[:, at : at + group].float().abs().amax(1) / 7.5
        found[:, at] = (left[:, at].float() * (1 / scale)).round().clamp(-8, 7) * scale
        error = (left[:, at] - found[:, at]) / inverse[at, at]
        left[:, at + 1 :] -= torch.outer(error, inverse[at, at + 1 :])
        inverse = inverse - torch.outer(inverse[:, at], inverse[at]) / inverse[at, at]
    return found


def test_gptq_is_the_plain_algorithm_and_beats_rounding() -> None:
    torch.manual_seed(0)
    x = torch.randn(400, 160) @ torch.randn(160, 160) / 8
    weight, hessian = torch.randn(12, 160), x.t() @ x / 400
    kind = NumberFormat(dtype="int4", group=8, rounding="gptq")
    ours = gptq(weight, hessian, kind).dequantize()
    assert float((ours - plain_gptq(weight, hessian, kind)).abs().max()) < 1e-5
    rounded = quantize_nearest(weight, kind).dequantize()
    errors = [float(((weight - q) @ x.t()).square().mean()) for q in (ours, rounded)]
    assert errors[0] < 0.7 * errors[1]


def test_gptq_of_a_model_is_nearer_to_it_than_rounding() -> None:
    model, ids_BT = decoder(), text(8)
    spec = PRESETS["int4-gptq"]
    calibrated = quantize_model(model, spec, gptq_model(model, spec, ids_BT))
    errors = [error_of(model, spec, stored) for stored in (calibrated, quantize_model(model, spec))]
    assert errors[0] < 0.9 * errors[1]


def error_of(model: Decoder, spec: QuantizationSpec, stored: Stored) -> float:
    """Return the mean squared difference of a quantized model's logits to those of the whole."""
    ids_BT = text(8)
    whole = logits_on(model, ids_BT)
    with faking(model, spec, stored):
        return float((logits_on(model, ids_BT) - whole).square().mean())


def test_bits_go_to_the_matrices_that_need_them() -> None:
    model, spec = decoder(), PRESETS["int4"]
    measured = sensitivities(model, spec, quantize_model(model, spec), text())
    assert [*measured.values()] == sorted(measured.values(), reverse=True)
    order = ranked(model, spec, measured)
    assert len(order) == 8 and {*measured} - {*order} == {"embed.weight", "head.weight"}
    mixed = [with_higher(spec, names) for names in (order[:4], order[4:])]
    errors = [error_of(model, one, quantize_model(model, one)) for one in (*mixed, spec)]
    assert errors[0] < errors[1] < errors[2]
    low, high = stored_bytes(model, spec), stored_bytes(model, PRESETS["int8"])
    shape = model.get_parameter(order[0]).shape
    more = NumberFormat(dtype="int8").stored_bytes(*shape) - spec.matrices.stored_bytes(*shape)
    fits = within_budget(model, spec, order, low + more)
    assert order[0] in fits.exceptions and stored_bytes(model, fits) <= low + more
    assert stored_bytes(model, within_budget(model, spec, order, high)) == high
    assert not within_budget(model, spec, order, low).exceptions


def test_what_cannot_be_quantized_is_refused() -> None:
    model = decoder()
    with pytest.raises(ConfigError, match="do not divide the 64 columns") as error:
        formats_of(model, PRESETS["int4"].with_group(48))
    assert str(error.value.remedy) == "--group 64"
    unknown = QuantizationSpec(name="x", exceptions={"blocks.9.qkv.weight": NumberFormat()})
    with pytest.raises(ConfigError, match="is no matrix of this model"):
        formats_of(model, unknown)
    with torch.no_grad():
        model.get_parameter("blocks.0.mixer.out.weight")[3, 5] = float("nan")
    with pytest.raises(ConfigError, match=r"blocks.0.mixer.out.weight has 1 of 4,096 numbers"):
        quantize_model(model, PRESETS["int8"])
