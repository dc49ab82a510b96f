"""Compute what published scaling laws say of parameters, tokens, batch and learning rate.

The loss is Chinchilla's L(N, D) = E + A / N^alpha + B / D^beta (arXiv 2203.15556) with the
constants that Besiroglu et al. fitted again (arXiv 2404.10102). Tokens that repeat count for less
(arXiv 2305.16264), until a model learns them by heart. The batch and the learning rate are Step
Law's (arXiv 2503.04715). All functions are pure. Every law is of its own corpus, tokenizer and
recipe: it ranks shapes for a budget, and says of no other text how low its loss will be.
"""

import math
from dataclasses import dataclass

from headrace.costs.constants import number, numbers
from headrace.predict.intervals import Between

E, A, B, ALPHA, BETA = numbers("scaling_loss")
E_ERROR, A_ERROR, B_ERROR, ALPHA_ERROR, BETA_ERROR = numbers("scaling_loss_error")
LEAST_FITTED, MOST_FITTED, FEWEST_FITTED, LONGEST_FITTED = numbers("scaling_range")
REPEATED = number("repeated_tokens")
CHINCHILLA = number("tokens_per_parameter")
RATE, RATE_PARAMETERS, RATE_TOKENS = numbers("step_law_rate")
BATCH, BATCH_TOKENS = numbers("step_law_batch")
LEAST_SWEPT, MOST_SWEPT, FEWEST_SWEPT, LONGEST_SWEPT = numbers("step_law_range")
HIGHEST_RATE = number("step_law_highest")
EIGHTY = 1.2816
"""Standard deviations on either side of a normal distribution's mean that hold 80% of it."""


@dataclass(frozen=True)
class ExpectedLoss:
    """Hold the loss that the law expects.

    Args:
        nats: nats a token, on the law's own corpus.
        between: the 80% interval by the standard errors of the law's constants.
        effective_tokens: fresh tokens that would teach as much.
        by_parameters, by_tokens: nats that a larger model and more tokens could still take away.
    """

    nats: float
    between: Between
    effective_tokens: float
    by_parameters: float
    by_tokens: float


def compute_optimal(flops: float) -> tuple[float, float]:
    """Return the parameters and tokens of lowest loss for 6 x parameters x tokens FLOPs."""
    both = flops / 6
    ratio = (ALPHA * A / (BETA * B)) ** (1 / (ALPHA + BETA))
    parameters = ratio * both ** (BETA / (ALPHA + BETA))
    return parameters, both / parameters


def worth(count: float, fresh: float, decay: float) -> float:
    """Return what `count` are worth, of which those beyond `fresh` lose worth as they repeat.

    It is U + U R* (1 - exp(-R / R*)) with R = count / U - 1 (arXiv 2305.16264, equation 5).
    """
    repeats = max(0.0, count / fresh - 1)
    return min(count, fresh) + fresh * decay * -math.expm1(-repeats / decay)


def expected_loss(
    parameters: float, tokens: float, fresh_tokens: float | None = None
) -> ExpectedLoss:
    """Return the loss that the law expects of a model.

    The interval takes the errors of the constants as independent, for their covariances are not
    published. Those of A and alpha, and of B and beta, offset each other, so that it is wider than
    the law's own. It is lognormal above zero, where the reducible part lies.

    Args:
        parameters: all parameters of the model.
        tokens: tokens that it is trained on.
        fresh_tokens: how many of them are different; None where none repeats. Parameters count
            whole, however few the fresh tokens: the discount of arXiv 2305.16264 takes all models
            of benchmarks/repeated_text.py for the same, and the larger ones learned more.
    """
    n, d = parameters, tokens
    if fresh_tokens is not None and fresh_tokens < tokens:
        d = worth(tokens, fresh_tokens, REPEATED)
    by_parameters, by_tokens = A / n**ALPHA, B / d**BETA
    errors = (
        E_ERROR,
        by_parameters * A_ERROR / A,
        by_parameters * ALPHA_ERROR * math.log(n),
        by_tokens * B_ERROR / B,
        by_tokens * BETA_ERROR * math.log(d),
    )
    reducible = by_parameters + by_tokens
    wide = math.exp(EIGHTY * math.hypot(*errors) / reducible)
    between = Between(E + reducible / wide, E + reducible * wide)
    return ExpectedLoss(E + reducible, between, d, by_parameters, by_tokens)


def step_law_rate(parameters: float, tokens: float) -> float:
    """Return Step Law's learning rate of AdamW, at most the highest that it was swept to.

    Args:
        parameters: parameters without the embedding and the output matrix.
        tokens: tokens of the whole run.
    """
    return min(HIGHEST_RATE, RATE * parameters**RATE_PARAMETERS * tokens**RATE_TOKENS)


def step_law_batch(tokens: float) -> float:
    """Return Step Law's global batch, in tokens, for a run of so many tokens."""
    return BATCH * tokens**BATCH_TOKENS


def is_fitted(parameters: float, tokens: float) -> bool:
    """Return whether models of this size and length are among those that the loss was fitted to."""
    return LEAST_FITTED <= parameters <= MOST_FITTED and FEWEST_FITTED <= tokens <= LONGEST_FITTED


def is_swept(parameters: float, tokens: float) -> bool:
    """Return whether Step Law swept such models; `parameters` are those without tables."""
    return LEAST_SWEPT <= parameters <= MOST_SWEPT and FEWEST_SWEPT <= tokens <= LONGEST_SWEPT
