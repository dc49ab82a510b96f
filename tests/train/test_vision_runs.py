"""Runs of images go through the trainer of text: steps, resumes, evaluations, refusals."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import report, tensors

from headrace.assemble.build import make_build
from headrace.cli.catalogue import catalogue
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.vision_config import VisionConfig
from headrace.data.images import FILE, Images, draw
from headrace.data.ingest import prepare
from headrace.data.shards import Shards
from headrace.inference.load import open_model
from headrace.parallel.world import World
from headrace.plan.plan import Plan
from headrace.recipes import read_recipe
from headrace.techniques.compile.cudnn_autotune import CudnnAutotune
from headrace.train.evaluate import evaluate
from headrace.train.train import run, step

TINY = (
    *("device=cpu", "vision.size=16", "vision.images=64", "vision.validation_images=40"),
    *("batch.tokens=16", "eval.tokens=40", "goal.steps=4", "schedule.steps=4"),
    *("schedule.warmup_steps=0", "eval.every_steps=2", "checkpoint.every_steps=2"),
)
Make = Callable[..., Plan]
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def plan(tmp_path: Path) -> Make:
    """Make the recipe tiny, with words behind it."""

    def make(*words: str, with_: tuple[str, ...] = ()) -> Plan:
        places = (f"directory={tmp_path / 'runs'}", f"data.directory={tmp_path / 'data'}")
        text = read_recipe("vision-demo")
        return Plan.read(text, catalogue(), overrides=[*TINY, *places, *words], with_=with_)

    return make


@pytest.mark.slow
def test_a_run_is_resumed_where_it_was(plan: Make, tmp_path: Path) -> None:
    whole = run(plan("name=whole")).folder
    half = run(plan("name=half", "goal.steps=2")).folder
    run(plan("name=half"), resume=True)
    kept = tensors(half / "checkpoints" / "latest")
    names = [n for n in kept if n.startswith("technique/batch_norm/")]
    assert len(names) == 68 and any(float(kept[n].abs().max()) > 0 for n in names)
    want = tensors(whole / "checkpoints" / "latest")
    for name, tensor in want.items():
        assert torch.equal(tensor, kept[name]), name
    told = report(whole)
    numbers = {"step", "tokens", "wall_s", "loss_nats", "bits_per_byte", "accuracy", "share"}
    assert {*told["val"][0]} == numbers
    assert told["wasted_token_fraction"] == 0 and told["guard"]["compared"] is False
    assert told["outcome"]["guess_nats"] == pytest.approx(np.log(10))


def test_an_evaluation_uses_running_statistics(plan: Make, tmp_path: Path) -> None:
    folder = run(plan("name=one")).folder
    build = open_model(folder, catalogue(), with_data=True, images=True)
    model: Any = build.model
    assert not model.training
    images, labels = draw(VisionConfig(size=16), 1, 40)
    with torch.no_grad():
        logits = model.logits_of(torch.from_numpy(images))
    found = evaluate(build)
    right = float((logits.argmax(-1) == torch.from_numpy(labels)).float().mean())
    assert found.more == {"accuracy": pytest.approx(right)} and found.tokens == 40
    wanted = torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels))
    assert found.loss_nats == pytest.approx(float(wanted), rel=1e-5)
    best = min(row["loss_nats"] for row in report(folder)["val"])
    assert best == pytest.approx(found.loss_nats, rel=1e-5)


def test_the_first_step_is_compared_with_the_plain_trainers(plan: Make) -> None:
    told = report(run(plan("name=two", "goal.steps=1", with_=("loader_workers",))).folder)
    assert told["guard"]["compared"] is True


def test_micro_batches_change_no_image(plan: Make) -> None:
    first, second = (
        make_build(one, prepare(one), World(), torch.device("cpu"))
        for one in (plan(), plan("batch.micro_sequences=8"))
    )
    (whole,), parts = first.loader.step(1).micros, second.loader.step(1).micros
    assert whole.numbers_BT is not None and whole.targets_BT.shape == (16, 1)
    images = torch.cat([part.numbers_BT["image"] for part in parts if part.numbers_BT])
    assert torch.equal(images, whole.numbers_BT["image"])
    first.loader.close()
    second.loader.close()


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, on_a_gpu])],
)
def test_the_libraries_of_a_networks_convolutions_are_counted(plan: Make, device: str) -> None:
    """A CPU has no cuDNN, which the evidence says; on a GPU it times its algorithms."""
    asked = plan(f"device={device}")
    build = make_build(asked, prepare(asked), World(), torch.device(device))
    technique = CudnnAutotune()
    technique.apply(build)
    with ExitStack() as stack:
        for enter in build.runtime:
            stack.enter_context(enter())
        for index in range(2):
            step(build, build.loader.step(index).micros, index)
    evidence = technique.active(build)
    build.loader.close()
    assert evidence.active is (device == "cuda")
    assert evidence.numbers == {"steps": 2, "launched": 52}, evidence.detail


@pytest.mark.parametrize(
    ("words", "with_", "said"),
    [
        (("data.sequence_length=16",), (), "rows of mobilenet_v3_small have one token"),
        (("model.layers=2",), (), "model.layers = 2 is a key of text"),
        (("data.vocab=300",), (), "data.vocab = 300 is a key of text"),
        (("eval.general=x",), (), "eval.general = 'x' is a text"),
        (("attention=measured",), (), "times backends of attention"),
        (("mesh.data=2", "batch.tokens=32"), (), "is trained by one process"),
        ((), ("document_packing",), "document_packing was asked for and cannot run here"),
        ((), ("rope",), "is a key of text|rope was asked for"),
        ((), ("muon",), "made for tokens of text"),
        ((), ("quantization_aware_training",), "8 bits a channel"),
        ((), ("distillation",), "has no teacher"),
        (("techniques.distillation.teacher=x", "techniques.distillation.top_k=4"), (), "top_k = 4"),
    ],
)
def test_what_is_of_text_is_refused(
    plan: Make, words: tuple[str, ...], with_: tuple[str, ...], said: str
) -> None:
    with pytest.raises(HeadraceError, match=said) as caught:
        run(plan(*words, with_=with_))
    assert caught.value.remedy.text


def test_a_text_needs_rows_of_two_tokens() -> None:
    with pytest.raises(ConfigError, match="rows of 2 tokens at least"):
        Plan.read(read_recipe("demo"), catalogue(), overrides=["data.sequence_length=1"])


def test_images_are_drawn_alike_and_checked(plan: Make) -> None:
    config = VisionConfig(size=16)
    images, labels = draw(config, 0, 300)
    again, same = draw(config, 0, 7)
    assert np.array_equal(images[:7], again) and np.array_equal(labels[:7], same)
    assert set(labels.tolist()) == set(range(10)) and images.std() > 30
    prepared = prepare(plan())
    file = prepared.train[0].directory / FILE
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ConfigError, match="is damaged: its sha256"):
        Images(Shards.open(file.parent))
