"""Sophia against its definition in fp64, and the labels that its second sweep draws."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace.assemble.sockets import Build
from headrace.data.loader import Micro
from headrace.model.head import IGNORED, Vocabulary
from headrace.optim.roles import group_by_role
from headrace.optim.sophia import SophiaOptimizer
from headrace.plan.plan import OptimizerConfig
from headrace.techniques.optim.sophia import against_draws, draw, gumbel, mix, noise_keys
from headrace.train.train import step

LR, BETAS, RHO, DECAY, TARGETS = 0.05, (0.9, 0.8), 0.04, 0.2, 37
SHAPES = {"w": (7, 5), "v": (5,)}


def optimizer_of(parameters: dict[str, nn.Parameter]) -> SophiaOptimizer:
    optimizer = SophiaOptimizer(parameters, lr=LR, betas=BETAS, rho=RHO, weight_decay=DECAY)
    group_by_role(optimizer.param_groups, parameters, OptimizerConfig())
    return optimizer


def gradient(name: str, index: int) -> Tensor:
    seed = torch.Generator().manual_seed(100 * index + len(name) + ord(name[0]))
    return torch.randn(SHAPES[name], generator=seed) * 0.1


def test_updates_equal_the_official_rule() -> None:
    """Five steps with estimates after steps 0, 2 and 4, the official code's lines in fp64."""
    torch.manual_seed(0)
    named = {n: nn.Parameter(torch.randn(s)) for n, s in SHAPES.items()}
    right = {n: p.detach().double() for n, p in named.items()}
    exp_avg = {n: torch.zeros_like(p) for n, p in right.items()}
    hess = {n: torch.zeros_like(p) for n, p in right.items()}
    optimizer = optimizer_of(named)
    for index in range(5):
        for name, p in named.items():
            p.grad = gradient(name, index)
        optimizer.step()
        for name in named:
            grad = gradient(name, index).double()
            right[name].mul_(1 - LR * (DECAY if name == "w" else 0.0))
            exp_avg[name].mul_(BETAS[0]).add_(grad, alpha=1 - BETAS[0])
            ratio = (exp_avg[name].abs() / (RHO * TARGETS * hess[name] + 1e-15)).clamp(None, 1)
            right[name].addcmul_(exp_avg[name].sign(), ratio, value=-LR)
            torch.testing.assert_close(named[name].double(), right[name], rtol=1e-5, atol=1e-6)
        if index % 2 == 0:
            for name, p in named.items():
                p.grad = gradient(name, 50 + index)
            optimizer.estimate(torch.tensor(float(TARGETS)))
            for name in named:
                drawn = gradient(name, 50 + index).double()
                hess[name].mul_(BETAS[1]).addcmul_(drawn, drawn, value=1 - BETAS[1])
    inner = (exp_avg["w"].abs() < RHO * TARGETS * hess["w"]).double().mean()
    assert 0.1 < inner < 0.9, "both branches of the clip are tested"


def test_two_steps_by_hand() -> None:
    """Take lr 0.05, b1 0.9, b2 0.8, rho 0.04, decay 0.2, 37 labels, and the one weight 1.

    m = 0.1 * 2 = 0.2, h = 0: the step is clipped, w = 1 - 0.05 (0.2 + 1) = 0.94
    a label's gradient 0.5: h = 0.2 * 37 * 0.25 = 1.85, rho h = 0.074
    m = 0.9 * 0.2 - 0.1 * 1.5 = 0.03, and 0.03 / 0.074 is inside: w = 0.94 (1 - 0.01) - 0.05 * that
    """
    weight = nn.Parameter(torch.ones(1, 1))
    optimizer = optimizer_of({"w": weight})
    weight.grad = torch.full((1, 1), 2.0)
    optimizer.step()
    assert weight.item() == pytest.approx(0.94, rel=1e-6)
    weight.grad = torch.full((1, 1), 0.5)
    optimizer.estimate(torch.tensor(float(TARGETS)))
    assert optimizer.state[weight]["hessian"].item() == pytest.approx(1.85, rel=1e-6)
    weight.grad = torch.full((1, 1), -1.5)
    optimizer.step()
    assert weight.item() == pytest.approx(0.94 * 0.99 - 0.05 * 0.03 / 0.074, rel=1e-6)


