"""What the gated delta rule does beside the sum: it overwrites, solves in fp32 and compiles."""

import torch
from test_linear_attention_chunks import delta_inputs, documents

from headrace.kernels.gated_delta import chunked, recurrent


def test_the_recurrence_overwrites_and_a_sum_does_not() -> None:
    """At full strength and without decay a key gives back the last value written under it."""
    _, k, v, g, strength = (t.detach() for t in delta_inputs(2))
    k[:, 1] = k[:, 0]
    out, _ = recurrent(k[:, :, :, None], k, v, torch.zeros_like(g), torch.ones_like(strength))
    torch.testing.assert_close(out[:, 1, :, 0], v[:, 1])


def test_repeated_keys_over_a_long_row() -> None:
    """Every key is the same at full strength, with hardly any decay: the triangle's worst."""
    q, k, v, g, strength = (t.detach().float() for t in delta_inputs(256))
    k = k[:, :1].expand_as(k)
    given = q, k, v, g * 1e-3, torch.ones_like(strength)
    right, _ = recurrent(*(t.double() for t in given))
    found, _ = chunked(*given, chunk=64)
    torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-4)


def test_autocast_leaves_it_in_fp32() -> None:
    """Its results and its gradients are what fp32 gives for the same numbers, rounded once."""
    given = [t.detach().bfloat16().requires_grad_() for t in delta_inputs(7)]
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
    given = [t.detach().float().requires_grad_() for t in delta_inputs(4)]
    torch.compiler.reset()
    seen = []
    for run in (chunked, torch.compile(chunked, backend="aot_eager", fullgraph=True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=run is not chunked):
            mixed, state = run(*given, documents(4), chunk=2)
        loss = mixed.square().sum() + state.sum()
        seen.append([mixed, state, *torch.autograd.grad(loss, given)])
    for n, (a, b) in enumerate(zip(*seen, strict=True)):
        assert (a - b).norm() <= (1e-6 if n < 2 else 2e-2) * b.norm()
