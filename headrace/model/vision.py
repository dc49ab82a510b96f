"""Convolutional networks that tell images apart, with torchvision's names of parameters.

MobileNetV3 small and EfficientNet-B0 are made of one kind of block, so both are one class over the
list in core/vision_config. Left out are dropout and stochastic depth, which have no parameters: the
runs here are short and their images are drawn, so nothing is learned by heart. Running means move
by 0.1 a step, also in MobileNetV3, where torchvision has 0.01 for runs of 10^5 steps and more.

A network has the decoder's `forward`, so the trainer's step, engine and evaluation call it as they
call a decoder. It reads the images that lie beside the rows, `extras["image"]`; a row has one
token, its label.

Shapes: B images, C channels, H x W pixels, V classes.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.core.vision_config import COLORS, InvertedBlock, VisionConfig
from headrace.model.head import IGNORED, Objective, Vocabulary
from headrace.model.init import Source, drawn
from headrace.model.mask import MaskSpec, Rows

IMAGE = "image"
"""Name of the images among what rows carry beside tokens: uint8 [B, C, H, W]."""
MEAN, SPREAD = 127.5, 127.5
"""Taken off each number of an image, and what it is then divided by."""
EPS = {"mobilenet_v3_small": 1e-3, "efficientnet_b0": 1e-5}
"""Added to the variance by batch normalisation, as torchvision has it."""
MOMENTUM = 0.1
"""Share by which the running mean and variance move towards those of each batch."""
ACTIVATIONS = {
    "relu": nn.ReLU,
    "hard_swish": nn.Hardswish,
    "swish": nn.SiLU,
    "none": nn.Identity,
}


def convolution(
    inputs: int,
    outputs: int,
    kernel: int,
    eps: float,
    activation: str,
    *,
    stride: int = 1,
    groups: int = 1,
) -> nn.Sequential:
    """Return a convolution, its normalisation and what follows it, named 0, 1 and 2."""
    layers = [
        nn.Conv2d(inputs, outputs, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs, eps, MOMENTUM),
    ]
    return nn.Sequential(*layers, *([] if activation == "none" else [ACTIVATIONS[activation]()]))


class SqueezeExcitation(nn.Module):
    """Scale each channel by what the means of all channels say (arXiv 1709.01507)."""

    def __init__(self, channels: int, squeezed: int, *, hard: bool) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)
        self.activation = nn.ReLU() if hard else nn.SiLU()
        self.scale_activation = nn.Hardsigmoid() if hard else nn.Sigmoid()

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the scaled channels."""
        mean_BC11 = x_BCHW.mean((2, 3), keepdim=True)
        scale_BC11 = self.fc2(self.activation(self.fc1(mean_BC11)))
        return x_BCHW * self.scale_activation(scale_BC11)


