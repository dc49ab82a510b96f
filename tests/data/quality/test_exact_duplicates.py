"""Exact duplicates of documents and of paragraphs, beside what Python sets say."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quality_texts import Sources, cleaned, left_of

from headrace.core.errors import ConfigError
from headrace.data.quality.exact import ExactDocuments, ExactParagraphs
from headrace.data.quality.passages import passage_ends

TEXTS = st.lists(
    st.lists(st.sampled_from(["a", "b", "ab", "\u00e9", " a", ""]), max_size=8), max_size=3
)


@settings(max_examples=40, deadline=None)
@given(TEXTS, st.sampled_from(["all", "source"]))
def test_documents_are_those_of_a_set(sources: Sources, scope: str) -> None:
    cleaner = ExactDocuments(scope=scope)  # pyright: ignore
    report, rest = cleaned(cleaner, sources)
    seen, expected = set(), []
    for number, texts in enumerate(sources):
        if scope == "source":
            seen = set()
        expected.append(["" if t in seen or seen.add(t) else t for t in texts])
        for index, text in enumerate(texts):
            others = sum(t == text for ts in (sources if scope == "all" else [texts]) for t in ts)
            fell = cleaner.register.find(number, index)
            stays = cleaner._fell_for[fell] == fell
            assert cleaner.duplicates(number, index) == (others - 1 if stays else 0)
    assert rest == expected
    total = sum(len(texts) for texts in sources)
    assert report.documents == total
    assert report.dropped_bytes == sum(len(t.encode()) for ts in sources for t in ts) - sum(
        len(t.encode()) for ts in expected for t in ts
    )


@settings(max_examples=40, deadline=None)
@given(st.text(alphabet="ab \t\r\n\f\u00e9", max_size=40))
def test_paragraphs_joined_are_the_text(text: str) -> None:
    raw = text.encode()
    ends = passage_ends(raw)
    assert ends[-1] == len(raw) and ends == sorted(ends)
    pieces = [raw[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    assert b"".join(pieces) == raw
    assert len(pieces) == 1 or all(piece.strip() for piece in pieces)
    assert [p.split() for p in pieces if p.strip()] == [
        q.split() for q in _blocks(text) if q.strip()
    ]


def _blocks(text: str) -> list[bytes]:
    """Return runs of lines that hold something."""
    blocks = [b""]
    for line in text.encode().split(b"\n"):
        if line.strip():
            blocks[-1] += line + b"\n"
        else:
            blocks.append(b"")
    return blocks


PARAGRAPHS = [f"Paragraph {number} is long enough to be compared." for number in range(6)]


@pytest.mark.parametrize("scope", ["all", "source"])
def test_each_paragraph_stays_once_in_any_order(scope: str) -> None:
    draw = random.Random(1)
    texts = ["\n\n".join(draw.choices([*PARAGRAPHS, "Yes."], k=4)) for _ in range(20)]
    sources = [texts[:12], texts[12:]]
    cleaner = ExactParagraphs(scope=scope, least_bytes=20)  # pyright: ignore
    report, rest = cleaned(cleaner, sources)
    before = "\n\n".join(texts)
    for paragraph in PARAGRAPHS:
        stays = [sum(text.count(paragraph) for text in left) for left in rest]
        there = [any(paragraph in text for text in source) for source in sources]
        assert stays == there if scope == "source" else sum(stays) == (paragraph in before)
    assert sum(t.count("Yes.") for ts in rest for t in ts) <= before.count("Yes.")
    assert report.cut_documents and report.dropped_documents
    lost = sum(len(t) for ts in sources for t in ts) - sum(len(t) for ts in rest for t in ts)
    assert report.dropped_bytes == lost
    copied = [p for p in PARAGRAPHS if any(p in text for text in sources[0])]
    across = sum(text.count(paragraph) for paragraph in copied for text in sources[1])
    assert report.across_sources == (across if scope == "all" else 0)
    total = sum(cleaner.duplicates(n, i) for n, ts in enumerate(sources) for i in range(len(ts)))
    assert total == sum(before.count(p) for p in PARAGRAPHS) - sum(
        t.count(p) for p in PARAGRAPHS for ts in rest for t in ts
    )
    for source in sources:
        draw.shuffle(source)
    shuffled = ExactParagraphs(scope=scope, least_bytes=20)  # pyright: ignore
    assert left_of(cleaned(shuffled, sources)[1]) == left_of(rest)


def test_what_stays_is_untouched_and_a_changed_text_is_refused() -> None:
    text = "A first paragraph.\r\n \r\n\n  A second one.  \n\n"
    cleaner = ExactParagraphs(least_bytes=1)
    _, rest = cleaned(cleaner, [[text, "A second one."], ["B"]])
    first = "A first paragraph.\r\n \r\n\n"  # which of the others stays depends on their digests
    assert rest in ([[text, ""], ["B"]], [[first, "A second one."], ["B"]])
    for changed in ("A second one", text + " "):
        with pytest.raises(ConfigError, match="the source changed while it was read"):
            cleaner.apply(0, 1, changed)
