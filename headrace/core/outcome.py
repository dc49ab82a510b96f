"""Judge whether a run learned or diverged, by its last loss, its first one and a uniform guess.

A loss that is no number ends a run. One that is finite and high does not: the budget is spent, and
nothing was learned. The validation loss decides, but only where the loss of the training text rose
as well: a model that learns its text by heart has a high validation loss and has not diverged.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

WORSE = 1.5
"""Times a uniform guess's loss above which a finite loss is divergence. Chosen, not measured."""
ROSE = 1.2
"""Times the loss that the run began with above which a later one is divergence. Chosen, too."""

Divergence = Literal["", "not finite", "worse than a guess", "rose"]


@dataclass(frozen=True)
class Outcome:
    """Hold what a run's losses came to, in nats per token, and how the run diverged, if it did.

    Args:
        kind: how it diverged; "" where it did not.
        first_nats: the loss that it began with: of the first step or the first validation, the
            lower one. None where there was none.
        last_nats: of the last validation; of the last step, where there was no validation.
        guess_nats: of a uniform guess over the vocabulary.
        first_step: of the first loss.
        last_step: of the last loss.
    """

    kind: Divergence
    first_nats: float | None
    last_nats: float | None
    guess_nats: float
    first_step: int | None
    last_step: int | None

    @property
    def diverged(self) -> bool:
        """Return whether the run diverged, so that nothing that it learned is left."""
        return bool(self.kind)

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as JSON values, with its sentence."""
        return {"diverged": self.diverged, **asdict(self), "sentence": self.sentence}

    @property
    def sentence(self) -> str:
        """Return the divergence in one sentence without a full stop; "" where there is none."""
        if not self.kind:
            return ""
        guess = f"a uniform guess has {self.guess_nats / math.log(2):.1f}"
        if self.kind == "not finite" or self.last_nats is None:
            return f"diverged (a loss or a gradient was not finite; {guess} bits per token)"
        losses = f"{self.last_nats / math.log(2):.1f} bits per token after step {self.last_step}"
        if self.first_nats is not None and self.first_step != self.last_step:
            losses += f", {self.first_nats / math.log(2):.1f} after step {self.first_step}"
        return f"diverged ({losses}; {guess})"


def outcome_of(
    val: Sequence[Mapping[str, Any]],
    first_loss: float | None,
    last_loss: float | None,
    *,
    step: int,
    vocab: int,
    ended_wild: bool,
) -> Outcome:
    """Judge a run by its losses.

    Args:
        val: its validations, each with `step` and `loss_nats`.
        first_loss: of its first step, in nats per token; None where it was not finite.
        last_loss: of its last step.
        step: its last step.
        vocab: entries of its tokenizer.
        ended_wild: a loss or a gradient that was not finite ended it.
    """
    guess = math.log(vocab)
    begun = [(one["loss_nats"], one["step"]) for one in val[:1]]
    begun += [(first_loss, 1)] if first_loss is not None else []
    first, first_step = min(begun, default=(None, None))
    last, last_step = (val[-1]["loss_nats"], val[-1]["step"]) if val else (last_loss, step)
    kind: Divergence = ""
    if ended_wild:
        kind = "not finite"
    elif last is not None and (last_loss is None or last_loss > min(guess, first or guess)):
        if last > WORSE * guess:
            kind = "worse than a guess"
        elif first is not None and last > ROSE * first:
            kind = "rose"
    return Outcome(kind, first, last, guess, first_step, last_step)
