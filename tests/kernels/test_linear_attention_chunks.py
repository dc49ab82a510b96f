"""This module compares chunks of both rules of linear attention with the recurrence."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from headrace.kernels import gated_delta, linear_attention
from headrace.kernels.linear_attention import between

B, G, P, K, V = 2, 3, 2, 5, 4
LENGTHS = (1, 7, 13, 16)
CHUNKS = (1, 4, 5, 64)


def sum_inputs(T: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(B, T, G, P, K), (B, T, G, K), (B, T, G, V)]
    q, k, v = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    g = (-torch.rand(B, T, G, dtype=torch.float64)).requires_grad_()
    return [q, k, v, g]


def delta_inputs(T: int) -> list[Tensor]:
    q, k, v, g = sum_inputs(T)
    k = (k / k.norm(dim=-1, keepdim=True)).detach().requires_grad_()
    strength = torch.rand(B, T, G, dtype=torch.float64, requires_grad=True)
    return [q, k, v, g, strength]


class Rule(NamedTuple):
    """A rule in chunks and token by token, and what it takes."""

    chunked: Callable[..., Any]
    recurrent: Callable[..., Any]
    inputs: Callable[[int], list[Tensor]]


RULES = {
    "sum": Rule(linear_attention.chunked, linear_attention.recurrent, sum_inputs),
    "gated_delta": Rule(gated_delta.chunked, gated_delta.recurrent, delta_inputs),
}
EACH = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def documents(T: int) -> Tensor:
    """Return documents' indices that differ by row, with documents of one token."""
    starts = torch.zeros(B, T, dtype=torch.long)
    for row, places in enumerate(((1, 2, 6), (4, 5, 12))):
        starts[row, [p for p in places if p < T]] = 1
    return starts.cumsum(1)


@EACH
@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
@pytest.mark.parametrize("before", [False, True], ids=["fresh", "continued"])
def test_chunks_equal_the_recurrence(
    rule: Rule, T: int, chunk: int, packed: bool, before: bool
) -> None:
    given = rule.inputs(T)
    segments = documents(T) if packed else None
    state = torch.randn(B, G, K, V, dtype=torch.float64, requires_grad=True) if before else None
    found = rule.chunked(*given, segments, chunk=chunk, state_BGKV=state)
    right = rule.recurrent(*given, segments, state_BGKV=state)
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    grads = [torch.randn_like(t) for t in right]
    leaves = given if state is None else [*given, state]
    gradients = [torch.autograd.grad(results, leaves, grads) for results in (found, right)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@EACH
@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_document_does_not_feel_its_neighbours(rule: Rule, chunk: int) -> None:
    """Its results and the gradients of its inputs do not move by one bit, in fp32."""
    T, cut = 13, 6
    given = [t.detach().float() for t in rule.inputs(T)]
    segments = (torch.arange(T) >= cut).long().expand(B, -1)
    seen = []
    for factor in (1.0, 0.25):
        moved = [t.clone() for t in given]
        for t in moved:
            t[:, :cut] = t[:, :cut] * factor
            t.requires_grad_()
        out, state = rule.chunked(*moved, segments, chunk=chunk)
        loss = out[:, cut:].square().sum() + state.square().sum()
        gradients = torch.autograd.grad(loss, moved)
        assert all((grad[:, :cut] == 0).all() for grad in gradients)
        seen.append([out[:, cut:], state, *(grad[:, cut:] for grad in gradients)])
    assert all(a.equal(b) for a, b in zip(*seen, strict=True))


@EACH
def test_one_token_at_a_time_from_a_state(rule: Rule) -> None:
    T = 9
    given = [t.detach().float() for t in rule.inputs(T)]
    whole, end = rule.chunked(*given, chunk=4)
    state, out = None, []
    for t in range(T):
        mixed, state = rule.chunked(*(x[:, t : t + 1] for x in given), chunk=4, state_BGKV=state)
        out.append(mixed)
    torch.testing.assert_close(torch.cat(out, 1), whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, end, rtol=1e-5, atol=1e-6)


def test_long_rows_neither_overflow_nor_vanish() -> None:
    """Numbers and gradients are finite where decays add up to e^-4000."""
    q, k, v, _ = (t.detach().float() for t in sum_inputs(256))
    g = torch.full((B, 256, G), -16.0, requires_grad=True)
    out, state = linear_attention.chunked(q, k, v, g, chunk=64)
    (out.sum() + state.sum()).backward()
    assert out.isfinite().all() and g.grad is not None and g.grad.isfinite().all()
    now = torch.einsum("btgpk,btgk->btgp", q, k)[..., None] * v[:, :, :, None]
    torch.testing.assert_close(out, now, rtol=1e-4, atol=1e-4)


def test_between_is_the_product_of_what_is_kept() -> None:
    g = -torch.rand(6, dtype=torch.float64)
    found = between(g, torch.tensor([0, 0, 0, 1, 1, 2]))
    for i in range(6):
        for j in range(6):
            same = [0, 0, 0, 1, 1, 2][i] == [0, 0, 0, 1, 1, 2][j]
            right = g[j + 1 : i + 1].sum().exp() if j <= i and same else 0.0
            assert found[i, j] == pytest.approx(float(right), rel=1e-12, abs=0)
