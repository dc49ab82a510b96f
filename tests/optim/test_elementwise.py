"""Compare Lion, Schedule-Free AdamW and AdEMAMix with their papers, by hand and in fp64."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace.optim import elementwise
from headrace.optim.ademamix import AdemamixOptimizer, slow_share
from headrace.optim.elementwise import ElementwiseOptimizer
from headrace.optim.lion import LionOptimizer
from headrace.optim.roles import group_by_role
from headrace.optim.schedule_free import ScheduleFreeOptimizer
from headrace.plan.plan import OptimizerConfig

SHAPES = {"blocks.0.a.weight": (7, 5), "blocks.0.b.weight": (3, 4), "norm.weight": (5,)}


def lion(named: dict[str, nn.Parameter], **more: Any) -> LionOptimizer:
    return LionOptimizer(named, **{"lr": 0.1, "betas": (0.9, 0.5), "weight_decay": 0.5, **more})


def schedule_free(named: dict[str, nn.Parameter], **more: Any) -> ScheduleFreeOptimizer:
    usual = {"lr": 0.1, "beta": 0.75, "memory": 0.5, "eps": 1e-8, "weight_decay": 0.5}
    return ScheduleFreeOptimizer(named, **{**usual, **more})


def ademamix(named: dict[str, nn.Parameter], **more: Any) -> AdemamixOptimizer:
    usual = {"lr": 0.1, "betas": (0.5, 0.75, 0.9), "eps": 1e-8, "weight_decay": 0.5}
    return AdemamixOptimizer(named, **{**usual, "alpha": 2.0, "warmup": 4.0, **more})


MAKERS = {"lion": lion, "schedule_free": schedule_free, "ademamix": ademamix}


def grouped(make: Callable[..., Any], named: dict[str, nn.Parameter], **more: Any) -> Any:
    """Return an optimizer as a build has it: vectors without decay, rates with their peak."""
    optimizer = make(named, **more)
    group_by_role(optimizer.param_groups, named, OptimizerConfig())
    return optimizer


def one_weight(make: Callable[..., Any], **more: Any) -> tuple[nn.Parameter, Any]:
    """Return a matrix of the one weight 1.0, and its optimizer."""
    weight = nn.Parameter(torch.ones(1, 1))
    return weight, grouped(make, {"blocks.0.w.weight": weight}, **more)


def stepped(weight: nn.Parameter, optimizer: Any, gradient: float) -> float:
    """Return the weight after a step with this gradient."""
    weight.grad = torch.full((1, 1), gradient)
    optimizer.step()
    return weight.item()


# --- two steps by hand -----------------------------------------------------------------------


def test_two_steps_of_lion_by_hand() -> None:
    """Take b1 0.9, b2 0.5, lr 0.1, decay 0.5, and gradients 2 and -0.1.

    c = 0.1 * 2 > 0:            w = 1 - 0.1 (1 + 0.5 * 1)       = 0.85     m = 0.5 * 2 = 1
    c = 0.9 * 1 - 0.01 > 0:     w = 0.85 - 0.1 (1 + 0.5 * 0.85) = 0.7075   m = 0.5 - 0.05 = 0.45

    The second step goes on against its own gradient, as the momentum outweighs it.
    """
    weight, optimizer = one_weight(lion)
    assert stepped(weight, optimizer, 2.0) == pytest.approx(0.85, rel=1e-6)
    assert optimizer.state[weight]["exp_avg"].item() == pytest.approx(1.0, rel=1e-6)
    assert stepped(weight, optimizer, -0.1) == pytest.approx(0.7075, rel=1e-6)
    assert optimizer.state[weight]["exp_avg"].item() == pytest.approx(0.45, rel=1e-6)
    assert optimizer.state[weight].keys() == {"exp_avg"}, "one state, where AdamW has two"


def test_two_steps_of_schedule_free_by_hand() -> None:
    """Take b 0.75, b2 0.5, lr 0.1, decay 0.5, and gradients 2 and -1.

    y1 = z1 = x1 = 1; v = 2, corrected 4;  d = 2/2 + 0.5 * 1 = 1.5;  z2 = 0.85;  c = 1;  x2 = 0.85
    y2 = 0.85; v = 1.5, corrected 2;  d = -1/sqrt(2) + 0.425;  z3 = 0.85 - 0.1 d
    c = 1/2;  x3 = (0.85 + z3) / 2;  y3 = 0.25 z3 + 0.75 x3
    """
    weight, optimizer = one_weight(schedule_free)
    assert stepped(weight, optimizer, 2.0) == pytest.approx(0.85, rel=1e-6)
    z = 0.85 - 0.1 * (0.425 - 1 / math.sqrt(2))
    x = (0.85 + z) / 2
    assert stepped(weight, optimizer, -1.0) == pytest.approx(0.25 * z + 0.75 * x, rel=1e-6)
    assert optimizer.state[weight]["z"].item() == pytest.approx(z, rel=1e-6)
    before = weight.detach().clone()
    with optimizer.averaged():
        assert weight.item() == pytest.approx(x, rel=1e-6)
    assert torch.equal(weight, before), "training goes on from the same bits"


def test_two_steps_of_ademamix_by_hand() -> None:
    """Take b1 0.5, b2 0.75, b3 0.9, alpha 2 over 4 steps, lr 0.1, decay 0.5, gradients 2 and -1.

    The half-life of b1 is 1 step, that of 0.9 h = log(0.5)/log(0.9) = 6.58. After a quarter of the
    warmup it is 1 + (h - 1)/4, so that b3(1) = 0.5^(1 / 2.395), and b3(2) = 0.5^(1 / 3.789).
    t = 1: m = 1, corrected 2; s = 2 (1 - b3(1)); v = 1, corrected 4; a = 0.5
    t = 2: m = 0, corrected 0; s = b3(2) s - (1 - b3(2)); v = 1, corrected 16/7; a = 1
    """
    weight, optimizer = one_weight(ademamix)
    half = math.log(0.5) / math.log(0.9)
    b3 = [0.5 ** (1 / (1 + (half - 1) * t / 4)) for t in (1, 2)]
    s = 2 * (1 - b3[0])
    right = 1 - 0.1 * ((2 + 0.5 * s) / 2 + 0.5)
    assert stepped(weight, optimizer, 2.0) == pytest.approx(right, rel=1e-5)
    s = b3[1] * s - (1 - b3[1])
    right -= 0.1 * (s / math.sqrt(16 / 7) + 0.5 * right)
    assert stepped(weight, optimizer, -1.0) == pytest.approx(right, rel=1e-5)
    assert optimizer.state[weight]["slow"].item() == pytest.approx(s, rel=1e-5)


def test_the_slow_memory_rises_to_the_papers_decay() -> None:
    """Compare with the paper's formula in fp64, at 0.9999 where 1 - b3 is small."""
    steps = torch.tensor([1.0, 50.0, 100.0, 250.0])
    found = slow_share(steps, 0.9, 0.9999, 100.0)
    for step, share in zip(steps.tolist(), found.tolist(), strict=True):
        done, first, last = min(1.0, step / 100), math.log(0.9), math.log(0.9999)
        right = -math.expm1(first * last / ((1 - done) * last + done * first))
        assert share == pytest.approx(right, rel=1e-5)
    assert found[-1].item() == pytest.approx(1e-4, rel=1e-4)
    assert torch.isfinite(slow_share(steps, 0.0, 0.9999, 100.0)).all(), "no logarithm of zero"


