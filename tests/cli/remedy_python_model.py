"""Errors of models and reports that only a caller in Python meets."""

import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from remedy_python import Call
from shell import run

from headrace.assemble.filled import evidence_after
from headrace.core.errors import ConfigError
from headrace.core.model_config import ModelConfig
from headrace.model.backend_needs import check_plain
from headrace.model.decoder import Decoder, baseline_parts
from headrace.model.mask import MaskSpec
from headrace.plan.technique import Evidence
from headrace.report.run_files import read_run

CONFIG = ModelConfig(vocab=64, dim=16, layers=1, heads=2, ffn=32)


class Plain:
    """A backend that knows no other mask than most do."""

    def prepare(self, *_: Any) -> None:
        """Accept any mask, for there is nothing to prepare."""

    def __call__(self, q: Any, k: Any, v: Any, mask: Any) -> Any:
        """Mix nothing."""
        return v


def strange_mask(_: pytest.MonkeyPatch) -> None:
    """Give a backend a mask with a prefix, which it would not compute."""
    Decoder(CONFIG, replace(baseline_parts(CONFIG), attend=Plain()), MaskSpec(prefix=True))


def without_backend(remedy: str) -> None:
    """Leave the backend out, so that the plain one computes the mask."""
    owner = Plain.__module__.rpartition(".")[2]
    assert remedy.startswith(f"--without {owner}")
    Decoder(CONFIG, baseline_parts(CONFIG), MaskSpec(prefix=True))


def strange_slopes(_: pytest.MonkeyPatch) -> None:
    """Give a model of two heads the slopes of three."""
    Decoder(CONFIG, baseline_parts(CONFIG), MaskSpec(alibi=3))


def without_slopes(remedy: str) -> None:
    """Leave the slopes out."""
    assert remedy == "--without alibi"
    Decoder(CONFIG, baseline_parts(CONFIG), MaskSpec())


def other_kernel(remedy: str) -> None:
    """Plan each of the other kernels, for a GPU that has them."""
    for way in remedy.split(" or "):
        words = ["plan", "demo", "--device-name", "H200", "--with", "sliding_window"]
        kernel = way.rpartition(" ")[2]
        told = run([*words, "data.sequence_length=2048", "--with", kernel])
        assert not told.code, told


def reads(remedy: str) -> None:
    """Read the folder that the remedy names: it is a run, whose report is not complete."""
    words = shlex.split(remedy.replace("NAME", "demo"))
    assert words[:2] == ["headrace", "report"] and len(words) == 3
    with pytest.raises(ConfigError, match="is not a complete report"):
        read_run(Path(words[2]))


def read(folder: str) -> Any:
    """Read a folder as a run, beside one that is."""

    def fails(_: pytest.MonkeyPatch) -> None:
        Path("runs/demo").mkdir(parents=True)
        Path("runs/demo/report.json").write_text("{}")
        Path("empty").mkdir()
        read_run(Path(folder))

    return fails


def build() -> Any:
    """What is asked of a run for the evidence of its techniques."""
    technique = SimpleNamespace(
        name=lambda: "z_loss", active=lambda build: Evidence(active=True, detail="it had a loss")
    )
    return SimpleNamespace(techniques=[technique], world=SimpleNamespace(gather=lambda one: [one]))


def no_target(_: pytest.MonkeyPatch) -> None:
    """Look for evidence after a last step that counted no target."""
    evidence_after(build(), [0.0, 0.0, 1.0, 0.0], last=True)


def with_targets(remedy: str) -> None:
    """Take steps that count targets."""
    assert remedy.startswith("data.sources=")
    assert evidence_after(build(), [5.0, 1.0, 1.0, 8.0], last=True) == {"z_loss": "it had a loss"}


MODEL = {
    "model/attention:check_mask#1": Call(strange_mask, without_backend),
    "model/attention:check_mask#2": Call(strange_slopes, without_slopes),
    "model/backend_needs:check_plain#1": Call(
        lambda patch: check_plain(MaskSpec(window=4)), other_kernel
    ),
    "report/run_files:_check_is_run#1": Call(read("runs/demo/report.json"), reads),
    "report/run_files:_check_is_run#2": Call(read("runs/dmeo"), reads),
    "report/run_files:_check_is_run#5": Call(read("empty"), reads),
    "assemble/filled:evidence_after#1": Call(no_target, with_targets),
}
"""Each error by its site."""
