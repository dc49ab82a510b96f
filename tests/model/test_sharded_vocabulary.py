"""The loss over a share of the vocabulary keeps two tensors of logits, and is read once."""

import pytest
import torch
import torch.nn.functional as F

from headrace.model import sharded_vocabulary
from headrace.model.sharded_vocabulary import ShardedVocabulary
from headrace.parallel.tensor import Peers


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> ShardedVocabulary:
    """Return the vocabulary of one rank that holds all of it, whose sums are its own."""
    monkeypatch.setattr(sharded_vocabulary, "all_reduce", lambda x, operation, peers: x)
    return ShardedVocabulary(0, 7, 7, Peers("alone", 1, 0))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_gradient_takes_the_place_of_the_probabilities(
    alone: ShardedVocabulary, smoothing: float
) -> None:
    logits = torch.randn(5, 7, requires_grad=True)
    targets = torch.tensor([1, 2, -100, 0, 6])
    saved: list[torch.Tensor] = []

    def save(x: torch.Tensor) -> torch.Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        loss = alone.nll(logits, targets, smoothing)
    (gradient,) = torch.autograd.grad(loss, logits)
    plain = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
    (wanted,) = torch.autograd.grad(plain, logits)
    torch.testing.assert_close(gradient, wanted)
    places = [x.untyped_storage().data_ptr() for x in saved]
    assert gradient.untyped_storage().data_ptr() in places


def test_a_second_backward_pass_is_refused(alone: ShardedVocabulary) -> None:
    logits = torch.randn(3, 7, requires_grad=True)
    loss = alone.nll(logits, torch.tensor([1, 2, 3]))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
