"""Write a network that tells images apart for a device, and run what was written.

The folder has `model.onnx` or `model.pte` and `headrace.json`, which says what the network is, how
its weights are stored, and the sha256 of the file. A file takes images as they are, uint8
[B, 3, H, W], and gives a logit for each class. Normalisations are in the weights: each multiplies
what a convolution gives by a factor of the channel, which goes into that row's scale. So codes of
8 bits are those of training.

Before the folder is there its own runtime runs the file on held-out images, and the largest
difference of a logit to the network that was evaluated is told.

Shapes: B images, V classes.
"""

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from headrace import __version__
from headrace.assemble.sockets import Build
from headrace.compress.vision import image_codes
from headrace.core.command import rerun_with
from headrace.core.errors import ConfigError, UnsupportedError, nearest
from headrace.core.files import sha256_of, shell
from headrace.core.native import silent_library
from headrace.core.vision_config import COLORS, VisionConfig
from headrace.data.images import draw
from headrace.export import executorch_file, onnx_file
from headrace.export.edge_runtime import IMAGES, RECORD, VERSION
from headrace.export.folder import new_folder, write_json
from headrace.export.gguf import Origin
from headrace.export.onnx_file import OPSET, quiet
from headrace.model.vision import MEAN, SPREAD, ImageClassifier, folded
from headrace.model.vision_folder import KIND, SHAPES, WEIGHTS, images_state

FORMATS = {"onnx": "model.onnx", "executorch": "model.pte"}
"""Format of `headrace export --to` -> the name of its file."""
FOLDER = "torchvision"
"""The format that is a folder of weights, from which other runs start and learn."""
PRESETS = ("fp32", "int8")
"""How weights are stored: whole, or in 8 bits with a scale for each channel."""
EQUAL = 1e-4
"""Difference of logits up to which a file computes what a graph does."""
COMPARED = 64
"""Held-out images on which a new file is compared with the network."""
CALIBRATED = 128
"""Training images over which the ranges of what convolutions read and give are found."""
TIMED = 50
"""Images that are told one by one for the time of one."""


@dataclass(frozen=True)
class StoredWeight:
    """A weight as a file stores it, with its normalisation in it.

    Args:
        codes: int8 in the weight's shape; None where it is stored whole.
        scales: of each row, with the normalisation's factor; may be below 0.
        whole: the fp32 numbers, which the codes stand for.
        bias: of each row; None without any.
    """

    codes: Tensor | None
    scales: Tensor
    whole: Tensor
    bias: Tensor | None


def stored_weights(model: ImageClassifier, preset: str) -> dict[str, StoredWeight]:
    """Return by the name of its module every weight as a file stores it."""
    norms, stored = folded(model), {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Conv2d | nn.Linear):
            continue
        weight = module.weight.detach().float()
        rows = len(weight)
        factor, offset = norms.get(name, (torch.ones(rows), None))
        bias = None if module.bias is None else module.bias.detach().float()
        bias = offset if bias is None else bias
        shape = (rows, *(1 for _ in weight.shape[1:]))
        if preset == "fp32":
            whole = weight * factor.view(shape)
            stored[name] = StoredWeight(None, factor, whole, bias)
            continue
        made = image_codes(weight)
        codes = made.codes.to(torch.int8)
        scales = made.scales * factor
        whole = codes.float() * scales.view(shape)
        stored[name] = StoredWeight(codes, scales, whole, bias)
    return stored


class DeviceNetwork(nn.Module):
    """A network as a device runs it: uint8 images in, logits out, no normalisation left.

    Args:
        model: the network.
        stored: its weights, from `stored_weights`.
    """

    def __init__(self, model: ImageClassifier, stored: Mapping[str, StoredWeight]) -> None:
        super().__init__()
        own = copy.deepcopy(model)
        for name, one in stored.items():
            parent = name.rpartition(".")[0]
            module: Any = own.get_submodule(name)
            vars(module).pop("forward", None)  # which rounds while it trains
            module.weight = nn.Parameter(one.whole, requires_grad=False)
            module.bias = None if one.bias is None else nn.Parameter(one.bias, requires_grad=False)
            owner: Any = own.get_submodule(parent)
            normed = isinstance(owner, nn.Sequential) and len(owner) > 1
            if normed and isinstance(owner[1], nn.BatchNorm2d):
                owner[1] = nn.Identity()
        self.network = own

    def forward(self, images: Tensor) -> Tensor:
        """Return fp32 logits [B, V] of images, uint8 [B, 3, H, W]."""
        return self.network.classify((images.to(torch.float32) - MEAN) / SPREAD)


