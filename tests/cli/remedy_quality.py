"""Errors of what cleans text, and how each remedy is carried out."""

import sys
from importlib.util import find_spec

import pytest
from remedy_python import Call

from headrace.data.quality.bloom import RepeatedPassages
from headrace.data.quality.compiled import compiled
from headrace.data.quality.exact import ExactDocuments

TEXT = " ".join(f"word{number}" for number in range(200))


def without_numba(patch: pytest.MonkeyPatch) -> None:
    """Ask for loops that nothing compiles."""
    patch.setitem(sys.modules, "numba", None)
    compiled()


def installs_numba(remedy: str) -> None:
    """Let be installed what the remedy installs; ask again, now that it is there."""
    assert remedy == "pip install 'headrace[data]'" and find_spec("numba")
    assert compiled().WORDS == 16


def learned(text: str) -> None:
    """Learn a text, and ask what remains of what is read then."""
    cleaner = ExactDocuments()
    cleaner.learn(0, 0, TEXT)
    cleaner.finish()
    assert cleaner.apply(0, 0, text) == TEXT


def reads_again(remedy: str) -> None:
    """Read the text again, which does not change this time."""
    assert remedy == "the same command again"
    learned(TEXT)


def sift(ngrams: int) -> None:
    """Insert a text into a filter."""
    cleaner = RepeatedPassages(ngrams=ngrams)
    cleaner.learn(0, 0, TEXT)
    cleaner.finish()


def with_ngrams(remedy: str) -> None:
    """Make the filter as large as the remedy says."""
    key, _, ngrams = remedy.partition(",")[0].partition("=")
    assert key == "ngrams"
    sift(int(ngrams))


QUALITY = {
    "data/quality/compiled:compiled#1": Call(without_numba, installs_numba),
    "data/quality/register:Register.find#1": Call(lambda patch: learned("other"), reads_again),
    "data/quality/bloom:RepeatedPassages._full#1": Call(lambda patch: sift(100), with_ngrams),
}
"""Each error by its site."""