# --- many steps, many tensors ----------------------------------------------------------------


def gradient(name: str, index: int) -> Tensor:
    draw = torch.Generator().manual_seed(1000 * index + len(name) + ord(name[9]))
    return torch.randn(SHAPES[name], generator=draw)


def parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}


RATES = (0.01, 0.03, 0.0, 0.03, 0.02)
"""Rates of five steps, as a schedule sets them; none is a step that leaves the average alone."""


def of_lion(w: Tensor, g: Tensor, s: dict[str, Any], rate: float, decay: float) -> Tensor:
    m = s.setdefault("m", torch.zeros_like(w))
    direction = (0.9 * m + 0.1 * g).sign()
    s["m"] = 0.5 * m + 0.5 * g
    return w - rate * (direction + decay * w)


def of_schedule_free(y: Tensor, g: Tensor, s: dict[str, Any], rate: float, decay: float) -> Tensor:
    """Keep x and z apart, as the paper's algorithm does."""
    x, z = s.setdefault("x", y), s.setdefault("z", y)
    s["t"], s["v"] = s.get("t", 0) + 1, 0.5 * s.get("v", torch.zeros_like(y)) + 0.5 * g**2
    direction = g / ((s["v"] / (1 - 0.5 ** s["t"])).sqrt() + 1e-8)
    s["z"] = z = z - rate * direction - rate * decay * y
    s["rates"] = s.get("rates", 0.0) + rate**2
    share = rate**2 / s["rates"]
    s["x"] = x = (1 - share) * x + share * z
    return 0.25 * z + 0.75 * x


