"""Find which characters of a conversation the assistant wrote.

A template that marks answers with `{% generation %}` says it. For any other, an answer is what a
conversation up to it has beyond one that ends in the beginning of an answer: the end of the turn,
which the model has to write as well, is part of it. `trl` counts the answer of a prompt the same
way; here it holds for every turn.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.data.chat.template import ChatTemplate, TemplateRefused

ASSISTANT = "assistant"


class AnswersHidden(ValueError):
    """A template writes earlier turns otherwise once later ones follow, and marks no answers."""


def find_answers(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    special: Sequence[str] = (),
    after: int = 0,
) -> tuple[str, list[tuple[int, int]]]:
    """Return a conversation as text, and the characters [begin, end) of each answer.

    Args:
        template: the chat template.
        messages: of the conversation.
        tools: JSON schemas of what the assistant may call.
        special: texts that are one token each: none is cut in two.
        after: number of the first message that may be an answer.

    Raises:
        TemplateRefused: the template refuses the conversation.
        AnswersHidden: answers cannot be told from the text.
    """
    whole = template.render(messages, tools)
    if template.marks_answers:
        earlier = sum(message["role"] == ASSISTANT for message in messages[:after])
        later = sum(message["role"] == ASSISTANT for message in messages[after:])
        # A template may mark the last turns alone.
        spans = whole.answers[max(0, len(whole.answers) - later) :] if earlier else whole.answers
        return whole.text, [span for span in spans if span[0] < span[1]]
    text, answers = whole.text, list[tuple[int, int]]()
    for number, message in enumerate(messages):
        if message["role"] != ASSISTANT or number < after:
            continue
        try:
            head = template.render(messages[:number], tools, add_generation_prompt=True).text
            upto = template.render(messages[: number + 1], tools).text
        except TemplateRefused as refused:
            raise AnswersHidden(f"it refuses the turns before an answer: {refused}") from None
        begin, end = len(head), _shared(text, upto, special)
        if not text.startswith(head) or end < begin:
            raise AnswersHidden("it writes earlier turns otherwise when later ones follow")
        answers.append((begin, end))
    return text, [span for span in answers if span[0] < span[1]]


def _shared(text: str, other: str, special: Sequence[str]) -> int:
    """Return how many characters two texts begin with alike, whole special tokens only."""
    if text.startswith(other):
        return len(other)
    low, high = 0, min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if text[:middle] == other[:middle] else (low, middle - 1)
    for token in special:
        begin = text.find(token, max(0, low - len(token) + 1), low + len(token) - 1)
        if 0 <= begin < low:
            low = begin
    return low
