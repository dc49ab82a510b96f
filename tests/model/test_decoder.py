"""Test the whole decoder: loss, gradients of every combination, accumulation, packing, cache."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.model.attention import KVCache
from headrace.model.decoder import Decoder
from headrace.model.head import IGNORED, cross_entropy
from headrace.model.mask import MaskSpec, Rows

B, T = 3, 11


def plain_rows(batch: int = B, start: int = 0, end: int = T) -> Rows:
    return Rows(torch.arange(start, end).expand(batch, -1))


def batch(vocab: int = 61) -> tuple[Tensor, Tensor]:
    """Ids and targets; a third of the targets is ignored, unevenly over rows."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(vocab, (B, T + 1), generator=generator)
    targets = ids[:, 1:].clone()
    targets[0, :9] = IGNORED
    targets[1, 4] = IGNORED
    return ids[:, :-1], targets


def loss_of(model: Decoder, ids: Tensor, targets: Tensor, rows: Rows, scale: float = 1.0) -> Tensor:
    return model(ids, targets, rows, objective=cross_entropy, scale=torch.tensor(scale))


def gradients(model: Decoder) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad
    return found


def test_loss_is_the_scaled_sum_of_cross_entropy(make_decoder: Callable[..., Decoder]) -> None:
    model, (ids, targets) = make_decoder(), batch()
    logits = model.logits(ids, plain_rows())
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    found = loss_of(model, ids, targets, plain_rows(), scale=0.25)
    torch.testing.assert_close(found, expected * 0.25, rtol=1e-6, atol=0)


def test_a_batch_without_targets_costs_nothing(make_decoder: Callable[..., Decoder]) -> None:
    model, (ids, targets) = make_decoder(), batch()
    loss = loss_of(model, ids, torch.full_like(targets, IGNORED), plain_rows())
    loss.backward()
    assert loss.item() == 0
    assert all(torch.count_nonzero(g) == 0 for g in gradients(model).values())


@pytest.mark.parametrize("activation", ["swiglu", "gelu", "gelu_tanh", "relu2"])
@pytest.mark.parametrize("position", ["rope", "learned", "none"])
def test_every_combination_trains_every_parameter(
    make_decoder: Callable[..., Decoder], activation: str, position: str
) -> None:
    flags = (False, True)
    for norm, tied, bias, qk_norm, kv in product(
        ("rms_norm", "layer_norm"), flags, flags, flags, (1, 3)
    ):
        keys: dict[str, Any] = {
            "activation": activation,
            "position": position,
            "norm": norm,
            "qk_norm": qk_norm,
            "tied_embeddings": tied,
            "bias": bias,
            "kv_heads": kv,
            "heads": 3,
            "head_dim": 10,
            "dim": 14,
            "ffn": 9,
            "vocab": 61,
        }
        model, (ids, targets) = make_decoder(**keys), batch()
        loss_of(model, ids, targets, plain_rows(), scale=0.1).backward()
        for name, gradient in gradients(model).items():
            assert torch.isfinite(gradient).all(), (keys, name)
            assert gradient.abs().max() > 0, (keys, name)


@pytest.mark.parametrize("tied", [False, True])
def test_accumulation_gives_the_gradient_of_the_whole_batch(
    make_decoder: Callable[..., Decoder], tied: bool
) -> None:
    whole, parts = (make_decoder(tied_embeddings=tied, qk_norm=True) for _ in range(2))
    ids, targets = batch()
    scale = 1 / int((targets != IGNORED).sum())
    loss = loss_of(whole, ids, targets, plain_rows(), scale)
    loss.backward()
    total = torch.zeros(())
    for row in range(B):
        part = loss_of(parts, ids[row : row + 1], targets[row : row + 1], plain_rows(1), scale)
        part.backward()
        total += part.detach()
    torch.testing.assert_close(total, loss.detach(), rtol=1e-6, atol=0)
    expected = gradients(whole)
    for name, gradient in gradients(parts).items():
        error = (gradient - expected[name]).norm() / expected[name].norm()
        assert error < 1e-6, (name, error)


def test_packed_documents_do_not_leak(make_decoder: Callable[..., Decoder]) -> None:
    model = make_decoder(mask=MaskSpec(document=True))
    ids, _ = batch()
    segments = torch.tensor([[0] * 4 + [1] * 7]).expand(B, -1)
    positions = torch.tensor([[*range(4), *range(7)]]).expand(B, -1)
    packed = model.logits(ids, Rows(positions, segments))
    other = ids.clone()
    other[:, :4] = (other[:, :4] + 1) % 61
    assert torch.equal(model.logits(other, Rows(positions, segments))[:, 4:], packed[:, 4:])
    alone = model.logits(ids[:, 4:], plain_rows(end=7))
    torch.testing.assert_close(packed[:, 4:], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("position", ["rope", "learned", "none"])
def test_a_cache_changes_nothing(make_decoder: Callable[..., Decoder], position: str) -> None:
    model, (ids, _) = make_decoder(position=position, qk_norm=True), batch()
    whole = model.logits(ids, plain_rows())
    cache = KVCache(model.config, B, T, like=whole)
    pieces = [model.logits(ids[:, :6], plain_rows(end=6), cache)]
    for at in range(6, T):
        pieces.append(model.logits(ids[:, at : at + 1], plain_rows(start=at, end=at + 1), cache))
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-5, atol=1e-5)
    assert cache.length == T
