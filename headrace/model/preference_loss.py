"""Losses of preference pairs, of the log-probabilities of their answers.

An answer's log-probability is the sum over its tokens. Each loss is a function of both answers'
sums and lengths, and of a reference's sums where it has one: pairs in, nats a pair out.

- dpo: Rafailov et al. 2023, arXiv 2305.18290, eq. 7. With `smoothing` it is the conservative DPO of
  Mitchell's note (https://ericmitchell.ai/cdpo.pdf), of labels that are wrong so often.
- ipo: Azar et al. 2023, arXiv 2310.12036, eq. 17, of log-ratios that are means over an answer's
  tokens, as `trl` has it, which says that the authors confirmed it.
- simpo: Meng et al. 2024, arXiv 2405.14734, eq. 6: means, a margin, and no reference.
- orpo: Hong et al. 2024, arXiv 2403.07691, eqs. 6 and 7: the negative log likelihood of the chosen
  answer, a mean over its tokens, and the log odds ratio of both answers' mean likelihoods.

Shapes: P pairs.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LossName = Literal["dpo", "ipo", "simpo", "orpo"]
"""The losses, as their papers call them."""
BETAS: dict[LossName, float] = {"dpo": 0.1, "ipo": 0.1, "simpo": 2.0, "orpo": 0.1}
"""Strengths where a plan says none: those of trl for dpo, ipo and orpo, and of the paper for
simpo."""
LARGEST = -1e-6
"""Mean log-probability above which an answer counts as this likely: at 0 its odds are infinite."""


class Answers(NamedTuple):
    """Hold what is known of one answer of each pair, fp32 [P] each."""

    log_probability: Tensor
    """Sum over the answer's tokens, in nats."""
    tokens: Tensor
    reference: Tensor
    """The reference's sum; zeros where a loss has no reference."""

    @property
    def mean(self) -> Tensor:
        """Return the log-probability of a token, in nats."""
        return self.log_probability / self.tokens

    @property
    def ratio(self) -> Tensor:
        """Return the log of the answer's probability over the reference's, in nats."""
        return self.log_probability - self.reference


class PairLosses(NamedTuple):
    """Hold what a loss says of each pair, fp32 [P] each."""

    loss: Tensor
    chosen_reward: Tensor
    rejected_reward: Tensor


@dataclass(frozen=True)
class PreferenceLoss:
    """Compare the answers of pairs.

    Args:
        name: the loss.
        beta: its strength.
        gamma: the margin of rewards that simpo asks for.
        smoothing: share of the pairs whose answers are taken to be the wrong way round.
    """

    name: LossName
    beta: float
    gamma: float = 0.0
    smoothing: float = 0.0

    @property
    def has_reference(self) -> bool:
        """Return whether it reads a reference's log-probabilities."""
        return self.name in ("dpo", "ipo")

    def __call__(self, chosen: Answers, rejected: Answers) -> PairLosses:
        """Return the loss of each pair in nats, and the rewards of both answers."""
        if self.name in ("dpo", "ipo"):
            rewards = self.beta * chosen.ratio, self.beta * rejected.ratio
            if self.name == "dpo":
                return PairLosses(self._logistic(rewards[0] - rewards[1]), *rewards)
            apart = chosen.ratio / chosen.tokens - rejected.ratio / rejected.tokens
            return PairLosses((apart - 1 / (2 * self.beta)) ** 2, *rewards)
        rewards = self.beta * chosen.mean, self.beta * rejected.mean
        if self.name == "simpo":
            return PairLosses(self._logistic(rewards[0] - rewards[1] - self.gamma), *rewards)
        odds = _log_odds(chosen.mean) - _log_odds(rejected.mean)
        return PairLosses(-chosen.mean - self.beta * F.logsigmoid(odds), *rewards)

    def _logistic(self, margin: Tensor) -> Tensor:
        """Return the negative log likelihood of the order of pairs, of which some are wrong."""
        right = -F.logsigmoid(margin)
        if not self.smoothing:
            return right
        return (1 - self.smoothing) * right - self.smoothing * F.logsigmoid(-margin)


def _log_odds(mean: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of likelihoods p, whose logarithms are given; finite up to p = 1."""
    mean = mean.clamp(max=LARGEST)
    small = torch.log1p(-torch.exp(mean.clamp(max=-math.log(2))))
    large = torch.log(-torch.expm1(mean.clamp(min=-math.log(2))))
    return mean - torch.where(mean < -math.log(2), small, large)