def of_ademamix(w: Tensor, g: Tensor, s: dict[str, Any], rate: float, decay: float) -> Tensor:
    t = s["t"] = s.get("t", 0) + 1
    done, first, last = min(1.0, t / 4), math.log(0.5), math.log(0.9)
    b3 = min(0.9, math.exp(first * last / ((1 - done) * last + done * first)))
    none = torch.zeros_like(w)
    s["m"] = 0.5 * s.get("m", none) + 0.5 * g
    s["s"] = b3 * s.get("s", none) + (1 - b3) * g
    s["v"] = 0.75 * s.get("v", none) + 0.25 * g**2
    mixed = s["m"] / (1 - 0.5**t) + 2.0 * done * s["s"]
    return w - rate * (mixed / ((s["v"] / (1 - 0.75**t)).sqrt() + 1e-8) + decay * w)


PAPERS = {"lion": of_lion, "schedule_free": of_schedule_free, "ademamix": of_ademamix}


@pytest.mark.parametrize("cut", [1 << 25, 12], ids=["one list", "lists of one tensor"])
@pytest.mark.parametrize("name", MAKERS)
def test_five_steps_equal_the_paper(name: str, cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor without a gradient in a step stays, and counts its own steps."""
    monkeypatch.setattr(elementwise, "BATCH_NUMBERS", cut)
    named = parameters()
    right = {n: p.detach().double() for n, p in named.items()}
    states: dict[str, dict[str, Any]] = {n: {} for n in named}
    optimizer = grouped(MAKERS[name], named, lr=max(RATES))
    for index, rate in enumerate(RATES):
        for group in optimizer.param_groups:
            group["lr"] = rate
        absent = "blocks.0.b.weight" if index == 1 else ""
        for n, p in named.items():
            p.grad = None if n == absent else gradient(n, index)
        optimizer.step()
        for n in named.keys() - {absent}:
            decay = 0.5 if right[n].ndim > 1 else 0.0
            right[n] = PAPERS[name](right[n], gradient(n, index).double(), states[n], rate, decay)
        for n, p in named.items():
            torch.testing.assert_close(p.double(), right[n], rtol=2e-5, atol=2e-6)
            if p.grad is not None:
                assert torch.equal(p.grad, gradient(n, index)), "gradients are others' to read"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", MAKERS)
def test_a_masked_step_is_no_step(name: str, bad: float) -> None:
    """Mask the first step and one in between: weights and states are those of a run without."""
    ends = []
    for masked in ((0, 2), ()):
        named = parameters()
        optimizer = grouped(MAKERS[name], named)
        for index in range(4):
            wrong = index in masked
            if not wrong and not masked and index in (0, 2):
                continue
            for n, p in named.items():
                p.grad = torch.full_like(p, bad) if wrong else gradient(n, index)
            optimizer.found_inf = torch.tensor(float(wrong))
            optimizer.step()
        ends.append([p.detach() for p in named.values()])
        ends[-1] += [t for p in named.values() for t in optimizer.state[p].values()]
    assert len(ends[0]) == len(ends[1]) > len(SHAPES)
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_an_evaluation_before_the_first_step_and_one_that_fails_leave_the_weights() -> None:
    named = parameters()
    optimizer: ElementwiseOptimizer = grouped(schedule_free, named)
    assert isinstance(optimizer, ScheduleFreeOptimizer)
    before = [p.detach().clone() for p in named.values()]
    with optimizer.averaged():
        assert all(torch.equal(a, b) for a, b in zip(before, named.values(), strict=True))
    for index in range(3):
        for n, p in named.items():
            p.grad = gradient(n, index)
        optimizer.step()
    before = [p.detach().clone() for p in named.values()]
    with pytest.raises(ValueError, match="lost"), optimizer.averaged():
        assert not any(torch.equal(a, b) for a, b in zip(before, named.values(), strict=True))
        raise ValueError("lost")
    assert all(torch.equal(a, b) for a, b in zip(before, named.values(), strict=True))
