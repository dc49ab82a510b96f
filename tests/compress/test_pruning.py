"""What is left of a pruned model computes what the whole one does without what is gone."""

from typing import Any

import pytest
import torch
from test_quantized_model import FAMILIES, decoder, text
from torch import Tensor

from headrace.compress.pruning import (
    Importance,
    PrunedShape,
    config_of,
    cut,
    importance_of,
    kept_of,
    loss_on,
    shape_of,
    shapes_within,
    smaller,
    try_shapes,
)
from headrace.compress.sensitivity import logits_on
from headrace.core.errors import UnsupportedError
from headrace.costs.count import total_parameters
from headrace.model.decoder import Decoder

CPU = torch.device("cpu")


def drawn(model: Decoder) -> Importance:
    """Return an importance that is drawn at random."""
    whole, draw = shape_of(model.config), torch.Generator().manual_seed(5)
    rises = torch.rand(whole.layers, generator=draw).tolist()
    groups = torch.rand(whole.layers, whole.groups, generator=draw)
    return Importance(
        tuple(rises), groups, torch.rand(whole.layers, whole.channels, generator=draw)
    )


def without(model: Decoder, importance: Importance, shape: PrunedShape) -> Tensor:
    """Return the logits of the whole model with what a shape leaves out at zero."""
    kept, config = kept_of(importance, shape), model.config
    with torch.no_grad():
        for layer, block in enumerate(model.blocks.values()):
            out: Any = block.get_submodule("mixer.out")
            down: Any = block.get_submodule("mlp.down")
            if layer not in kept.layers:
                for linear in (out, down):
                    for parameter in linear.parameters():
                        parameter.zero_()
                continue
            number = kept.layers.index(layer)
            for group in {*range(config.resolved_kv_heads)} - {*kept.groups[number]}:
                wide = out.weight.size(1) // config.resolved_kv_heads
                out.weight[:, group * wide : (group + 1) * wide] = 0
            for channel in {*range(config.resolved_ffn)} - {*kept.channels[number]}:
                down.weight[:, channel] = 0
    return logits_on(model, text())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "shape", [PrunedShape(1, 1, 40), PrunedShape(2, 1, 24), PrunedShape(1, 2, 96)]
)
def test_the_smaller_model_computes_the_whole_one_without_what_is_gone(
    family: str, shape: PrunedShape
) -> None:
    model = decoder(family)
    importance = drawn(model)
    small = config_of(model.config, shape)
    state = cut(model.state_dict(), model.config, kept_of(importance, shape))
    made = smaller(state, small, CPU)
    assert sum(p.numel() for p in made.parameters()) == total_parameters(small)
    wanted = without(model, importance, shape)
    torch.testing.assert_close(logits_on(made, text()), wanted, atol=1e-5, rtol=1e-5)


def test_importance_finds_what_text_does_not_need() -> None:
    """A channel, a group and a layer that write nothing are the first to go."""
    model = decoder("llama")
    with torch.no_grad():
        weights = dict(model.named_parameters())
        weights["blocks.0.mlp.down.weight"][:, 7] = 0
        weights["blocks.1.mixer.out.weight"][:, 32:] = 0
        before = loss_on(model, text())
        importance = importance_of(model, text())
    assert loss_on(model, text()) == before, "the model is as it was"
    assert int(importance.channels_LF[0].argmin()) == 7
    assert importance.channels_LF[0, 7] == 0 and importance.groups_LG[1, 1] == 0
    assert bool((importance.groups_LG[0] > 0).all()) and bool((importance.channels_LF[1] > 0).all())
    with torch.no_grad():
        for name in ("mixer.out", "mlp.down"):
            weights[f"blocks.1.{name}.weight"].zero_()
    assert importance_of(model, text()).layers[1] == pytest.approx(0, abs=1e-6)


def test_importance_is_the_first_order_change_of_the_loss() -> None:
    model = decoder("llama")
    weight, row = model.get_parameter("blocks.0.mlp.down.weight"), text(1)
    found = importance_of(model, row).channels_LF[0, 3].sqrt()
    losses = []
    for factor in (1.02, 0.98):
        with torch.no_grad():
            weight[:, 3] *= factor
            losses.append(loss_on(model, row))
            weight[:, 3] /= factor
    assert float(found) == pytest.approx(abs(losses[0] - losses[1]) / 0.04, rel=0.02)


def test_shapes_are_of_the_size_that_is_asked_for_and_the_best_is_first() -> None:
    model = decoder("llama")
    shapes = shapes_within(model.config, 0.3, ("layers", "heads", "channels"))
    sizes = [total_parameters(config_of(model.config, shape)) for shape in shapes]
    whole = total_parameters(model.config)
    assert sizes and all(0.6 * whole <= size <= 0.7 * whole for size in sizes)
    shapes += shapes_within(model.config, 0.3, ("channels", "heads"))
    tried = try_shapes(model, shapes, importance_of(model, text()), text())
    assert [one.loss_nats for one in tried] == sorted(one.loss_nats for one in tried)
    assert {one.shape for one in tried} == {*shapes}
    (narrow,) = shapes_within(model.config, 0.2, ("channels",))
    assert narrow.layers == 2 and narrow.groups == 2 and narrow.channels < 96
    with pytest.raises(UnsupportedError, match=r"by channels") as refused:
        shapes_within(model.config, 0.8, ("channels",))
    least = float(refused.value.remedy.text.removeprefix("--by ").removesuffix("%")) / 100
    assert shapes_within(model.config, least, ("channels",))
