"""Make conversations of the techniques' cards: questions on Headrace, with their answers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.core.files import write_whole
from headrace.plan.technique import Catalogue, Technique

ASKED = {
    "buys": "What does {name} buy?",
    "costs": "What does {name} cost?",
    "helps": "When does {name} help?",
    "hurts": "When does {name} hurt?",
    "source": "Where does {name} come from?",
}
"""Maps a field of a card to the question that it answers."""


def write_questions(catalogue: Catalogue, file: Path) -> Path:
    """Write one conversation for each fact of each card as JSON lines, and return the file."""
    lines = [
        json.dumps(one)
        for name in sorted(catalogue.techniques)
        for one in questions(catalogue.techniques[name])
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, "\n".join(lines) + "\n")
    return file


def questions(technique: type[Technique[Any]]) -> Iterator[dict[str, Any]]:
    """Yield a card as conversations of one question each."""
    name, card = technique.name(), technique.card
    yield _conversation(f"What is {name}?", technique.line())
    for field, question in ASKED.items():
        yield _conversation(question.format(name=name), "; ".join(card.parts(field)))
    yield _conversation(f"In which room is {name}?", f"{name} is in the room {technique.room}.")


def _conversation(question: str, answer: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages}
