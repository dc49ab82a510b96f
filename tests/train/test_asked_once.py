"""Whether a technique can run is asked once for a run, and asked anew of another plan."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from headrace.assemble.build import make_build
from headrace.assemble.context import check_supported, make_context
from headrace.core.progress import Progress
from headrace.data.ingest import prepare
from headrace.parallel.world import World
from headrace.plan.plan import Plan
from headrace.plan.technique import Context, Supported
from headrace.techniques.loss.label_smoothing import LabelSmoothing
from headrace.techniques.loss.z_loss import ZLoss
from headrace.train import train

ON = ("techniques.z_loss={}", "techniques.label_smoothing={}")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each of two techniques was asked, in a counter that goes on."""
    counter: Counter[str] = Counter()

    def count(technique: ZLoss | LabelSmoothing, context: Context) -> Supported:
        counter[technique.name()] += 1
        return Supported()

    for kind in (ZLoss, LabelSmoothing):
        monkeypatch.setattr(kind, "supports", count)
    return counter


def test_a_run_asks_each_technique_once(
    tiny_plan: Callable[..., Plan], asked: Counter[str]
) -> None:
    train.run(tiny_plan(*ON, "goal.steps=1", "guard=false"), progress=Progress())
    assert asked == {"z_loss": 1, "label_smoothing": 1}


def test_a_build_asks_of_a_plan_that_was_not_checked(
    tiny_plan: Callable[..., Plan], asked: Counter[str]
) -> None:
    cpu, plan = torch.device("cpu"), tiny_plan(*ON)
    other = tiny_plan(ON[0])
    checked = check_supported([*plan.techniques.values()], make_context(plan, cpu))
    make_build(other, prepare(other), World(), cpu, checked=checked)
    assert asked == {"z_loss": 2, "label_smoothing": 1}
