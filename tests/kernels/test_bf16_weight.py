"""bf16 weights: what they leave out is kept to the bit, or is right on average."""

import pytest
import torch
from torch import Tensor

from headrace.kernels.bf16_weight import (
    joined,
    keys_at,
    keys_of,
    noise,
    places,
    round_,
    round_with_noise_,
    split_,
)

CPU = torch.device("cpu")
SHAPE = (200, 300)


def numbers() -> Tensor:
    """Return fp32 numbers of both signs over many magnitudes, and some special ones."""
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(SHAPE, generator=draw) * torch.exp2(
        torch.randint(-30, 30, SHAPE, generator=draw).float()
    )
    values[0, :6] = torch.tensor([0.0, -0.0, 1.0, -1.5, 1e-40, torch.inf])
    return values


def noise_at(step: int, name: str = "w", seed: int = 0) -> Tensor:
    keys = keys_at(keys_of(seed, name, CPU), torch.tensor(float(step)))
    return noise(*places((0, 0), SHAPE, SHAPE, CPU), keys)


def test_weight_and_rest_are_the_fp32_number() -> None:
    values = numbers()
    weight, rest = torch.empty(SHAPE, dtype=torch.bfloat16), torch.empty(SHAPE, dtype=torch.int16)
    split_(weight, rest, values)
    assert joined(weight, rest).view(torch.int32).equal(values.view(torch.int32))
    near = values.bfloat16()
    tie = (values.view(torch.int32) & 0xFFFF) == 0x8000  # torch rounds those to even
    assert weight[~tie].equal(near[~tie]) and tie.float().mean() < 1e-3
    assert joined(weight, None).equal(weight.float())


def test_noise_is_uniform_and_of_each_step_and_matrix() -> None:
    draws = torch.stack([noise_at(step) for step in range(20)]).double()
    assert draws.min() >= 0 and draws.max() < 1 << 16
    counts = torch.bincount((draws.flatten() / 256).long(), minlength=256).double()
    expected = draws.numel() / 256
    assert 0.7 < float(((counts - expected) ** 2 / expected).sum()) / 255 < 1.3
    centred = draws.flatten(1) - draws.mean()
    spread = 5 / centred.numel() ** 0.5  # five standard deviations of a correlation of nothing
    neighbours = (
        (centred[1:], centred[:-1]),
        (centred[:, 1:], centred[:, :-1]),
        (centred[:, SHAPE[1] :], centred[:, : -SHAPE[1]]),
    )
    for one, other in neighbours:
        assert abs(float((one * other).mean() / centred.var())) < spread
    first = noise_at(0)
    assert first.equal(noise_at(0))
    for other in (noise_at(1), noise_at(0, name="v"), noise_at(0, seed=1)):
        assert (first == other).float().mean() < 1e-3


def test_rounding_is_right_on_average_and_leaves_bf16_numbers() -> None:
    values = numbers()[1:]
    weight, total = (
        torch.empty_like(values, dtype=torch.bfloat16),
        torch.zeros_like(values).double(),
    )
    unit = torch.exp2(values.abs().log2().floor() - 7).double()
    steps = 64
    for step in range(steps):
        round_(weight, values, noise_at(step)[1:])
        assert ((weight.double() - values.double()).abs() < unit).all()
        total += weight.double()
    bias = (total / steps - values.double()) / unit
    # A Bernoulli draw has a variance of p (1 - p), a sixth on average.
    assert abs(float(bias.mean())) < 5 * (1 / 6 / bias.numel() / steps) ** 0.5
    assert float(bias.std()) == pytest.approx((1 / 6 / steps) ** 0.5, rel=0.03)
    exact = values.bfloat16()
    round_(weight, exact.float(), noise_at(3)[1:])
    assert weight.equal(exact)


def test_a_part_rounds_as_the_whole() -> None:
    whole = (3, 8, 10)
    keys = keys_at(keys_of(0, "w", CPU), torch.tensor(5.0))
    all_of_it = noise(*places((0, 0, 0), whole, whole, CPU), keys).view(whole)
    offset, shape = (1, 2, 5), (2, 6, 5)
    part = noise(*places(offset, shape, whole, CPU), keys).view(shape)
    assert part.equal(all_of_it[1:3, 2:8, 5:10])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_rounds_as_the_host(compiled: bool) -> None:
    function = torch.compile(round_with_noise_, dynamic=True) if compiled else round_with_noise_
    found = []
    for device, do in ((CPU, round_with_noise_), (torch.device("cuda"), function)):
        weight = torch.empty(SHAPE, dtype=torch.bfloat16, device=device)
        keys = keys_at(keys_of(0, "w", device), torch.tensor(7.0, device=device))
        do(weight, numbers().to(device), *places((0, 0), SHAPE, SHAPE, device), keys)
        found.append(weight.cpu().view(torch.int16))
    assert found[0].equal(found[1])
