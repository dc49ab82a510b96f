"""Quantized weights in a run: what is stored, and that training sees exactly the stored numbers."""

from collections.abc import Callable

import pytest
import torch

from headrace.data.loader import Micro
from headrace.filled import check_active
from headrace.kernels.quantized_weight import QuantizedWeight, quantize
from headrace.model.lora import LoraLinear
from headrace.sockets import Build
from headrace.train import step

Make = Callable[..., Build]
Batch = Callable[[Build], list[Micro]]


@pytest.mark.parametrize(("base", "bits"), [("nf4", 32), ("int8", 11)])
def test_the_chosen_weights_are_stored_and_no_others(
    make_tiny: Make, batch: Batch, base: str, bits: float
) -> None:
    trunk = dict(make_tiny().model.named_parameters())
    build = make_tiny(
        "techniques.qlora.rank=2", f"techniques.qlora.base={base}",
        'techniques.qlora.targets=["mlp.gate_up"]',
    )  # fmt: skip
    for name, parameter in build.model.named_parameters():
        assert isinstance(parameter, QuantizedWeight) == name.endswith("gate_up.weight")
        if isinstance(parameter, QuantizedWeight):
            right = quantize(trunk[name], base).dequantize()  # type: ignore[arg-type]
            assert torch.equal(parameter.dequantize(), right)
        elif name in trunk:
            assert torch.equal(parameter, trunk[name])
    step(build, batch(build), 0)
    assert check_active(build)["qlora"].numbers["bits_per_weight"] <= bits  # rows of 16 numbers


@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_it_is_lora_on_the_stored_numbers(make_tiny: Make, batch: Batch, base: str) -> None:
    """Loss and gradients equal those of plain adapters over the weights that are read back."""
    stored = make_tiny("techniques.qlora.rank=2", f"techniques.qlora.base={base}")
    plain = make_tiny("techniques.lora.rank=2")
    with torch.no_grad():
        for name, module in plain.model.named_modules():
            if isinstance(module, LoraLinear):
                other = stored.model.get_submodule(name)
                module.weight.copy_(other.weight.dequantize())  # type: ignore[union-attr]
                other.lora_b.fill_(0.1)  # type: ignore[union-attr]
                module.lora_b.fill_(0.1)
    losses = [float(step(b, batch(b), 0)[0]) for b in (stored, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    right = dict(plain.model.named_parameters())
    for name, parameter in stored.model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, right[name].grad, rtol=1e-5, atol=1e-7)
