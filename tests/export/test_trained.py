"""A checkpoint that was trained here, in transformers: the same greedy text."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from facts import tells

from headrace.assemble.build import make_build
from headrace.core.errors import UnsupportedError
from headrace.data.ingest import prepare
from headrace.export.run import export_run
from headrace.parallel.world import World


def test_a_trained_run_generates_the_same_greedy_text_in_transformers(
    tmp_path: Path, plan_file: Path, zygote: Any
) -> None:
    plan = [str(plan_file), "model.qk_norm=true", "goal.steps=20", "name=trained"]
    assert zygote.run(tmp_path, "train", *plan).code == 0
    ended = zygote.run(tmp_path, "export", "trained", "--to", "hf", "--output", "out")
    assert ended.code == 0
    ours = zygote.run(
        tmp_path,
        "sample",
        "trained",
        "--temperature",
        "0",
        "--tokens",
        "12",
        "--prompt",
        "the",
        "--json",
    )
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").float()
    prompt = [tokenizer.bos_token_id, *tokenizer("the", add_special_tokens=False).input_ids]
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
    new = [i for i in theirs[0, len(prompt) :].tolist() if i != tokenizer.eos_token_id]
    assert json.loads(ours.out)["text"] == tokenizer.decode(new)


def test_training_goes_on_from_an_exported_folder(
    tmp_path: Path, plan_file: Path, zygote: Any
) -> None:
    plan = str(plan_file)
    assert zygote.run(tmp_path, "train", plan, "name=first").code == 0
    assert zygote.run(tmp_path, "export", "first", "--to", "hf", "--output", "out").code == 0
    # The folder says what the plan's file says otherwise: shape, heads and tokenizer.
    other = plan_file.read_text().replace("dim = 16", "dim = 48").replace("heads = 2", "heads = 3")
    (tmp_path / "on.toml").write_text(other)
    starts = ["model.pretrained=out"]
    still = [*starts, "optimizer.lr=1e-12", "goal.steps=1", "schedule.warmup_steps=0"]
    assert zygote.run(tmp_path, "train", "on.toml", "name=second", *still).code == 0
    reports = [
        json.loads((tmp_path / "runs" / n / "report.json").read_text()) for n in ("first", "second")
    ]
    before, after = (r["val"][-1]["loss_nats"] for r in reports)
    assert after == pytest.approx(before, rel=1e-6)
    told = zygote.run(tmp_path, "explain", "on.toml", *still, "--json")
    weights = 4 * reports[0]["parameters"]
    assert json.loads(told.out)["memory_lines"]["parameters"] == weights
    other = zygote.run(tmp_path, "train", "on.toml", "name=third", "model.layers=5", *still)
    assert other.code == 2 and "model.layers=1" in other.err
    both = zygote.run(tmp_path, "explain", "on.toml", *still, "model.layers=5", "model.dim=64")
    assert both.code == 2 and "model.layers = 5" in both.err and "model.dim = 64" in both.err
    bpe = zygote.run(tmp_path, "train", "on.toml", *still, "data.tokenizer=bpe", "data.vocab=290")
    assert bpe.code == 2 and tells(bpe.err, "model.pretrained", "sha256", "other text")
    assert "data.tokenizer=out" in bpe.err
    hub = zygote.run(tmp_path, "train", "on.toml", "model.pretrained=org/model-1b")
    assert hub.code == 2 and "hf download org/model-1b" in hub.err
    shutil.rmtree(tmp_path / "out")
    assert zygote.run(tmp_path, "sample", "second", "--tokens", "3").code == 0


def test_adapters_stand_on_the_weights_that_they_were_trained_with(
    tmp_path: Path, plan_file: Path, zygote: Any
) -> None:
    """Other weights of the same shapes, in the base's folder, are refused by every verb."""
    for name, seed in (("one", 1), ("two", 2)):
        words = [str(plan_file), f"name={name}", f"seed={seed}", "goal.steps=1"]
        assert zygote.run(tmp_path, "train", *words).code == 0
        assert zygote.run(tmp_path, "export", name, "--to", "hf", "--output", name).code == 0
    words = [str(plan_file), "name=tuned", "model.pretrained=one", "--with", "lora"]
    assert zygote.run(tmp_path, "train", *words, "goal.steps=2").code == 0
    before = zygote.run(tmp_path, "eval", "tuned", "--json")
    assert before.code == 0
    kept = (tmp_path / "one" / "model.safetensors").read_bytes()
    shutil.copy(tmp_path / "two" / "model.safetensors", tmp_path / "one" / "model.safetensors")
    tried = [
        ["eval", "tuned"],
        ["sample", "tuned"],
        ["export", "tuned", "--to", "hf", "--output", "x"],
        ["train", *words, "goal.steps=4", "--resume"],
    ]
    for words in tried:
        ended = zygote.run(tmp_path, *words)
        assert ended.code == 2 and tells(ended.err, "'one'", "other weights", "sha256"), words
    (tmp_path / "one" / "model.safetensors").write_bytes(kept)
    assert zygote.run(tmp_path, "eval", "tuned", "--json").out == before.out


def test_a_run_of_another_device_opens_here(tmp_path: Path, plan_file: Path, zygote: Any) -> None:
    assert zygote.run(tmp_path, "train", str(plan_file), "name=far", "goal.steps=2").code == 0
    before = zygote.run(tmp_path, "eval", "far", "--json")
    plan = tmp_path / "runs" / "far" / "plan.toml"
    there = plan.read_text().replace('device = "cpu"', 'device = "cuda"')
    assert there != plan.read_text()
    plan.write_text(there + "\n[techniques.cudnn_attention]\n")
    after = zygote.run(tmp_path, "eval", "far", "--json")
    assert after.code == before.code == 0 and after.out == before.out


def test_a_mask_that_no_family_has_is_not_exported_as_another_model(
    tmp_path: Path, plan_file: Path, zygote: Any
) -> None:
    window = ["--with", "sliding_window", "techniques.sliding_window.window=5", "goal.steps=1"]
    assert zygote.run(tmp_path, "train", str(plan_file), *window, "name=w").code == 0
    told = zygote.run(tmp_path, "export", "w", "--to", "hf", "--output", "out")
    assert told.code == 3 and "window = 5" in told.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["techniques.prefix_lm.tokens=5"], "prefix = True"),
        (["techniques.short_convolution.between=1", "model.layers=2"], "GatedConvolution"),
        (["techniques.mixture_of_experts.experts=2"], "ExpertLayer"),
    ],
    ids=["prefix", "convolution", "experts"],
)
def test_a_model_that_no_family_computes_is_not_exported(
    tmp_path: Path, tiny_plan: Callable[..., Any], more: list[str], why: str
) -> None:
    plan = tiny_plan(*more)
    build = make_build(plan, prepare(plan), World(), torch.device("cpu"))
    build.loader.close()
    with pytest.raises(UnsupportedError, match=why):
        export_run(build, "hf", tmp_path / "out", run=tmp_path, sequence_length=16)
    assert not (tmp_path / "out").exists()
