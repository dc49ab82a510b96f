"""A run that would read its text too often is doubted before its first step."""

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.core.model_config import ModelConfig
from headrace.costs.count import total_parameters
from headrace.costs.passes import most_passes
from headrace.plan.plan import Plan
from headrace.plan.technique import installed
from headrace.train.repeats import FAR, doubt_of_repeats

CONFIG = ModelConfig(dim=32, layers=2, heads=2, vocab=320, context=16)
FRESH = 4096
PLAN = """
[data]
sequence_length = 16
[batch]
tokens = 128
[goal]
{goal}
[schedule]
{kind}
"""


def _build(goal: str, more: str = "") -> Any:
    kind = 'kind = "constant"' if "minutes" in goal else "warmup_steps = 60"
    plan = Plan.read(PLAN.format(goal=goal, kind=kind) + more, installed())
    shards = [SimpleNamespace(tokens=FRESH // 2)] * 2
    return SimpleNamespace(plan=plan, config=CONFIG, prepared=SimpleNamespace(train=shards))


def test_many_passes_of_a_large_model_are_doubted_with_an_end_that_is_none() -> None:
    most = most_passes(total_parameters(CONFIG), FRESH)
    doubt = doubt_of_repeats(_build("steps = 640"))
    assert doubt is not None and doubt.numbers == {"passes": 20.0, "most_passes": most}
    assert "20 times" in doubt.reason and f"after about {most:.2g}" in doubt.reason
    words = doubt.remedy.text.split()
    assert words[0] == f"goal.steps={-(-round(most * FRESH) // 128)}"
    assert words[1] == words[0].replace("goal", "schedule") and words[2].startswith("schedule.warm")
    mended = _build("steps = 640")
    mended.plan = Plan.read(mended.plan.to_toml(), installed(), overrides=words)
    assert doubt_of_repeats(mended) is None


@pytest.mark.parametrize(
    ("goal", "more"),
    [
        (f"tokens = {2 * FRESH - 128}", ""),
        ("minutes = 60", ""),
        ("steps = 640", "[techniques.lora]\nrank = 4\n"),
    ],
    ids=["under two", "by time alone", "adapters"],
)
def test_other_runs_are_not(goal: str, more: str) -> None:
    assert FAR > 1 and doubt_of_repeats(_build(goal, more)) is None
