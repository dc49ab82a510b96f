"""Losses of preference pairs, beside trl's numbers and where likelihoods are extreme."""

import json

import preference_by_trl as trl
import pytest
import torch
from torch import Tensor

from headrace.model.preference_loss import Answers, PreferenceLoss

LOSSES = {
    "dpo": PreferenceLoss("dpo", trl.BETA),
    "cdpo": PreferenceLoss("dpo", trl.BETA, smoothing=trl.SMOOTHING),
    "ipo": PreferenceLoss("ipo", trl.BETA),
    "simpo": PreferenceLoss("simpo", trl.BETA, trl.GAMMA),
    "csimpo": PreferenceLoss("simpo", trl.BETA, trl.GAMMA, trl.SMOOTHING),
    "orpo": PreferenceLoss("orpo", trl.BETA),
}


def _answers(side: int) -> Answers:
    """Return the chosen (0) or rejected (1) answers of all pairs."""
    both = [pair[side] for pair in trl.pairs()]
    sums = [torch.stack([pair[model].sum() for pair in both]) for model in (0, 1)]
    return Answers(sums[0], torch.tensor([float(len(own)) for own, _ in both]), sums[1])


@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_is_trls(name: str) -> None:
    """On twenty random pairs of answers of 1 to 8 tokens."""
    expected = torch.tensor(json.loads(trl.FILE.read_text())[name])
    found = LOSSES[name](_answers(0), _answers(1))
    torch.testing.assert_close(found.loss, expected, rtol=1e-5, atol=1e-5)
    assert expected.std() > 0.01 and len(expected) == 20


@pytest.mark.slow
def test_trl_still_says_so() -> None:
    """The kept numbers are those of the trl that is installed."""
    for name, numbers in trl.by_trl().items():
        assert numbers == pytest.approx(json.loads(trl.FILE.read_text())[name], abs=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_certain_and_hopeless_answers_have_finite_gradients(name: str) -> None:
    """One answer of a pair is certain, and the likelihood of the other underflows."""

    def answers(sums: list[float]) -> tuple[Answers, Tensor]:
        own = torch.tensor(sums, requires_grad=True)
        return Answers(own, torch.tensor([2.0, 2.0]), torch.tensor([-3.0, -3.0])), own

    chosen, own = answers([0.0, -900.0])
    rejected, other = answers([-900.0, 0.0])
    loss = LOSSES[name](chosen, rejected).loss
    loss.sum().backward()
    assert own.grad is not None and other.grad is not None
    assert torch.isfinite(torch.stack([loss.detach(), own.grad, other.grad])).all()
    assert loss[1] > loss[0]
