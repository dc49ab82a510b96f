"""Compare Muon's update of a part of each matrix with Dion2's rule (arXiv 2512.16928), by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace.kernels.orthogonalize import POLYNOMIALS, orthogonalize, reference_orthogonalize
from headrace.optim import muon
from headrace.optim.muon import MatrixCut, MuonOptimizer, MuonRule
from headrace.optim.submatrix import IDLE, count_taken, count_touched, longest

LR, MOMENTUM, DECAY = 0.1, 0.9, 0.2
HOW: dict[str, Any] = {"lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY}


def test_a_fraction_is_rounded_up_and_takes_one_at_least() -> None:
    taken = [(0.5, 4), (0.5, 5), (0.01, 5), (0.07, 100), (0.9, 3), (1.0, 7)]
    assert [count_taken(fraction, size) for fraction, size in taken] == [2, 3, 1, 7, 3, 7]


@pytest.mark.parametrize("shape", [(3, 4, 6), (3, 5, 5), (3, 6, 4)], ids=str)
def test_the_longest_of_the_shorter_side_are_taken(shape: tuple[int, int, int]) -> None:
    batch = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    part = longest(batch, 0.5, torch.float32)
    tall = shape[1] > shape[2]
    lengths = batch.norm(dim=1 if tall else 2)
    least = lengths.topk(part.of(batch).size(2 if tall else 1)).values.amin(1, keepdim=True)
    inside = (lengths >= least).unsqueeze(1 if tall else 2).expand(shape)
    updates = part.alone(part.of(batch))
    assert updates[inside].equal(batch[inside]) and bool((updates[~inside] == IDLE).all())
    assert int(count_touched(updates)) == part.index.numel() == 3 * -(-min(shape[1:]) // 2)  # type: ignore[union-attr]
    whole = longest(batch, 1.0, torch.float32)
    assert whole.of(batch) is batch and whole.alone(batch) is batch


def test_two_steps_are_those_that_a_hand_computes() -> None:
    """Half of two rows is one, and the polar factor of one row is that row at length 1.

    The polynomials bring the length 1 / 1.02 to `near`, not quite to 1. M is Dion2's momentum, to
    which whole gradients are added; the optimizer keeps a tenth of it.

    1. M = G = [[3, 4], [1, 0]]: rows of lengths 5 and 1. The first is taken:
       w[0] = 0.98 (1, 2) - 0.1 near (0.6, 0.8), w[1] = 0.98 (3, 4), and M[0] decays to (2.7, 3.6).
    2. M = [[2.7, 3.6], [1, 0]] + [[-2.5, -3.5], [0, 2]] = [[0.2, 0.1], [1, 2]]: the second is
       longer, though its gradient is shorter. w[0] = 0.98 w[0], w[1] = 0.98 w[1] - 0.1 near (1, 2)
       / sqrt(5), and M[1] decays to (0.9, 1.8).
    """
    near, (coefficients, margin) = 1.0, POLYNOMIALS["polar_express"]
    near /= margin
    for a, b, c in coefficients:
        near = a * near + b * near**3 + c * near**5
    weight = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    optimizer = MuonOptimizer({"w": weight}, {}, rule=MuonRule(nesterov=False, fraction=0.5), **HOW)
    gradients = ([[3.0, 4.0], [1.0, 0.0]], [[-2.5, -3.5], [0.0, 2.0]])
    one = [[0.98 - 0.06 * near, 1.96 - 0.08 * near], [2.94, 3.92]]
    step = 0.1 * near / 5**0.5
    two = [[0.98 * x for x in one[0]], [0.98 * 2.94 - step, 0.98 * 3.92 - 2 * step]]
    momenta = ([[2.7, 3.6], [1.0, 0.0]], [[0.2, 0.1], [0.9, 1.8]])
    for gradient, now, momentum in zip(gradients, (one, two), momenta, strict=True):
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        torch.testing.assert_close(weight.data, torch.tensor(now), rtol=1e-5, atol=1e-6)
        kept = optimizer.state[weight]["momentum"]
        torch.testing.assert_close(10 * kept, torch.tensor(momentum), rtol=1e-5, atol=1e-5)
    assert (int(optimizer.touched), optimizer.sides) == (2, {2: 2})  # type: ignore[arg-type]


def dion2(
    weight: Tensor, momentum: Tensor, gradient: Tensor, fraction: float, kind: str, ahead: bool
) -> Tensor:
    """Take a step by Dion2's rule in fp64, one matrix at a time; updates `momentum`.

    `ahead` adds Nesterov's step to it: with M = m / 0.1, 0.9 m + 0.1 g is as long as 0.9 M + g.
    """
    momentum += gradient
    tall = weight.size(0) > weight.size(1)
    m = momentum.mT if tall else momentum
    direction = MOMENTUM * momentum + gradient if ahead else momentum
    d = direction.mT if tall else direction
    w = (weight * (1 - LR * DECAY)).mT if tall else weight * (1 - LR * DECAY)
    taken = sorted(range(len(m)), key=lambda row: -float(d[row].norm()))
    taken = taken[: count_taken(fraction, len(m))]
    sub = d[taken].mT if tall else d[taken]
    polar = reference_orthogonalize(sub) if kind == "svd" else orthogonalize(sub.float())
    long = max(1.0, weight.size(0) / weight.size(1)) ** 0.5
    w[taken] -= LR * long * (polar.mT if tall else polar)
    m[taken] *= MOMENTUM
    return w.mT if tall else w


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", ["polar_express", "svd"])
@pytest.mark.parametrize("fraction", [0.25, 0.6])
@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6)], ids=str)
def test_five_steps_are_dion2s(
    shape: tuple[int, int], fraction: float, kind: str, ahead: bool
) -> None:
    """To rounding with the same polynomials; an SVD has all singular values at 1."""
    draw = torch.Generator().manual_seed(1)
    named = {n: nn.Parameter(torch.randn(shape, generator=draw)) for n in "abc"}
    right = {n: p.detach().double().clone() for n, p in named.items()}
    momenta = {n: torch.zeros(shape).double() for n in named}
    optimizer = MuonOptimizer(named, {}, rule=MuonRule(nesterov=ahead, fraction=fraction), **HOW)
    for _ in range(5):
        for name, parameter in named.items():
            before = parameter.detach().double().clone()
            parameter.grad = torch.randn(shape, generator=draw)
            begin = before if kind == "svd" else right[name]
            gradient = parameter.grad.double()
            right[name] = dion2(begin, momenta[name], gradient, fraction, kind, ahead)
        old = {n: p.detach().double().clone() for n, p in named.items()}
        optimizer.step()
        for name, parameter in named.items():
            moved, wanted = parameter.double() - old[name], right[name] - old[name]
            off = float((moved - wanted).detach().norm() / wanted.norm())
            assert off < (0.15 if kind == "svd" else 1e-4), f"{name} is off by {off}"
            kept = optimizer.state[parameter]["momentum"].double() / (1 - MOMENTUM)
            torch.testing.assert_close(kept, momenta[name], rtol=1e-5, atol=1e-5)


def test_all_of_a_matrix_is_the_update_without_a_fraction() -> None:
    """Check it bit for bit, against the same operations on each matrix by itself."""
    named = {n: nn.Parameter(torch.randn(s)) for n, s in (("a", (6, 9)), ("b", (9, 6)))}
    right = {n: (p.detach().clone(), torch.zeros_like(p)) for n, p in named.items()}
    optimizer = MuonOptimizer(named, {}, rule=MuonRule(fraction=1.0), **HOW)
    share = 1 - torch.tensor(MOMENTUM)
    for _ in range(3):
        for name, parameter in named.items():
            parameter.grad = torch.randn_like(parameter)
            weight, m = right[name]
            m.lerp_(parameter.grad, share)
            direction = orthogonalize(parameter.grad.lerp(m, torch.tensor(MOMENTUM)))
            if name == "b":
                direction *= 1.5**0.5
            weight -= torch.tensor(LR) * direction + torch.tensor(LR * DECAY) * weight
        optimizer.step()
        for name, parameter in named.items():
            assert parameter.equal(right[name][0])
            assert optimizer.state[parameter]["momentum"].equal(right[name][1])
    assert optimizer.touched is None and not optimizer.sides


@pytest.mark.parametrize("rule", [{}, {"rows": True, "cautious": True}], ids=str)
def test_a_fused_matrix_moves_as_its_pieces_do_alone(
    rule: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of each piece is taken: of these, queries are tall and keys and values wide.

    A step that is masked is between them, and a batch is updated in two chunks.
    """
    monkeypatch.setattr(muon, "CHUNK_NUMBERS", 2 * 30 * 7)
    cut = MatrixCut(
        2, ((1, 9, 1), (2, 3, 1))
    )  # 2 groups of 9 rows of queries, 3 of keys and values
    draw = torch.Generator().manual_seed(2)
    whole = {n: nn.Parameter(torch.randn(30, 7, generator=draw)) for n in ("0.x", "1.x", "2.x")}
    pieces = {n: [piece.clone() for piece in taken_apart(cut, p)] for n, p in whole.items()}
    alone = {f"{n}{i}": nn.Parameter(p) for n, ps in pieces.items() for i, p in enumerate(ps)}
    optimizers = [
        MuonOptimizer(named, cuts, rule=MuonRule(fraction=0.5, **rule), **HOW)
        for named, cuts in ((whole, {"x": cut}), (alone, {}))
    ]
    for masked in (0.0, 0.0, 1.0, 0.0):
        for name, parameter in whole.items():
            parameter.grad = torch.randn(30, 7, generator=draw)
            for index, piece in enumerate(taken_apart(cut, parameter.grad)):
                alone[f"{name}{index}"].grad = piece.clone()
        for optimizer in optimizers:
            optimizer.found_inf = torch.tensor(masked)
            optimizer.step()
    for name, parameter in whole.items():
        for index, piece in enumerate(taken_apart(cut, parameter)):
            torch.testing.assert_close(piece, alone[f"{name}{index}"].data, rtol=1e-4, atol=1e-6)
    counts = [(int(o.touched), o.sides) for o in optimizers]  # type: ignore[arg-type]
    assert counts == [(4 * 3 * (4 + 3 + 3), {7: 4 * 3, 6: 4 * 3 * 2})] * 2


