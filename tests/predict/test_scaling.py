"""Scaling laws give their papers' numbers."""

import pytest

from headrace.costs.passes import most_passes
from headrace.predict.scaling import (
    A,
    B,
    E,
    compute_optimal,
    expected_loss,
    is_fitted,
    is_swept,
    step_law_batch,
    step_law_rate,
    worth,
)

CHINCHILLA_FLOPS, CHINCHILLA_PARAMETERS, CHINCHILLA_TOKENS = 5.76e23, 70e9, 1.4e12


def test_the_refit_takes_chinchillas_own_size_for_its_budget() -> None:
    parameters, tokens = compute_optimal(CHINCHILLA_FLOPS)
    assert parameters == pytest.approx(CHINCHILLA_PARAMETERS, rel=0.05)
    assert tokens / parameters == pytest.approx(20, rel=0.1)
    assert 6 * parameters * tokens == pytest.approx(CHINCHILLA_FLOPS)
    # No other split of the budget has a lower loss.
    best = expected_loss(parameters, tokens).nats
    for factor in (0.9, 1.1):
        assert expected_loss(parameters * factor, tokens / factor).nats > best
    # arXiv 2404.10102: parameters grow with the power 0.5126 of the budget.
    more, _ = compute_optimal(10 * CHINCHILLA_FLOPS)
    assert more / parameters == pytest.approx(10**0.5126, rel=1e-3)


def test_the_loss_is_the_formula_and_its_interval_holds_it() -> None:
    loss = expected_loss(1e9, 20e9)
    assert loss.nats == pytest.approx(E + A * 1e9**-0.3478 + B * 20e9**-0.3658)
    assert loss.nats == pytest.approx(E + loss.by_parameters + loss.by_tokens)
    assert E < loss.between.low < loss.nats < loss.between.high
    # By hand: errors of E, A, alpha, B, beta in nats, root of the sum of squares 0.334.
    reducible, error = loss.nats - E, 0.334
    assert loss.between.high - E == pytest.approx(
        reducible * 2.718281828 ** (1.2816 * error / reducible), rel=0.01
    )


def test_repeated_tokens_are_worth_less_and_the_first_epochs_nearly_all() -> None:
    # arXiv 2305.16264: up to 4 epochs change little, and worth ends at U + U R*.
    assert worth(1e9, 1e9, 15.387756) == 1e9
    assert worth(4e9, 1e9, 15.387756) / 4e9 > 0.92
    assert worth(1e15, 1e9, 15.387756) == pytest.approx(16.387756e9)
    assert worth(0.5e9, 1e9, 15.387756) == 0.5e9
    fresh, twice, again = (expected_loss(1e8, 4e9, f).nats for f in (None, 2e9, 2e8))
    assert fresh < twice < again and twice - fresh < 0.02
    assert expected_loss(1e8, 4e9, 8e9) == expected_loss(1e8, 4e9)
    assert expected_loss(10e9, 4e9, 1e9).nats < expected_loss(1e9, 4e9, 1e9).nats


def test_a_larger_model_learns_a_text_by_heart_in_fewer_passes() -> None:
    each = [most_passes(parameters, 1e8) for parameters in (1e7, 1e8, 1e9, 1e12)]
    assert each == sorted(each, reverse=True) and each[-1] == 1
    assert each[0] / each[1] == pytest.approx(each[1] / each[2])


def test_step_law_gives_its_own_examples() -> None:
    # arXiv 2503.04715: 1.79 N^-0.713 D^0.307 and 0.58 D^0.571, here at 1B and 100B tokens.
    assert step_law_rate(1e9, 100e9) == pytest.approx(1.632e-3, rel=1e-3)
    assert step_law_batch(100e9) == pytest.approx(1.11e6, rel=0.01)
    assert step_law_rate(1e5, 1e9) == 2**-7  # the highest that was swept
    assert is_swept(1e9, 100e9) and not is_swept(1e6, 100e9)
    assert is_fitted(1e9, 20e9) and not is_fitted(1e9, 1e6)
