"""The Bloom filter of n-grams: its false positives, what falls, and that it stops when full."""

import random

import numpy as np
import pytest
from quality_texts import cleaned, hashes_of, random_words

from headrace.core.errors import ConfigError
from headrace.data.quality import bloom
from headrace.data.quality.bands import bloom_rate
from headrace.data.quality.bloom import RepeatedPassages, bits_per_ngram, count_ngrams, filter_bytes
from headrace.data.quality.methods import make_deduplicator
from headrace.plan.cleaning import DeduplicationConfig


def test_the_rate_of_false_positives_is_the_one_asked_for() -> None:
    """Fill filters with n-grams and ask for others: as many are taken for old as was said."""
    draw = random.Random(1)
    text = " ".join(f"{draw.random()}" for _ in range(10_000))
    fresh = [f"{draw.random()}" for _ in range(20_000)]
    ngrams = count_ngrams([text], 1)
    for rate in (0.1, 0.01):
        cleaner = RepeatedPassages(ngrams=ngrams, rate=rate, words=1, share=0.5)
        cleaner.learn(0, 0, text)
        cleaner._sift()
        assert 0.9 * ngrams / 2 < cleaner.inserted <= ngrams
        blocks = cleaner._blocks.copy()
        assert cleaner._blocks.ctypes.data % 64 == 0
        hits = sum(_seen(blocks, cleaner, number) for number in range(len(fresh)))
        expected = bloom_rate(blocks.size * 64 / cleaner.inserted)
        assert hits / len(fresh) == pytest.approx(expected, rel=0.35)
        assert expected <= rate
    assert filter_bytes(10**9, 0.01) < 2 * 10**9


def _seen(blocks: np.ndarray, cleaner: RepeatedPassages, number: int) -> int:
    hashed = (number + 1) * 0x9E3779B97F4A7C15 % (1 << 64)
    return cleaner._native.is_in(blocks, np.uint64(hashed ^ hashed >> 29))


def test_fewer_false_positives_take_more_bits() -> None:
    rates = (0.1, 0.01, 0.001, 0.0001)
    bits = [*map(bits_per_ngram, rates)]
    assert bits == sorted(bits) and bits[0] < bits[-1]
    for rate in rates:
        size = bits_per_ngram(rate)
        assert bloom_rate(size) <= rate < bloom_rate(size - 1)
        assert size >= 1.44 * -np.log2(rate)  # no Bloom filter has fewer


def test_the_plans_rate_is_the_filters() -> None:
    sizes = []
    for rate in (0.1, 0.001):
        config = DeduplicationConfig(method="bloom", false_positive_rate=rate)
        cleaner = make_deduplicator(config, lambda: ["one two three"] * 1000)
        assert isinstance(cleaner, RepeatedPassages)
        sizes.append(cleaner._blocks.nbytes)
    assert sizes[0] < sizes[1]


def test_repeated_paragraphs_fall_and_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bloom, "BATCH_BYTES", 500)
    draw = random.Random(2)
    first, second, third = (random_words(draw, 60) for _ in range(3))
    copied = [*second[:55], "altered", "end"]
    texts = [
        " ".join(first) + "\n\n" + " ".join(second),
        " ".join(third) + "\n\n" + " ".join(copied).upper() + "!\n\nYes, yes.\n",
        " ".join(first),
    ]
    cleaner = RepeatedPassages(ngrams=count_ngrams(texts), rate=0.001)
    report, rest = cleaned(cleaner, [texts])
    assert rest[0] == [texts[0], " ".join(third) + "\n\nYes, yes.\n", ""]
    assert (report.dropped_documents, report.cut_documents) == (1, 1)
    assert report.dropped_bytes == sum(map(len, texts)) - sum(map(len, rest[0]))
    assert report.memory_bytes > 0 and report.across_sources is None


@pytest.mark.parametrize("share", [0.8, 0.5, 1.0])
def test_what_falls_is_what_a_set_says(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy passages with a few words changed at one end, so that shares lie around the bound."""
    monkeypatch.setattr(bloom, "BATCH_BYTES", 20_000)
    draw = random.Random(3)
    texts = [random_words(draw, draw.randrange(5, 120)) for _ in range(30)]
    for words in list(texts):
        count = len(words) - 12
        for changed in {0, int((1 - share) * count), int((1 - share) * count) + 1}:
            texts.append([*words[: len(words) - changed], *random_words(draw, changed)])
    passages = [" ".join(words) for words in texts]
    before, falls = set[int](), []
    for passage, words in zip(passages, texts, strict=True):
        hashes = hashes_of(passage, 13) if len(words) >= 13 else []
        seen = sum(one in before for one in hashes)
        falls.append(bool(hashes) and seen >= share * len(hashes))
        before.update([] if falls[-1] else hashes)
    cleaner = RepeatedPassages(ngrams=count_ngrams(passages), rate=0.0001, share=share)
    _, rest = cleaned(cleaner, [passages])
    assert [not text for text in rest[0]] == falls
    assert 0.99 * len(before) <= cleaner.inserted <= len(before)
    assert 20 < sum(falls) < len(falls) - 40


def test_a_full_filter_stops() -> None:
    texts = [" ".join(random_words(random.Random(n), 100)) for n in range(50)]
    whole = count_ngrams(texts)
    cleaned(RepeatedPassages(ngrams=whole), [texts])
    with pytest.raises(ConfigError) as caught:
        cleaned(RepeatedPassages(ngrams=whole // 2), [texts])
    assert f"{whole // 2:,} n-grams" in caught.value.message
    key, _, wanted = caught.value.remedy.text.partition(",")[0].partition("=")
    assert key == "ngrams" and int(wanted) >= whole
