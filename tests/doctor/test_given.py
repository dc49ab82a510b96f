"""Faults that are planted into a fine-tuning are found, each with a command that mends it."""

import hashlib
import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.data.chat.template import CHATML_TEXT
from headrace.doctor.findings import Kind
from headrace.doctor.observation import Observation
from headrace.doctor.rules import faults
from headrace.export.start import beginning
from headrace.model.lora import LoraLinear
from headrace.plan.symptoms import names
from headrace.plan.technique import installed

STEPS = ("goal.steps=12", "eval.every_steps=6", "schedule.warmup_steps=0", "data.validation=0.2")
FINDINGS = ("no gradient moved blocks.0.mlp.down", "for lora 0.0002 is usual", "The model forgets")
"""Words of a planted fault's finding."""
Tune = Callable[..., list[dict[str, Any]]]
Call = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where runs are."""
    return tmp_path_factory.mktemp("given")


@pytest.fixture(scope="module")
def call(folder: Path) -> Call:
    """Run `headrace ARGV --json` in the folder: return its JSON value, or what it noted."""

    def run(*words: str, noted: bool = False) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            ended = CliRunner().invoke(app, [*words, "--json"], prog_name="headrace")
        assert ended.exit_code == 0, ended.output
        return ended.stderr if noted else json.loads(ended.stdout)

    return run


@pytest.fixture(scope="module")
def tune(folder: Path, call: Call, corpus: Path) -> Tune:
    """Return what fine-tunes a tiny run, and gives the doctor's findings of what came of it."""
    call(
        *("train", "demo", "device=cpu", f"data.sources={corpus}", "name=base"),
        *("model.dim=16", "model.layers=1", "model.heads=2", "model.ffn=32", "data.vocab=300"),
        *("data.sequence_length=16", "batch.tokens=128", "goal.steps=60", "schedule.steps=60"),
        *("eval.tokens=2048", "checkpoint.every_steps=60"),
    )

    def run(
        name: str, *words: str, model: str = "base", mends: bool = False
    ) -> list[dict[str, Any]]:
        texts = () if model != "base" else (str(corpus),)
        call("finetune", model, *texts, *words, f"name={name}", *STEPS)
        found = call("doctor", name)
        if mends:  # the remedy to try first is a command that works
            mended = shlex.split(found[0]["first"]["command"])[1:]
            mended = call(*mended, "goal.steps=1", f"name={name}-mended")
            assert mended["status"] == "done"
        return found

    return run


