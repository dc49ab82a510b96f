"""Near-duplicates: what is found, what is not merged, and that no order changes it."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quality_texts import (
    cleaned,
    hashes_of,
    jaccard_of,
    left_of,
    ngrams_of,
    pairs_of,
    random_words,
    sketch_of,
)

from headrace.core.errors import ConfigError
from headrace.data.quality import audit, minhash, native, work
from headrace.data.quality.audit import jaccard
from headrace.data.quality.bands import BINS, choose_bands, deviation
from headrace.data.quality.bloom import count_ngrams
from headrace.data.quality.minhash import NearDuplicates

PIECES = st.sampled_from(
    [
        "a",
        "B",
        "b ",
        "stra\u00dfe ",
        " Stra\u00dfe",
        "\u00e9t\u00e9",
        "e\u0301te\u0301 ",
        "-",
        "\u2019",
        "\u00ad",
        "\n\n",
        "\u6f22",
        "\u5b57",
        "\u306e",
        "\u0e01",
        "\U0001f600",
        "\U00020000",
        "\u03a9\u03bc ",
        "\u023a",
        "\u212a",
        "lengthened",
        "in32letters_and-some-that-break:",
        "\ufb01",
        "1",
        "\u0928\u092e\u0938\u094d\u0924 ",
    ]
)
"""Pieces of texts: letters of one to four bytes, some of them equal but for their case or how they
are composed, and what is between words or inside of one without being seen."""


def sketched(texts: list[str], words: int = 5) -> tuple[NearDuplicates, minhash.Sketches]:
    """Return the sketches of texts, all of them sampled."""
    cleaner = NearDuplicates(words=words, workers=1)
    for index, text in enumerate(texts):
        cleaner.learn(0, index, text)
    starts, bar = np.frombuffer(cleaner._starts, np.int64), cleaner._sample.highest
    batch, arguments = cleaner._prepare(cleaner._text, starts, bar, minhash.MOST_SAMPLED_BYTES)
    native.sketch(*arguments)
    return cleaner, batch


def sampled(batch: minhash.Sketches, place: int) -> list[int]:
    return sorted(batch.sampled[batch.ends[place - 1] if place else 0 : batch.ends[place]].tolist())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(PIECES, max_size=40), min_size=2, max_size=4), st.sampled_from([1, 2, 5]))
def test_ngrams_are_those_of_python_sets(pieces: list[list[str]], words: int) -> None:
    texts = ["".join(part) for part in pieces]
    _, batch = sketched(texts, words)
    for place, text in enumerate(texts):
        found = sampled(batch, place)
        assert found == sorted({*hashes_of(text, words)})
        assert len(found) == len(ngrams_of(text, words))
    assert count_ngrams(texts, words) == sum(len(hashes_of(text, words)) for text in texts)


def test_sketches_are_those_of_their_definition() -> None:
    """Check every bin, key and hash, also where a word or a character lies across two pieces."""
    draw = random.Random(5)
    texts = [
        "",
        "one two",
        *(" ".join(random_words(draw, count)) for count in (7, 90, 3000)),
        *("x" * (work.PIECE - n) + " b\u00e9 \u6f22 c d e f" for n in range(4)),
        *("ab" * (work.PIECE + n) + "\u00adc d e f g" for n in range(9)),
        *("a " * n + "\u023a" * 2 * work.PIECE + " b c d e" for n in range(3)),
        "\u00e9" * work.PIECE + " " * work.PIECE + "\u6f22" * work.PIECE + "a b c d e f g",
    ]
    cleaner, batch = sketched(texts)
    for place, text in enumerate(texts):
        bins = [int(word) >> 4 * n & 15 for word in batch.kept[place] for n in range(16)]
        found = bins, batch.keys[place].tolist(), int(batch.least[place])
        assert found == sketch_of(text, cleaner.bands)
        assert sampled(batch, place) == sorted({*hashes_of(text)})
    again = sketched(texts)[1]  # what a thread works on has nothing left of what was before
    assert all(np.array_equal(one, two) for one, two in zip(batch[:3], again, strict=False))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=14))
def test_union_find_is_that_of_a_plain_search(edges: list[tuple[int, int]]) -> None:
    parent = np.arange(12, dtype=np.uint32)
    for one, two in edges:
        native.unite(parent, one, two)
    native.flatten(parent)
    expected = list(range(12))
    for _ in range(12):  # the least member spreads along the edges
        for one, two in edges:
            expected[one] = expected[two] = min(expected[one], expected[two])
    assert parent.tolist() == expected


def test_bands_are_chosen_for_a_recall() -> None:
    for threshold, recall in ((0.8, 0.999), (0.8, 0.99), (0.75, 0.999), (0.95, 0.9)):
        bands = choose_bands(threshold, recall)
        assert bands.bands * bands.rows <= BINS
        assert bands.candidates(threshold) >= recall
        fewer = type(bands)(threshold, bands.bands - 1, bands.rows)
        assert bands.bands == 1 or fewer.candidates(threshold) < recall
        assert bands.merged(0.5) < 1e-5 and bands.merged(threshold) > recall - 1e-3
        assert bands.merged(1.0) == pytest.approx(1.0)
    assert deviation(0.5) > deviation(0.8) > deviation(1.0) == 0


def test_pairs_are_found_and_none_is_merged_that_differs() -> None:
    """Check recall, estimates and the audit on pairs from 40 to 400 words."""
    pairs = pairs_of(random.Random(1), 600)
    cleaner = NearDuplicates(workers=2)
    report, rest = cleaned(cleaner, [[text for pair in pairs for text in pair]])
    found = [(jaccard_of(*p), not (a and b)) for p, a, b in zip(pairs, *cut(rest), strict=True)]
    similar = [hit for index, hit in found if index >= 0.8]
    assert len(similar) > 100 and np.mean(similar) >= 0.99
    apart = [hit for index, hit in found if index < 0.5]
    assert len(apart) > 50 and not any(apart)
    assert cleaner.audit is not None and cleaner.audit.pairs > 50 and not cleaner.audit.wrong
    assert report.audited_recall is not None and report.audited_recall >= 0.99
    assert report.predicted_recall == pytest.approx(0.999, abs=1e-3)
    assert report.memory_bytes <= cleaner.predict_bytes(report.documents)
    assert report.dropped_documents == sum(hit for _, hit in found)
    counts = [cleaner.duplicates(0, index) for index in range(report.documents)]
    assert sum(counts) == report.dropped_documents


def cut(rest: list[list[str]]) -> tuple[list[str], list[str]]:
    """Return what is left of the first and of the second of each pair."""
    return rest[0][::2], rest[0][1::2]


def test_the_audit_sees_what_was_missed() -> None:
    """A finder that finds nothing has an audited recall of 0, and one that merges all is told."""
    sample = audit.AuditSample()
    one, two, far = (np.arange(begin, begin + 100, dtype=np.uint64) for begin in (0, 5, 90))
    every = np.concatenate((one, two, far))
    seven, numbers, sizes = np.full(3, 7, np.uint64), np.arange(3), np.full(3, 100)
    sample.add(audit.SamplePart(seven, numbers, every, sizes))
    missed = sample.audit(np.array([0, 1, 2]), 0.8, None)
    assert (missed.pairs, missed.met, missed.recall) == (1, 0, 0.0)
    merged = sample.audit(np.array([0, 0, 0]), 0.8, None)
    assert (merged.met, merged.merged, merged.wrong) == (1, 2, 1)
    assert sample.audit(np.array([0, 1, 2]), 0.8, np.array([0, 1, 0])).recall is None
    assert jaccard(one, two) == 95 / 105


def chain(draw: random.Random, length: int) -> list[str]:
    """Return texts of which each is similar to the next one, and not to those far from it."""
    words = random_words(draw, 200 + 25 * length)
    return [" ".join(words[25 * place : 25 * place + 200]) for place in range(length)]


@pytest.fixture
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small batches and samples: many of them."""
    monkeypatch.setattr(minhash, "BATCH_BYTES", 4000)
    monkeypatch.setattr(audit, "SAMPLE_BYTES", 40_000)


