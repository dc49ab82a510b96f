"""Define the plan's table `data.chat`: conversations to train on, and which of their tokens count.

With the table, rows are conversations, prompts with an answer, or plain text, told apart by their
fields. A chat template makes text of a conversation, and the loss counts the tokens that the model
itself would have to write.
"""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from headrace.core.limits import MOST
from headrace.core.remedy import mend
from headrace.core.strict import Strict, Wrong

RowKind = Literal["messages", "completion", "text", "preference"]
"""What a row holds: a list of messages, a prompt and its answer, plain text, or a prompt with a
chosen and a rejected answer."""
CHATML = "chatml"
"""The name of the template that is built in."""


def _check_date(date: str) -> str:
    """Refuse what is no date."""
    from datetime import date as calendar

    try:
        return calendar.fromisoformat(date).isoformat()
    except ValueError:
        raise ValueError(f"{date!r} is no date, as 2024-07-26 is") from None


class ChatConfig(Strict):
    """Say how rows become conversations, and which of their tokens the loss counts."""

    kind: Literal["auto", "messages", "completion", "text", "chosen", "preference"] = "auto"
    """What rows hold; `auto` looks at the fields of each. `messages`: `messages` of `role` and
    `content`, or `conversations` of `from` and `value`; `completion`: `prompt` and `completion` or
    `response`, or `instruction`, `input` and `output`; `text`: the field `data.text_key`; `chosen`:
    as `auto`, and of preference pairs the chosen answer; `preference`: pairs of `chosen` and
    `rejected`, with their `prompt` beside them or at the beginning of both, for the technique
    `preference`."""
    train_on: Literal["answers", "all"] = "answers"
    """Count the tokens of the assistant's turns, or all but the first of each conversation."""
    system: str = ""
    """A system prompt for conversations that begin with none. Left empty, they keep none."""
    template: str = ""
    """Path of a Jinja template, or `chatml`, which is built in. Left empty, it is the chat template
    beside the tokenizer."""
    max_tokens: int | None = Field(default=None, ge=2, le=MOST)
    """Cut conversations to so many tokens; answers that fall away are counted and told. Without it
    none is cut."""
    date: Annotated[str, AfterValidator(_check_date)] = "2024-07-26"
    """The date that a template reads which writes one, so that its text is the same on any day."""

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        """Refuse to count all tokens of pairs, whose answers are what is compared."""
        if self.kind == "preference" and self.train_on == "all":
            raise Wrong(
                "kind = 'preference' compares two answers, and train_on = 'all' counts their "
                "prompt too",
                mend("data.chat.train_on=answers"),
            )
        return self
