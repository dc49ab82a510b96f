"""A tokenizer whose library panics is one message: Rust's own is dropped, and nothing else is."""

import json
import os
from pathlib import Path

import pytest

from headrace.core.errors import ConfigError
from headrace.core.native import silent_panics
from headrace.data.tokenizer import Tokenizer, train_tokenizer

ENDLESS = r"(?:(?=(x+x+)+y)x|(?:x+x+)+y|.)"
"""A pattern that tries every way to cut a run of one letter."""


def test_a_pattern_that_never_ends_is_one_message(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train_tokenizer(["one two three four"] * 9, vocab=300).save(tmp_path / "own.json")
    spec = json.loads((tmp_path / "own.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": ENDLESS}, "behavior": "Isolated",
             "invert": False}  # fmt: skip
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, spec["pre_tokenizer"]]}
    with pytest.raises(ConfigError, match="cannot encode"):
        Tokenizer(json.dumps(spec)).refuse_losses()
    said = capfd.readouterr()
    assert said.err == "" and said.out == ""


def test_what_is_no_panic_is_still_said(capfd: pytest.CaptureFixture[str]) -> None:
    with silent_panics():
        os.write(2, b"a warning\n")
        assert capfd.readouterr().err == ""
    assert capfd.readouterr().err == "a warning\n"
    with pytest.raises(ValueError), silent_panics():
        os.write(2, b"more\n")
        raise ValueError
    assert capfd.readouterr().err == "more\n"
