"""Assert the facts of a message, whatever its wording is.

A fact is what a reader acts on: a name, a number with its unit, a file, a key of the plan. The
words around the facts may change without a test's knowing.
"""

import re

INGEST = ("headrace", "data", "ingest")
"""The command that prepares data."""


def in_order(*facts: object) -> str:
    """Return the pattern of one line that has each fact as a word of its own, in this order.

    It suits `match=` of `pytest.raises`, where it finds no fact in the remedy, which has a line of
    its own. A 3 is found neither in 13 nor in 3.5 nor in 1,003.

    Args:
        facts: names, numbers and files as they are printed; one at least.
    """
    assert facts, "a pattern without facts matches everything"
    return ".*".join(_word(str(fact)) for fact in facts)


def tells(text: str, *facts: object) -> bool:
    """Return whether one line of a text has all facts, in this order."""
    return re.search(in_order(*facts), text) is not None


def begins(text: str, *words: object) -> bool:
    """Return whether a text begins with these words and signs: a command as it is typed."""
    return text.split()[: len(words)] == [str(word) for word in words]


def _word(fact: str) -> str:
    begin = r"(?<!\w)(?<!\d[.,])" if re.match(r"\w", fact) else ""
    end = r"(?!\w)(?![.,]\d)" if re.search(r"\w$", fact) else ""
    return f"{begin}{re.escape(fact)}{end}"