def preset_of(quantize: str | None, trained: bool) -> str:
    """Return how weights are stored: as asked, else as the run was trained for.

    Raises:
        ConfigError: there is no such way.
    """
    if quantize is None:
        return "int8" if trained else "fp32"
    if quantize not in PRESETS:
        near = nearest(quantize, PRESETS)
        raise ConfigError(
            f"--quantize {quantize} is none of a network of images, which are {', '.join(PRESETS)}",
            rerun_with("--quantize", near if near in PRESETS else "int8", verb="export"),
        )
    return quantize


@dataclass
class ImagesExport:
    """Hold what is written of a network of images, and what was found of it.

    Args:
        build: the run, opened with its trained weights; its model computes what was evaluated.
        to: the format, of `FORMATS`.
        preset: how weights are stored, of `PRESETS`.
        name: of the model.
        origin: the run whose model it is.
    """

    build: Build
    to: str
    preset: str
    name: str
    origin: Origin | None = None
    drift: float = 0.0
    """Largest difference of a logit to the network that was evaluated."""
    computed: float | None = None
    """Largest difference of a logit to the graph that was lowered, whose activations have the same
    codes, computed by torch: what the runtime adds. None where the drift is that."""
    equal: float = 1.0
    """Share of the images of which no logit differs from that graph's by more than `EQUAL`."""
    bytes: int = 0
    """Size of the file."""
    files: list[Path] = field(default_factory=list)

    def write(self, output: Path) -> Path:
        """Write the folder, and return the file in it.

        Raises:
            ConfigError: the folder has files already.
            UnsupportedError: the runtime is not installed.
        """
        (onnx_file if self.to == "onnx" else executorch_file).check_installed()
        model, config = _network(self.build)
        stored = stored_weights(model, self.preset)
        images = torch.from_numpy(draw(config, 1, COMPARED)[0])
        expected = DeviceNetwork(model, stored).eval()(images)
        if self.preset == "int8" and self.build.fake_quantized:
            expected = model.logits_of(images)  # as it was trained and evaluated
        with new_folder(output) as aside:
            file = aside / FORMATS[self.to]
            writes = _write_onnx if self.to == "onnx" else _write_executorch
            coded = writes(model, stored, config, file)
            self.files, self.bytes = [file], file.stat().st_size
            self._record(aside, config)
            runtime = ImagesRuntime(file, self._facts(config))
            logits = torch.from_numpy(runtime.logits(images.numpy()))
            self.drift = float((logits - expected.detach()).abs().max())
            self._compare(coded, images, logits)
            self._record(aside, config)
        return output / file.name

    @torch.no_grad()
    def _compare(self, coded: nn.Module | None, images: Tensor, logits: Tensor) -> None:
        """Note how far the file is from the graph that was lowered, where that rounds more."""
        if coded is None:
            return
        by_torch = torch.cat([coded(image) for image in images.split(1)])
        apart_B = (logits - by_torch).abs().amax(-1)
        self.computed = float(apart_B.max())
        self.equal = float((apart_B <= EQUAL).float().mean())

    def _facts(self, config: VisionConfig) -> dict[str, Any]:
        return {
            "format": VERSION,
            "name": self.name,
            IMAGES: config.model_dump(mode="json", exclude={"pretrained"}),
            "preset": self.preset,
            "sha256": {one.name: sha256_of(one) for one in self.files},
            "drift": self.drift,
            "computed": self.computed,
            "equal": self.equal,
            "origin": None
            if self.origin is None
            else {**self.origin._asdict(), "fingerprint": dict(self.origin.fingerprint)},
            "headrace": __version__,
        }

    def _record(self, folder: Path, config: VisionConfig) -> None:
        write_json(folder / RECORD, self._facts(config))


def _network(build: Build) -> tuple[ImageClassifier, VisionConfig]:
    """Return the network of an opened run on the host, in evaluation mode."""
    model: Any = build.model
    assert isinstance(model, ImageClassifier)
    return model.to("cpu").eval().requires_grad_(False), model.vision


def write_images_folder(folder: Path, config: VisionConfig, state: dict[str, Tensor]) -> None:
    """Write a network into an empty folder, which `vision_folder.read_images_folder` reads.

    Args:
        folder: an existing folder.
        config: what network it is.
        state: its weights and statistics, as `images_state` returns them.
    """
    shapes = {key: value for key, value in config.model_dump(mode="json").items() if key in SHAPES}
    write_json(folder / "config.json", {"model_type": KIND, **shapes})
    save_file(state, folder / WEIGHTS)


