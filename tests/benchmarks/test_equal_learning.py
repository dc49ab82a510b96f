"""The program of equal learning: its plans, what it plants, and what the judge says of that."""

from argparse import Namespace
from pathlib import Path

import equal_learning as program
import pytest
import torch

from headrace.tuner.equality import BRIEF_STEPS
from headrace.tuner.readings import Reading


def losses(off: float) -> Reading:
    """Return a falling training whose second half lies off."""
    falling = [8 * (i + 1) ** -0.1 + off * (i > 8) for i in range(BRIEF_STEPS)]
    return Reading(losses=falling, norms=[1.0] * BRIEF_STEPS)


@pytest.mark.parametrize("shape", ["160m", "330m"])
def test_a_pair_differs_in_the_technique_alone(tmp_path: Path, shape: str) -> None:
    args = Namespace(folder=tmp_path, data=None, steps=1000, set=[])
    base = program.plan_of(shape, 3, "", args)
    assert not {*program.CHANGES} & {*base.techniques} and base.seed == 3
    for name, words in program.CHANGES.items():
        changed = program.plan_of(shape, 3, words, args)
        assert {*changed.techniques} == {*base.techniques, name}
        assert changed.batch == base.batch and changed.schedule == base.schedule


def test_few_bits_are_kept() -> None:
    x = torch.tensor([1.0, 1.0624, 1.3, -3.3, 0.0])
    assert program.rounded(x, 3).tolist() == [1.0, 1.0, 1.25, -3.25, 0.0]
    assert program.rounded(x, 1).tolist() == [1.0, 1.0, 1.5, -3.0, 0.0]


@pytest.mark.parametrize(("kind", "size"), program.PLANTED)
def test_an_error_is_planted(kind: str, size: float) -> None:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([torch.nn.Linear(32, 32)])})
    linear = model["blocks"][0]  # type: ignore[index]
    x = torch.randn(4, 32)
    linear(x).square().sum().backward()
    right = linear.weight.grad.clone()
    linear.weight.grad = None
    program.plant(Namespace(model=model), kind, size)  # type: ignore[arg-type]
    linear(x).square().sum().backward()
    assert linear.weight.grad is not None and not torch.equal(linear.weight.grad, right)


def test_the_judge_sees_so_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.tuner.equality._other_numbers", lambda *given: "")
    assert program.verdict_after(BRIEF_STEPS, losses(0.0), losses(1e-4)) == "not shown"  # no norms
    assert program.verdict_after(BRIEF_STEPS, losses(0.0), losses(0.0)) == "same"
