"""Watch the loss and the gradient norm of a run on the device: what is usual, and what is a spike.

Both classes keep a few numbers on the device and never read one, so that the host does not wait.
They take a number in only where it is finite. Ranks that are given the same numbers keep the same
state to the bit.

Shapes: W numbers of a window.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

TINY = 1e-6
"""Added to a standard deviation before it divides, as in ZClip's code."""
LEAST_SPREAD = (0.02, 1.5)
"""Least standard deviation of a loss and of a norm, as a share of its mean. A window of nearly
equal numbers would otherwise call noise a spike. Assumed: with 6 deviations a loss must rise by
12%, and a norm to ten times its mean, for clipping bounds what is below that: norms of five times
the mean were seen in healthy runs of `benchmarks/spikes.py`."""


@dataclass
class Spike:
    """A spike is a run of steps whose update was masked, and what was done about it.

    Steps are counted from 1. Numbers that are not finite are None.
    """

    step: int
    """the first step whose update was masked"""
    masked: int
    """how many updates were masked, the last ones of the run or up to the recovery"""
    loss: float | None
    """the loss of the first such step in nats per token"""
    grad_norm: float | None
    """the gradient norm of that step"""
    loss_limit: float | None = None
    """the largest loss that was in the band"""
    norm_limit: float | None = None
    """the largest gradient norm that was in the band"""
    rewound_to: tuple[int, ...] = ()
    """after how many steps the weights were as a rewind made them, for each rewind"""
    recovered: int | None = None
    """the first of the steps in a row that were in the band again; None where there were none"""
    source: str = ""
    """what made the first number that is not finite; "" where all were"""

    def to_dict(self) -> dict[str, Any]:
        """Return the spike as JSON values."""
        return asdict(self)


class NormTracker:
    """Keep an exponential mean and variance of gradient norms, and limit those that stand out.

    The first `warmup` norms give the mean and the (population) variance. From then on, a norm g
    with z = (g - mean) / deviation above `threshold` is to be clipped to
    mean + threshold^2 / z x deviation, and mean and variance take in the clipped norm, each with
    the share 1 - alpha. Source: arXiv 2504.02507 (algorithm 1) and its code.
    """

    def __init__(self, device: torch.device, *, alpha: float, threshold: float, warmup: int):
        self.alpha, self.threshold, self.warmup = alpha, threshold, warmup
        self.count = torch.zeros((), device=device)
        """norms that were taken in"""
        self.mean = torch.zeros((), device=device)
        self.variance = torch.zeros((), device=device)
        self.clipped = torch.zeros((), device=device)
        """norms that were above their limit"""

    def limit(self, norm: Tensor) -> Tensor:
        """Take in a norm, and return what it is to be clipped to; itself where it is usual."""
        deviation = self.variance.sqrt()
        z = (norm - self.mean) / (deviation + TINY)
        spikes = (z > self.threshold) & (self.count >= self.warmup)
        limited = self.mean + self.threshold**2 / z * deviation
        limit = torch.where(spikes, limited, norm)
        self._take(limit, torch.isfinite(norm))
        self.clipped += spikes & torch.isfinite(norm)
        return limit

    def _take(self, norm: Tensor, finite: Tensor) -> None:
        """Move mean and variance by a norm, where `finite` is true."""
        warm, count = self.count < self.warmup, self.count + 1
        share = torch.where(warm, 1 / count, torch.full_like(count, 1 - self.alpha))
        mean = self.mean + share * (norm - self.mean)
        # In warmup the variance of all norms so far (Welford), then that around the new mean.
        square = (norm - mean) * torch.where(warm, norm - self.mean, norm - mean)
        variance = self.variance + share * (square - self.variance)
        for kept, new in ((self.mean, mean), (self.variance, variance), (self.count, count)):
            kept.copy_(torch.where(finite, new, kept))

    def tensors(self) -> dict[str, Tensor]:
        """Return what is saved, and filled in place."""
        names = ("count", "mean", "variance", "clipped")
        return {name: getattr(self, name) for name in names}


class Band:
    """Keep the last W good losses and norms, and say of the next ones whether they stand out.

    A number stands out where it is above mean + sigmas x deviation of the window, or is not finite.
    What stands out is not taken in. Nothing finite stands out until `warmup` steps were taken in.
    Source: the skipped steps of OLMo-core (SkipStepOptimizer: 128 steps, 6 deviations).
    """

    def __init__(self, device: torch.device, *, window: int, sigmas: float, warmup: int):
        self.sigmas, self.warmup = sigmas, warmup
        self.kept = torch.zeros(2, window, device=device)
        """losses and norms [2, W]"""
        self.count = torch.zeros((), device=device)
        """steps that were taken in"""
        self.limits = torch.full((2,), torch.inf, device=device)
        """the largest loss and norm that are in the band now"""
        self._slots = torch.arange(window, device=device)
        self._least = torch.tensor(LEAST_SPREAD, device=device)

    def stands_out(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Return on the device whether a step's loss or norm is above the band or not finite."""
        known = (self._slots < self.count).float()
        filled = known.sum().clamp(min=1)
        mean = (self.kept * known).sum(-1) / filled
        square = ((self.kept - mean[:, None]).square() * known).sum(-1) / filled
        spread = torch.maximum(square.sqrt(), self._least * mean)
        limits = mean + self.sigmas * spread
        self.limits.copy_(limits.masked_fill(self.count < self.warmup, torch.inf))
        pair = torch.stack([loss.detach().float(), norm.detach().float()])
        return ~(torch.isfinite(pair) & (pair <= self.limits)).all()

    def take(self, loss: Tensor, norm: Tensor, good: Tensor) -> None:
        """Take in a step where `good` is true; one without a gradient counted no target."""
        good = good & (norm > 0)
        here = (self._slots == self.count % len(self._slots)) & good
        pair = torch.stack([loss.detach().float(), norm.detach().float()])
        self.kept.copy_(torch.where(here, pair[:, None], self.kept))
        self.count += good

    def tensors(self) -> dict[str, Tensor]:
        """Return what is saved, and filled in place."""
        return {"kept": self.kept, "count": self.count}