def write_torchvision(build: Build, output: Path) -> Path:
    """Write the weights of a run with torchvision's names, and return the folder."""
    model, config = _network(build)
    with new_folder(output) as aside:
        write_images_folder(aside, config, images_state(model))
    return output


@torch.no_grad()
def _write_onnx(
    model: ImageClassifier, stored: Mapping[str, StoredWeight], config: VisionConfig, file: Path
) -> None:
    """Write a graph whose weights are whole, and then put codes in their place."""
    network = DeviceNetwork(model, stored).eval()
    with quiet():
        program = torch.onnx.export(
            network,
            (torch.zeros(2, COLORS, config.size, config.size, dtype=torch.uint8),),
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
            opset_version=OPSET,
            dynamo=True,
        )
        assert program is not None
        for node in program.model.graph.all_nodes():
            node.metadata_props.clear()
        program.save(file)
    _with_codes(file, stored)


def _with_codes(file: Path, stored: Mapping[str, StoredWeight]) -> None:
    """Replace each weight of a graph by its codes, and what makes numbers of them."""
    onnx: Any = import_module("onnx")
    graph = (proto := onnx.load(file)).graph
    made = {f"network.{name}.weight": one for name, one in stored.items() if one.codes is not None}
    whole = {one.name: one for one in graph.initializer}
    nodes = []
    for name, one in made.items():
        if name not in whole:
            raise UnsupportedError(
                f"the writer of ONNX files gave the weight {name} another name",
                "headrace export RUN --to onnx --quantize fp32",
            )
        assert one.codes is not None
        graph.initializer.remove(whole[name])
        numpy_helper = onnx.numpy_helper
        codes, scales = one.codes.numpy(), one.scales.float().numpy()
        graph.initializer.append(numpy_helper.from_array(codes, f"{name}.codes"))
        graph.initializer.append(numpy_helper.from_array(scales, f"{name}.scales"))
        inputs = [f"{name}.codes", f"{name}.scales"]
        nodes.append(onnx.helper.make_node("DequantizeLinear", inputs, [name], axis=0))
    old = [*graph.node]
    del graph.node[:]
    graph.node.extend([*nodes, *old])
    onnx.save(proto, file)


@torch.no_grad()
def _write_executorch(
    model: ImageClassifier, stored: Mapping[str, StoredWeight], config: VisionConfig, file: Path
) -> nn.Module | None:
    """Write a program for one image at a time, whose convolutions XNNPACK computes.

    It multiplies codes of 8 bits by codes of 8 bits, so with weights in codes what convolutions
    read and give has codes too. Their ranges are those over some training images. It returns the
    graph with these codes; None without any.
    """
    network: Any = DeviceNetwork(model, stored).eval()
    coded = None
    with quiet():
        exir = import_module("executorch.exir")
        xnnpack = import_module(f"{executorch_file.XNNPACK}.xnnpack_partitioner")
        given = (torch.zeros(1, COLORS, config.size, config.size, dtype=torch.uint8),)
        if any(one.codes is not None for one in stored.values()):
            network = coded = _in_codes(network, given, config)
        lowered = exir.to_edge_transform_and_lower(
            torch.export.export(network, given),
            partitioner=[xnnpack.XnnpackPartitioner()],
            compile_config=exir.EdgeCompileConfig(_check_ir_validity=False),
        )
        with file.open("wb") as opened:
            lowered.to_executorch().write_to_file(opened)
    return coded


def _in_codes(network: nn.Module, given: tuple[Tensor], config: VisionConfig) -> nn.Module:
    """Return the graph of a network with codes of 8 bits wherever XNNPACK multiplies them.

    A row of codes from -127 to 127 that has one of either keeps its codes and its scale. Biases are
    what XNNPACK adds. Sums are of fp32 numbers here and of codes there, so a number that lies
    between two codes may get the other one, in one image of some.
    """
    quantizers = import_module("executorch.backends.xnnpack.quantizer.xnnpack_quantizer")
    pt2e = import_module("torchao.quantization.pt2e.quantize_pt2e")
    quantizer = quantizers.XNNPACKQuantizer().set_global(
        quantizers.get_symmetric_quantization_config(is_per_channel=True)
    )
    watched = pt2e.prepare_pt2e(torch.export.export(network, given).module(), quantizer)
    for image in torch.from_numpy(draw(config, 0, CALIBRATED)[0]).split(1):
        watched(image)
    coded = pt2e.convert_pt2e(watched)
    round_biases(coded)
    return coded