class InvertedResidual(nn.Module):
    """Widen, filter each channel by itself, scale channels, narrow, and add the input."""

    def __init__(self, shape: InvertedBlock, eps: float) -> None:
        super().__init__()
        self.shape = shape
        hidden, kind = shape.hidden, shape.activation
        layers: list[nn.Module] = []
        if shape.widens:
            layers.append(convolution(shape.inputs, hidden, 1, eps, kind))
        layers.append(
            convolution(hidden, hidden, shape.kernel, eps, kind, stride=shape.stride, groups=hidden)
        )
        if shape.squeezed:
            layers.append(SqueezeExcitation(hidden, shape.squeezed, hard=kind != "swish"))
        layers.append(convolution(hidden, shape.outputs, 1, eps, "none"))
        self.block = nn.Sequential(*layers)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Run the block."""
        out_BCHW = self.block(x_BCHW)
        return x_BCHW + out_BCHW if self.shape.adds_input else out_BCHW


class ImageClassifier(nn.Module):
    """A network of a plan's table `vision`, whose parameters have torchvision's names."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        eps, name = EPS[config.architecture], config.architecture
        kind = "hard_swish" if name == "mobilenet_v3_small" else "swish"
        stem = convolution(COLORS, config.stem, 3, eps, kind, stride=config.stem_stride)
        blocks = [(one.name.split("."), InvertedResidual(one, eps)) for one in config.blocks()]
        layers: list[nn.Module] = [stem]
        for (_, place, *inner), block in blocks:
            if not inner:
                layers.append(block)
            elif len(layers) <= int(place):
                layers.append(nn.Sequential(block))
            else:
                stage = layers[int(place)]
                assert isinstance(stage, nn.Sequential)
                stage.append(block)
        layers.append(convolution(config.blocks()[-1].outputs, config.last, 1, eps, kind))
        self.features = nn.Sequential(*layers)
        if config.classifier:
            self.classifier = nn.Sequential(
                nn.Linear(config.last, config.classifier),
                nn.Hardswish(),
                nn.Identity(),  # torchvision's dropout
                nn.Linear(config.classifier, config.classes),
            )
        else:
            self.classifier = nn.Sequential(nn.Identity(), nn.Linear(config.last, config.classes))
        self.vision = config
        self.vocabulary = Vocabulary()
        self.right: Tensor | None = None
        self.judged: Tensor | None = None
        # What the trainer asks every model: it has no blocks of a decoder, and no mask.
        self.blocks: dict[str, nn.Module] = {}
        self.mask = MaskSpec()
        self.residual_dtype = torch.float32

    @property
    def head(self) -> nn.Module:
        """Return what makes logits, by which techniques see that a loss is computed here."""
        return self.classifier

    def forward(
        self,
        x: Tensor,
        targets_BT: Tensor,
        rows: Rows | None = None,
        *,
        objective: Objective,
        scale: Tensor,
        extras: Any = None,
        part: Any = None,
    ) -> Tensor:
        """Return the objective's sum over the labels, times `scale`; a scalar.

        Args:
            x: tokens of the rows, which are not read.
            targets_BT: the labels, [B, 1].
            rows: places of tokens, which are not read.
            objective: what is computed of the logits.
            scale: one over the labels of the whole batch.
            extras: of the batch, with the images.
            part: of a pipeline, which an image classifier is never cut for.
        """
        logits_BV, targets_B = self.logits_of(extras[IMAGE]), targets_BT.flatten()
        if not self.training:
            self._judge(logits_BV, targets_B)
        return objective(logits_BV, targets_B, extras, self.vocabulary) * scale

    def logits_of(self, images_BCHW: Tensor) -> Tensor:
        """Return fp32 logits [B, V] of images, uint8 [B, C, H, W]."""
        x_BCHW = (images_BCHW.float() - MEAN) / SPREAD
        # In this layout cuDNN has depthwise convolutions, and a CPU is a fifth faster.
        return self.classify(x_BCHW.contiguous(memory_format=torch.channels_last)).float()

    def classify(self, x_BCHW: Tensor) -> Tensor:
        """Return the logits of images whose numbers run from -1 to 1."""
        x_BCHW = self.features(x_BCHW)
        return self.classifier(x_BCHW.mean((2, 3)))

    @torch.no_grad()
    def _judge(self, logits_BV: Tensor, targets_B: Tensor) -> None:
        """Count the labels, and those that were told rightly, while the model is evaluated."""
        counted_B = targets_B != IGNORED
        right = ((logits_BV.argmax(-1) == targets_B) & counted_B).sum()
        self.right = right if self.right is None else self.right + right
        self.judged = counted_B.sum() if self.judged is None else self.judged + counted_B.sum()

    def take_accuracy(self) -> float:
        """Return the share of labels told rightly since the last call, and begin again."""
        assert self.right is not None and self.judged is not None, "nothing was evaluated"
        share = float(self.right) / max(1.0, float(self.judged))
        self.right = self.judged = None
        return share


def random_images_source(seed: int) -> Source:
    """Return the initial values of a network, a function of (seed, name, shape).

    Convolutions are drawn by He's rule over what they give (arXiv 1502.01852), linears with a
    standard deviation of 0.01, as torchvision draws MobileNetV3; norms begin as the identity.
    """

    def source(name: str, shape: torch.Size) -> Tensor:
        if name.endswith(".bias"):
            return torch.zeros(shape)
        if len(shape) == 1:
            return torch.ones(shape)
        fan_out = shape[0] * shape[2] * shape[3] if len(shape) == 4 else 0
        std = (2 / fan_out) ** 0.5 if fan_out else 0.01
        return drawn(seed, name, shape, lambda x, g: x.normal_(0.0, std, generator=g))

    return source


def norm_statistics(model: nn.Module) -> dict[str, Tensor]:
    """Return the running means and variances of a network by torchvision's names."""
    return {n: b for n, b in model.named_buffers() if b.is_floating_point()}


def load_images_state(model: ImageClassifier, state: Mapping[str, Tensor]) -> None:
    """Fill the weights and running statistics of a network whose shapes are those of the state."""
    own = {**dict(model.named_parameters()), **norm_statistics(model)}
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(state[name])


def folded(model: ImageClassifier) -> dict[str, tuple[Tensor, Tensor]]:
    """Return name of a convolution -> factor and offset of its normalisation, [C] each, fp32.

    What a convolution gives, times the factor and plus the offset, is what the normalisation makes
    of it in evaluation. Its factor can be put into the weight's rows.
    """
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_var is not None and module.running_mean is not None
            factor = module.weight * torch.rsqrt(module.running_var + module.eps)
            pairs[f"{name.removesuffix('.1')}.0"] = (
                factor.detach(),
                (module.bias - module.running_mean * factor).detach(),
            )
    return pairs


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, like: nn.Conv2d) -> Tensor:
    """Return what the convolution `like` gives with another weight."""
    return F.conv2d(x, weight, bias, like.stride, like.padding, like.dilation, like.groups)
