"""Remedies on a run's page: as they were forecast, escaped, and silent where there are none."""

import json
from pathlib import Path

import pytest

from headrace.core.errors import ConfigError
from headrace.doctor.words.answer import SHARE_ENDS
from headrace.report.advice import remedies

REMEDY = {
    "change": ["-slow", "+fast", "batch.micro_sequences=2"],
    "what": "Is <fast>.",
    "gain": {"low": 0.02, "value": 0.04, "high": 0.06, "n": 76},
    "memory_bytes": -(2.0**31),
    "fits": "yes",
    "costs": "time & money",
    "equality": "learning",
    "forecast_from": "ledger",
    "unknown": "",
}
FINDING = {"bottleneck": "launch", "share": 0.1, "sentence": "It waits.", "evidence": "1 of 2 s"}


def test_remedies_are_shown_as_they_were_forecast(tmp_path: Path) -> None:
    unsure = {**REMEDY, "gain": None, "unknown": "seeds tell", "equality": "exact"}
    other = {**FINDING, "sentence": "Nothing to do."}
    (tmp_path / "findings.json").write_text(
        json.dumps([{**FINDING, "remedies": [REMEDY, unsure]}, other])
    )
    page = remedies(tmp_path)
    for text in (
        "batch.micro_sequences=2 --with fast --without slow",
        "+4.0% (+2.0% to +6.0%)",
        "-2.0 GiB",
        "time &amp; money; learns otherwise",
        "Is &lt;fast&gt;.",
        "It waits.",
        "not forecast: seeds tell",
    ):
        assert text in page
    assert "Nothing to do." not in page


def test_of_a_share_both_ends_are_shown_and_no_interval(tmp_path: Path) -> None:
    shared = {**FINDING, "remedies": [{**REMEDY, "forecast_from": "share"}]}
    (tmp_path / "findings.json").write_text(json.dumps([shared]))
    page = remedies(tmp_path)
    assert f"+2.0% to +6.0% ({SHARE_ENDS})" in page
    assert "+4.0%" not in page


def test_a_run_without_them_has_no_section(tmp_path: Path) -> None:
    assert remedies(tmp_path) == ""
    (tmp_path / "findings.json").write_text(json.dumps([FINDING]))
    assert remedies(tmp_path) == ""
    (tmp_path / "findings.json").write_text('[{"remedies"')
    with pytest.raises(ConfigError, match="damaged"):
        remedies(tmp_path)
