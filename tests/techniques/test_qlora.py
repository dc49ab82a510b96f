"""Quantized weights in a run: what is stored, and that training sees exactly the stored numbers."""

from collections.abc import Callable

import pytest
import torch
from facts import in_order

from headrace.assemble.build import make_ledger
from headrace.assemble.context import make_context
from headrace.assemble.filled import check_active
from headrace.assemble.sockets import Build
from headrace.core.errors import UnsupportedError
from headrace.costs.ledger import Ledger
from headrace.data.loader import Micro
from headrace.kernels.quantized_weight import QuantizedWeight, quantize
from headrace.model.lora import LoraLinear
from headrace.plan.plan import Plan
from headrace.train.train import step

Make = Callable[..., Build]
Batch = Callable[[Build], list[Micro]]


@pytest.mark.parametrize(("base", "bits"), [("nf4", 32), ("int8", 11)])
def test_the_chosen_weights_are_stored_and_no_others(
    make_tiny: Make, batch: Batch, base: str, bits: float
) -> None:
    baseline = dict(make_tiny().model.named_parameters())
    build = make_tiny(
        "techniques.qlora.rank=2",
        f"techniques.qlora.base={base}",
        'techniques.qlora.targets=["mlp.gate_up"]',
    )
    for name, parameter in build.model.named_parameters():
        assert isinstance(parameter, QuantizedWeight) == name.endswith("gate_up.weight")
        if isinstance(parameter, QuantizedWeight):
            right = quantize(baseline[name], base).dequantize()  # type: ignore[arg-type]
            assert torch.equal(parameter.dequantize(), right)
        elif name in baseline:
            assert torch.equal(parameter, baseline[name])
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


SHORT = ("model.dim=8", "model.ffn=8", "techniques.qlora.rank=2")
"""Rows of 8 numbers, beside scales that are made for 64."""


def test_rows_too_short_to_be_smaller_are_refused(make_tiny: Make, batch: Batch) -> None:
    """24 rows of 41 bytes and the levels twice are 46 bits a number, in int8 they are 12."""
    with pytest.raises(UnsupportedError, match=in_order("46.3 bits", "nf4")) as caught:
        make_tiny(*SHORT, 'techniques.qlora.targets=["mlp.gate_up", "mlp.down"]')
    with pytest.raises(UnsupportedError, match="in nf4"):
        make_tiny(*SHORT)
    build = make_tiny(*SHORT, caught.value.remedy.text.split(" (or ")[0])
    step(build, batch(build), 0)
    assert check_active(build)["qlora"].numbers["bits_per_weight"] == 12
    with pytest.raises(UnsupportedError, match="in int8") as caught:
        make_tiny(
            "model.dim=1",
            "model.heads=1",
            "model.ffn=1",
            "model.position=none",
            "techniques.qlora.base=int8",
        )
    assert "--with lora" in caught.value.remedy.text


def test_weights_with_longer_rows_are_stored(make_tiny: Make, batch: Batch) -> None:
    """Where what is chosen has long rows, the others do not count; experts are no linears."""
    down = ("model.ffn=64", 'techniques.qlora.targets=["mlp.down"]')
    build = make_tiny(*SHORT, *down)
    step(build, batch(build), 0)
    assert check_active(build)["qlora"].numbers["bits_per_weight"] < 8
    long = ("model.ffn=512", "techniques.qlora.rank=2")
    make_tiny(*SHORT, *long)
    with pytest.raises(UnsupportedError, match="in nf4"):
        make_tiny(*SHORT, *long, "techniques.mixture_of_experts.experts=2")


@pytest.mark.parametrize(("base", "eager"), [("nf4", 22.5), ("int8", 11.0)])
def test_weights_are_foreseen_to_be_made_whole_in_both_passes(
    tiny_plan: Callable[..., Plan], base: str, eager: float
) -> None:
    def foreseen(*words: str) -> Ledger:
        plan = tiny_plan("model.precision=bf16", *words)
        return make_ledger(plan, make_context(plan, torch.device("cpu")))

    name = "techniques.qlora"
    lora, ledger = foreseen("techniques.lora.rank=2"), foreseen(f"{name}={{rank=2, base='{base}'}}")
    more = {n: piece for n, piece in ledger.work.items() if lora.work.get(n) != piece}
    assert set(more) == {"whole_weight/forward", "whole_weight/backward"}
    assert set(lora.work) - set(ledger.work) == {"weight_cast/forward"}
    numbers = sum(
        ledger.sizes[n] * ledger.sizes[n.replace("/in", "/out")]
        for n in ledger.sizes
        if n.endswith("/in")
    )
    assert {piece.bytes for piece in more.values()} == {eager * numbers}
    down = foreseen(f"{name}={{rank=2, base='{base}', targets=['mlp.down']}}")
    cast, whole = (down.work[f"{what}/forward"].bytes for what in ("weight_cast", "whole_weight"))
    left = cast / lora.work["weight_cast/forward"].bytes
    assert 0 < left < 1 and left == pytest.approx(1 - whole / (eager * numbers))
