"""Describe what mends an error: as changes of the plan for a program, as text for a reader.

A change is a tuple of words that `headrace/plan/changes.py` reads: `+technique` adds a technique,
`-technique` leaves one out, `key=value` sets a key. A sweep that meets an error tries the error's
changes. A reader is shown the text, which no program reads.
"""

import shlex
from dataclasses import dataclass


@dataclass(frozen=True)
class Remedy:
    """Hold what mends an error.

    Args:
        changes: alternatives, the best first. All words of one alternative are needed together.
        text: what a reader is shown: the changes as they are typed, other commands, or prose.
    """

    changes: tuple[tuple[str, ...], ...] = ()
    text: str = ""

    def __bool__(self) -> bool:
        """Return whether there is anything to show."""
        return bool(self.text)

    def __str__(self) -> str:
        """Return the text."""
        return self.text

    def __or__(self, other: "Remedy | str") -> "Remedy":
        """Return a remedy that offers the other one as a further alternative, after " or "."""
        other = as_remedy(other)
        texts = [remedy.text for remedy in (self, other) if remedy.text]
        return Remedy(self.changes + other.changes, " or ".join(texts))

    def otherwise(self, other: "Remedy | str") -> "Remedy":
        """Return a remedy that offers the other one as the last resort, in brackets.

        Nothing is offered twice.
        """
        other = as_remedy(other)
        if other.changes and {*other.changes} <= {*self.changes}:
            return self
        return Remedy(self.changes + other.changes, f"{self.text} (or {other.text})")

    @property
    def only_override(self) -> str | None:
        """Return the `key=value` where the remedy is that one word; None where it is not."""
        whole = len(self.changes) == 1 and self.text == typed(*self.changes[0])
        if not whole or len(self.changes[0]) != 1:
            return None
        (word,) = self.changes[0]
        return None if word[0] in "+-" else word


def typed(*words: str) -> str:
    """Return the words of a change as they are typed after `headrace train PLAN`."""
    options = {"+": "--with ", "-": "--without "}
    return " ".join(
        f"{options[word[0]]}{shlex.quote(word[1:])}" if word[0] in options else shlex.quote(word)
        for word in words
    )


def mend(*words: str, text: str = "") -> Remedy:
    """Return a remedy that makes one change of the plan.

    Args:
        words: `+technique`, `-technique` or `key=value`; empty ones are left out.
        text: what a reader is shown; "" shows the words as they are typed.
    """
    given = tuple(filter(None, words))
    return Remedy((given,) if given else (), text or typed(*given))


def leave_out(key: str) -> Remedy:
    """Return a remedy that asks a reader to leave a key out of the plan."""
    return Remedy(text=f"leave out {key}")


def as_remedy(remedy: Remedy | str) -> Remedy:
    """Return a remedy as it is, and a text as a remedy without changes of the plan."""
    return remedy if isinstance(remedy, Remedy) else Remedy(text=remedy)


NONE = Remedy()
"""The remedy of an error that nothing mends: no changes and no text."""
