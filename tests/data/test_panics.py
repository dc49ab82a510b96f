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
    split = {
        "type": "Split",
        "pattern": {"Regex": ENDLESS},
        "behavior": "Isolated",
        "invert": False,
    }
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, spec["pre_tokenizer"]]}
    with pytest.raises(ConfigError, match="cannot encode"):
        Tokenizer(json.dumps(spec)).refuse_losses()
    said = capfd.readouterr()
    assert said.err == "" and said.out == ""


PARTS = {
    "model": {"continuing_subword_prefix": "##"},
    "normalizer": {"type": "Precompiled", "precompiled_charsmap": ""},
}
"""Parts over which the library panics while it reads the file."""


@pytest.mark.parametrize("part", PARTS)
def test_a_file_that_cannot_be_read_is_one_message(
    part: str, capfd: pytest.CaptureFixture[str]
) -> None:
    spec = json.loads(train_tokenizer(["one two three four"] * 9, vocab=300).text)
    spec[part] = {**(spec[part] or {}), **PARTS[part]}
    with pytest.raises(ConfigError, match=r"is not a tokenizer\.json"):
        Tokenizer(json.dumps(spec))
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
