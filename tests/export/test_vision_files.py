"""A network of images goes from its teacher to a file that its own runtime runs."""

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.cli.catalogue import catalogue
from headrace.compress.vision import image_codes
from headrace.core.vision_config import VisionConfig
from headrace.data.images import draw
from headrace.export import executorch_file, onnx_file, vision
from headrace.export.vision import DeviceNetwork, stored_weights
from headrace.inference.load import open_model
from headrace.model.vision import ImageClassifier
from headrace.model.vision_folder import read_images_folder

TINY = (
    *("device=cpu", "vision.size=16", "vision.images=64", "vision.validation_images=32"),
    *("batch.tokens=16", "eval.tokens=32", "goal.steps=3", "schedule.warmup_steps=0"),
    *("eval.every_steps=100", "checkpoint.every_steps=3", "data.workers=0", "guard=false"),
)
Call = Callable[..., Any]


class Scaled(nn.Module):
    """Give a convolution the numbers of images, which run from 0 to 1 for it."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.convolution = convolution

    def forward(self, images: Tensor) -> Tensor:
        return self.convolution(images.to(torch.float32) / 255)


@pytest.fixture(scope="module")
def call(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Call]:
    """`headrace ARGV --json` in a folder where a teacher is trained."""
    folder = tmp_path_factory.mktemp("vision")

    def run(*argv: str, code: int = 0) -> Any:
        ended = CliRunner().invoke(app, [*argv, "--json"], prog_name="headrace")
        assert ended.exit_code == code, ended.output
        return json.loads(ended.stdout)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run("train", "vision-demo", *TINY, "name=teacher")
        run("export", "teacher", "--to", "torchvision", "--output", "weights")
        yield run


@pytest.fixture(scope="module")
def student(call: Call) -> dict[str, Any]:
    """The report of a student of fewer channels, which learns from the teacher in 8 bits."""
    pruned = call("prune", "teacher", "--by", "40%", "--output", "cut")
    channels = str(pruned["channels"]).replace(" ", "")
    report = call(
        *("train", "vision-demo", *TINY, "name=student", "vision.pretrained=cut"),
        *(f"vision.channels={channels}", "techniques.quantization_aware_training.to=int8"),
        *("--with", "distillation", "techniques.distillation.teacher=weights"),
    )
    assert report["parameters"] == pruned["left"]
    return report | pruned


def test_a_student_of_fewer_channels_learns_in_8_bits(student: dict[str, Any]) -> None:
    assert student["parameters"] == 1528106 and student["left"] < 0.75 * 1528106
    assert student["left_flops"] < 0.75 * student["flops"]
    config, state = read_images_folder(Path("cut"), "vision.pretrained")
    assert [*config.channels] == student["channels"]
    assert sum(one.numel() for n, one in state.items() if "running" not in n) == student["left"]
    assert student["techniques"]["quantization_aware_training"]["numbers"]["rounded"] > 50
    assert student["techniques"]["distillation"]["numbers"]["divergence_nats"] > 0
    assert 0 <= student["val"][-1]["accuracy"] <= 1 and student["sample"] is None


@torch.no_grad()
def test_a_file_has_the_codes_of_training(student: dict[str, Any]) -> None:
    build = open_model(Path("runs/student"), catalogue(), images=True)
    network: Any = build.model
    assert isinstance(network, ImageClassifier) and not network.training
    images = torch.from_numpy(draw(network.vision, 1, 8)[0])
    trained = network.logits_of(images)
    stored = stored_weights(network, "int8")
    coded = DeviceNetwork(network, stored).eval()(images)
    assert (coded - trained).abs().max() < 1e-4
    name = "features.1.block.0.0"
    weight: Any = network.get_submodule(name).weight
    codes = stored[name].codes
    assert codes is not None and torch.equal(codes.float(), image_codes(weight).codes)
    whole = DeviceNetwork(network, stored_weights(network, "fp32"))(images)
    moved, apart = (whole - trained).abs().max(), (coded - trained).abs().max()
    assert moved > 100 * apart  # after three steps all logits are near zero


@pytest.mark.parametrize("to", ["onnx", "executorch"])
def test_a_file_is_run_by_its_own_runtime(student: dict[str, Any], call: Call, to: str) -> None:
    for package in ("onnx", "onnxruntime", "onnxscript") if to == "onnx" else ("executorch",):
        pytest.importorskip(package, reason=f"pip install 'headrace[{to}]'")
    made = call("export", "student", "--to", to)
    assert made["preset"] == "int8" and made["drift"] < (1e-4 if to == "onnx" else 0.05)
    assert made["equal"] > 0.8  # none is without rounded biases
    whole = call("export", "student", "--to", to, "--quantize", "fp32", "--output", f"whole-{to}")
    assert made["bytes"] < 0.5 * whole["bytes"] and whole["drift"] < 1e-4
    ran = call("run", made["file"])
    assert ran["images"] == 32 and ran["bytes"] == made["bytes"] and ran["image_s"] > 0
    told = call("eval", "student")
    assert ran["accuracy"] == pytest.approx(told["accuracy"])
    (finding,) = call("doctor", made["file"])
    assert finding["bottleneck"] in ("memory bandwidth", "computation", "launch")
    assert "image" in finding["sentence"]


@torch.no_grad()
def test_a_bias_is_the_whole_number_that_xnnpack_adds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One convolution gives other codes than its file, unless its bias is rounded."""
    executorch = pytest.importorskip("executorch.exir", reason=executorch_file.INSTALL)
    partition = importlib.import_module(f"{executorch_file.XNNPACK}.xnnpack_partitioner")
    runtime = importlib.import_module("executorch.runtime").Runtime.get()
    draw_some = torch.Generator().manual_seed(0)
    images = torch.randint(256, (8, 3, 16, 16), generator=draw_some).to(torch.uint8)
    network = Scaled(nn.Conv2d(3, 64, 1)).eval()
    for parameter in network.parameters():
        parameter.uniform_(-0.5, 0.5, generator=draw_some)
    whole, apart = [one.clone() for one in network.parameters()], []
    for name, change in (("rounded", vision.round_biases), ("fp32", lambda graph: None)):
        monkeypatch.setattr(vision, "round_biases", change)
        coded = vision._in_codes(network, (images[:1],), VisionConfig(size=16))
        lowered = executorch.to_edge_transform_and_lower(
            torch.export.export(coded, (images[:1],)),
            partitioner=[partition.XnnpackPartitioner()],
            compile_config=executorch.EdgeCompileConfig(_check_ir_validity=False),
        )
        (file := tmp_path / f"{name}.pte").write_bytes(lowered.to_executorch().buffer)
        program = runtime.load_program(file)
        method = program.load_method("forward")
        off = [(method.execute([one])[0] - coded(one)).abs().max() for one in images.split(1)]
        apart.append(float(max(off)))
    assert apart[0] == 0.0 and apart[1] > 1e-3, apart
    assert all(
        torch.equal(one, before) for one, before in zip(network.parameters(), whole, strict=True)
    )


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("sample", "teacher", "--prompt", "x"), 3, "tells images apart"),
        (("export", "teacher", "--to", "gguf"), 3, "--to gguf is a format of text"),
        (("export", "teacher", "--to", "onnx", "--quantize", "int4"), 2, "fp32, int8"),
        (("export", "teacher", "--to", "torchvision", "--quantize", "int8"), 2, "keeps weights"),
        (("export", "teacher", "--to", "onnx", "--adapter", "x"), 2, "is of a model of text"),
        (("train", "vision-demo", "name=x", "vision.pretrained=runs"), 2, "no network of images"),
        (("train", "vision-demo", "name=x", "vision.classes=5", *TINY), 2, "classes"),
    ],
)
def test_what_makes_no_sense_for_images_is_refused(
    call: Call, words: tuple[str, ...], code: int, said: str
) -> None:
    if "vision.classes=5" in words:
        words += ("--with", "distillation", "techniques.distillation.teacher=weights")
    error = call(*words, code=code)
    assert said in error["error"] and error["remedy"], error


def test_a_missing_runtime_is_named(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_file, "find_spec", lambda name: None)
    monkeypatch.setattr(executorch_file, "find_spec", lambda name: None)
    for to in ("onnx", "executorch"):
        error = call("export", "teacher", "--to", to, code=3)
        assert error["remedy"].startswith("pip install")


def test_a_folder_of_weights_says_what_is_wrong(call: Call) -> None:
    Path("bad").mkdir()
    for facts, said in (
        ({}, "its model_type is None"),
        ({"model_type": "headrace_vision"}, "architecture"),
    ):
        Path("bad/config.json").write_text(json.dumps(facts))
        error = call("train", "vision-demo", "name=x", "vision.pretrained=bad", code=2)
        assert said in error["error"]


def test_the_names_are_those_of_the_config() -> None:
    config = VisionConfig(architecture="efficientnet_b0")
    names = {f"{one.name}.weight" for one in config.convolutions()}
    own = {n for n, p in ImageClassifier(config).named_parameters() if p.ndim > 1}
    assert names == own
