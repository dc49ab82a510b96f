"""Compare DoRA with its plain definition, and look at it in a run."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.assemble.filled import check_active
from headrace.assemble.sockets import Build
from headrace.data.loader import Micro
from headrace.model.lora import DoraLinear
from headrace.train.train import step

Make = Callable[..., Build]
Batch = Callable[[Build], list[Micro]]


def matrix(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bias", [False, True])
def test_it_is_its_definition_and_its_merged_weight(bias: bool) -> None:
    """Compare result and gradients with those of m (W + s B A) / |W + s B A|, lengths detached."""
    linear = DoraLinear(nn.Linear(70, 33, bias=bias), rank=3, scale=2.0)
    with torch.no_grad():
        for number, parameter in enumerate(linear.parameters()):
            parameter.copy_(matrix(*parameter.shape, seed=number))
    given = {n: p.detach().clone().requires_grad_() for n, p in linear.named_parameters()}
    x, y = (matrix(5, 70, seed=9).requires_grad_() for _ in range(2))
    turned = given["weight"] + 2.0 * given["lora_b"] @ given["lora_a"]
    lengths = torch.linalg.vector_norm(turned.detach(), dim=1)
    whole = given["lora_m"][:, None] / lengths[:, None] * turned
    found, right = linear(x), F.linear(y, whole, given.get("bias"))
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(linear.merged(), whole.detach(), rtol=1e-5, atol=1e-5)
    found.square().sum().backward()
    right.square().sum().backward()
    for mine, its in (
        (x.grad, y.grad),
        *((p.grad, given[n].grad) for n, p in linear.named_parameters()),
    ):
        assert mine is not None and its is not None
        assert (mine - its).abs().max() <= 1e-5 * its.abs().max()


def test_a_run_starts_at_the_model_and_lengths_learn(make_tiny: Make, batch: Batch) -> None:
    baseline, build = make_tiny(), make_tiny("techniques.dora={rank = 2, alpha = 4.0}")
    linears = {n: m for n, m in build.model.named_modules() if isinstance(m, DoraLinear)}
    before = {n: m.lora_m.detach().clone() for n, m in linears.items()}
    for name, linear in linears.items():
        torch.testing.assert_close(before[name], linear.weight.norm(dim=1))
    losses = [float(step(b, batch(b), 0)[0]) for b in (baseline, build)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert all(bool((m.lora_m != before[n]).any()) for n, m in linears.items())
    assert check_active(build)["dora"].numbers["reached"] == len(linears) > 0


def test_what_learns_is_predicted(make_tiny: Make, states: Callable[[Build], tuple]) -> None:
    on = "targets = ['mixer.out', 'mlp.gate_up'], ranks = [3, 2]"
    held, predicted = states(make_tiny(f"techniques.dora={{{on}}}"))
    assert predicted == held
