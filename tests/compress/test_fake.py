"""A model that trains with rounding computes what its quantized matrices stand for."""

import pytest
import torch
import torch.nn.functional as F
from test_quantized_model import FAMILIES, decoder, text
from torch import Tensor, nn

from headrace.compress.fake import FakeMatmul, Rounding, fake_input, fake_weight, install
from headrace.compress.quantized_model import faking, formats_of, quantize_model
from headrace.compress.sensitivity import logits_on
from headrace.compress.spec import PRESETS
from headrace.model.lora import DoraLinear, LoraLinear

TRAINED = ("8da4w", "int4", "int8", "int8-dynamic")


@pytest.mark.parametrize("family", FAMILIES)
def test_it_computes_the_logits_of_the_quantized_model(family: str) -> None:
    ids_BT = text()
    for name in TRAINED:
        spec = PRESETS[name]
        model, other = decoder(family), decoder(family)
        whole = logits_on(model, ids_BT)
        with faking(model, spec, quantize_model(model, spec)):
            wanted = logits_on(model, ids_BT)
        is_on = [True]
        formats = formats_of(other, spec)
        rounding = {name: Rounding(kind, spec.activations) for name, kind in formats.items()}
        install(other, rounding, lambda is_on=is_on: is_on[0])
        assert [*dict(other.named_parameters())] == [*dict(model.named_parameters())]
        found = logits_on(other, ids_BT)
        largest = float(wanted.abs().max())  # sums of fp32 are off by its share of them
        assert float((found - wanted).abs().max()) < 1e-6 * max(1.0, largest), name
        is_on[0] = False
        assert torch.equal(logits_on(other, ids_BT), whole)


def saved_storages(module_input: Tensor, weight: Tensor, rounding: Rounding) -> set[int]:
    """Return where what a matmul keeps for its gradient is stored."""
    kept: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        FakeMatmul.apply(module_input, weight, None, rounding, torch.float32)
    return kept


@pytest.mark.parametrize("name", TRAINED)
def test_gradients_go_through_the_rounding_and_no_copy_is_kept(name: str) -> None:
    torch.manual_seed(3)
    spec = PRESETS[name]
    rounding = Rounding(spec.matrices, spec.activations)
    x, weight, bias = torch.randn(2, 5, 64), torch.randn(24, 64), torch.randn(24)
    given = [one.clone().requires_grad_() for one in (x, weight, bias)]
    y = FakeMatmul.apply(*given, rounding, torch.float32)
    grad = torch.randn_like(y)
    y.backward(grad)
    rounded = fake_input(x, spec.activations), fake_weight(weight, spec.matrices), bias.clone()
    plain = [one.clone().requires_grad_() for one in rounded]
    F.linear(*plain).backward(grad)
    for found, wanted in zip(given, plain, strict=True):
        assert found.grad is not None and wanted.grad is not None
        torch.testing.assert_close(found.grad, wanted.grad)
    own = {one.untyped_storage().data_ptr() for one in given[:2]}
    assert saved_storages(given[0], given[1], rounding) == own


@pytest.mark.parametrize("kind", [LoraLinear, DoraLinear])
def test_the_weight_that_an_adapter_is_merged_into_learns_as_the_adapter(
    kind: type[LoraLinear],
) -> None:
    torch.manual_seed(4)
    adapted = kind(nn.Linear(12, 7), rank=2, scale=0.5)
    for parameter in adapted.parameters():
        nn.init.normal_(parameter)
    adapted.weight.requires_grad_(False)
    x = torch.randn(3, 12)
    gradients = []
    for y in (adapted(x), F.linear(x, adapted.effective(), adapted.bias)):
        adapted.zero_grad()
        y.square().sum().backward()
        gradients.append([p.grad.clone() for p in adapted.parameters() if p.grad is not None])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(adapted(x), F.linear(x, adapted.merged(), adapted.bias))
