"""Networks of images have torchvision's names, shapes and results."""

import hashlib
import json
from typing import Any

import pytest
import torch

from headrace.core.strict import Wrong
from headrace.core.vision_config import VisionConfig
from headrace.costs.vision import image_flops, image_ledger, image_parameters
from headrace.model.vision import ImageClassifier, folded, load_images_state, norm_statistics

NAMES = {
    "mobilenet_v3_small": (
        "518ffd3d0875ac6888d633febfced6f800ed52f95ec0973f16f95798b306d03a",
        1528106,
    ),
    "efficientnet_b0": (
        "f047af2fbd5542b692fe81997c9fc7c636b65d14e2fc7460b77c5388b46e12c3",
        4020358,
    ),
}
"""The sha256 of the names and shapes of torchvision 0.29's state dict of ten classes, in its order
and without counters of batches; and how many numbers are trained."""
Named = dict[str, torch.Tensor]


def state_of(model: torch.nn.Module) -> Named:
    """Return weights and running statistics in the order in which the state dict has them."""
    return {n: t for n, t in model.state_dict().items() if not n.endswith("num_batches_tracked")}


def digest_of(state: Named) -> str:
    """Return the sha256 of names and shapes."""
    shapes = [[name, list(one.shape)] for name, one in state.items()]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()


@pytest.mark.parametrize("name", NAMES)
def test_names_and_shapes_are_torchvisions(name: Any) -> None:
    config = VisionConfig(architecture=name)
    with torch.device("meta"):
        model = ImageClassifier(config)
    digest, parameters = NAMES[name]
    assert digest_of(state_of(model)) == digest
    assert sum(p.numel() for p in model.parameters()) == parameters == image_parameters(config)


@pytest.mark.parametrize("name", NAMES)
def test_results_are_torchvisions(name: Any) -> None:
    try:
        models = __import__("torchvision.models").models
    except (ImportError, RuntimeError) as error:  # PyPI's does not import beside a CPU torch
        pytest.skip(f"torchvision cannot be imported: {error}")
    torch.manual_seed(0)
    theirs = getattr(models, name)(num_classes=10)
    images = torch.randint(0, 256, (4, 3, 64, 64), dtype=torch.uint8)
    x_BCHW = (images.float() - 127.5) / 127.5
    for module in theirs.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        theirs(x_BCHW)
    theirs.eval()
    ours = ImageClassifier(VisionConfig(architecture=name)).eval()
    assert digest_of(state_of(theirs)) == NAMES[name][0]
    load_images_state(ours, theirs.state_dict())
    with torch.no_grad():
        wanted = theirs(x_BCHW)
        found = ours.logits_of(images)
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


@torch.no_grad()
def test_a_normalisation_is_a_factor_and_an_offset() -> None:
    torch.manual_seed(0)
    model = ImageClassifier(VisionConfig(size=16)).eval()
    for statistics in norm_statistics(model).values():
        statistics.uniform_(0.5, 1.5)
    pairs = folded(model)
    assert len(pairs) == 34
    stem: Any = model.get_submodule("features.0")
    factor, offset = pairs["features.0.0"]
    x = torch.rand(1, 3, 16, 16)
    wanted = stem[1](stem[0](x))
    found = stem[0](x) * factor.view(-1, 1, 1) + offset.view(-1, 1, 1)
    torch.testing.assert_close(found, wanted)


def test_the_work_of_an_image_is_counted() -> None:
    """arXiv 1905.02244 gives 56 million multiply-adds of 224 pixels, arXiv 1905.11946 390."""
    for name, millions in (("mobilenet_v3_small", 56), ("efficientnet_b0", 390)):
        config = VisionConfig(architecture=name, size=224)  # type: ignore[arg-type]
        assert image_flops(config) / 2e6 == pytest.approx(millions, rel=0.03)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_for_the_backward_pass_is_predicted(name: Any) -> None:
    config = VisionConfig(architecture=name, size=32)
    model = ImageClassifier(config)
    own = {p.data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.data_ptr() not in own:
            kept[x.data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model.classify(torch.rand(32, 3, 32, 32)).sum()
    ledger = image_ledger(config, rows=32, precision="fp32", device="cpu", accumulates=False)
    told = sum(line.bytes for key, line in ledger.memory.items() if key.endswith("/kept"))
    assert loss.requires_grad and sum(kept.values()) == pytest.approx(told, rel=0.1)


@pytest.mark.parametrize(
    ("channels", "said"),
    [((8,), "places for them"), ((17, *VisionConfig().whole_channels[1:]), "takes 16 there")],
)
def test_channels_that_do_not_fit_are_refused(channels: tuple[int, ...], said: str) -> None:
    with pytest.raises((Wrong, ValueError), match=said):
        VisionConfig(channels=channels)
