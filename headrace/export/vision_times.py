"""Say what binds telling an image apart with an exported file: reads, computation or overhead.

As for decoding, an image's least times are those of reading every weight and of its
multiplications at the rates of this machine; what is measured beyond is the runtime's own. Weights
of a network of images fit into most caches, and each is used at many places of an image, so it is
seldom memory that binds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.units import format_bytes, format_seconds
from headrace.costs.vision import image_flops
from headrace.export.decoding import Decoding, measure_host
from headrace.export.llama_cpp import TokenWork
from headrace.export.vision import ImagesRuntime

QUANTIZED_BYTES = {"fp32": 4, "int8": 1}
"""Bytes of a weight, by how a file stores it."""


@dataclass(frozen=True)
class ImageTiming(Decoding):
    """Hold what was measured of a file that tells images apart: a token is an image."""

    @property
    def remedy(self) -> str:
        """Return the command that makes what binds less."""
        kind = "onnx" if self.file.suffix == ".onnx" else "executorch"
        if self.bottleneck == "memory bandwidth" and self.quantized == "fp32":
            return f"headrace export {self.run} --to {kind} --quantize int8"
        if self.bottleneck == "launch" and kind == "onnx":
            return f"headrace export {self.run} --to executorch"
        return f"headrace prune {self.run} --by 30%"

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values; what is told of a token elsewhere is told of an image."""
        values = super().to_dict()
        values["images_per_s"] = values.pop("tokens_per_s")
        values["bytes_per_image"] = values.pop("bytes_per_token")
        return values

    @property
    def sentence(self) -> str:
        """Return the verdict in a sentence."""
        share = f"{self.share:.0%}"
        return {
            "memory bandwidth": "Memory bandwidth binds telling an image: reading the weights is "
            f"{share} of its time.",
            "computation": f"Computation binds telling an image: multiplications are {share} of "
            "its time.",
            "launch": f"The runtime's overhead binds telling an image: {share} of its time is "
            "neither reads nor multiplications.",
        }[self.bottleneck]

    @property
    def evidence(self) -> str:
        """Return the numbers that the verdict is made of."""
        work, rates = self.work, self.rates
        return (
            f"{self.runtime} tells {1 / self.token_s:,.0f} images/s, "
            f"{format_seconds(self.token_s)} each. An image reads "
            f"{format_bytes(work.weight_bytes)} of weights, at {rates.bytes_per_s / 1e9:.3g} GB/s "
            f"{self.memory_share:.0%} of that; its {2 * work.multiplied / 1e6:.4g} MFLOP are "
            f"{self.compute_share:.0%} at {rates.flops_per_s / 1e9:.3g} GFLOP/s."
        )


def examine_images(file: Path, record: Mapping[str, Any]) -> ImageTiming:
    """Tell some images apart with an exported file, and return what binds it.

    Args:
        file: the file.
        record: what lies beside it.

    Raises:
        UnsupportedError: its runtime is not installed, or cannot load it.
    """
    runtime = ImagesRuntime(file, record)
    weights = sum(one.weights for one in runtime.config.convolutions())
    weight_bytes = weights * QUANTIZED_BYTES[record["preset"]]
    work = TokenWork(weight_bytes, 0, round(image_flops(runtime.config) / 2))
    image_s, rates = runtime.image_s(), measure_host(weight_bytes)
    run = (record.get("origin") or {}).get("run", "RUN")
    return ImageTiming(file, runtime.name, image_s, work, rates, run, record["preset"])
