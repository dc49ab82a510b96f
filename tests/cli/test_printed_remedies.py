"""What an error advises leads to another state: each remedy is run as it is printed."""

import os
import re
from pathlib import Path

import pytest

from headrace.cli.catalogue import catalogue
from headrace.core.errors import ConfigError
from headrace.data.sources import read_documents
from headrace.plan.plan import Plan

WRONG = (
    ("mdel.dim=32",),
    ("optimiser.lr=0.1",),
    ("model.dim=-3",),
    ("model.norm=rms",),
    ("optimizer.weight_decay=1e300",),
    ("batch.tokens=0",),
    ("data.workers=99999",),
    ("name=two words",),
    ("schedule.kind=cos",),
    ("data.vocab=3",),
    ("goal.minutes=-1",),
    ("techniques.muon.lr=5",),
    ("techniques.lora.rank=0",),
    ("techniques.mixture_of_experts.expert_ffn=9223372036854775807",),
    ("mesh.data=0",),
)


def outcome(*overrides: str) -> str:
    """What reading a plan says; nothing where it is well formed."""
    try:
        Plan.read("", catalogue(), overrides=["goal.steps=4", *overrides])
    except ConfigError as error:
        return f"{error.message}\n{error.remedy.text}"
    return ""


@pytest.mark.parametrize("wrong", WRONG, ids=" ".join)
def test_the_remedy_of_a_plan_leads_on(wrong: tuple[str, ...]) -> None:
    message, _, remedy = outcome(*wrong).partition("\n")
    assert message and remedy, message
    assert re.fullmatch(r"[\w.]+(=\S+)?", remedy), remedy
    assert outcome(remedy) != outcome(*wrong)
    if "=" in remedy:  # it is no mistake of the same key's value again
        assert not re.search("input should be|no key", outcome(remedy))


def test_a_pipe_is_told_as_such(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "text.jsonl")
    with pytest.raises(ConfigError) as caught:
        [*read_documents(str(pipe))]
    assert str(pipe) in caught.value.message and "neither a file nor" in caught.value.message
    assert caught.value.remedy.text.startswith(f"cat {pipe} > TEXT.txt, ")
    assert "nearest" not in caught.value.message
