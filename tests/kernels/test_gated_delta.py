"""Chunks of the gated delta rule equal its recurrence, alone, in documents and compiled."""

import pytest
import torch
from test_linear_attention_chunks import B, G, K, V, documents
from test_linear_attention_chunks import inputs as sums_inputs
from torch import Tensor

from headrace.kernels.gated_delta import chunked, recurrent


def inputs(T: int) -> list[Tensor]:
    q, k, v, g = sums_inputs(T)
    k = (k / k.norm(dim=-1, keepdim=True)).detach().requires_grad_()
    strength = torch.rand(B, T, G, dtype=torch.float64, requires_grad=True)
    return [q, k, v, g, strength]


@pytest.mark.parametrize("T", [1, 13])
@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
@pytest.mark.parametrize("before", [False, True], ids=["fresh", "continued"])
def test_chunks_equal_the_recurrence(T: int, chunk: int, packed: bool, before: bool) -> None:
    given = inputs(T)
    segments = documents(T) if packed else None
    state = torch.randn(B, G, K, V, dtype=torch.float64, requires_grad=True) if before else None
    found, right = (
        run(*given, segments, state_BGKV=state, **how)  # type: ignore[operator]
        for run, how in ((chunked, {"chunk": chunk}), (recurrent, {}))
    )
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    weigh = [torch.randn_like(t) for t in right]
    leaves = given if state is None else [*given, state]
    gradients = [
        torch.autograd.grad(sum((t * w).sum() for t, w in zip(ts, weigh, strict=True)), leaves)
        for ts in (found, right)
    ]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_the_recurrence_overwrites_and_a_sum_does_not() -> None:
    """At full strength and without decay a key gives back the last value written under it."""
    _, k, v, g, strength = (t.detach() for t in inputs(2))
    k[:, 1] = k[:, 0]
    out, _ = recurrent(k[:, :, :, None], k, v, torch.zeros_like(g), torch.ones_like(strength))
    torch.testing.assert_close(out[:, 1, :, 0], v[:, 1])


@pytest.mark.parametrize("chunk", [4, 64])
def test_a_document_does_not_feel_its_neighbours(chunk: int) -> None:
    """Not by one bit, in fp32: not its results, and not the gradients of its inputs."""
    T, cut = 13, 6
    given = [t.detach().float() for t in inputs(T)]
    segments = (torch.arange(T) >= cut).long().expand(B, -1)
    seen = []
    for change in (1.0, 0.25):
        moved = [t.clone() for t in given]
        for t in moved:
            t[:, :cut] = t[:, :cut] * change
            t.requires_grad_()
        out, state = chunked(*moved, segments, chunk=chunk)
        loss = out[:, cut:].square().sum() + state.square().sum()
        gradients = torch.autograd.grad(loss, moved)
        assert all((grad[:, :cut] == 0).all() for grad in gradients)
        seen.append([out[:, cut:], state, *(grad[:, cut:] for grad in gradients)])
    assert all(a.equal(b) for a, b in zip(*seen, strict=True))


def test_one_token_at_a_time_from_a_state() -> None:
    T = 9
    given = [t.detach().float() for t in inputs(T)]
    whole, end = chunked(*given, chunk=4)
    state, out = None, []
    for t in range(T):
        mixed, state = chunked(*(x[:, t : t + 1] for x in given), chunk=4, state_BGKV=state)
        out.append(mixed)
    torch.testing.assert_close(torch.cat(out, 1), whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, end, rtol=1e-5, atol=1e-6)


def test_repeated_keys_over_a_long_row() -> None:
    """The triangle's worst: every key the same, full strength, hardly any decay."""
    q, k, v, g, strength = (t.detach().float() for t in inputs(256))
    k = k[:, :1].expand_as(k)
    given = q, k, v, g * 1e-3, torch.ones_like(strength)
    right, _ = recurrent(*(t.double() for t in given))
    found, _ = chunked(*given, chunk=64)
    torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-4)


def test_autocast_leaves_it_in_fp32() -> None:
    """Its results and its gradients are what fp32 gives for the same numbers, rounded once."""
    given = [t.detach().bfloat16().requires_grad_() for t in inputs(7)]
    seen = []
    for low in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            mixed, state = chunked(*given, chunk=4)
        assert mixed.dtype == torch.bfloat16 and state.dtype == torch.float32
        loss = mixed.float().square().sum() + state.sum()
        seen.append([mixed, state, *torch.autograd.grad(loss, given)])
    assert all(a.equal(b) for a, b in zip(*seen, strict=True))


def test_a_compiler_takes_it_in_one_graph_under_autocast() -> None:
    """Its results are those of fp32; its gradients have factors in bf16, see the essay."""
    given = [t.detach().float().requires_grad_() for t in inputs(4)]
    torch.compiler.reset()
    seen = []
    for run in (chunked, torch.compile(chunked, backend="aot_eager", fullgraph=True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=run is not chunked):
            mixed, state = run(*given, documents(4), chunk=2)
        loss = mixed.square().sum() + state.sum()
        seen.append([mixed, state, *torch.autograd.grad(loss, given)])
    for n, (a, b) in enumerate(zip(*seen, strict=True)):
        assert (a - b).norm() <= (1e-6 if n < 2 else 2e-2) * b.norm()
