"""Remedies that a caller in Python is given are carried out, and lead on."""

from pathlib import Path

import pytest
from remedies import recording
from remedy_compress import SPECS
from remedy_finetune import TALKING
from remedy_gguf import GGUF_IN_PYTHON
from remedy_python import PYTHON
from remedy_python_model import MODEL
from remedy_python_techniques import TECHNIQUES
from remedy_quality import QUALITY
from remedy_rates import RATES

from headrace.core.errors import HeadraceError

CALLS = PYTHON | GGUF_IN_PYTHON | TALKING | MODEL | SPECS | TECHNIQUES | RATES | QUALITY


@pytest.mark.parametrize("site", CALLS)
def test_a_remedy_in_python_leads_on(
    site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with recording() as made, monkeypatch.context() as patch, pytest.raises(HeadraceError) as told:
        CALLS[site].fails(patch)
    assert site in [name for name, _ in made], told.value
    assert told.value.remedy.text
    CALLS[site].mends(told.value.remedy.text)
