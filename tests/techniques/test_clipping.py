"""Test clipping by a fixed and by a moving limit: ZClip by hand, and what an update sees."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace.assemble.clipping import norm_in_the_update, norm_over_ranks
from headrace.assemble.filled import check_active
from headrace.assemble.sockets import Build
from headrace.optim.stability import NormTracker
from headrace.train.train import step


def test_the_limit_is_zclips_by_hand() -> None:
    """Three norms warm it up; a usual one follows, a spike, and what is not finite."""
    tracker = NormTracker(torch.device("cpu"), alpha=0.9, threshold=2.0, warmup=3)

    def limit(norm: float) -> float:
        return float(tracker.limit(torch.tensor(norm)))

    assert [limit(norm) for norm in (1.0, 2.0, 3.0)] == [1.0, 2.0, 3.0]
    mean, variance = 2.0, 2.0 / 3.0  # of the population, as ZClip begins
    assert float(tracker.mean) == pytest.approx(mean)
    assert float(tracker.variance) == pytest.approx(variance)
    assert limit(2.5) == 2.5
    mean = 0.9 * mean + 0.1 * 2.5
    variance = 0.9 * variance + 0.1 * (2.5 - mean) ** 2
    z = (10.0 - mean) / variance**0.5
    clipped = mean + 2.0**2 / z * variance**0.5
    assert limit(10.0) == pytest.approx(clipped, rel=1e-5)
    assert mean < clipped < mean + 2.0 * variance**0.5, "the further out, the harder"
    mean = 0.9 * mean + 0.1 * clipped
    variance = 0.9 * variance + 0.1 * (clipped - mean) ** 2
    kept = float(tracker.mean), float(tracker.variance)
    assert kept == pytest.approx((mean, variance), rel=1e-5)
    limit(float("nan"))
    limit(float("inf"))
    assert kept == (float(tracker.mean), float(tracker.variance)), "not finite: not taken in"
    assert (float(tracker.count), float(tracker.clipped)) == (5, 1)


def test_a_fixed_limit_is_the_plans_key_and_counts(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Any]]
) -> None:
    """It is the baseline's clipping at that limit, and says what the update saw."""
    low = make_tiny("techniques.gradient_clipping.max_norm=0.25")
    plain = make_tiny("optimizer.clip_norm=0.25")
    assert low.plan.optimizer.clip_norm == 0.25
    for build in (low, plain):
        for index in range(2):
            step(build, batch(build), index)
    ours, other = (dict(build.model.named_parameters()) for build in (low, plain))
    assert all(torch.equal(p, other[name]) for name, p in ours.items())
    assert float(norm_in_the_update(low)) == pytest.approx(0.25, rel=1e-4)
    evidence = check_active(low)["gradient_clipping"]
    assert (evidence.numbers["steps"], evidence.numbers["clipped"]) == (2, 2)
    with torch.no_grad():
        for parameter in ours.values():
            parameter.grad.mul_(100)  # type: ignore[union-attr]
    with pytest.raises(Exception, match="gradient_clipping"):
        check_active(low)


def test_a_moving_limit_clips_what_stands_out(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Any]]
) -> None:
    """A gradient that is 50 times as long as usual is cut, the plan's limit stays above it."""
    build = make_tiny("techniques.adaptive_clipping.warmup=4", "optimizer.clip_norm=0")
    micros, engine = batch(build), build.engine
    norms = [float(step(build, micros, index)[1]) for index in range(6)]

    def longer(build: Build, *rest: Any) -> Any:
        loss = engine(build, *rest)
        for parameter in build.model.parameters():
            parameter.grad.mul_(50)  # type: ignore[union-attr]
        return loss

    clip = build.clip
    before = {name: float(value) for name, value in clip.tensors().items()}  # type: ignore[attr-defined]
    build.engine = longer
    spike = float(step(build, micros, 6)[1])
    assert spike > 20 * max(norms)
    deviation = before["variance"] ** 0.5
    z = (spike - before["mean"]) / (deviation + 1e-6)
    wanted = before["mean"] + 2.5**2 / z * deviation
    assert float(norm_over_ranks(build)) == pytest.approx(wanted, rel=1e-3)
    evidence = check_active(build)["adaptive_clipping"]
    assert evidence.numbers["clipped"] == 1 and evidence.numbers["count"] == 7
    # A second pass of a step, whose limit is 0, is measured and not taken in.
    clip(build, 0.0)
    assert float(clip.tensors()["count"]) == 7  # type: ignore[attr-defined]
