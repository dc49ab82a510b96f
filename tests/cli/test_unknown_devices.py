"""Verbs that need the rates of a device of which nothing is known yet."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import probes

CPU = torch.device("cpu")
LONGER = ("goal.steps=40", "eval.every_steps=100", "checkpoint.every_steps=0")
"""Steps of which a doctor forecasts something."""
TOLD = "nothing is known of this processor yet: it is measured now, once"


@pytest.fixture
def new_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder in which nothing is kept."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_plan_measures_an_unknown_processor_once_and_says_so(
    say: Callable[..., tuple[str, str]], tiny_demo: list[str], new_user: Path, quick_probe: None
) -> None:
    out, err = say("plan", *tiny_demo)
    assert err.count(TOLD) == 1 and str(probes.path(CPU)) in err.replace("\n", "")
    assert TOLD not in out and out.startswith("demo on cpu")
    again, silent = say("plan", *tiny_demo)
    assert TOLD not in silent and again.startswith("demo on cpu")


def test_json_stays_one_document(
    call: Callable[..., Any], tiny_demo: list[str], new_user: Path, quick_probe: None
) -> None:
    assert call("plan", *tiny_demo)["rates"] == "probes"


def test_the_doctor_of_a_run_measures_and_its_closing_words_do_not(
    call: Callable[..., Any],
    tiny_demo: list[str],
    new_user: Path,
    quick_probe: None,
    workshop: Path,
) -> None:
    call("train", *tiny_demo, *LONGER, "name=closing")
    assert probes.cached(CPU) is None
    call("doctor", "closing")
    known = probes.cached(CPU)
    assert known is not None and known.source == "probes"

    file = workshop / "runs" / "closing" / "environment.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "cpu": "Cyrix 6x86"}))
    probes.path(CPU).unlink()
    call("doctor", "closing")
    assert probes.cached(CPU) is None, "this processor's rates are not those of the run"


def test_apples_gpu_has_its_memory_foreseen(
    say: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    out, err = say("plan", "small", "device=mps")
    assert out.startswith("small on mps") and "memory: it fits" in out and TOLD not in err
    out, err = say("doctor", "small", "device=mps")
    assert "mps" in out and TOLD not in err
