"""Chunks equal the recurrence, for any chunk, any length, documents and a state before the row."""

import pytest
import torch
from torch import Tensor

from headrace.kernels.linear_attention import between, chunked, recurrent

B, G, P, K, V = 2, 3, 2, 5, 4
LENGTHS = (1, 7, 13, 16)
CHUNKS = (1, 4, 5, 64)


def inputs(T: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(B, T, G, P, K), (B, T, G, K), (B, T, G, V)]
    q, k, v = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    g = (-torch.rand(B, T, G, dtype=torch.float64)).requires_grad_()
    return [q, k, v, g]


def documents(T: int) -> Tensor:
    """Different in each row, with documents of one token."""
    starts = torch.zeros(B, T, dtype=torch.long)
    for row, places in enumerate(((1, 2, 6), (4, 5, 12))):
        starts[row, [p for p in places if p < T]] = 1
    return starts.cumsum(1)


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
@pytest.mark.parametrize("before", [False, True], ids=["fresh", "continued"])
def test_chunks_equal_the_recurrence(T: int, chunk: int, packed: bool, before: bool) -> None:
    given = inputs(T)
    segments = documents(T) if packed else None
    state = torch.randn(B, G, K, V, dtype=torch.float64) if before else None
    found, right = (
        run(*given, segments, state_BGKV=state, **how)  # type: ignore[operator]
        for run, how in ((chunked, {"chunk": chunk}), (recurrent, {}))
    )
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    weigh = [torch.randn_like(t) for t in right]
    gradients = [
        torch.autograd.grad(sum((t * w).sum() for t, w in zip(ts, weigh, strict=True)), given)
        for ts in (found, right)
    ]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_document_does_not_feel_its_neighbours(chunk: int) -> None:
    """Not by one bit, in fp32: not its results, and not the gradients of its inputs."""
    T, cut = 13, 6
    given = [t.detach().float() for t in inputs(T)]
    segments = (torch.arange(T) >= cut).long().expand(B, -1)
    seen = []
    for change in (0.0, 3.0):
        moved = [t.clone() for t in given]
        for t in moved:
            t[:, :cut] = t[:, :cut] * (1 + change)
            t.requires_grad_()
        out, state = chunked(*moved, segments, chunk=chunk)
        loss = out[:, cut:].square().sum() + state.square().sum()
        gradients = torch.autograd.grad(loss, moved)
        assert all((grad[:, :cut] == 0).all() for grad in gradients)
        seen.append([out[:, cut:], state, *(grad[:, cut:] for grad in gradients)])
    assert all(a.equal(b) for a, b in zip(*seen, strict=True))


def test_long_rows_neither_overflow_nor_vanish() -> None:
    """Decays that add up to e^-4000 leave finite numbers and gradients."""
    q, k, v, _ = (t.detach().float() for t in inputs(256))
    g = torch.full((B, 256, G), -16.0, requires_grad=True)
    out, state = chunked(q, k, v, g, chunk=64)
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
