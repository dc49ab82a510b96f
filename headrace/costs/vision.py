"""Count what a network that tells images apart costs, from the list of its convolutions.

Memory is counted for eager torch: a convolution keeps its input, its normalisation what the
convolution gave, and an activation what the normalisation gave. The two phases' FLOPs count a
multiply-add as two. There are no pieces of work with rates: no machine's rates of convolutions are
measured yet, so a step's time is not predicted.

A token is an image here, so what other ledgers count by token is counted by image.
"""

from collections.abc import Iterator

from headrace.core.vision_config import COLORS, Convolution, VisionConfig
from headrace.costs.ledger import Ledger, Line, Matrix

FP32 = 4
NOT_HERE = (
    *("layers", "composed_norms", "norm_products", "qk_norm_products", "residual", "dim"),
    *("head_gradients", "capped", "heads", "kv_heads", "head_dim", "ffn", "embedding", "tables"),
    *("pairs", "entering", "unsplit", "final_norm", "tied", "block_flops", "down_flops", "mask"),
    *("attention_flops", "mask_copy"),
)
"""Sizes of a decoder that techniques read, and that are 0 of a network of images."""


def image_parameters(config: VisionConfig) -> int:
    """Return the count of all trained numbers."""
    return sum(one.numbers for one in config.convolutions())


def image_flops(config: VisionConfig) -> float:
    """Return the FLOPs of one image's forward pass: two for each weight at each place."""
    return sum(2.0 * one.weights * one.places for one in config.convolutions())


def model_flops_per_image(config: VisionConfig) -> float:
    """Return the FLOPs per image of training: the backward pass is twice the forward pass."""
    return 3.0 * image_flops(config)


def _activations(config: VisionConfig) -> Iterator[tuple[str, int]]:
    """Yield what each convolution leaves for the backward pass, in numbers of one image."""
    squeezed = {f"{one.name}.block" for one in config.blocks() if one.squeezed}
    scaled = {one.name for one in config.blocks() if one.squeezed}
    for one in config.convolutions():
        given = one.outputs * one.places
        if one.biased:
            yield one.name, 2 * given
            continue
        block = one.name.rpartition(".block.")[0]
        narrows = block and one.groups == 1 and _narrows(one, config, block)
        count = 2 if narrows else 3
        if one.groups > 1 and block in scaled and f"{block}.block" in squeezed:
            count += 1  # what squeeze and excitation made of it
        yield one.name, count * given


def _narrows(one: Convolution, config: VisionConfig, block: str) -> bool:
    """Return whether a convolution is the last of its block, which no activation follows."""
    last = [c.name for c in config.convolutions() if c.name.startswith(f"{block}.block.")][-1]
    return one.name == last


def image_ledger(
    config: VisionConfig, *, rows: int, precision: str, device: str, accumulates: bool
) -> Ledger:
    """Return the baseline's costs for one micro-batch of images.

    Args:
        config: the network.
        rows: images of the micro-batch.
        precision: "fp32", "bf16" or "fp16".
        device: the type of the device.
        accumulates: whether a step has several micro-batches.
    """
    parameters, size = image_parameters(config), FP32 if precision == "fp32" else 2
    instants = ("always",) if accumulates else ("backward", "optimizer")
    memory = {
        "parameters": Line(FP32 * parameters, ("always",)),
        "gradients": Line(FP32 * parameters, instants),
        "optimizer": Line(2 * FP32 * parameters, ("always",)),
        "images": Line(rows * COLORS * config.size**2 * (1 + FP32), ("loss", "turn", "backward")),
        "logits": Line(3 * FP32 * rows * config.classes, ("loss",)),
    }
    for name, numbers in _activations(config):
        memory[f"{name}/kept"] = Line(size * rows * numbers, ("loss", "turn"))
    forward = image_flops(config)
    sizes: dict[str, float] = dict.fromkeys(NOT_HERE, 0.0)
    sizes |= {
        "rows": rows,
        "length": 1,
        "tokens": rows,
        "vocab": config.classes,
        "logits_per_token": 3 * FP32 * config.classes,
        "logits_fused": 3 * size * rows * config.classes,
        "activation_bytes": size,
        "stream_bytes": size,
        "on_gpu": float(device == "cuda"),
    }
    matrices = {
        f"{one.name}.weight": Matrix(
            (one.outputs, one.inputs // one.groups, one.kernel, one.kernel)
        )
        for one in config.convolutions()
    }
    return Ledger(memory, {"forward": forward, "backward": 2 * forward}, sizes, matrices=matrices)