@pytest.mark.parametrize("keep", ["first", "longest"])
def test_no_order_of_files_and_no_number_of_threads_changes_it(keep: str, few_bytes: None) -> None:
    draw = random.Random(2)
    texts = [text for pair in pairs_of(draw, 40) for text in pair] + chain(draw, 30)
    texts += [*texts[:20], "", "...", "?", "too short", "Too, short!"]
    outcomes = []
    for workers in (1, 3, 2):
        cleaner = NearDuplicates(keep=keep, workers=workers)  # pyright: ignore
        report, rest = cleaned(cleaner, [texts])
        outcomes.append((report.dropped_bytes, report.audited_recall, left_of(rest)))
        draw.shuffle(texts)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    left = outcomes[0][2]
    assert "..." in left and "?" in left and len({"too short", "Too, short!"} & {*left}) == 1


def test_of_a_chain_those_fall_that_are_similar_to_one_that_stays(few_bytes: None) -> None:
    texts = chain(random.Random(3), 40)
    _, rest = cleaned(NearDuplicates(), [texts])
    left = left_of(rest)
    assert 10 < len(left) < 30
    fallen = [text for text in texts if text not in left]
    assert all(max(jaccard_of(text, stays) for stays in left) > 0.6 for text in fallen)
    assert all(jaccard_of(one, two) < 0.8 for one in left for two in left if one < two)


def test_scope_and_what_stays(few_bytes: None) -> None:
    words = random_words(random.Random(4), 300)
    short, long = " ".join(words), " ".join([*words, "and", "more"])
    for scope, keep, expected in (
        ("all", "first", [[short, ""], [""]]),
        ("all", "longest", [["", ""], [long]]),
        ("source", "longest", [[short, ""], [long]]),
    ):
        cleaner = NearDuplicates(scope=scope, keep=keep)  # pyright: ignore
        assert cleaned(cleaner, [[short, short], [long]])[1] == expected
    with pytest.raises(ConfigError, match=r"document 0 of source 0 .* changed"):
        cleaner.apply(0, 0, long)
    with pytest.raises(ConfigError, match="document 2 of source 0"):
        cleaner.apply(0, 2, long)
