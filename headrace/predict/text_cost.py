"""Predict what the choice of a tokenizer costs a plan: tokens of a text, steps, time and money."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from headrace.core.errors import HeadraceError
from headrace.costs.count import model_flops_per_token
from headrace.costs.machine import Machine
from headrace.plan.plan import Plan
from headrace.plan.technique import Context
from headrace.predict.prediction import predict


@dataclass(frozen=True)
class TextCost:
    """Hold what one pass over a text costs a plan with one tokenizer.

    Args:
        tokenizer: its name.
        vocab: its entries, which the output matrix has too.
        tokens: tokens of the text, one at the start of each document included.
        steps: optimizer steps of one pass over them.
        context_words: words in a sequence of the plan; None where words cannot be counted.
        context_bytes: bytes of text in a sequence.
        flops: FLOPs of the model for one pass.
        relative_cost: those FLOPs, in times the least of all tokenizers.
        hours: predicted hours of those steps; None where no time is predicted.
        dollars: price of those hours; None without hours or without hardware.dollars_per_hour.
    """

    tokenizer: str
    vocab: int
    tokens: int
    steps: int
    context_words: float | None
    context_bytes: float
    flops: float
    relative_cost: float = 1.0
    hours: float | None = None
    dollars: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return every number as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class EncodedText:
    """Hold a text as a tokenizer cuts it: tokens, words (None if unknown) and UTF-8 bytes."""

    tokenizer: str
    vocab: int
    tokens: int
    words: int | None
    text_bytes: int


def text_costs(
    plan: Plan, texts: Sequence[EncodedText], place: tuple[Context, Machine] | None = None
) -> list[TextCost]:
    """Return what one pass over a text costs a plan with each tokenizer.

    Args:
        plan: the plan; its own tokenizer is left out of account.
        texts: the same text, as each tokenizer cuts it.
        place: where the plan would run and the rates there, to predict the time; None without.
    """
    costs = [_cost(plan, text, place) for text in texts]
    least = min((cost.flops for cost in costs), default=1.0)
    return [replace(cost, relative_cost=cost.flops / least) for cost in costs]


def _cost(plan: Plan, text: EncodedText, place: tuple[Context, Machine] | None) -> TextCost:
    model = plan.model.model_copy(update={"vocab": text.vocab})
    length = plan.data.sequence_length
    steps = math.ceil(text.tokens / plan.batch.tokens)
    hours = _hours(plan, text, place, steps) if place else None
    price = plan.hardware.dollars_per_hour
    return TextCost(
        text.tokenizer,
        text.vocab,
        text.tokens,
        steps,
        context_words=None if text.words is None else length * text.words / max(1, text.tokens),
        context_bytes=length * text.text_bytes / max(1, text.tokens),
        flops=text.tokens * model_flops_per_token(model, length),
        hours=hours,
        dollars=None if hours is None or price is None else hours * price,
    )


def _hours(
    plan: Plan, text: EncodedText, place: tuple[Context, Machine], steps: int
) -> float | None:
    """Return the hours of that many steps; None where the plan's time cannot be predicted."""
    changed = plan.model_copy(
        update={
            "data": plan.data.model_copy(update={"tokenizer": "bpe", "vocab": text.vocab}),
            "model": plan.model.model_copy(update={"vocab": text.vocab}),
        }
    )
    context, machine = place
    try:
        step_s = predict(changed, context, machine).time.step_s
    except HeadraceError:
        return None
    return None if step_s is None else steps * step_s / 3600
