"""Compare the baseline's AdamW and clipping with torch's plain forms, and mask a bad step."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace.core.model_config import ModelConfig
from headrace.optim.adamw import clip_factor, gradient_norm, make_adamw, scale_gradients
from headrace.optim.muon import MuonOptimizer, MuonRule
from headrace.optim.roles import group_by_role
from headrace.plan.plan import OptimizerConfig
from headrace.techniques.optim.muon import cuts_of

CONFIG = ModelConfig(dim=8, heads=4, kv_heads=2, ffn=6, layers=1, vocab=11)


def parameters() -> dict[str, nn.Parameter]:
    """Matrices and vectors with gradients, by the names of a decoder."""
    draw = torch.Generator().manual_seed(0)
    shapes = {
        "blocks.0.mixer.qkv.weight": (16, 8),
        "blocks.0.mlp.gate_up.weight": (12, 8),
        "blocks.0.mlp.down.weight": (8, 6),
        "norm.weight": (8,),
        "embed.weight": (11, 8),
    }
    named = {n: nn.Parameter(torch.randn(s, generator=draw)) for n, s in shapes.items()}
    for parameter in named.values():
        parameter.grad = torch.randn(parameter.shape, generator=draw)
    return named


def adamw(named: dict[str, nn.Parameter]) -> Any:
    config = OptimizerConfig(lr=0.1, weight_decay=0.3)
    optimizer = make_adamw(config, named)
    group_by_role(optimizer.param_groups, named, config)
    return optimizer


def muon(named: dict[str, nn.Parameter]) -> Any:
    taken = {n: p for n, p in named.items() if n.startswith("blocks.")}
    return MuonOptimizer(taken, cuts_of(CONFIG), lr=0.1, momentum=0.9, weight_decay=0.3)


def muon_with_all(named: dict[str, nn.Parameter]) -> Any:
    taken = {n: p for n, p in named.items() if n.startswith("blocks.")}
    how: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.3}
    rule = MuonRule(nesterov=False, cautious=True, rows=True)
    return MuonOptimizer(taken, cuts_of(CONFIG, head_pairs=True), rule=rule, **how)


def muon_of_a_part(named: dict[str, nn.Parameter]) -> Any:
    taken = {n: p for n, p in named.items() if n.startswith("blocks.")}
    how: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.3}
    rule = MuonRule(cautious=True, rows=True, fraction=0.3)
    return MuonOptimizer(taken, cuts_of(CONFIG, head_pairs=True), rule=rule, **how)


def snapshot(named: dict[str, nn.Parameter], optimizer: Any) -> dict[str, Tensor]:
    """Return weights and all of the optimizer's state."""
    found = {n: p.detach().clone() for n, p in named.items()}
    for name, parameter in named.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}/{key}"] = value.clone()
    return found


@pytest.mark.parametrize("make", [adamw, muon, muon_with_all, muon_of_a_part])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_found_inf_leaves_weights_and_state_bit_equal(
    make: Callable[[dict[str, nn.Parameter]], Any], bad: float
) -> None:
    named = parameters()
    optimizer = make(named)
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    before = snapshot(named, optimizer)
    assert len(before) > len(named)
    for parameter in named.values():
        assert parameter.grad is not None
        parameter.grad.fill_(bad)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    after = snapshot(named, optimizer)
    assert before.keys() == after.keys()
    assert all(after[name].equal(value) for name, value in before.items())


@pytest.mark.parametrize("make", [adamw, muon, muon_with_all, muon_of_a_part])
def test_a_masked_first_step_is_no_step(make: Callable[[dict[str, nn.Parameter]], Any]) -> None:
    """What follows a skipped first step is what would have been the first."""
    ends = []
    for skips in ((1.0, 0.0), (0.0,)):
        named = parameters()
        optimizer = make(named)
        for skip in skips:
            optimizer.found_inf = torch.tensor(skip)
            optimizer.step()
        ends.append(snapshot(named, optimizer))
    assert all(ends[0][name].equal(value) for name, value in ends[1].items())


def test_adamw_equals_the_paper_with_decay_on_matrices_only() -> None:
    named, config = parameters(), OptimizerConfig(lr=0.1, weight_decay=0.3, betas=(0.8, 0.9))
    right = {n: p.detach().double() for n, p in named.items()}
    optimizer = make_adamw(config, named)
    group_by_role(optimizer.param_groups, named, config)
    first = {n: torch.zeros_like(p) for n, p in right.items()}
    second = {n: torch.zeros_like(p) for n, p in right.items()}
    for step in (1, 2, 3):
        optimizer.step()
        for name, weight in right.items():
            assert named[name].grad is not None
            grad = named[name].grad.double()  # type: ignore[union-attr]
            first[name] = 0.8 * first[name] + 0.2 * grad
            second[name] = 0.9 * second[name] + 0.1 * grad**2
            decay = 0.3 if weight.ndim >= 2 else 0.0
            update = (first[name] / (1 - 0.8**step)) / (
                (second[name] / (1 - 0.9**step)).sqrt() + config.eps
            )
            right[name] = weight - 0.1 * decay * weight - 0.1 * update
    for name, parameter in named.items():
        torch.testing.assert_close(parameter.double(), right[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clipping_equals_torchs_reference(limit: float) -> None:
    ours, theirs = list(parameters().values()), list(parameters().values())
    gradients = [p.grad for p in ours if p.grad is not None]
    flat = torch.cat([g.flatten().double() for g in gradients])
    norm = gradient_norm(gradients)
    assert float(norm) == pytest.approx(float(flat.norm()), rel=1e-6)
    scale_gradients(gradients, clip_factor(norm, limit))
    torch.nn.utils.clip_grad_norm_(theirs, limit)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=0)
    assert float(gradient_norm(gradients)) <= max(limit, float(norm)) * (1 + 1e-5)
    assert limit != 0.5 or float(gradient_norm(gradients)) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_norm_over_ranks_counts_copies_once_and_waits_for_nothing(device: str) -> None:
    """A host's numbers on a device would hold the host up until the backward pass has ended."""
    world: Any = SimpleNamespace(ranks=2, mesh=None, sum_=lambda total: 3 * total)
    if device == "cuda":
        world.mesh = SimpleNamespace(device_type="cuda")
    gradients = [torch.randn(n, device=device) for n in (3, 50, 7, 11)]
    copies = [1, 4, 1, 2]
    wanted = sum(
        float(g.double().square().sum()) / n for g, n in zip(gradients, copies, strict=True)
    )
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        norm = gradient_norm(gradients, copies, world)
        none = gradient_norm([], [], world)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert float(norm) == pytest.approx((3 * wanted) ** 0.5, rel=1e-6) and float(none) == 0.0


def test_no_gradients_have_no_norm() -> None:
    assert float(gradient_norm([])) == 0.0
    scale_gradients([], torch.ones(()))


def test_the_norm_of_bf16_gradients_has_more_than_their_8_bits() -> None:
    gradient = torch.full((999,), 0.1).bfloat16()
    norm = gradient_norm([gradient])
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(float(gradient.double().norm()), rel=1e-6)
