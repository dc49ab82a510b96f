"""A mixture of experts equals the plainest loop over tokens, in value, balance and gradients."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headrace.core.model_config import ModelConfig
from headrace.model.moe import ExpertLayer

B, T, D, FFN = 3, 7, 12, 8


def make(activation: str = "swiglu", **keys: Any) -> ExpertLayer:
    torch.manual_seed(0)
    config = ModelConfig(dim=D, heads=2, vocab=64, activation=activation)  # type: ignore[arg-type]
    how = {"experts": 5, "top_k": 2, "ffn": FFN, "balance": 0.3, "norm_topk": True, **keys}
    layer = ExpertLayer(config, 0, **how)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def expert(layer: ExpertLayer, index: int, x_D: Tensor) -> Tensor:
    """Return what one expert's MLP makes of one token; gate and up rows alternate in groups."""
    down = layer.down[index]
    if layer.first == "up":
        return down @ F.relu(layer.get_parameter("up")[index] @ x_D).square()
    gate, up = layer.get_parameter("gate_up")[index].view(layer.units, 2, -1, D).unbind(1)
    return down @ (F.silu(gate.flatten(0, 1) @ x_D) * (up.flatten(0, 1) @ x_D))


def by_token(layer: ExpertLayer, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """Return (output, balance) from their formulas."""
    E, k = layer.experts, layer.top_k
    probability = (x_BTD @ layer.router.weight.T).softmax(-1)
    rows, balance = [], torch.zeros((), dtype=x_BTD.dtype)
    for row in range(x_BTD.size(0)):
        chosen, done = torch.zeros(E, dtype=x_BTD.dtype), []
        for t in range(x_BTD.size(1)):
            best = probability[row, t].topk(k).indices.tolist()
            weight = probability[row, t, best]
            weight = weight / weight.sum() if layer.norm_topk else weight
            parts = (w * expert(layer, e, x_BTD[row, t]) for w, e in zip(weight, best, strict=True))
            done.append(sum(parts))
            chosen[best] += 1
        rows.append(torch.stack(done))
        length = x_BTD.size(1)
        share = E / (k * length) * chosen
        balance = balance + layer.balance * length * (share * probability[row].mean(0)).sum()
    return torch.stack(rows), balance


def gradients(loss: Tensor, *of: Any) -> list[Tensor]:
    return list(torch.autograd.grad(loss, of, retain_graph=True))


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("top_k", [1, 2, 5])
@pytest.mark.parametrize("norm_topk", [True, False])
def test_equals_a_loop_over_tokens(activation: str, top_k: int, norm_topk: bool) -> None:
    layer = make(activation, top_k=top_k, norm_topk=norm_topk).double()
    x = torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
    weigh = torch.randn(B, T, D, dtype=torch.float64)
    out, balance = layer(x), layer.take_balance()
    right, wanted = by_token(layer, x)
    assert balance is not None
    # The router computes in fp32.
    torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(balance.double(), wanted, rtol=1e-5, atol=1e-5)
    found = gradients((out * weigh).sum() + balance, x, *layer.parameters())
    exact = gradients((right * weigh).sum() + wanted, x, *layer.parameters())
    for a, b in zip(found, exact, strict=True):
        assert b.abs().max() > 0 or top_k == 1
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_no_token_is_dropped_when_all_want_one_expert() -> None:
    layer = make(top_k=1)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[3] = 1.0
    x = torch.rand(B, T, D)  # positive, so that expert 3 wins everywhere
    out = layer(x)
    assert layer.routed_E is not None and layer.routed_E.tolist() == [0, 0, 0, B * T, 0]
    right, _ = by_token(layer, x)
    torch.testing.assert_close(out, right)
    out.square().sum().backward()
    assert layer.down.grad is not None
    assert [bool(g.abs().sum() > 0) for g in layer.down.grad] == [False, False, False, True, False]


def test_balance_is_least_when_even_and_adds_up_over_rows() -> None:
    layer = make(balance=1.0)
    with torch.no_grad():
        layer.router.weight.zero_()  # even probabilities, whatever is chosen
    layer(torch.randn(B, T, D))
    even = layer.take_balance()
    assert even is not None
    torch.testing.assert_close(even, torch.tensor(float(B * T)))
    layer = make(balance=1.0)
    x = torch.randn(B, T, D)
    parts = []
    for piece in (x, *x.split(1)):
        layer(piece)
        parts.append(layer.take_balance())
    torch.testing.assert_close(parts[0], sum(parts[1:]))


def test_balance_is_handed_out_once_and_only_for_training() -> None:
    layer = make()
    layer(torch.randn(B, T, D))
    assert layer.take_balance() is not None
    assert layer.take_balance() is None
    with torch.no_grad():
        layer(torch.randn(B, T, D))
    assert layer.take_balance() is None


@pytest.mark.parametrize(
    "compiled",
    [False, pytest.param(True, marks=pytest.mark.slow)],  # compiled, test_mixture_of_experts is
    ids=["eager", "compiled"],
)
def test_recomputation_keeps_nothing_and_counts_once(compiled: bool) -> None:
    layer, x = make(), torch.randn(B, T, D, requires_grad=True)

    def again(x_BTD: Tensor) -> Tensor:
        return checkpoint(layer, x_BTD, use_reentrant=False)  # type: ignore[return-value]

    seen = []
    for forward in (layer, again):
        run: Any = forward
        if compiled:
            torch.compiler.reset()
            run = torch.compile(forward, backend="aot_eager", fullgraph=True)
        with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
            out = run(x)
            balance = layer.take_balance()
            assert balance is not None
            found = torch.autograd.grad(out.square().sum() + balance, [x, *layer.parameters()])
        assert layer.take_balance() is None, "the backward pass kept a balance loss, and its graph"
        seen.append([out, balance, *found])
    for a, b in zip(*seen, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_router_is_in_fp32_under_autocast() -> None:
    layer, x = make(), torch.randn(B, T, D).bfloat16().float()
    choices = []
    for low in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            out = layer(x)
        assert out.dtype == (torch.bfloat16 if low else torch.float32)
        balance = layer.take_balance()
        assert balance is not None and balance.dtype == torch.float32
        choices.append(balance)
    assert choices[0] == choices[1]


def test_slices_of_the_hidden_features_add_up() -> None:
    """As tensor parallelism cuts it: outputs and the router's gradients are partial sums."""
    whole, x = make(), torch.randn(B, T, D)
    weigh = torch.randn(B, T, D)
    right = whole(x)
    (router,) = gradients((right * weigh).sum(), whole.router.weight)
    parts, routers = [], []
    for rank in range(2):
        part = make()
        for table in (part.column_parameters, part.row_parameters):
            for name, dim in table.items():
                cut = whole.get_parameter(name).detach().chunk(2, dim)[rank]
                part.register_parameter(name, torch.nn.Parameter(cut.clone()))
        parts.append(part(x))
        routers += gradients((parts[-1] * weigh).sum(), part.router.weight)
    torch.testing.assert_close(sum(parts), right)
    torch.testing.assert_close(sum(routers), router, rtol=1e-4, atol=1e-5)