def test_a_masked_step_changes_nothing() -> None:
    named = {n: nn.Parameter(torch.ones(s)) for n, s in SHAPES.items()}
    optimizer = optimizer_of(named)
    for name, p in named.items():
        p.grad = gradient(name, 0)
    optimizer.step()
    optimizer.estimate(torch.tensor(3.0))
    before = [p.detach().clone() for p in named.values()]
    states = [t.clone() for p in named.values() for t in optimizer.state[p].values()]
    optimizer.found_inf = torch.ones(())
    for p in named.values():
        p.grad = torch.full_like(p, torch.nan)
    optimizer.step()
    for p in named.values():
        p.grad = torch.full_like(p, torch.inf)
    optimizer.estimate(torch.tensor(3.0))
    after = [t for p in named.values() for t in optimizer.state[p].values()]
    assert all(torch.equal(a, b) for a, b in zip(before, named.values(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(states, after, strict=True))


def test_labels_of_masked_estimates_are_not_counted() -> None:
    optimizer = optimizer_of({n: nn.Parameter(torch.ones(s)) for n, s in SHAPES.items()})
    for masked, count in ((1.0, 3.0), (0.0, 0.0), (0.0, 5.0)):
        optimizer.found_inf = torch.tensor(masked)
        optimizer.estimate(torch.tensor(count))
        assert optimizer.labels == (5.0 if count == 5.0 else 0.0)


# --- drawn labels ----------------------------------------------------------------------------


def test_the_hash_is_a_permutation_that_any_device_computes() -> None:
    words = torch.arange(1 << 16) * 65_521
    assert mix(words).unique().numel() == len(words)
    assert [mix(int(w)) for w in words[:50]] == mix(words)[:50].tolist()
    assert int(mix(words).max()) < 1 << 32 and int(mix(words).min()) >= 0


def test_noise_is_gumbels() -> None:
    """Mean and variance of 2 million draws, and their distribution to 0.1%."""
    keys = noise_keys(3, 7, torch.arange(2000))
    noise = gumbel(keys, torch.arange(1000)).double()
    assert torch.isfinite(noise).all()
    assert noise.mean() == pytest.approx(0.5772, abs=0.003)
    assert noise.var() == pytest.approx(torch.pi**2 / 6, rel=0.005)
    for x in (-1.0, 0.0, 1.0, 3.0):
        share = torch.exp(-torch.exp(torch.tensor(-x))).item()
        assert (noise < x).double().mean() == pytest.approx(share, abs=1e-3)
    rows = noise - noise.mean()
    assert ((rows[1:] * rows[:-1]).mean() / noise.var()).abs() < 3e-3, "rows are not independent"
    assert ((rows[:, 1:] * rows[:, :-1]).mean() / noise.var()).abs() < 3e-3


def test_labels_follow_the_models_distribution() -> None:
    logits_V = torch.tensor([0.0, 1.0, -2.0, 0.5, 2.0])
    count = 40_000
    keys = noise_keys(0, 0, torch.arange(count) + (1 << 33))
    labels = draw(logits_V.expand(count, -1), keys, Vocabulary())
    found = torch.bincount(labels, minlength=5) / count
    torch.testing.assert_close(found, logits_V.softmax(0), rtol=0, atol=0.008)


class Columns(Vocabulary):
    """The second half of a vocabulary: its ids, as a shard knows them."""

    def ids(self, values_NV: Tensor) -> Tensor:
        return torch.arange(values_NV.size(-1)) + 4


def test_a_label_depends_on_seed_step_place_and_logits_alone() -> None:
    torch.manual_seed(1)
    logits = torch.randn(300, 8)
    index = torch.arange(300) + 11
    whole = draw(logits, noise_keys(0, 5, index), Vocabulary())
    order = torch.randperm(300)
    moved = draw(logits[order], noise_keys(0, 5, index[order]), Vocabulary())
    assert torch.equal(moved, whole[order])
    for other in (noise_keys(1, 5, index), noise_keys(0, 6, index), noise_keys(0, 5, index + 1)):
        assert not torch.equal(draw(logits, other, Vocabulary()), whole)
    right = draw(logits[:, 4:], noise_keys(0, 5, index), Columns())
    mine = whole >= 4
    assert torch.equal(right[mine] + 4, whole[mine])


def test_ignored_targets_have_no_drawn_label() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 9, requires_grad=True)
    targets = torch.tensor([1, IGNORED, 2, IGNORED, 0, 3])
    extras = {"sophia": noise_keys(0, 0, torch.arange(6))}
    against_draws(logits, targets, extras, Vocabulary()).backward()
    assert logits.grad is not None
    assert (logits.grad.abs().sum(-1) > 0).tolist() == [t != IGNORED for t in targets.tolist()]


# --- in a run --------------------------------------------------------------------------------


def curvature(build: Build) -> dict[str, Tensor]:
    optimizer = build.optimizers["sophia"]
    return {n: optimizer.state[p]["hessian"] for n, p in build.routed["sophia"].items()}


def test_the_curvature_is_the_mean_square_of_drawn_gradients(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Micro]]
) -> None:
    """Compute it from whole logits, one label at a time, without the run's step."""
    build = make_tiny("techniques.sophia.memory=0.9")
    twin = make_tiny("techniques.sophia.memory=0.9")
    micros = batch(build)
    step(build, micros, 0)
    work = twin.place(twin, micros[0])
    twin.model.load_state_dict(build.model.state_dict())  # the sweep follows the update
    logits = twin.model.logits(work.ids_BT, work.rows).flatten(0, 1)
    keys = noise_keys(twin.plan.seed, 0, work.index_BT.flatten())
    labels = (logits.detach() + gumbel(keys, torch.arange(logits.size(-1)))).argmax(-1)
    nn.functional.cross_entropy(logits, labels).backward()
    for name, h in curvature(build).items():
        grad = twin.model.get_parameter(name).grad
        assert grad is not None
        wanted = 0.1 * labels.numel() * grad.square()
        assert (h - wanted).abs().max() <= 1e-5 * wanted.max(), name


def test_accumulation_draws_the_same_labels(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Micro]]
) -> None:
    found: list[Any] = []
    for rows in (0, 2):
        build = make_tiny("techniques.sophia.every=3", f"batch.micro_sequences={rows}")
        step(build, batch(build), 0)
        found.append(curvature(build))
    for name, h in found[0].items():
        assert (h - found[1][name]).abs().max() <= 1e-5 * h.max(), name


def test_sweeps_when_due_and_sees_its_share(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Micro]]
) -> None:
    build = make_tiny(
        "techniques.sophia.every=3", "techniques.sophia.share=0.6", "batch.micro_sequences=2"
    )
    works = [build.place(build, m) for m in batch(build)]
    assert len(works) == 4
    names = [[p.name for p in build.passes(build, n)] for n in range(4)]
    assert names == [["update", "curvature"], ["update"], ["update"], ["update", "curvature"]]
    update, sweep = build.passes(build, 0)
    assert len(update.micros(works)) == 4 and len(sweep.micros(works)) == 3