def taken_apart(cut: MatrixCut, matrix: Tensor) -> list[Tensor]:
    """Return the pieces of one matrix."""
    return [piece for batch in cut.apart(matrix.detach()[None]) for piece in batch]


def test_rows_that_are_not_taken_keep_their_mean_squares() -> None:
    """Check Dion3's order: lengths of rows are made even among those that are taken."""
    weight = nn.Parameter(torch.zeros(4, 8))
    optimizer = MuonOptimizer({"w": weight}, {}, rule=MuonRule(fraction=0.5, rows=True), **HOW)
    for first, length in ((0, 1e2), (2, 1e4)):  # two rows are long, and then the others are
        weight.grad = 0.01 * torch.randn(4, 8)
        weight.grad[first : first + 2] += length * torch.randn(2, 8)
        before = weight.detach().clone()
        optimizer.step()
        moved = (weight.detach() - 0.98 * before).norm(dim=1)
        assert bool((moved[first : first + 2] > 0.05).all()) and int((moved > 1e-3).sum()) == 2
        even = optimizer.state[weight]["rows"]
        assert int((even > 0).sum()) == first + 2


@pytest.mark.parametrize("compiled", [False, True])
def test_nothing_waits_and_no_number_compiles_anew(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but a step's numbers is read from tensors; one graph serves all steps of a shape."""
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: compiler(f, backend="eager", **how))
    rule, draw = MuonRule(fraction=0.25, rows=True, cautious=True), torch.Generator().manual_seed(3)
    named = {n: nn.Parameter(torch.randn(8, 12, generator=draw)) for n in "ab"}
    copies = {n: nn.Parameter(p.detach().clone()) for n, p in named.items()}
    plain = MuonOptimizer(copies, {}, rule=rule, **HOW)
    optimizer = MuonOptimizer(named, {}, rule=rule, compiled=compiled, **HOW)
    with torch._dynamo.config.patch(recompile_limit=1):
        for index in range(3):
            for name, parameter in named.items():
                parameter.grad = torch.randn(8, 12, generator=draw)
                copies[name].grad = parameter.grad.clone()
            for one in (plain, optimizer):
                one.param_groups[0] |= {"lr": LR / (index + 1), "momentum": 0.8 + 0.05 * index}
                one.step()
    assert len(optimizer.graphs) == compiled
    for name, parameter in named.items():
        assert parameter.equal(copies[name])
    assert int(optimizer.touched) == int(plain.touched) == 3 * 2 * 2  # type: ignore[arg-type]


def test_rows_that_wait_do_not_decay_where_decay_is_cautious() -> None:
    """One of two rows is updated, and what of it has the sign of its update decays."""
    rule = MuonRule(nesterov=False, cautious=True, fraction=0.5)
    weight = nn.Parameter(torch.tensor([[1.0, -2.0], [3.0, 4.0]]))
    optimizer = MuonOptimizer({"w": weight}, {}, rule=rule, **HOW)
    weight.grad = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    optimizer.step()
    assert weight[1].tolist() == [3.0, 4.0]
    shrunk = 1 - HOW["lr"] * HOW["weight_decay"]
    near = (weight[0, 1] + 2.0) / -0.8  # times the rate; this number has not decayed
    torch.testing.assert_close(weight[0, 0].detach(), shrunk - 0.6 * near.detach())
