"""Quantized weights in a run: what is stored, and that training sees exactly the stored numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import house
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
from headrace.kernels.quantized_weight import BLOCK, NF4, QuantizedWeight, quantize
from headrace.model.lora import LoraLinear, merged_state, storage_errors
from headrace.model.mask import Rows
from headrace.plan.plan import Plan
from headrace.plan.technique import Supported, Unsupported
from headrace.techniques.adapt.qlora import Qlora
from headrace.train.train import step

Make = Callable[..., Build]
Batch = Callable[[Build], list[Micro]]


def adapted(build: Build) -> dict[str, LoraLinear]:
    """Return the adapted linears by their full names."""
    return {n: m for n, m in build.model.named_modules() if isinstance(m, LoraLinear)}


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
    """Loss and gradients equal those of plain adapters over the weights that are read back.

    The sums are in another order. Adapters ten times as large magnify that: one last place of the
    embedding then moves gradients by 5e-5.
    """
    stored = make_tiny("techniques.qlora.rank=2", f"techniques.qlora.base={base}")
    plain = make_tiny("techniques.lora.rank=2")
    with torch.no_grad():
        for name, module in plain.model.named_modules():
            if isinstance(module, LoraLinear):
                other = stored.model.get_submodule(name)
                module.weight.copy_(other.weight.dequantize())  # type: ignore[union-attr]
                other.lora_b.fill_(0.01)  # type: ignore[union-attr]
                module.lora_b.fill_(0.01)
    losses = [float(step(b, batch(b), 0)[0]) for b in (stored, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    right = dict(plain.model.named_parameters())
    for name, parameter in stored.model.named_parameters():
        if parameter.requires_grad:
            wanted = right[name].grad
            assert wanted is not None and parameter.grad is not None, name
            assert (parameter.grad - wanted).abs().max() <= 2e-6 * wanted.abs().max(), name


@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_whole_blocks_hold_the_same_numbers(make_tiny: Make, batch: Batch, base: str) -> None:
    """The last block is held whole: losses and gradients are those of one made whole."""
    knobs = ("model.layers=2", "techniques.qlora.rank=2", f"techniques.qlora.base={base}")
    stored, part = make_tiny(*knobs), make_tiny(*knobs, "techniques.qlora.whole_blocks=1")
    for name, module in adapted(part).items():
        whole, other = name.startswith("blocks.1."), adapted(stored)[name].weight
        assert isinstance(module.weight, QuantizedWeight) != whole
        if whole:
            assert torch.equal(module.weight, other.dequantize())
    losses = [float(step(b, batch(b), 0)[0]) for b in (stored, part)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    right = dict(stored.model.named_parameters())
    for name, parameter in part.model.named_parameters():
        if parameter.requires_grad:
            wanted = right[name].grad
            assert wanted is not None and parameter.grad is not None, name
            assert (parameter.grad - wanted).abs().max() <= 2e-6 * wanted.abs().max(), name
    assert "are held whole" in check_active(part)["qlora"].detail
    ledgers = [make_ledger(b.plan, make_context(b.plan, b.device)) for b in (stored, part)]
    bytes_held = [sum(p.nbytes for p in b.model.parameters()) for b in (stored, part)]
    foreseen = ledgers[1].memory["parameters"].bytes - ledgers[0].memory["parameters"].bytes
    assert foreseen == bytes_held[1] - bytes_held[0] > 0


def test_all_blocks_whole_are_refused(make_tiny: Make) -> None:
    with pytest.raises(UnsupportedError) as raised:
        make_tiny("model.layers=2", "techniques.qlora.rank=2", "techniques.qlora.whole_blocks=2")
    assert "whole_blocks=1" in str(raised.value)


def test_scales_of_blocks_are_quantized_too() -> None:
    """Double quantization takes 0.36 of 4.5 bits a number, and adds a thousandth to the error."""
    weight = torch.randn(256, 4096, generator=torch.Generator().manual_seed(0))
    stored = quantize(weight, "nf4")
    blocks = weight.unflatten(1, (-1, BLOCK))
    scales, levels = blocks.abs().amax(-1, keepdim=True), torch.tensor(NF4)
    nearest = torch.bucketize(blocks / scales, (levels[1:] + levels[:-1]) / 2)
    once = (levels[nearest] * scales).flatten(1)  # with scales of fp32
    errors = [float((one - weight).norm() / weight.norm()) for one in (stored.dequantize(), once)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-3) and 0.08 < errors[1] < 0.1
    assert 4.5 - 8 * stored.nbytes / weight.numel() == pytest.approx(0.36, abs=0.005)


@pytest.mark.parametrize(("base", "off"), [("nf4", 0.09), ("int8", 0.005)])
def test_what_storing_a_merged_weight_again_loses(
    make_tiny: Make, batch: Batch, given: Callable[..., str], base: str, off: float
) -> None:
    """Merged weights compute what the adapted model does; in few bits again they do not."""
    folder = given(shape := "model.layers=2", spread := "model.init_std=0.2")
    build = make_tiny(shape, spread, folder, f"techniques.qlora={{rank = 2, base = '{base}'}}")
    baseline, (micro, *_) = make_tiny(shape, spread, folder), batch(build)
    draw = torch.Generator().manual_seed(0)
    for name, parameter in build.model.named_parameters():
        if name.endswith(".lora_b"):
            parameter.data.normal_(std=0.01, generator=draw)
    merged, rows = merged_state(build.model), Rows(torch.arange(16)[None])
    with torch.no_grad():
        for name, parameter in baseline.model.named_parameters():
            parameter.copy_(merged[name])
        right = build.model.logits(micro.ids_BT, rows)
        found = baseline.model.logits(micro.ids_BT, rows)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    errors = storage_errors(build.model, build.source)
    assert errors is not None and errors.requantized == pytest.approx(off, rel=0.4)
    assert errors.stored == pytest.approx(errors.requantized, rel=0.2)
    next(iter(adapted(build).values())).lora_b.data.mul_(100)
    more = storage_errors(build.model, build.source)
    assert more is not None and more.learned > errors.learned > 0 and more.stored == errors.stored
    assert storage_errors(baseline.model, baseline.source) is None


@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_columns_stand_for_the_numbers_of_the_whole(base: Literal["nf4", "int8"]) -> None:
    weight = quantize(torch.randn(5, 150), base)
    whole = weight.dequantize()
    for begin, count in ((0, 64), (64, 64), (128, 22), (64, 86), (0, 150)):
        part = weight.columns(begin, count)
        assert part.shape == (5, count) and part.nbytes <= weight.nbytes
        assert torch.equal(part.dequantize(), whole[:, begin : begin + count])


def test_tensor_ranks_store_the_numbers_of_one_process(
    zygote: Any, tmp_path: Path, corpus: Path, prepared_folder: Path
) -> None:
    """Losses, gradients and weights of five steps are the same; int8 is cut anywhere."""
    house.put_data_in(str(corpus), str(prepared_folder))
    house.prepare(house.make_plan())
    wide = {"dim": 128, "heads": 4, "head_dim": 32, "kv_heads": 2, "ffn": 128, "vocab": 308}
    calm = {**wide, "init_std": 0.05}  # 0.2 magnifies in such rows what sums in another order round
    knobs = {"rank": 2, "alpha": 4.0}
    cases = [
        {"shape": "biased", "beside": {"qlora": {**knobs, "base": "int8", "dropout": 0.3}}},
        {"shape": "grouped", "sequence": False, "beside": {"qlora": {**knobs, "base": "int8"}}},
        {"shape": "grouped", "model": calm, "beside": {"qlora": {**knobs, "base": "nf4"}}},
    ]
    ranks = Path(__file__).with_name("tensor_parallel_ranks.py")
    data = {"corpus": str(corpus), "prepared": str(prepared_folder)}
    zygote.call(2, tmp_path, ranks, "equals", ranks=2, cases=cases, **data)


def test_cuts_inside_of_blocks_are_refused(
    tiny_plan: Callable[..., Plan], make_tiny: Make, given: Callable[..., str]
) -> None:
    """The remedy is int8, and linears that are not stored are cut anywhere."""
    base = given("model.layers=2", "model.ffn=192")
    split = (base, "mesh.tensor=2", "techniques.tensor_parallel={}")
    with pytest.raises(UnsupportedError, match=r"mlp\.down, of 192 numbers"):
        make_tiny(*split, "techniques.qlora.targets=['mlp.down']")
    words = ["mesh.tensor=2", "model.ffn=192", "techniques.tensor_parallel={}"]
    technique = Qlora(rank=2, targets=("mlp.down",))

    def answer(technique: Qlora, *more: str) -> Supported | Unsupported:
        plan = tiny_plan(*words, *more)
        return technique.supports(make_context(plan, torch.device("cpu")))

    refused = answer(technique)
    assert isinstance(refused, Unsupported) and "mlp.down, of 192 numbers" in refused.reason
    assert refused.remedy.changes == (("techniques.qlora.base=int8",),)
    assert isinstance(answer(Qlora(base="int8")), Supported)
    assert isinstance(answer(technique, "model.ffn=256"), Supported)
    assert isinstance(answer(Qlora(targets=("mlp.gate_up",))), Supported)


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
