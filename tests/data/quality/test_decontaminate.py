"""Words as numbers, and what of an evaluation set is found in a text."""

import random

import numpy as np
import pytest

from headrace.data.quality import words
from headrace.data.quality.decontaminate import Decontaminator
from headrace.data.quality.words import runs_of, words_of
from headrace.plan.cleaning import DecontaminationConfig

VOCABULARY = [f"w{n}" for n in range(300)]


def prose(seed: int, count: int) -> str:
    return " ".join(random.Random(seed).choices(VOCABULARY, k=count))


def cut(text: str) -> list[str]:
    found = words_of(text)
    return [text[a:b] for a, b in zip(found.starts_N, found.ends_N, strict=True)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don't  STOP, now!", ["Don", "t", "STOP", "now"]),
        ("d\u00e9j\u00e0 \u201cvu\u201d", ["d\u00e9j\u00e0", "vu"]),
        ("\u4e2d\u6587 a\u3002", ["\u4e2d", "\u6587", "a"]),
        ("\u0928\u092e\u0938\u094d\u0924\u0947 7", ["\u0928\u092e\u0938\u094d\u0924\u0947", "7"]),
        ("co\u00adop\u00ad er", ["co\u00adop", "er"]),
        ("\U00020000a\u0e01", ["\U00020000", "a", "\u0e01"]),
        ("... \n", []),
        ("", []),
    ],
)
def test_words_are_cut_in_any_script(text: str, expected: list[str]) -> None:
    assert cut(text) == expected


def test_a_word_has_one_number_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that case, punctuation, soft hyphens and the blocks of a long text change nothing."""
    plain = words_of("the old mill \u00e9t\u00e9").numbers_N
    assert len({*plain.tolist()}) == 4
    assert np.array_equal(words_of("-- The, O\u00adLD mill; \u00c9T\u00c9.").numbers_N, plain)
    whole = words_of(text := prose(1, 4_000))
    words._powers.cache_clear()
    monkeypatch.setattr(words, "BLOCK", 1_000)
    in_blocks = words_of(text)
    words._powers.cache_clear()
    assert all(np.array_equal(a, b) for a, b in zip(whole, in_blocks, strict=True))
    runs = runs_of(whole.numbers_N, 13)
    assert len(runs) == 4_000 - 12
    assert np.array_equal(runs[100:103], runs_of(whole.numbers_N[100:115], 13))
    assert len(runs_of(whole.numbers_N[:12], 13)) == 0


def test_a_share_of_either_document_contaminates() -> None:
    """A long page with a whole question is contaminated, one with a common quotation is not."""
    question, quotation = prose(1, 40), prose(2, 15)
    cleaner = Decontaminator(DecontaminationConfig(remove="document"))
    cleaner.evaluate(question)
    cleaner.evaluate(f"{prose(3, 100)} {quotation} {prose(4, 100)}")
    documents = [
        f"{prose(5, 1000)}. {question}. {prose(6, 1000)}",
        f"{prose(7, 300)} {quotation} {prose(8, 300)}",
        f"{prose(9, 9)} {' '.join(question.split()[:14])}",
        prose(10, 50),
    ]
    for index, text in enumerate(documents):
        cleaner.learn(0, index, text)
    report = cleaner.finish()
    assert [bool(cleaner.apply(0, i, t)) for i, t in enumerate(documents)] == [0, 1, 0, 1]
    assert (report.documents, report.dropped_documents) == (4, 2)
    assert report.memory_bytes > 0 and len(report.examples) == 2


def test_short_evaluation_documents_are_compared_as_they_can_be() -> None:
    """From 8 words on inside of others; shorter ones with whole documents, and each is counted."""
    cleaner = Decontaminator(DecontaminationConfig())
    for text in ("Yes, it is.", "yes it is", prose(1, 8), "?!"):
        cleaner.evaluate(text, is_validation=True)
    documents = ["yes it IS", "I say yes it is so", f"{prose(2, 20)}. {prose(1, 8)}.", "!?", "?!"]
    for index, text in enumerate(documents):
        cleaner.learn(0, index, text)
    cleaner.finish()
    left = [cleaner.apply(0, index, text) for index, text in enumerate(documents)]
    assert left == ["", documents[1], f"{prose(2, 20)}. ", "!?", ""]
    overlap = cleaner.overlap()
    assert (overlap.documents, overlap.of_documents) == (0, 4)

    only_told = Decontaminator(DecontaminationConfig(remove="nothing"))
    only_told.evaluate("Yes, it is.", is_validation=True)
    only_told.evaluate("yes it is", is_validation=True)
    only_told.learn(0, 0, "yes it is")
    assert only_told.finish().dropped_documents == 0
    assert (only_told.overlap().documents, only_told.overlap().bytes) == (2, 20)
