"""What a run in fp16 leaves is opened by every verb, as that of any other precision."""

from collections.abc import Callable
from typing import Any

import pytest

FP16 = ("model.precision=fp16", "--with", "fp16_loss_scaling", "name=half")


def test_a_run_in_fp16_is_told_resumed_evaluated_sampled_and_exported(
    call: Callable[..., Any], tiny_demo: list[str]
) -> None:
    for more in ([], ["--resume", "goal.steps=9"]):
        report = call("train", *tiny_demo, *FP16, *more)
        assert report["status"] == "done" and report["sample"]["text"]
    best = min(one["bits_per_byte"] for one in report["val"])
    assert call("eval", "half", "--tokens", "512")["bits_per_byte"] == pytest.approx(best, rel=1e-6)
    assert call("sample", "half", "--tokens", "4")["text"]
    assert call("export", "half", "--to", "hf", "--output", "half-exported")["folder"]