@torch.no_grad()
def round_biases(coded: Any) -> None:
    """Round each bias of a converted graph to the whole number that XNNPACK stores for it.

    XNNPACK adds a bias to the sum of products of codes, in 32 bits: its unit is the scale of what
    the convolution reads times the scale of the row. torchao leaves biases in fp32, with which some
    numbers that a convolution gives get the next code in every image.

    Source: QuantParams.from_bias in
    https://github.com/pytorch/executorch/blob/main/backends/xnnpack/operators/quant_params.py

    Args:
        coded: a graph from `convert_pt2e`, which is changed; its weights have a scale for each row.
    """
    multiplied = (torch.ops.aten.conv2d.default, torch.ops.aten.linear.default)
    for node in coded.graph.nodes:
        if node.target not in multiplied or len(node.args) < 3 or node.args[2] is None:
            continue
        read, weight, bias = node.args[:3]
        unit = read.args[1] * _constant(coded, weight.args[1])
        whole = _constant(coded, bias)
        owner, _, name = bias.target.rpartition(".")
        rounded = nn.Parameter((whole / unit).round() * unit, requires_grad=False)
        setattr(coded.get_submodule(owner), name, rounded)  # the network keeps its own


def _constant(graph: nn.Module, node: Any) -> Tensor:
    """Return the tensor that a node of a graph reads by its name."""
    owner, _, name = node.target.rpartition(".")
    return getattr(graph.get_submodule(owner), name)


class ImagesRuntime:
    """A runtime has opened one file of a network of images."""

    reads: ClassVar[Mapping[str, str]] = {".onnx": "ONNX Runtime", ".pte": "ExecuTorch"}

    def __init__(self, file: Path, record: Mapping[str, Any]) -> None:
        """Open a file.

        Args:
            file: the file.
            record: what lies beside it.

        Raises:
            UnsupportedError: the runtime cannot load it, or is not installed.
        """
        self.record = record
        self.config = VisionConfig(**record[IMAGES])
        self._is_onnx = file.suffix == ".onnx"
        try:
            (self._open_onnx if self._is_onnx else self._open_executorch)(file)
        except UnsupportedError:
            raise
        except Exception as error:  # the runtimes' errors have no class of their own
            name = self.reads[file.suffix]
            raise UnsupportedError(
                f"{name} cannot load {shell(file)}: {str(error).splitlines()[0]}",
                f"pip install --upgrade {'onnxruntime' if self._is_onnx else 'executorch'}",
            ) from None

    def _open_onnx(self, file: Path) -> None:
        onnx_file.check_installed()
        onnxruntime = import_module("onnxruntime")
        self.name = f"ONNX Runtime {onnxruntime.__version__}"
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(
            file, options, providers=["CPUExecutionProvider"]
        )

    def _open_executorch(self, file: Path) -> None:
        executorch_file.check_installed()
        with quiet():
            runtime = import_module("executorch.runtime")
        self.name = f"ExecuTorch {version('executorch')}"
        executorch_file.check_identifier(file)
        with silent_library():
            self._program = runtime.Runtime.get().load_program(file)
            self._method: Any = self._program.load_method("forward")

    def logits(self, images: np.ndarray) -> np.ndarray:
        """Return the logits of images, fp32 [B, V], told one by one as a device sees them."""
        return np.concatenate([self._one(images[n : n + 1]) for n in range(len(images))])

    def _one(self, image: np.ndarray) -> np.ndarray:
        if self._is_onnx:
            return np.asarray(self._session.run(None, {"images": image})[0])
        given = torch.from_numpy(np.ascontiguousarray(image))
        return self._method.execute([given])[0].numpy().copy()

    def accuracy(self, count: int) -> tuple[float, int]:
        """Return the share of held-out images told rightly, and how many were told."""
        images, labels = draw(self.config, 1, min(count, self.config.validation_images))
        right = self.logits(images).argmax(-1) == labels
        return float(right.mean()), len(labels)

    def image_s(self) -> float:
        """Return the seconds that one image takes, the median of some."""
        images, _ = draw(self.config, 1, TIMED)
        times = []
        for place in range(len(images)):
            begin = time.perf_counter()
            self._one(images[place : place + 1])
            times.append(time.perf_counter() - begin)
        return float(np.median(times))
