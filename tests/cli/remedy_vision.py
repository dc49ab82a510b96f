"""Plans, folders and files of networks that tell images apart, and what mends them."""

import json
from pathlib import Path

from shell import Case, once, run

from headrace.core.vision_config import VisionConfig

SMALL = (
    "device=cpu vision.size=16 vision.images=32 vision.validation_images=16 batch.tokens=16 "
    "eval.tokens=16 goal.steps=1 schedule.steps=1 schedule.warmup_steps=0 guard=false"
)
PLAN = f"explain vision-demo {SMALL}"
TRAIN = f"train vision-demo {SMALL} name=other"
WIDE = [*VisionConfig().whole_channels[:-1], 2048]


def seen(_: Path) -> None:
    """Train a network of images."""

    def trained_network() -> None:
        assert run(["train", "vision-demo", *SMALL.split(), "name=seen"]).code == 0
        words = ["export", "seen", "--to", "torchvision", "--output", "network"]
        assert run(words).code == 0

    once(trained_network, "runs/seen", "network")


def without_images(folder: Path) -> None:
    """Train a network of images, and cut its images short."""
    seen(folder)
    assert run(["data", "ingest", *TRAIN.split()[1:]]).code == 0
    (file,) = Path("data").glob("*/train-00/images.bin")
    file.write_bytes(file.read_bytes()[:-1])


def other_kind(folder: Path) -> None:
    """Write a network of images, and a folder of another model beside it."""
    seen(folder)
    Path("bad").mkdir()
    Path("bad/config.json").write_text(json.dumps({"model_type": "llama"}))


def in_file(folder: Path) -> None:
    """Write a file of a network of images, which nothing opens."""
    seen(folder)
    facts = {"format": 1, "images": VisionConfig(size=16).model_dump(mode="json"), "preset": "fp32"}
    file = Path("file/model.onnx")
    file.parent.mkdir()
    file.write_bytes(b"")
    digest = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    record = facts | {"sha256": {file.name: digest}}
    (file.parent / "headrace.json").write_text(json.dumps(record))


ONNX = {"pip install 'headrace[onnx]'": "only the file's own tests install it"}
VISION = {
    "plan/vision:check_vision#1": Case("explain demo device=cpu data.sequence_length=1"),
    "plan/vision:check_vision#2": Case(f"{PLAN} data.sequence_length=16"),
    "plan/vision:check_vision#3": Case(f"{PLAN} model.layers=2"),
    "plan/vision:check_vision#4": Case(f"{PLAN} eval.general=stdlib"),
    "plan/vision:check_vision#5": Case(f"{PLAN} attention=measured"),
    "plan/vision:check_vision#6": Case(f"{PLAN} mesh.data=2"),
    "core/vision_config:VisionConfig._check_channels#1": Case(f"{PLAN} 'vision.channels=[8]'"),
    "core/vision_config:VisionConfig._check_channels#2": Case(
        f"{PLAN} 'vision.channels={WIDE}'".replace(", ", ",")
    ),
    "assemble/context:check_reads_images#1": Case(f"{TRAIN} --with document_packing"),
    "data/images:Images.__init__#1": Case(TRAIN, without_images),
    "model/vision_folder:read_images_folder#1": Case(
        f"{TRAIN} vision.stem_stride=1 vision.pretrained=bad",
        other_kind,
        fills={"FOLDER that `headrace export RUN --to torchvision` wrote": "network"},
    ),
    "model/vision_folder:_check_same#1": Case(
        f"{TRAIN} vision.stem_stride=2 vision.pretrained=network", seen
    ),
    "assemble/teacher:make_images_teaching#1": Case(
        f"{TRAIN} vision.classes=5 --with distillation techniques.distillation.teacher=network",
        seen,
    ),
    "inference/load:open_model#1": Case("sample seen", seen),
    "export/vision:preset_of#1": Case("export seen --to onnx --quantize int7", seen, prose=ONNX),
    "cli/vision:export_images#1": Case("export demo --to torchvision"),
    "cli/vision:export_images#2": Case("export seen --to gguf --output out", seen),
    "cli/vision:export_images#3": Case("export seen --to torchvision --adapter x", seen),
    "cli/vision:export_images#4": Case(
        "export seen --to torchvision --output out --quantize int8", seen
    ),
    "cli/vision:run_images#1": Case("run file/model.onnx --prompt x", in_file, prose=ONNX),
}
"""Each error by its site."""