@pytest.fixture(scope="module")
def general(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A text of which no document is trained on."""
    file = tmp_path_factory.mktemp("general") / "general.txt"
    file.write_text("the gate of the mill was open when the river rose over the weir. " * 40)
    return str(file)


def told(findings: list[dict[str, Any]], words: str) -> list[dict[str, Any]]:
    """Return the findings that say so."""
    return [one for one in findings if words in one["sentence"] + one["evidence"]]


def test_a_healthy_fine_tuning_shows_none_of_them(tune: Tune, general: str) -> None:
    found = tune("healthy", "--with", "lora", "batch.tokens=128", f"eval.general={general}")
    assert not [words for words in FINDINGS if told(found, words)]


def test_adapters_without_a_gradient_and_a_rate_that_is_too_high(
    tune: Tune, monkeypatch: pytest.MonkeyPatch, general: str
) -> None:
    whole = LoraLinear.correction

    def cut(self: LoraLinear, given: Tensor) -> Tensor:
        """Return the correction, of wide inputs without its gradient."""
        made = whole(self, given)
        return made.detach() + 0 * self.lora_b.sum() if self.in_features == 32 else made

    monkeypatch.setattr(LoraLinear, "correction", cut)
    words = ("--with", "lora", "batch.tokens=128", "optimizer.lr=1", f"eval.general={general}")
    found = tune("ill", *words, mends=True)
    (idle,) = told(found, "no gradient moved blocks.0.mlp.down")
    assert idle["bottleneck"] == "silent no-op" and "1 of " in idle["sentence"]
    targets, off = idle["remedies"][:2]
    (kept,) = targets["change"]
    assert kept.startswith("techniques.lora.targets=") and "qkv" in kept and "down" not in kept
    assert off["change"] == ["-lora"] and targets["equality"] == "learning"
    (high,) = told(found, "for lora 0.0002 is usual")
    assert high["bottleneck"] == "instability"
    assert "optimizer.lr=0.0002" in high["remedies"][0]["change"]
    (lost,) = told(found, "The model forgets")
    assert lost["bottleneck"] == "forgetting" and general in lost["evidence"]
    assert ["optimizer.lr=0.33"] in [one["change"] for one in lost["remedies"]]


@pytest.mark.slow
def test_another_template_than_the_tokenizers_is_told_everywhere(
    tune: Tune, call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(call("export", "base", "--to", "hf", "--output", str(folder / "model"))["folder"])
    own = model / "chat_template.jinja"
    own.write_text(CHATML_TEXT + "{# of its own #}")
    talks = folder / "talks.jsonl"
    rows = [{"prompt": f"Where is {n}?", "completion": "By the river."} for n in range(40)]
    talks.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = (str(talks), "data.sequence_length=64", "batch.tokens=256", "--with", "lora")
    found = tune("other", *words, "data.chat.template=chatml", model=str(model))
    (told_of,) = told(found, "another chat template")
    digests = [hashlib.sha256(one.encode()).hexdigest() for one in (CHATML_TEXT, own.read_text())]
    assert all(digest[:12] in told_of["evidence"] for digest in digests)
    assert told_of["remedies"][0]["change"] == ["data.chat.template="]
    mended = shlex.split(told_of["remedies"][0]["command"])[1:]
    assert call(*mended, "goal.steps=1", "name=own")["status"] == "done"
    assert not told(call("doctor", "own"), "another chat template")
    for words in (
        ("chat", "other", "--prompt", "a", "--tokens", "1"),
        ("export", "other", "--to", "peft"),
    ):
        assert digests[1][:12] in call(*words, noted=True)
    written = folder / "runs" / "other" / "peft" / "chat_template.jinja"
    assert written.read_text() == CHATML_TEXT
    monkeypatch.chdir(folder)
    begun = beginning(Path("other"), installed(), (lines := list[str]()).append).weights
    assert any(digests[1][:12] in line for line in lines)
    assert (begun / "chat_template.jinja").read_text() == CHATML_TEXT, (
        "a run that begins with its weights talks as it does"
    )


@pytest.mark.slow
def test_padding_beside_masked_prompts_is_waste(tune: Tune, folder: Path) -> None:
    """Prompts are read to be answered; rows that whole conversations do not fill are waste."""
    answer = "the mill stands by the river and grinds"
    rows = [{"prompt": f"river {n} " * 6, "completion": answer} for n in range(10, 50)]
    talks = folder / "long.jsonl"
    talks.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = (str(talks), "data.sequence_length=96", "batch.tokens=384", "--with", "lora")
    packed = tune("packed", *words, model="runs/base")
    assert not told(packed, "count in no loss")
    chat = json.loads((folder / "runs" / "packed" / "report.json").read_text())["data"]["chat"]
    row = 3 * chat["tokens"] // (2 * len(rows))  # holds one conversation and half of another
    words = (str(talks), f"data.sequence_length={row}", f"batch.tokens={4 * row}", *words[3:])
    words = (*words, "--with", "best_fit_packing", "--without", "document_packing")
    (waste,) = told(tune("padded", *words, model="runs/base"), "count in no loss")
    assert waste["bottleneck"] == "wasted tokens" and waste["share"] > 0.1
    assert "of all tokens have a target that counts" in waste["evidence"]
    assert "+document_packing" in waste["remedies"][0]["change"]


def test_all_weights_that_forget_are_told_of_adapters() -> None:
    """The techniques that are a remedy are known by their symptoms alone."""
    known = installed()
    named = [n for n, t in known.techniques.items() if names(t.symptoms, "forgetting")]
    assert named == ["dora", "lora", "qlora"]


def test_each_finding_at_its_threshold() -> None:
    """A loss that fell first, a general text that is as hard as it was, and the like are none."""
    even = Observation(step_s=(0.1,) * 16, before_nats=2.0, given={"usual_lr": 2e-4})
    one = {"lora": {"parts": ["blocks.0.mlp.down"], "others": ["blocks.0.mlp.up"]}}
    cases: list[tuple[Kind, dict[str, Any], bool]] = [
        (Kind.ABOVE_THE_START, {"val_nats": (2.05, 3.0)}, True),
        (Kind.ABOVE_THE_START, {"val_nats": (2.03, 3.0)}, False),
        (Kind.ABOVE_THE_START, {"val_nats": (3.0,), "given": {"usual_lr": None}}, False),
        (Kind.ABOVE_THE_START, {"val_nats": (3.0,), "given": {}}, False),
        (Kind.FORGOT, {"general": {"before_nats": 2.0, "after_nats": 2.05}}, True),
        (Kind.FORGOT, {"general": {"before_nats": 2.0, "after_nats": 2.03}}, False),
        (Kind.FORGOT, {"general": {"before_nats": 2.0, "after_nats": None}}, False),
        (Kind.UNREACHED, {"unreached": one}, True),
        (Kind.UNREACHED, {"unreached": {}}, False),
        (Kind.WASTED_TOKENS, {"useful_share": 0.9, "counted_share": 0.2}, True),
        (Kind.WASTED_TOKENS, {"useful_share": 0.97, "counted_share": 0.2}, False),
        (Kind.OTHER_TEMPLATE, {"templates": ("1", "2")}, True),
        (Kind.OTHER_TEMPLATE, {"templates": None}, False),
    ]
    for kind, changes, named in cases:
        found = [one.kind for one in faults(replace(even, **changes))]
        assert (kind in found) is named, (kind, changes)


def test_frozen_weights_in_fp32_beside_bf16_arithmetic() -> None:
    even = Observation(step_s=(0.1,) * 16, device="cuda", capacity_bytes=2.0**36)
    for held, device, named in (
        (2**33, "cuda", True),
        (2**31, "cuda", False),
        (2**33, "cpu", False),
    ):
        seen = replace(even, device=device, given={"fp32_bytes": held, "usual_lr": None})
        found = [one for one in faults(seen) if one.kind is Kind.WIDE_BASE]
        assert bool(found) is named
    assert "bf16_parameters" in [
        name for name, t in installed().techniques.items() if names(t.symptoms, "memory bandwidth")
    ]
