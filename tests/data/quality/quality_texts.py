"""Texts whose Jaccard index is known, a plain reference of it, and what cleaners leave of texts."""

import random
import unicodedata
from collections.abc import Iterable

from headrace.data.quality.bands import BINS, Bands
from headrace.data.quality.cleaner import Cleaner, CleanReport
from headrace.data.quality.letters import UNSPACED

ALL = (1 << 64) - 1
Sources = list[list[str]]


def words_of(text: str) -> list[str]:
    """Return the words that are compared, as the plainest code finds them."""
    words = [""]
    for character in unicodedata.normalize("NFC", text):
        category, code = unicodedata.category(character), ord(character)
        if category == "Cf":
            continue
        word = category[0] in "LMN"
        if code >= 0x20000 or (word and any(a <= code <= b for a, b in UNSPACED)):
            words += [character, ""]
        elif word:
            folded = character.casefold()
            words[-1] += folded if len(folded) == 1 else character
        else:
            words.append("")
    return [word for word in words if word]


def ngrams_of(text: str, n: int = 5) -> set[tuple[str, ...]]:
    """Return the set of a text's n-grams; all of its words where they are fewer."""
    words = words_of(text)
    if len(words) < n:
        return {tuple(words)} if words else set()
    return {tuple(words[place : place + n]) for place in range(len(words) - n + 1)}


def hashes_of(text: str, n: int = 5) -> list[int]:
    """Return the hash of each n-gram of a text, as its definition says; see ngrams.py."""
    words, prime = [], 0x9E3779B97F4A7C15
    for word in words_of(text):
        hashed, raw = 0, word.encode()
        for begin in range(0, len(raw), 8):
            chunk = int.from_bytes(raw[begin : begin + 8], "little")
            hashed = (hashed ^ chunk) * 0xE7037ED1A0B428DB & ALL
            hashed ^= hashed >> 32
        words.append(hashed)
    if len(words) < n:
        return [mixed(polynomial(words, prime) + len(words))] if words else []
    return [mixed(polynomial(words[at : at + n], prime)) for at in range(len(words) - n + 1)]


def polynomial(numbers: list[int], base: int) -> int:
    """Return the polynomial of numbers, the last of them its constant, modulo 2^64."""
    total = 0
    for number in numbers:
        total = total * base + number & ALL
    return total


def mixed(x: int) -> int:
    """Return a hash of 64 bits."""
    for _ in range(2):
        x = (x ^ x >> 32) * 0xD6E8FEB86659FD93 & ALL
    return x ^ x >> 32


def sketch_of(text: str, bands: Bands) -> tuple[list[int], list[int], int]:
    """Return the bins of a text's sketch as numbers below 16, its keys and its least hash."""
    bins, least = [ALL] * BINS, ALL
    for x in hashes_of(text):
        bins[x % BINS] = min(bins[x % BINS], x >> 8)
        other = x * 0xA0761D6478BD642F & ALL
        least = min(least, other ^ other >> 32)
    kept = [0 if value == ALL else 1 + ((value & 0xFFFF) * 15 >> 16) for value in bins]
    keys = []
    for band in range(bands.bands if any(kept) else 0):
        key = (band + 1) * 0xD6E8FEB86659FD93 & ALL
        for place in range(band * bands.rows, (band + 1) * bands.rows):
            h, full = mixed((place + 1) * 0x9E3779B97F4A7C15 & ALL), place
            order = ((h >> 8) + (h | 1) * step for step in range(BINS))
            full = place if kept[place] else next(at % BINS for at in order if kept[at % BINS])
            key = (key ^ bins[full]) * 0x9E3779B97F4A7C15 & ALL
            key ^= key >> 29
        keys.append(mixed(key) >> 32)
    return kept, keys or [0] * bands.bands, least


def jaccard_of(one: str, two: str) -> float:
    """Return the Jaccard index of two texts."""
    first, second = ngrams_of(one), ngrams_of(two)
    return len(first & second) / max(1, len(first | second))


def random_words(draw: random.Random, count: int) -> list[str]:
    """Return words of a small language."""
    return [f"w{draw.randrange(4000)}" for _ in range(count)]


def pairs_of(draw: random.Random, count: int) -> list[tuple[str, str]]:
    """Return pairs of texts of which the second has some words of the first replaced."""
    pairs = []
    for _ in range(count):
        words = random_words(draw, draw.randrange(40, 400))
        other = list(words)
        for _ in range(draw.randrange(1, 2 + len(words) // 12)):
            other[draw.randrange(len(words))] = "changed" + str(draw.random())
        pairs.append((" ".join(words), ", ".join(other).capitalize() + "."))
    return pairs


def cleaned(cleaner: Cleaner, sources: Sources) -> tuple[CleanReport, Sources]:
    """Return the report on texts, and what is left of each."""
    for number, texts in enumerate(sources):
        for index, text in enumerate(texts):
            cleaner.learn(number, index, text)
    report = cleaner.finish()
    rest = [
        [cleaner.apply(number, index, text) for index, text in enumerate(texts)]
        for number, texts in enumerate(sources)
    ]
    return report, rest


def left_of(rest: Iterable[Iterable[str]]) -> list[str]:
    """Return the texts that are left, sorted."""
    return sorted(text for texts in rest for text in texts if text)
